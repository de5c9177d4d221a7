"""The mock engine behind our front end in benchmarks: what it says of its cache is true."""

from __future__ import annotations

import random

import pytest

from lab.benchmarks.http_worker import MockCache, MockEngine
from poolgrid.wire.events import BlocksRemoved, BlocksStored, RequestFinished, RequestProgressed
from poolgrid.wire.hashing import pack_tokens, unpack_hashes
from poolgrid.wire.requests import FinishReason, Generate, Routing, Sampling

BLOCKS_MAX = 50


@pytest.mark.parametrize("seed", range(100))
def test_the_mock_cache_says_what_was_there_and_what_went_ends_first(seed: int) -> None:
    randomness = random.Random(seed)
    cache, held = MockCache(BLOCKS_MAX), set[int]()
    conversations = [[randomness.getrandbits(64) for _ in range(randomness.randrange(1, 20))] for _ in range(6)]
    for _ in range(100):
        conversation = randomness.choice(conversations)
        if randomness.random() < 0.25:
            conversation += [randomness.getrandbits(64) for _ in range(randomness.randrange(1, 9))]
        path = conversation[: randomness.randrange(1, len(conversation) + 1)]
        if randomness.random() < 0.2:  # it goes on otherwise
            path = [*path[: randomness.randrange(1, len(path) + 1)], randomness.getrandbits(64)]

        known, evicted = cache.take(path)

        assert set(path[:known]) <= held
        assert known == len(path) or path[known] not in held
        held |= set(path)
        assert len(set(evicted)) == len(evicted)
        assert set(evicted) <= held
        held -= set(evicted)
        assert len(held) == cache.blocks
        assert cache.blocks <= BLOCKS_MAX or held <= {*conversation, *path}, "one conversation alone may be longer"


def test_what_is_evicted_of_a_conversation_is_its_end_and_of_the_one_used_longest_ago() -> None:
    cache = MockCache(6)
    cache.take([1, 2, 3])
    cache.take([4, 5, 6])
    cache.take([1, 2, 3])

    assert cache.take([7, 8]) == (0, [6, 5])
    assert cache.take([1, 2, 9]) == (2, [3])


@pytest.mark.parametrize(("together", "steps"), [(1, 20), (256, 2)])
def test_an_answer_that_is_read_at_its_end_takes_two_steps_and_says_the_same_of_its_blocks(
    together: int, steps: int
) -> None:
    engine = MockEngine(16)
    sampling, routing = Sampling(max_tokens=20), Routing(tokens_together=together)
    engine.submit(Generate("a", pack_tokens(range(40)), sampling, routing=routing))

    reports = [engine._step() for _ in range(steps)]

    deltas = [delta for report in reports for delta in report.deltas]
    assert [delta.position for delta in deltas] == ([*range(20)] if together == 1 else [0, 1])
    assert sum(len(delta.token_ids) // 4 for delta in deltas) == 20
    assert deltas[-1].finish_reason is FinishReason.LENGTH
    events = [event for report in reports for event in report.ranks[0].events]
    [stored] = [event for event in events if isinstance(event, BlocksStored)]
    assert len(unpack_hashes(stored.sequence_hashes)) == 2
    assert sum(isinstance(event, RequestProgressed) for event in events) == 1
    assert isinstance(events[-1], RequestFinished)
    assert not any(isinstance(event, BlocksRemoved) for event in events)
