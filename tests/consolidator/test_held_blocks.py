"""What a source holds, on pages, against one dict: the same blocks in the same order, whatever comes and goes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poolgrid.kernel.consolidation.owned_blocks import (
    PAGE_BLOCKS,
    SHARD_ENTRIES,
    SPARSE_BLOCKS_MIN,
    SPARSE_SHARE,
    FrozenBlocks,
    OwnedBlocks,
)
from tests.examples import examples

TOP = 1 << 59
"""Some of the bits by which shards are told apart."""

hashes = st.integers(1, 30).map(lambda number: number * TOP + number)
some = st.lists(hashes, max_size=12)
changes = st.lists(
    st.one_of(
        *(st.tuples(st.just(what), some) for what in ("add", "remove", "set", "delete", "freeze")),
    ),
    max_size=40,
)


def small(blocks: dict[int, int | None] | None = None) -> OwnedBlocks:
    return OwnedBlocks(blocks, page_blocks=5, shard_entries=3)


def _same(held: OwnedBlocks, model: dict[int, int | None]) -> None:
    assert list(held.items()) == list(model.items())
    assert list(held) == list(model)
    assert (len(held), bool(held)) == (len(model), bool(model))
    for block in range(32):
        assert (block * TOP + block in held) == (block * TOP + block in model)
    for block, parent in model.items():
        assert held[block] == parent


def _bounded(held: OwnedBlocks) -> None:
    for number, page in held._pages.items():
        if number != held._number:
            assert page.held
            is_sparse = len(page.hashes) >= SPARSE_BLOCKS_MIN and page.held * SPARSE_SHARE < len(page.hashes)
            assert not is_sparse or number in held._sparse


@settings(max_examples=examples(40))
@given(changes)
def test_pages_answer_as_one_dict_would_order_included(history: list[tuple[str, list[int]]]) -> None:
    held, model = small(), dict[int, int | None]()
    frozen: list[tuple[FrozenBlocks, dict[int, int | None]]] = []
    for what, blocks in history:
        if what == "add":
            is_new = len(set(blocks)) == len(blocks) and model.keys().isdisjoint(blocks)
            assert held.add(99, blocks) == is_new
            if is_new:
                model.update(zip(blocks, [99, *blocks], strict=False))
        elif what == "remove":
            gone = [block for block in dict.fromkeys(blocks) if block in model]
            assert held.remove(blocks) == gone
            for block in gone:
                del model[block]
        elif what == "set":
            for block in blocks:
                held[block] = model[block] = block + 1
        elif what == "delete":
            for block in blocks:
                assert held.pop(block, -1) == model.pop(block, -1)
        else:
            frozen.append((held.freeze(), dict(model)))
        _same(held, model)
        _bounded(held)
    for then, as_it_was in frozen:
        assert list(then.items()) == list(as_it_was.items())
        assert (len(then), set(then)) == (len(as_it_was), set(as_it_was))
        assert all((block * TOP + block in then) == (block * TOP + block in as_it_was) for block in range(32))
    for block in range(1, 31):
        if block * TOP + block not in model:
            with pytest.raises(KeyError):
                held[block * TOP + block]
            with pytest.raises(KeyError):
                del held[block * TOP + block]


def test_what_nobody_asks_for_is_freed_bit_by_bit() -> None:
    held = small({block * TOP + block: None for block in range(1, 20)})

    held.discard(7)
    assert 12 <= len(held) < 19
    held.discard(100)
    assert (len(held), list(held.items())) == (0, [])


def test_blocks_that_stay_while_all_others_come_and_go_do_not_keep_their_pages() -> None:
    held = OwnedBlocks(page_blocks=100)
    for number in range(0, 10_000, 100):
        held.add(None, range(number, number + 100))
    for number in range(0, 10_000, 100):
        held.remove(range(number, number + 99))  # the last one of each stays

    for number in range(20_000, 30_000, 100):
        held.add(None, range(number, number + 100))
        held.remove(range(number, number + 100))

    assert list(held.items()) == [(number + 99, number + 98) for number in range(0, 10_000, 100)]
    assert sum(len(page.hashes) for page in held._pages.values()) < 100 * SPARSE_BLOCKS_MIN
    _bounded(held)


def test_no_dict_is_large_however_much_is_held() -> None:
    held = OwnedBlocks()
    for number in range(300):
        held.add(None, [(number * 1000 + each) * 0x9E3779B97F4A7C15 % 2**64 for each in range(1000)])

    assert len(held) == 300_000
    assert max(map(len, held._page_of.shards)) <= 1.5 * SHARD_ENTRIES
    assert max(len(page.hashes) for page in held._pages.values()) < PAGE_BLOCKS + 1000
    assert sum(1 for _ in held.items()) == 300_000
