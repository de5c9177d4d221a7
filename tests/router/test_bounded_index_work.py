"""No call of the prefix index does more because the index is large: its work is counted, not timed."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest

from poolgrid.kernel.index import (
    block_locator,
    block_map,
    intrusive_lru,
    lower_tiers,
    prefix_index,
    run_forest,
    run_map,
    sharded_map,
)
from poolgrid.kernel.index.prefix_index import BYTES_PER_BLOCK, PrefixIndex
from poolgrid.kernel.wire.identifiers import Tier, WorkerId, WorkerKey
from tests.counted_lines import CountedLines
from tests.router.index_structure import assert_sound

SLICE = 32
SHARD_ENTRIES = 64
BLOCKS_PER_CALL = 8
PATH_BLOCKS = 64

LINES_PER_CALL_MAX = 6000
"""Lines of code (each turn of a loop counts) of one call, at these slices, whatever the size of the index.

What is done without a line, by Python itself, is bounded by the size of what it is done to: of a shard, which is
rebuilt or copied, and of a run. Both are checked.
"""

MODULES = (
    intrusive_lru,
    block_map,
    block_locator,
    lower_tiers,
    prefix_index,
    run_forest,
    run_map,
    sharded_map,
)

FILES = {module.__file__ for module in MODULES}


@contextmanager
def small_slices() -> Iterator[None]:
    """Take slices and shards so small that a small index is already many times as large."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_index, "EVICTION_SLICE_BLOCKS", SLICE)
        patch.setattr(prefix_index, "RUN_BLOCKS_MAX", SLICE)
        patch.setattr(run_map, "RUN_BLOCKS_MAX", SLICE)
        patch.setattr(prefix_index, "SECOND_CHANCES", 4)
        patch.setattr(sharded_map, "SPLIT_EVERY_ENTRIES", 16)
        patch.setattr(sharded_map, "DEPTH_MAX", 9)
        yield


def a_life(blocks: int) -> dict[str, int]:
    """Fill an index, hold it at its budget, lose workers of all kinds; return the most lines that each call took."""
    randomness = random.Random(1)
    workers = [WorkerKey(WorkerId(f"w{number}")) for number in range(8)]
    index = PrefixIndex(blocks * BYTES_PER_BLOCK, sweep_slice_entries=SLICE, shard_entries=SHARD_ENTRIES, first_depth=3)
    work = CountedLines(MODULES)
    system_prompt = [randomness.getrandbits(64) for _ in range(16)]
    for worker in workers:
        index.store(worker, None, system_prompt)
    stored: list[tuple[WorkerKey, list[int]]] = []

    def store_a_path() -> None:
        worker = randomness.choice(workers)
        chain = system_prompt
        parent = chain[-1]
        for _ in range(PATH_BLOCKS // BLOCKS_PER_CALL):
            chain = [randomness.getrandbits(64) for _ in range(BLOCKS_PER_CALL)]
            tier = randomness.choice([Tier.DEVICE, Tier.DEVICE, Tier.HOST, Tier.DISK])
            work.count(index.store, worker, parent, chain, tier)
            stored.append((worker, chain))
            parent = chain[-1]
        other = randomness.choice(workers)
        work.count(index.store, other, system_prompt[-1], stored[-2][1])
        work.count(index.find, system_prompt + chain)

    for _ in range(blocks // PATH_BLOCKS):
        chain = [randomness.getrandbits(64) for _ in range(BLOCKS_PER_CALL + 1)]
        work.count(index.store, workers[2], chain[0], chain[1:])
    assert index._reach.waiting.entries == blocks // PATH_BLOCKS
    index.drop(workers[2])
    while index.sweeps:
        store_a_path()
    for _ in range(2 * blocks // PATH_BLOCKS):
        store_a_path()
    assert index.counters.evicted_blocks > blocks // 2
    for lost in (workers[0], workers[1]):
        work.count(index.drop, lost)
        for worker, chain in stored[-40:]:
            work.count(index.remove, worker, chain[::-1])
        while index.sweeps:
            store_a_path()
    old = index.empty()
    index.exchange(old)
    while work.count(old.discard, SLICE):
        pass
    assert len(old) == 0
    return work.most


def test_a_large_index_does_no_more_in_any_call_than_a_small_one() -> None:
    with small_slices():
        small = a_life(1000)
        large = a_life(8000)

    assert set(large) == {"store", "remove", "find", "drop", "discard"}
    assert max(small.values()) <= LINES_PER_CALL_MAX, small
    assert max(large.values()) <= LINES_PER_CALL_MAX, large


def test_what_python_does_by_itself_is_bounded_by_the_size_of_a_shard_and_of_a_run() -> None:
    with small_slices():
        randomness = random.Random(2)
        index = PrefixIndex(shard_entries=SHARD_ENTRIES, first_depth=3)
        workers = [WorkerKey(WorkerId(f"w{number}")) for number in range(8)]
        for _ in range(400):
            worker = randomness.choice(workers)
            chain = [randomness.getrandbits(64) for _ in range(50)]
            tier = randomness.choice(list(Tier))
            index.store(worker, None, chain, tier)
            index.store(worker, randomness.getrandbits(64), [randomness.getrandbits(64)])

    assert max(len(run.blocks) for run in index._reach.forest.ages) <= SLICE
    for each in (
        index._reach.edges,
        index._reach.waiting,
        index.lower.host,
        index.lower.disk,
    ):
        sizes = [len(shard) for shard in each.each_shard()]
        assert max(sizes) <= 2 * SHARD_ENTRIES, sizes


def test_blocks_that_an_engine_evicts_from_the_end_take_no_call_each() -> None:
    worker = WorkerKey(WorkerId("w"), 0)
    index = PrefixIndex()
    path = list(range(1, 1001))
    for begin in range(0, len(path), 100):
        index.store(worker, path[begin - 1] if begin else None, path[begin : begin + 100])
    called: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename in FILES:
            called.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        index.remove(worker, path[:0:-1])
    finally:
        sys.setprofile(None)

    assert called == ["remove", "shorten", "take", "_write", "no_edge", "set_edge"]
    assert index.find(path) == [(1, 1 << index.slot(worker))]
    assert len(index) == 1


A, B = WorkerKey(WorkerId("a")), WorkerKey(WorkerId("b"))
ROOT = 1


def a_chain(index: PrefixIndex, source: random.Random, blocks: int) -> None:
    index.store(A, ROOT, [source.getrandbits(64) for _ in range(blocks)])


def a_chain_of_forks(index: PrefixIndex, source: random.Random, blocks: int) -> None:
    parent = ROOT
    for _ in range(blocks):
        block = source.getrandbits(64)
        index.store(A, parent, [block])
        index.store(A, parent, [source.getrandbits(64)])
        parent = block


def many_children(index: PrefixIndex, source: random.Random, blocks: int) -> None:
    for _ in range(blocks):
        index.store(A, ROOT, [source.getrandbits(64)])


def a_chain_that_others_hold_in_part(index: PrefixIndex, source: random.Random, blocks: int) -> None:
    path = [ROOT, *(source.getrandbits(64) for _ in range(blocks))]
    index.store(A, None, path)
    for number in range(8):
        index.store(WorkerKey(WorkerId(f"w{number}")), None, path[: (number + 1) * blocks // 8])


def children_of_others(index: PrefixIndex, source: random.Random, blocks: int) -> None:
    for _ in range(blocks):
        index.store(B, ROOT, [source.getrandbits(64)])


def a_chain_on_all_tiers(index: PrefixIndex, source: random.Random, blocks: int) -> None:
    path = [source.getrandbits(64) for _ in range(blocks)]
    for tier in Tier:
        index.store(A, ROOT, path, tier)


@pytest.mark.parametrize(
    "below",
    [
        a_chain,
        a_chain_of_forks,
        many_children,
        a_chain_that_others_hold_in_part,
        children_of_others,
        a_chain_on_all_tiers,
    ],
)
@pytest.mark.parametrize("tiers", [[Tier.DEVICE], list(Tier)], ids=["device", "all tiers"])
def test_a_block_that_goes_and_comes_back_costs_the_same_however_many_are_behind_it(
    below: Callable[[PrefixIndex, random.Random, int], None], tiers: list[Tier]
) -> None:
    most: list[dict[str, int]] = []
    for blocks in (100, 3000):
        index, work = PrefixIndex(), CountedLines(MODULES)
        for tier in tiers:
            index.store(A, None, [ROOT], tier)
        below(index, random.Random(1), blocks)
        held = index.held_blocks(A)
        for _ in range(3):
            for tier in tiers:
                work.count(index.remove, A, [ROOT], tier)
            assert index.held_blocks(A) == held - 1
            assert not any(mask & 1 for _, mask in index.find([ROOT]))
            for tier in tiers:
                work.count(index.store, A, None, [ROOT], tier)
            assert index.held_blocks(A) == held
        assert_sound(index)
        most.append(work.most)

    for name, lines in most[1].items():
        assert lines <= most[0][name] + 60, most


def test_a_parent_that_comes_and_goes_costs_another_worker_nothing_of_what_waits_for_it() -> None:
    most: list[dict[str, int]] = []
    for blocks in (100, 3000):
        index, work, source = PrefixIndex(), CountedLines(MODULES), random.Random(1)
        for _ in range(blocks):
            index.store(A, ROOT, [source.getrandbits(64)])
        for _ in range(3):
            work.count(index.store, B, None, [ROOT])
            work.count(index.remove, B, [ROOT])
        assert_sound(index)
        most.append(work.most)

    assert most[0] == most[1]


@pytest.mark.parametrize("every", [2, 16, 1000])
def test_a_long_chain_costs_its_blocks_whatever_it_meets_on_its_way(every: int) -> None:
    """Runs that waited, or that other workers hold in part, cut it; each cut costs the same."""
    lines: list[float] = []
    for blocks in (2000, 16_000):
        source, work = random.Random(1), CountedLines(MODULES)
        waited_for, cut = PrefixIndex(), PrefixIndex()
        chain = [source.getrandbits(64) for _ in range(blocks)]
        for at in range(every, blocks, every):
            waited_for.store(A, chain[at - 1], [chain[at]])
            cut.store(B, chain[at - 1], [source.getrandbits(64)])
        for index in (waited_for, cut):
            work.count(index.store, A, None, chain)
            assert index.overlap(chain, A).blocks == blocks
            assert_sound(index)
        lines.append(work.most["store"] / blocks)

    assert lines[1] <= 1.2 * lines[0] + 0.1


@pytest.mark.parametrize("order", ["from the root", "from the end", "every second", "shuffled"])
def test_blocks_that_go_in_any_order_cost_the_same_each_however_long_their_chain_is(order: str) -> None:
    lines: list[float] = []
    for blocks in (2000, 16_000):
        source, work, index = random.Random(1), CountedLines(MODULES), PrefixIndex()
        chain = [source.getrandbits(64) for _ in range(blocks)]
        index.store(A, None, chain)
        match order:
            case "from the root":
                gone = chain
            case "from the end":
                gone = chain[::-1]
            case "every second":
                gone = chain[::2]
            case _:
                gone = source.sample(chain, blocks)
        work.count(index.remove, A, gone)
        assert index.held_blocks(A) == blocks - len(gone)
        assert_sound(index)
        lines.append(work.most["remove"] / len(gone))

    assert lines[1] <= 1.2 * lines[0] + 0.5
    if order in ("from the root", "from the end"):
        assert lines[1] < 1, "what goes in order goes by the run"
