"""A map in shards is a dict, but none of its shards is large."""

from __future__ import annotations

import gc
import random

import msgspec
import pytest

from poolgrid.kernel.index.sharded_map import DEPTH_MAX, KEY_BITS, SPLIT_EVERY_ENTRIES, ShardedMap, unknown_dict
from tests.router.index_structure import assert_sound_map


@pytest.mark.parametrize("depth", [0, 2, 3])
def test_it_is_a_dict_through_growth_and_churn(depth: int) -> None:
    randomness = random.Random(depth)
    sharded: ShardedMap[int] = ShardedMap(shard_entries=16, depth=depth)
    model: dict[int, int] = {}
    key = 0
    for step in range(20_000):
        known = randomness.randrange(3)
        if model and (known == 0 or (step > 10_000 and known == 1)):
            key, _ = model.popitem()
            del sharded[key]
            assert sharded.get(key) is None
            assert key not in sharded
        key = randomness.getrandbits(64)
        sharded[key] = model[key] = step
        assert sharded.get(key) == step
    sharded[key] = model[key] = -1

    assert dict(sharded.items()) == model
    assert len(sharded) == len(model)
    assert_sound_map(sharded)


def test_no_shard_grows_far_beyond_its_bound_and_none_is_split_early() -> None:
    randomness = random.Random(1)
    sharded: ShardedMap[None] = ShardedMap(shard_entries=512)
    for _ in range(60_000):
        sharded[randomness.getrandbits(64)] = None

    sizes = [len(shard) for shard in sharded.each_shard()]
    assert max(sizes) <= 512 + 8 * SPLIT_EVERY_ENTRIES
    assert min(sizes) > 512 // 8 // 2


def test_keys_that_share_all_leading_bits_stay_together_and_stop_being_split() -> None:
    sharded: ShardedMap[int] = ShardedMap(shard_entries=2)
    for key in range(20_000):
        sharded[key] = key

    assert dict(sharded.items()) == {key: key for key in range(20_000)}
    assert sharded.shift >= KEY_BITS - DEPTH_MAX
    assert_sound_map(sharded)


def test_a_walk_by_shards_meets_every_entry_that_stays_however_they_are_split() -> None:
    randomness = random.Random(3)
    sharded: ShardedMap[None] = ShardedMap(shard_entries=8)
    first = [randomness.getrandbits(64) for _ in range(3000)]
    for key in first:
        sharded[key] = None
    met: set[int] = set()
    at = 0
    while at < 1 << KEY_BITS:
        shard, at = sharded.shard_from(at)
        met.update(shard)
        for _ in range(20):
            sharded[randomness.getrandbits(64)] = None

    assert met >= set(first)


class Plain(msgspec.Struct, gc=False):
    number: int


def test_the_collector_never_knows_a_dict_that_it_is_not_to_know() -> None:
    made = unknown_dict()
    other = unknown_dict()
    for number in range(5000):
        made[number] = number
    made.update({number: Plain(number) for number in range(0, 5000, 7)})
    assert not gc.is_tracked(made)
    for number in range(0, 5000, 3):
        del made[number]
    gc.collect()
    assert not gc.is_tracked(made)
    assert len(made) == 5000 - 1667
    made.clear()
    assert not gc.is_tracked(made)
    assert other == {}
