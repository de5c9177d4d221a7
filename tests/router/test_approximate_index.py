"""What a router believes by its own choices expires, and goes on elsewhere exactly as it was."""

from __future__ import annotations

import random
import sys

import pytest

from poolgrid.kernel.index.prefix_index import PrefixIndex
from poolgrid.kernel.projection.approximate_index import ApproximateIndex
from tests.router.fleet_builder import worker_key

WORKERS = [worker_key(name) for name in "abc"]
TTL_MS = 100.0


class Choices:
    """Seeded choices over conversations that grow and share their beginnings; also drops of workers."""

    def __init__(self, seed: int, *indexes: ApproximateIndex) -> None:
        self.indexes = list(indexes)
        self.chance = random.Random(seed)
        self.now_ms = 1.5
        self.paths = [[block] for block in range(3)]

    def step(self) -> None:
        chance = self.chance
        self.now_ms += chance.choice((0.0, 0.3, 1.0, 12.0))
        if chance.random() < 0.02:
            worker = chance.choice(WORKERS)
            for index in self.indexes:
                index.drop(worker)
            return
        path = chance.choice(self.paths[-12:])
        if chance.random() < 0.5:
            path = [*path[: chance.randrange(len(path)) + 1]]
            path += [chance.getrandbits(60) for _ in range(chance.randrange(5))]
            self.paths.append(path)
        worker = chance.choice(WORKERS)
        for index in self.indexes:
            index.record(worker, path, self.now_ms)

    def answers(self, index: ApproximateIndex) -> list[int]:
        """How much of every path each worker is believed to hold now."""
        index.expire(self.now_ms)
        return [index.index.overlap(path, worker).blocks for path in self.paths for worker in WORKERS]


def made(budget_bytes: int | None = None) -> ApproximateIndex:
    return ApproximateIndex(PrefixIndex(budget_bytes), TTL_MS)


@pytest.mark.parametrize("seed", range(3))
def test_beliefs_restored_elsewhere_answer_alike_for_ever_after(seed: int) -> None:
    first, second = made(), made()
    choices = Choices(seed, first)
    for _ in range(150):
        choices.step()
    beliefs = first.beliefs()
    choices.indexes.append(second)
    moment_ms = choices.now_ms

    chains, exact_from_ms = beliefs.condensed(sys.maxsize)
    second.restore_beliefs(chains, exact_from_ms, moment_ms)

    assert exact_from_ms == 0.0
    assert [chain.chosen_ms for chain in chains] == sorted(chain.chosen_ms for chain in chains)
    for _ in range(100):
        assert choices.answers(second) == choices.answers(first)
        choices.step()


def test_beliefs_are_those_of_their_moment_whatever_happens_to_the_index_meanwhile() -> None:
    index = made()
    choices = Choices(7, index)
    for _ in range(200):
        choices.step()
    expected = index.beliefs().condensed(sys.maxsize)
    beliefs = index.beliefs()

    for _ in range(300):
        choices.step()

    assert beliefs.condensed(sys.maxsize) == expected


def test_the_youngest_beliefs_are_kept_and_the_rest_has_expired_when_it_says() -> None:
    first, second = made(), made()
    choices = Choices(3, first)
    for _ in range(300):
        choices.step()

    chains, exact_from_ms = first.beliefs().condensed(20)
    second.restore_beliefs(chains, exact_from_ms, choices.now_ms)

    assert sum(len(chain.hashes) for chain in chains) <= 20
    assert choices.now_ms < exact_from_ms <= choices.now_ms + TTL_MS
    assert choices.answers(second) != choices.answers(first)
    choices.indexes.append(second)
    while choices.now_ms < exact_from_ms:
        choices.step()
    assert choices.answers(second) == choices.answers(first)


def test_what_an_eviction_left_is_exact_again_once_all_of_that_time_has_expired() -> None:
    index = made(budget_bytes=128 * 5)
    index.record(WORKERS[0], range(4), 10.0)
    assert index.exact_from_ms == 0.0
    index.record(WORKERS[0], range(10, 14), 20.0)
    assert index.index.counters.evicted_blocks > 0
    assert index.exact_from_ms == 20.0 + TTL_MS
    assert index.beliefs().condensed(sys.maxsize)[1] == 20.0 + TTL_MS


def test_a_dropped_worker_begins_anew_under_its_name() -> None:
    index = made()
    index.record(WORKERS[0], [1, 2, 3], 10.0)
    index.drop(WORKERS[0])
    index.record(WORKERS[0], [1], 20.0)

    (chain,), _ = index.beliefs().condensed(sys.maxsize)

    assert (chain.chosen_ms, chain.hashes) == (20.0, (1,))
    index.expire(10.0 + TTL_MS)
    assert index.index.overlap([1, 2], WORKERS[0]).blocks == 1
