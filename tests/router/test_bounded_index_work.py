"""No call of the prefix index does more because the index is large: its work is counted, not timed."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest

from poolgrid.consolidator.core import sharded_map
from poolgrid.router.core import (
    block_locator,
    block_map,
    intrusive_lru,
    lower_tiers,
    orphans,
    prefix_index,
    run_forest,
    run_map,
)
from poolgrid.router.core.prefix_index import BYTES_PER_BLOCK, PrefixIndex
from poolgrid.wire.identifiers import Tier, WorkerId, WorkerKey

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
    orphans,
    prefix_index,
    run_forest,
    run_map,
    sharded_map,
)

FILES = {module.__file__ for module in MODULES}


class Work:
    """The most lines that one call took, by the name of the call."""

    def __init__(self) -> None:
        self.most: dict[str, int] = {}
        self._lines = 0

    def count(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Make a call and count its lines."""
        self._lines = 0
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            result = call(*arguments)
        finally:
            sys.settrace(before)
        name = call.__name__
        self.most[name] = max(self.most.get(name, 0), self._lines)
        return result

    def _enter(self, frame: FrameType, event: str, argument: object) -> Any:
        return self._line if frame.f_code.co_filename in FILES else None

    def _line(self, frame: FrameType, event: str, argument: object) -> Any:
        self._lines += 1
        return self._line


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
    work = Work()
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
    assert index._orphans.entries > blocks // 10
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
        index._orphans._by_hash,
        index._orphans._below,
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
    assert (len(index), index.counters.blocks_removed) == (1, 999)
