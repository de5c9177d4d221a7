"""Where a block is: what comes and goes in bulk is found again, and what it takes stays bounded."""

from __future__ import annotations

import random
from array import array
from collections import deque

import pytest

from poolgrid.kernel.index.block_locator import (
    FRESH_ENTRIES,
    GONE_SPARED,
    BlockLocator,
)
from poolgrid.kernel.index.run_forest import Run


def random_blocks(randomness: random.Random, count: int) -> array[int]:
    return array("Q", (randomness.getrandbits(64) for _ in range(count)))


@pytest.mark.parametrize(("shard_entries", "depth"), [(1, 0), (4, 3), (64, 0), (16_384, 8)])
@pytest.mark.parametrize("seed", range(2))
def test_every_block_is_found_in_its_run_while_runs_come_grow_shrink_and_go(
    shard_entries: int, depth: int, seed: int
) -> None:
    randomness = random.Random(seed)
    places = BlockLocator(shard_entries, depth)
    runs: list[Run] = []
    gone: list[int] = []
    for step in range(600):
        match randomness.randrange(4):
            case 0 | 1:
                run = Run(None, random_blocks(randomness, randomness.randrange(1, 12)), 1)
                places.enter(run)
                runs.append(run)
            case 2 if runs:
                run = randomness.choice(runs)
                more = random_blocks(randomness, 3)
                if gone:
                    more.append(gone.pop())  # it may come back, elsewhere
                run.blocks.extend(more)
                places.add(run, more)
            case _ if runs:
                run = randomness.choice(runs)
                short = run.blocks[-randomness.randrange(1, 6) :]
                del run.blocks[-len(short) :]
                places.take(run, short)
                gone.extend(short)
                if not run.blocks or randomness.randrange(3) == 0:
                    gone.extend(run.blocks)
                    places.leave(run)
                    runs.remove(run)
        if step % 20 == 0:
            for run in runs:
                for block in run.blocks:
                    assert any(each is run for each in places.where(block))
            for block in gone[-10:]:
                assert not any(block in each.blocks for each in places.where(block))

    expected = sorted((block, id(run)) for run in runs for block in run.blocks)
    assert sorted((block, id(run)) for block, run in places.items()) == expected
    for run in runs:
        places.leave(run)
    assert not list(places.items())


def test_what_comes_and_goes_again_and_again_takes_no_more_room() -> None:
    randomness = random.Random(1)
    places = BlockLocator(1024, 2)
    run = Run(None, random_blocks(randomness, 1), 1)
    places.enter(run)
    kept = random_blocks(randomness, 20_000)
    places.add(run, kept)
    sizes: list[int] = []
    for _ in range(300):
        passing = random_blocks(randomness, 1000)
        places.add(run, passing)
        places.take(run, passing)
        sizes.append(places.size_bytes())

    assert max(sizes[100:]) <= 1.2 * max(sizes[:100])
    assert max(sizes) < 4 * 12 * (len(kept) + 1000)


def test_places_of_a_full_cache_take_three_times_its_blocks_however_long_blocks_come_and_go() -> None:
    """Blocks come and go evenly, so that all shards have to be put in order at about the same time."""
    randomness = random.Random(2)
    places = BlockLocator(16_384, 8)
    runs = deque(Run(None, random_blocks(randomness, 100), 1) for _ in range(1000))
    for run in runs:
        places.enter(run)
    largest = 0
    for _ in range(15_000):
        oldest = runs.popleft()
        oldest.blocks, gone = array("Q"), oldest.blocks
        places.take(oldest, gone)
        places.leave(oldest)
        runs.append(Run(None, gone, 1))  # as good as any other
        places.enter(runs[-1])
        largest = max(largest, places.size_bytes())

    spared = GONE_SPARED * len(places._shards)
    assert largest < 12 * (3.2 * 100 * len(runs) + 2 * spared + 2 * FRESH_ENTRIES)


def test_hashes_that_are_all_alike_are_not_kept_apart_for_ever() -> None:
    places = BlockLocator(1, 0)
    run = Run(None, array("Q", range(2000)), 1)
    places.enter(run)

    assert all(places.where(block) == [run] for block in (0, 1000, 1999))
    assert len(places._shards) < 2000
