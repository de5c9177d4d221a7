"""The simulated engine of a hybrid model reuses what its groups hold, and its events promise exactly that."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poolgrid.router.core.load_ledger import LoadLedger
from poolgrid.router.core.prefix_index import PrefixIndex
from poolgrid.router.core.projection import Projection
from poolgrid.wire.events import AnyEvent, JournalRecord, RequestStarted, WorkerJoined
from poolgrid.wire.hashing import block_hashes, pack_tokens, sequence_hashes
from poolgrid.wire.identifiers import WorkerId, WorkerKey
from poolgrid.workers.engines.simulated.core.engine import SimulatedEngine, SimulatedLimits
from poolgrid.workers.engines.simulated.core.kv_groups import CacheRecorder, parse_groups
from tests.examples import examples
from tests.router.fleet_builder import make_card
from tests.workers.builders import make_request

BLOCK = 4
WORKER = WorkerKey(WorkerId("hybrid"))
PROMPTS = [[family] * 12 + [branch * 100 + at for at in range(60)] for family in (1, 2) for branch in (3, 4, 5)]


@given(
    st.sampled_from(["window:9", "state:16", "window:6 state:12", "window:5 window:20 state:1"]),
    st.lists(st.tuples(st.integers(0, len(PROMPTS) - 1), st.integers(1, 72), st.integers(1, 9)), max_size=20),
)
@settings(max_examples=examples(80), deadline=None)
def test_a_simulated_hybrid_engine_reuses_what_its_events_promise(
    groups: str, requests: list[tuple[int, int, int]]
) -> None:
    recorder = CacheRecorder()
    limits = SimulatedLimits(BLOCK, 40, max_batch_size=4, max_num_tokens=24, kv_groups=parse_groups(groups))
    engine = SimulatedEngine(limits, recorder=recorder)
    projection = Projection(PrefixIndex(), LoadLedger())
    offset = 0

    def apply(events: list[AnyEvent]) -> None:
        nonlocal offset
        projection.apply(JournalRecord(offset, *WORKER, 1, offset, 0, 0, events), 0.0)
        offset += 1

    apply([WorkerJoined(make_card())])
    apply([*recorder.take()])
    now_ms = 0.0
    for number, (which, isl, osl) in enumerate(requests):
        prompt = PROMPTS[which][:isl]
        path = sequence_hashes(block_hashes(pack_tokens(prompt), BLOCK))
        deepest = (len(prompt) - 1) // BLOCK
        found = projection.index.find(path, deepest)
        promised = BLOCK * (min(found[0][0], deepest) if found else 0)
        engine.submit(make_request(f"r{number}", prompt, osl), now_ms)
        while (outcome := engine.step(now_ms)) is not None:
            now_ms = outcome.ended_ms
            reused = [fact.cached_tokens for fact in outcome.facts if isinstance(fact, RequestStarted)]
            assert reused in ([], [promised])
            apply([*outcome.facts, *recorder.take()])


@pytest.mark.parametrize("text", ["window", "window:0", "conv:8", "state:-1", "window:x state:8"])
def test_groups_that_make_no_sense_are_refused_with_what_is_allowed(text: str) -> None:
    with pytest.raises(ValueError, match="allowed are window:TOKENS and state:TOKENS"):
        parse_groups(text)
