"""A frozen state stays what it was, while events go on."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poolgrid.kernel.consolidation import block_ownership, owned_blocks
from poolgrid.kernel.consolidation.block_ownership import DUMP_STEP_BLOCKS, BlockOwnership, chains, dump
from poolgrid.kernel.consolidation.consolidator import ConsolidatorTurn
from poolgrid.kernel.consolidation.owned_blocks import Discarded, OwnedBlocks
from poolgrid.kernel.consolidation.pool_state import FrozenPool, PoolState
from poolgrid.kernel.wire.identifiers import WorkerId, WorkerKey
from tests.consolidator.pusher import removed
from tests.consolidator.test_consolidator import Bench, Step, played, same, steps
from tests.router.fleet_builder import stored

Held = dict[int, "int | None"]
"""Blocks and their parents, as a plain dict has them."""

hashes = st.integers(1, 12)


def _content(frozen: FrozenPool) -> tuple[object, ...]:
    return (
        [worker.entry for worker in frozen.workers],
        list(frozen.source_chains()),
        list(frozen.visible_chains()),
    )


class Freezing:
    """Freezes a pool after each step, and compares the oldest of several later with what it was at first."""

    def __init__(self, pool: PoolState, pace: int) -> None:
        self._pool = pool
        self._pace = pace
        self._frozen: deque[tuple[FrozenPool, tuple[object, ...]]] = deque()
        self.compared = 0

    def step(self) -> None:
        self._frozen.append((self._pool.freeze(), _content(self._pool.freeze())))
        if len(self._frozen) > self._pace:
            self._compare()

    def _compare(self) -> None:
        frozen, content = self._frozen.popleft()
        assert _content(frozen) == content
        self.compared += 1

    def end(self) -> None:
        while self._frozen:
            self._compare()


@settings(max_examples=300, deadline=None)
@given(steps, st.integers(1, 4))
def test_what_is_frozen_stays_whatever_happens_meanwhile_and_changes_nothing(history: list[Step], pace: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_ownership, "DUMP_STEP_BLOCKS", 2)
        patch.setattr(owned_blocks, "FREED_AT_ONCE_BLOCKS", 1)
        frozen, plain = Bench(), Bench()
        freezing = Freezing(frozen.core.pool, pace)
        played(plain, history)
        played(frozen, history, freezing.step)
        freezing.end()

        assert frozen.records == plain.records
        same(frozen.core.pool, plain.core.pool)
        discarded = frozen.core.pool.discarded
        while discarded.free(1):
            pass
        assert len(discarded) == 0


@settings(max_examples=200, deadline=None)
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


@settings(max_examples=300, deadline=None)
@given(st.lists(st.dictionaries(hashes, st.none() | hashes), max_size=3), st.integers(1, 5))
def test_a_dump_names_each_block_once_however_long_its_steps_are(holdings: list[Held], step: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_ownership, "DUMP_STEP_BLOCKS", step)
        found: Held = {}
        for parent, run in dump(holdings):
            previous = parent
            for block in run:
                assert block not in found
                found[block] = previous
                previous = block
    union: Held = {}
    for held in reversed(holdings):
        union.update(held)
    assert found == union


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


def test_freezing_copies_no_block_and_a_change_copies_its_shard() -> None:
    here = BlockOwnership(10_000_000)
    here.store("worker", stored(list(range(1, 100_001))), [])
    ((*_, frozen),) = here.freeze()
    (held,) = here._places[0].values()
    shards = {id(shard) for shard in held._page_of.shards}
    assert {id(shard) for shard in frozen._shards} == shards

    here.remove("worker", removed(list(range(1, 11))), [])
    here.store("worker", stored(list(range(200_000, 200_005)), 100_000), [])

    assert len(frozen) == 100_000
    assert len(list(frozen)) == 100_000
    assert len(held) == 100_000 - 10 + 5
    assert list(held)[-5:] == list(range(200_000, 200_005))


def test_blocks_of_a_worker_that_left_are_freed_a_few_at_a_time_and_what_was_frozen_is_read_on() -> None:
    for freezes in (False, True):
        bench = Bench()
        pool = bench.core.pool
        played(bench, [])
        worker = pool.workers[WorkerKey(WorkerId("a"))]
        worker.presence.store("worker", stored(list(range(1, 10_001))), [])
        frozen = pool.freeze() if freezes else None
        bench.core.detach(worker.key, "gone", ConsolidatorTurn(bench.now()))

        assert len(pool.discarded) == 10_000
        freed = 0
        while pool.discarded.free(100):
            freed += 1
            assert len(pool.discarded) >= 10_000 - 100 * freed
        assert freezes or 99 <= freed <= 110  # dicts that became empty are freed, too
        if frozen is not None:
            assert sum(len(chain.sequence_hashes) for _, chain in frozen.visible_chains()) == 8 * 10_000


def test_few_blocks_are_freed_at_once_and_all_are_where_nobody_frees_them() -> None:
    discarded = Discarded()
    discarded.put(OwnedBlocks(dict.fromkeys(range(100_000))))
    assert not discarded
    discarded.in_slices = True
    discarded.put(OwnedBlocks(dict.fromkeys(range(owned_blocks.FREED_AT_ONCE_BLOCKS))))
    assert not discarded
    discarded.put(OwnedBlocks(dict.fromkeys(range(owned_blocks.FREED_AT_ONCE_BLOCKS + 1))))
    assert discarded


def test_a_dump_of_one_step_is_that_of_its_chains() -> None:
    held: Held = {2: 1, 1: None, 3: 2, 7: 2}
    assert list(dump([held])) == list(chains(held)) == [(None, [1, 2, 3]), (2, [7])]
