"""Random loads and random losses: the translator claims what is there, or admits that something may be missing."""

from __future__ import annotations

import random
from typing import Any

import pytest

from poolgrid.kernel.kv_events.trtllm import parse_event
from poolgrid.kernel.wire.hashing import BASE_SEED, block_hashes, pack_tokens, sequence_hashes, unpack_tokens
from poolgrid.kernel.wire.identifiers import Tier
from poolgrid.kernel.wire.requests import Generate, Sampling
from poolgrid.kernel.worker_protocol.event_translation import EventTranslator
from poolgrid.plugins.simulated.core.engine import SimulatedEngine, SimulatedLimits
from poolgrid.plugins.simulated.core.next_token import Vocabulary
from tests.examples import examples
from tests.fakes.tensorrt_llm._fake.cache_events import RankEvents, Tenant, groups_of
from tests.workers.builders import fold

BLOCK = 4
LONGEST = 64
SEEDS = range(examples(15))

Held = dict[Tier, set[int]]


class Rank:
    """A simulated engine that speaks TensorRT-LLM, events that may get lost, and what a reader makes of the rest."""

    def __init__(self, randomness: random.Random) -> None:
        device, host = randomness.randint(18, 40), randomness.choice([0, 6, 20])
        self.windows = randomness.choice([[LONGEST], [LONGEST, 8], [LONGEST, 8, 24]])
        self.recorder = RankEvents(BLOCK, device, host, self.windows, randomness.randint(1, 8), None)
        self.recorder.register(BASE_SEED, Tenant())
        limits = SimulatedLimits(
            BLOCK, device, host, 4, 32, max_sequence_length=LONGEST, kv_groups=groups_of(self.windows)
        )
        self.engine = SimulatedEngine(limits, Vocabulary(1000, 3, 2, 0.0), recorder=self.recorder)
        self.translator = EventTranslator(BLOCK, windows=len(self.windows))
        self.randomness = randomness
        self.held: Held = {tier: set() for tier in Tier}
        self.capacity = device + host
        self.now_ms = 0.0
        self.requests = 0
        self.lost = 0
        self.unnoticed = False
        """Events were lost after the last one that was read."""
        self._tokens: dict[str, list[int]] = {}

    def truth(self) -> Held:
        return fold(self.engine.resident_blocks())

    def submit(self, prompt: list[int], osl: int) -> None:
        name = f"r{self.requests}"
        self.requests += 1
        self.engine.submit(Generate(name, pack_tokens(prompt), Sampling(max_tokens=osl, seed=self.requests)), 0.0)
        self._tokens[name] = list(prompt)

    def step(self, loss: float) -> bool:
        """Do one engine step and read its events, each of which may be lost; say whether there was work."""
        outcome = self.engine.step(self.now_ms)
        if outcome is None:
            return False
        self.now_ms = outcome.ended_ms
        for delta in outcome.deltas:
            tokens = self._tokens[delta.request_id]
            tokens += unpack_tokens(delta.token_ids)
            if delta.finish_reason is not None:
                whole = sequence_hashes(block_hashes(pack_tokens(tokens[:-1]), BLOCK))
                self.recorder.request_ended(whole, tokens[:-1], BASE_SEED)
        self.read(self.recorder.drain(), loss)
        return True

    def read(self, events: list[dict[str, Any]], loss: float) -> None:
        if self.randomness.random() < loss:
            # The oldest go, as when a buffer overflows; sometimes all.
            lost = self.randomness.randint(1, len(events)) if events else 0
            self.lost += lost
            events = events[lost:]
            self.unnoticed = self.unnoticed or (lost > 0 and not events)
        if events:
            self.unnoticed = False
        fold(self.translator.translate([parse_event(event) for event in events]).events, self.held)

    def check(self) -> None:
        if self.unnoticed:
            return  # nobody can know: the hole shows with the next event
        truth = self.truth()
        for tier in Tier:
            assert self.held[tier] <= truth[tier], f"claims {tier.name} blocks that are not there"
        if not self.lost:
            assert self.held == truth
            assert not self.translator.is_incomplete
        assert fold(self.translator.restate()) == self.held

    def load(self, rounds: int, loss: float) -> None:
        for _ in range(rounds):
            for _ in range(self.randomness.randint(1, 3)):
                shared = [self.randomness.randint(3, 5)] * self.randomness.randint(0, 12)
                own = [self.randomness.randint(3, 9) for _ in range(self.randomness.randint(1, 16))]
                self.submit(shared + own, self.randomness.randint(1, 12))
            while self.step(loss):
                self.check()

    def turn_over(self) -> None:
        """Fill the cache with what was never there, until all that was is gone."""
        self.translator.learn_capacity(self.capacity)  # the created events may be among what was lost
        at = 0
        while self.translator.is_incomplete or at * 7 < 2 * self.capacity:
            self.submit([10_000 + at * 32 + each for each in range(32)], 1)
            at += 1
            while self.step(0.0):
                self.check()
            assert at < 20 * self.capacity, "it must be complete some time"


@pytest.mark.parametrize("seed", SEEDS)
def test_without_losses_the_index_is_the_truth_after_every_step(seed: int) -> None:
    rank = Rank(random.Random(seed))

    rank.load(12, loss=0.0)

    assert rank.requests
    assert rank.translator.counts.lost_events == 0


@pytest.mark.parametrize("seed", SEEDS)
def test_after_losses_nothing_is_claimed_that_is_not_there_and_in_the_end_nothing_is_missing(seed: int) -> None:
    """Fails when a loss does not clear, when what is remembered is claimed without proof, or when ``removed`` does not
    disprove it; and, in the end, when blocks are never learnt again."""
    rank = Rank(random.Random(seed))

    rank.load(12, loss=0.15)
    rank.load(4, loss=0.0)
    rank.turn_over()

    assert rank.lost
    assert rank.held == rank.truth()
    assert rank.translator.counts.gaps
