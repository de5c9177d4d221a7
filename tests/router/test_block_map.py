"""The map of edges is a dict from whole hashes to runs, though its keys are only parts of them."""

from __future__ import annotations

import random
import sys
from array import array
from itertools import pairwise

import pytest

from poolgrid.kernel.index.block_map import TABLES, BlockMap
from poolgrid.kernel.index.prefix_index import FIRST_DEPTH, PrefixIndex
from poolgrid.kernel.index.run_forest import Run
from poolgrid.kernel.wire.identifiers import WorkerId, WorkerKey
from tests.router.index_structure import assert_sound, assert_sound_map

WORKER = WorkerKey(WorkerId("w"))
LENGTHS = (1, 2, 4, 5, 32)


def random_blocks(randomness: random.Random, count: int) -> array[int]:
    return array("Q", (randomness.getrandbits(64) for _ in range(count)))


@pytest.mark.parametrize("depth", [0, 3, FIRST_DEPTH])
def test_it_is_a_dict_while_shards_are_split(depth: int) -> None:
    randomness = random.Random(1)
    sharded = BlockMap(shard_entries=4, depth=depth)
    model: dict[int, Run] = {}
    for step in range(600):
        run = Run(None, random_blocks(randomness, LENGTHS[step % 5]), 1)
        for block in run.blocks:
            sharded[block] = run
            sharded.relieve(block)
            model[block] = run
        if step % 3 == 0:
            for block in run.blocks:
                del sharded[block]
                del model[block]
        elif step % 3 == 1:
            other = Run(None, run.blocks, 2)
            for block in run.blocks:
                sharded[block] = other
            model.update(dict.fromkeys(run.blocks, other))

    assert dict(sharded.items()) == model
    assert len(sharded) == len(model)
    assert all(sharded.get(block) is run for block, run in model.items())
    assert random_blocks(randomness, 1)[0] not in sharded
    assert_sound_map(sharded)


def test_keys_of_an_index_as_routers_have_it_take_a_third_less_than_whole_hashes() -> None:
    index = PrefixIndex()
    for block in random_blocks(random.Random(2), 1000):
        index.store(WORKER, None, [block])

    assert index._reach.edges.entries == 1000
    assert {sys.getsizeof(key) for shard in index._reach.edges.shards for key in shard} <= {24, 28, 32}


@pytest.mark.parametrize("slots", TABLES)
def test_the_tables_of_shards_grow_one_after_the_other_though_all_fill_alike(slots: int) -> None:
    randomness = random.Random(slots)
    depth = 4
    index = PrefixIndex(first_depth=depth)
    shards = index._reach.edges.shards
    grown_at: list[int] = []
    has_grown = [False] * len(shards)
    larger_bytes = 1.5 * sys.getsizeof(dict.fromkeys(range(slots // 2)))
    while not all(has_grown):
        for _ in range(32):
            index.store(WORKER, None, random_blocks(randomness, 2))
        for place, shard in enumerate(shards):
            if not has_grown[place] and sys.getsizeof(shard) > larger_bytes:
                has_grown[place] = True
                grown_at.append(len(index))

    assert len(shards) == 1 << depth, "none is split yet"
    assert all(later - earlier >= slots // 32 for earlier, later in pairwise(grown_at))
    assert not any(key < 0 for shard in shards for key in shard)
    assert_sound_map(index._reach.edges)


@pytest.mark.parametrize("length", [2, 5, 40])
@pytest.mark.parametrize("place", [0, 1, -1])
@pytest.mark.parametrize("grown", [False, True], ids=["a new run", "a run that grows"])
@pytest.mark.parametrize("fault", ["resident", "twice", "before it", "twice, then resident"])
def test_a_chain_that_has_a_block_twice_or_an_edge_of_another_run_leaves_the_index_as_it_was(
    length: int, place: int, grown: bool, fault: str
) -> None:
    randomness = random.Random(length)
    index = PrefixIndex()
    path, other = random_blocks(randomness, 20), random_blocks(randomness, 3)
    index.store(WORKER, None, path)
    index.store(WORKER, None, other)
    parent = path[-1] if grown else path[5]
    chain = random_blocks(randomness, length)
    if "twice" in fault:
        chain[max(1, place % length)] = chain[0]
    if "resident" in fault:
        chain[-1] = other[place]
    if fault == "before it":
        chain[-1] = path[0]
    if chain[-1] == other[1]:
        # The inside of a run is not asked about, unless the chain is refused for its other fault.
        chain[-1] = other[2]
    before = dict(index._reach.edges.items())

    index.store(WORKER, parent, chain)

    assert index.counters.contradictions == 1
    assert dict(index._reach.edges.items()).keys() == before.keys()
    assert index.held_blocks(WORKER) == 23
    assert_sound(index)
