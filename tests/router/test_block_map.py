"""The map of blocks is a dict from whole hashes to runs, though its keys are only parts of them."""

from __future__ import annotations

import random
import sys
from array import array
from itertools import pairwise

import pytest

from poolgrid.router.core.block_map import BYTE_DEPTH, FEW_BLOCKS, TABLES, BlockMap
from poolgrid.router.core.prefix_index import PrefixIndex
from poolgrid.router.core.run_forest import Run
from poolgrid.wire.identifiers import WorkerId, WorkerKey
from tests.router.index_structure import assert_sound, assert_sound_map

WORKER = WorkerKey(WorkerId("w"))
LENGTHS = (1, 2, FEW_BLOCKS - 1, FEW_BLOCKS, 32, 600)


def random_blocks(randomness: random.Random, count: int) -> array[int]:
    return array("Q", (randomness.getrandbits(64) for _ in range(count)))


@pytest.mark.parametrize("depth", [0, 3, BYTE_DEPTH])
@pytest.mark.parametrize("splits", [0, 1, 200], ids=["never split", "split once", "split as often as may be"])
def test_keys_and_places_are_those_of_each_block_by_itself(depth: int, splits: int) -> None:
    randomness = random.Random(depth)
    blocks_of = BlockMap(shard_entries=1, depth=depth)
    run = Run(None, array("Q"), 1)
    for _ in range(splits):
        # The hashes are so alike that each split is one of the same shard.
        for each in (5, 6, 7):
            blocks_of.shards[0][each] = run
        blocks_of.relieve(5)
    if depth == BYTE_DEPTH:
        assert blocks_of.shift == (48 if splits else 56), "not by the leading bytes"
    for length in LENGTHS:
        blocks = random_blocks(randomness, length)
        keys, places = blocks_of.keys_and_places(blocks)

        assert list(keys) == [block & blocks_of.key_mask for block in blocks]
        assert list(places) == [block >> blocks_of.shift for block in blocks]
        assert blocks_of.view == (blocks_of.shards, blocks_of.shift, blocks_of.key_mask)


@pytest.mark.parametrize("depth", [0, 3, BYTE_DEPTH])
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
            gone = model.pop(run.blocks[0])
            del sharded[run.blocks[0]]
            sharded.delete_all(gone.blocks[1:])
            for block in gone.blocks[1:]:
                del model[block]
        elif step % 3 == 1:
            other = Run(None, run.blocks, 2)
            sharded.set_all(run.blocks, other)
            model.update(dict.fromkeys(run.blocks, other))

    assert dict(sharded.items()) == model
    assert len(sharded) == len(model)
    assert all(sharded.get(block) is run for block, run in model.items())
    assert random_blocks(randomness, 1)[0] not in sharded
    assert_sound_map(sharded)


def test_keys_of_an_index_as_routers_have_it_take_a_third_less_than_whole_hashes() -> None:
    index = PrefixIndex()
    index.store(WORKER, None, random_blocks(random.Random(2), 1000))

    assert {sys.getsizeof(key) for shard in index._reach.shards for key in shard} <= {24, 28, 32}


@pytest.mark.parametrize("slots", TABLES)
def test_the_tables_of_shards_grow_one_after_the_other_though_all_fill_alike(slots: int) -> None:
    randomness = random.Random(slots)
    depth = 4
    index = PrefixIndex(first_depth=depth)
    shards = index._reach.shards
    grown_at: list[int] = []
    has_grown = [False] * len(shards)
    larger_bytes = 1.5 * sys.getsizeof(dict.fromkeys(range(slots // 2)))
    while not all(has_grown):
        index.store(WORKER, None, random_blocks(randomness, 64))
        for place, shard in enumerate(shards):
            if not has_grown[place] and sys.getsizeof(shard) > larger_bytes:
                has_grown[place] = True
                grown_at.append(len(index))

    assert len(shards) == 1 << depth, "none is split yet"
    assert all(later - earlier >= slots // 32 for earlier, later in pairwise(grown_at))
    assert not any(key < 0 for shard in shards for key in shard)
    assert_sound_map(index._reach)


def test_shards_are_split_one_after_the_other_though_all_fill_alike() -> None:
    randomness = random.Random(3)
    limit = 1024
    sharded = BlockMap(limit, 4)
    run = Run(None, array("Q"), 1)
    split_at: list[int] = []
    while len(split_at) < 16:
        before = len(set(map(id, sharded.shards)))
        for block in random_blocks(randomness, 32):
            sharded[block] = run
        sharded.relieve(block)
        if len(set(map(id, sharded.shards))) > before:
            split_at.append(len(sharded))

    assert all(later - earlier >= limit // 16 for earlier, later in pairwise(split_at))
    assert_sound_map(sharded)


@pytest.mark.parametrize("length", [2, FEW_BLOCKS, 40])
@pytest.mark.parametrize("place", [0, 1, -1])
@pytest.mark.parametrize("grown", [False, True], ids=["a new run", "a run that grows"])
@pytest.mark.parametrize("fault", ["resident", "twice", "before it", "twice, then resident"])
def test_a_chain_that_contradicts_the_index_leaves_it_as_it_was(
    length: int, place: int, grown: bool, fault: str
) -> None:
    randomness = random.Random(length)
    index = PrefixIndex()
    path, other = random_blocks(randomness, 20), random_blocks(randomness, 3)
    index.store(WORKER, None, path)
    index.store(WORKER, None, other)
    parent = path[-1] if grown else path[5]
    chain = random_blocks(randomness, length)
    position = max(1, place % length)
    if "twice" in fault:
        chain[position] = chain[0]
    if "resident" in fault:
        chain[-1 if "twice" in fault else position] = other[1]
    if fault == "before it":
        chain[position] = path[3]
    before = dict(index._reach.items())

    index.store(WORKER, parent, chain)

    assert index.counters.contradictions == 1
    assert dict(index._reach.items()).keys() == before.keys()
    assert index.held_blocks(WORKER) == 23
    assert_sound(index)
