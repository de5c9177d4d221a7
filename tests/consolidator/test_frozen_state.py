"""A state frozen in place against a plain copy made at the same moment, while events go on between any two steps."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poolgrid.consolidator.core import block_ownership, frozen_blocks
from poolgrid.consolidator.core.block_ownership import DUMP_STEP_BLOCKS, BlockOwnership, dump
from poolgrid.consolidator.core.consolidator import ConsolidatorTurn
from poolgrid.consolidator.core.frozen_blocks import Discarded, Overlay
from poolgrid.consolidator.core.owned_blocks import OwnedBlocks
from poolgrid.consolidator.core.pool_state import FrozenPool, PoolState, WorkerEntry
from poolgrid.wire.feed import BlockChain
from poolgrid.wire.identifiers import WorkerId, WorkerKey
from tests.consolidator.pusher import removed, stored
from tests.consolidator.test_consolidator import Bench, Step, played, same, steps
from tests.examples import examples

Held = dict[int, "int | None"]
"""Blocks and their parents, as a plain dict has them."""

hashes = st.integers(1, 12)
changes = st.lists(
    st.one_of(
        st.tuples(st.just("update"), st.lists(st.tuples(hashes, st.none() | hashes), max_size=5)),
        st.tuples(st.just("add"), st.lists(hashes, max_size=5, unique=True)),
        st.tuples(st.just("remove"), st.lists(hashes, max_size=5)),
        st.tuples(st.just("pop"), st.lists(hashes, max_size=5)),
        st.tuples(st.just("thaw"), st.integers(1, 3)),
    ),
    max_size=30,
)


@settings(max_examples=examples(100))
@given(st.dictionaries(hashes, st.none() | hashes), changes)
def test_an_overlay_answers_as_the_mapping_would_and_its_base_stays_until_it_is_thawed(
    before: Held, history: list[tuple[str, object]]
) -> None:
    base, model = OwnedBlocks(before), dict(before)
    overlay = Overlay(base)
    thawing = False
    for what, given_ in history:
        if what == "update":
            new: list[tuple[int, int | None]] = given_  # type: ignore[assignment]
            # As a journal has it: a block that is held keeps its parent.
            new = [(block, model.get(block, parent)) for block, parent in new]
            overlay.update(new)
            model.update(new)
        elif what == "add":
            chain = [block for block in given_ if block not in model]  # type: ignore[attr-defined]
            assert overlay.add(7, given_) == (chain == given_)  # type: ignore[arg-type]
            if chain == given_:
                model.update(zip(chain, [7, *chain], strict=False))
        elif what == "remove":
            gone = [block for block in dict.fromkeys(given_) if block in model]  # type: ignore[call-overload]
            assert overlay.remove(given_) == gone  # type: ignore[arg-type]
            for block in gone:
                del model[block]
        elif what == "pop":
            for block in given_:  # type: ignore[attr-defined]
                assert overlay.pop(block, -1) == model.pop(block, -1)
        else:
            thawing = True
            overlay.thaw(given_)  # type: ignore[arg-type]

        if not thawing:
            assert list(base.items()) == list(before.items())
        assert len(overlay) == len(model)
        assert set(overlay) == set(model)
        assert {block for block in range(14) if block in overlay} == set(model)
        assert {block: overlay[block] for block in overlay} == model == overlay.copy()
        for some in ([1, 2], [3], [], list(range(13))):
            assert overlay.is_disjoint(some) == model.keys().isdisjoint(some)
        if not thawing:
            assert list(overlay) == list(model)
    while not overlay.thaw(2):
        pass
    assert overlay.changes == 0
    assert base == model
    if not thawing:
        assert list(base) == list(model)


class Freezing:
    """Freezes a pool again and again, reads a little of what is frozen after each step, and thaws it bit by bit."""

    def __init__(self, pool: PoolState, pace: int) -> None:
        self.pool = pool
        self.pace = pace
        self.compared = 0
        self.copy: FrozenPool | None = None
        self.entries: list[WorkerEntry] = []
        self.reading: Iterator[tuple[int, str, BlockChain]] | None = None
        self.visible: Iterator[tuple[int, BlockChain]] | None = None
        self.read: list[tuple[int, str, BlockChain]] = []
        self.seen: list[tuple[int, BlockChain]] = []
        self.thawing = False

    def step(self) -> None:
        if self.thawing:
            self.thawing = self.pool.thaw(self.pace)
        elif self.copy is None:
            self.copy = self.pool.freeze()
            frozen = self.pool.freeze_in_place()
            assert frozen.offset == self.copy.offset
            self.entries = [worker.entry for worker in frozen.workers]
            self.reading, self.read = frozen.source_chains(), []
            self.visible, self.seen = frozen.visible_chains(), []
        else:
            self._read(self.pace)

    def _read(self, chains_: int) -> None:
        assert self.copy is not None
        assert self.reading is not None
        assert self.visible is not None
        for _ in range(chains_):
            seen = next(self.visible, None)
            if seen is not None:
                self.seen.append(seen)
            chain = next(self.reading, None)
            if chain is not None:
                self.read.append(chain)
            elif seen is None:
                assert self.entries == [worker.entry for worker in self.copy.workers]
                assert self.read == list(self.copy.source_chains())
                assert self.seen == list(self.copy.visible_chains())
                self.compared += 1
                self.copy = self.reading = self.visible = None
                self.thawing = True
                return

    def end(self) -> None:
        """Go on until the last one is read and thawed."""
        while self.copy is not None or self.thawing:
            self.step()
        assert self.compared


@settings(max_examples=examples(60))
@given(steps, st.integers(1, 4))
def test_what_is_frozen_is_the_plain_copy_whatever_happens_meanwhile_and_changes_nothing(
    history: list[Step], pace: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_ownership, "DUMP_STEP_BLOCKS", 2)
        patch.setattr(frozen_blocks, "FREED_AT_ONCE_BLOCKS", 1)
        frozen, plain = Bench(), Bench()
        freezing = Freezing(frozen.core.pool, pace)
        played(plain, history)
        played(frozen, history, freezing.step)
        freezing.end()

        assert frozen.records == plain.records
        same(frozen.core.pool, plain.core.pool)
        for worker in frozen.core.pool.workers.values():
            assert all(type(held) is OwnedBlocks for tier in worker.presence._tiers for held in tier.values())
        discarded = frozen.core.pool.discarded
        while discarded.free(1):
            pass
        assert len(discarded) == 0


@settings(max_examples=examples(40))
@given(steps, st.integers(1, 4))
def test_a_fold_that_is_frozen_meanwhile_reaches_the_same_state(history: list[Step], pace: int) -> None:
    bench = Bench()
    played(bench, history)
    frozen, plain = PoolState(), PoolState()
    freezing = Freezing(frozen, pace)
    for record in bench.records:
        frozen.apply(record)
        plain.apply(record)
        freezing.step()
    freezing.end()

    same(frozen, plain)


class Counted(dict[int, "int | None"]):
    """Blocks that count how many of them were looked at, one by one."""

    def __init__(self, blocks: Held) -> None:
        super().__init__(blocks)
        self.looked_at = 0

    def items(self) -> Iterator[tuple[int, int | None]]:  # type: ignore[override]
        for item in super().items():
            self.looked_at += 1
            yield item


def test_no_step_of_a_dump_looks_at_more_blocks_because_more_are_held() -> None:
    longest: list[int] = []
    for size in (4 * DUMP_STEP_BLOCKS, 16 * DUMP_STEP_BLOCKS):
        # The worst for whoever looks for chains: each block below the one that comes next.
        held = Counted({block: block + 1 for block in range(size)})
        at, steps_ = 0, []
        for _ in dump([held]):
            steps_.append(held.looked_at - at)
            at = held.looked_at
        longest.append(max(steps_))
        assert at == size

    assert longest == [DUMP_STEP_BLOCKS, DUMP_STEP_BLOCKS]


def test_freezing_and_thawing_cost_what_changed_and_not_what_is_held() -> None:
    pool = Bench().core.pool
    here = BlockOwnership(10_000_000, pool.discarded)
    here.store("worker", stored(list(range(1, 100_001))), [])
    (_, _, base), *rest = here.freeze_in_place()
    assert not rest
    assert len(base) == 100_000

    here.remove("worker", removed(list(range(1, 11))), [])
    here.store("worker", stored(list(range(200_000, 200_005)), 100_000), [])
    assert len(base) == 100_000

    thawed = 0
    while not here.thaw(1):
        thawed += 1
    assert thawed <= 15 + 1
    ((_, _, now),) = here.freeze_in_place()
    assert now is base
    assert list(now)[-5:] == list(range(200_000, 200_005))
    assert len(now) == 100_000 - 10 + 5


def test_blocks_of_a_worker_that_left_are_freed_a_few_at_a_time_also_when_it_was_frozen() -> None:
    for freezes in (False, True):
        bench = Bench()
        pool = bench.core.pool
        played(bench, [])
        worker = pool.workers[WorkerKey(WorkerId("a"))]
        worker.presence.store("worker", stored(list(range(1, 10_001))), [])
        if freezes:
            frozen = pool.freeze_in_place()
        turn = ConsolidatorTurn(bench.now())
        bench.core.detach(worker.key, "gone", turn)
        if freezes:
            assert len(pool.discarded) == 0
            assert sum(len(chain.sequence_hashes) for _, chain in frozen.visible_chains()) == 8 * 10_000
            while pool.thaw(100):
                pass

        freed = 0
        assert len(pool.discarded) == 10_000
        while pool.discarded.free(100):
            freed += 1
            assert len(pool.discarded) >= 10_000 - 100 * freed
        assert 99 <= freed <= 110  # dicts that became empty are freed, too


def test_few_blocks_are_freed_at_once_and_all_are_where_nobody_frees_them() -> None:
    discarded = Discarded()
    discarded.put(OwnedBlocks(dict.fromkeys(range(100_000))))
    assert not discarded
    discarded.in_slices = True
    discarded.put(OwnedBlocks(dict.fromkeys(range(frozen_blocks.FREED_AT_ONCE_BLOCKS))))
    assert not discarded
    discarded.put(OwnedBlocks(dict.fromkeys(range(frozen_blocks.FREED_AT_ONCE_BLOCKS + 1))))
    assert discarded
