"""The simulated engine: batching, caching, preemption, and one answer however it is driven."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poolgrid.kernel.index.prefix_index import PrefixIndex
from poolgrid.kernel.projection.load_ledger import LoadLedger
from poolgrid.kernel.projection.projection import Projection
from poolgrid.kernel.wire import codec
from poolgrid.kernel.wire.events import (
    AnyEvent,
    JournalRecord,
    PrefillCompleted,
    RequestFinished,
    RequestProgressed,
    RequestStarted,
    WorkerJoined,
)
from poolgrid.kernel.wire.hashing import block_hashes, hash_seed, pack_tokens, sequence_hashes
from poolgrid.kernel.wire.identifiers import Tier, WorkerId, WorkerKey
from poolgrid.kernel.wire.multimodal import MediaItem, MediaKind, MultimodalInput, digest_media
from poolgrid.kernel.wire.requests import (
    Generate,
    KvOffered,
    KvRetention,
    RefusalKind,
    RetainedTokens,
    Routing,
    Sampling,
    TokenDelta,
)
from poolgrid.kernel.wire.sessions import SessionTurn
from poolgrid.kernel.worker_protocol.refusal import RefusedError
from poolgrid.plugins.simulated.core.engine import SimulatedEngine, SimulatedLimits, StepOutcome
from poolgrid.plugins.simulated.core.kv_groups import CacheRecorder, parse_groups
from poolgrid.plugins.simulated.core.kv_transfer import KvSource
from poolgrid.plugins.simulated.core.next_token import (
    AnswerLengths,
    Vocabulary,
    expected_output,
    expected_reply,
)
from tests.examples import examples
from tests.router.fleet_builder import make_card
from tests.workers.builders import (
    VOCABULARY,
    fold,
    make_request,
    outputs,
    prefill,
    prefill_leg,
    run_through,
    run_to_end,
)

BLOCK_SIZE = 4


def make_limits(**changes: int) -> SimulatedLimits:
    fields: dict[str, Any] = {
        "block_size": BLOCK_SIZE,
        "total_kv_blocks": 64,
        "max_batch_size": 4,
        "max_num_tokens": 16,
        "max_sequence_length": 256,
    }
    return SimulatedLimits(**(fields | changes))


def make_engine(**changes: int) -> SimulatedEngine:
    return SimulatedEngine(make_limits(**changes), VOCABULARY)


def expected(request: Generate) -> bytes:
    return pack_tokens(expected_output(request.token_ids, request.sampling, VOCABULARY, request.stop_token_ids))


def kinds(outcome: StepOutcome) -> list[str]:
    return [type(fact).__name__ for fact in outcome.facts]


def test_a_request_lives_from_prefill_to_its_last_token() -> None:
    engine = make_engine()
    engine.submit(make_request("a", range(5), max_tokens=3), 0.0)

    outcomes = run_to_end(engine)

    assert [kinds(outcome) for outcome in outcomes] == [
        ["RequestStarted", "PrefillCompleted"],
        [],
        ["RequestFinished"],
    ]
    assert outcomes[0].facts[0] == RequestStarted("a", isl=5, cached_tokens=0, active_blocks=2)
    assert [delta.finish_reason for outcome in outcomes for delta in outcome.deltas] == [None, None, "length"]
    assert [delta.cached_tokens for outcome in outcomes for delta in outcome.deltas] == [0, None, None]
    assert outputs(outcomes)["a"] == expected(make_request("a", range(5), max_tokens=3))
    assert engine.active_requests == 0


def test_no_step_computes_more_tokens_than_allowed_nor_runs_more_requests() -> None:
    engine = make_engine()
    for number in range(12):
        engine.submit(make_request(f"r{number}", range(number, number + 9), max_tokens=5), 0.0)

    now = 0.0
    while (outcome := engine.step(now)) is not None:
        now = outcome.ended_ms
        assert outcome.prefill_tokens + outcome.decode_tokens <= 16
        assert engine.load().running_requests <= 4


def test_precomputed_hashes_change_nothing_and_are_not_changed() -> None:
    prompt = list(range(22))
    hashes = sequence_hashes(block_hashes(pack_tokens(prompt), BLOCK_SIZE, hash_seed(cache_salt="s")))
    given_hashes = list(hashes)
    recorded = []
    for known in (None, given_hashes):
        recorder = CacheRecorder()
        engine = SimulatedEngine(make_limits(), VOCABULARY, recorder=recorder)
        engine.submit(make_request("a", prompt, max_tokens=30, cache_salt="s"), 0.0, known)
        run_to_end(engine)
        recorded.append(recorder.take())

    assert recorded[0] == recorded[1]
    assert given_hashes == hashes
    with pytest.raises(ValueError, match="1 sequence hashes were given, the prompt has 5 whole blocks"):
        make_engine().submit(make_request("a", prompt), 0.0, [1])


@pytest.mark.parametrize(
    ("request_", "named", "kind"),
    [
        (make_request(prompt=()), "prompt has 0 tokens", None),
        (make_request(max_tokens=0), "max_tokens is 0", None),
        (make_request(prompt=range(200), max_tokens=57), r"200 \+ 57 tokens, allowed are at most 256", None),
        (make_request(prompt=range(60), max_tokens=6), "need 17 KV blocks, this worker has 16", None),
        (make_request("active"), "'active' is already active", None),
        (
            Generate("a", pack_tokens((1, 2)), Sampling(8, guided_regex="a+")),
            "guided_regex is set",
            RefusalKind.CANNOT_DO,
        ),
    ],
)
def test_what_can_never_run_is_refused_with_the_reason(
    request_: Generate, named: str, kind: RefusalKind | None
) -> None:
    engine = make_engine(total_kv_blocks=16)
    engine.submit(make_request("active"), 0.0)
    before = engine.load()

    with pytest.raises(RefusedError, match=named) as refusal:
        engine.submit(request_, 0.0)

    assert refusal.value.kind is kind
    assert engine.load() == before


def test_a_full_waiting_room_refuses_and_says_that_another_worker_may_help() -> None:
    engine = make_engine(max_waiting_requests=2)
    engine.submit(make_request("a"), 0.0)
    engine.submit(make_request("b"), 0.0)

    with pytest.raises(RefusedError, match="2 requests are waiting, allowed are at most 2") as refusal:
        engine.submit(make_request("c"), 0.0)

    assert refusal.value.kind is RefusalKind.BUSY


def test_load_counts_what_is_there() -> None:
    engine = make_engine(max_batch_size=1)
    engine.submit(make_request("a", range(20), max_tokens=3), 0.0)
    engine.submit(make_request("b", range(100, 110), max_tokens=3), 0.0)
    assert engine.load().prefill_tokens == 30

    engine.step(0.0)
    load = engine.load()
    assert (load.running_requests, load.waiting_requests, load.prefill_tokens) == (1, 1, 14)
    assert (load.active_blocks, load.cached_blocks, load.total_blocks, load.steps) == (6, 0, 64, 1)

    run_to_end(engine)
    load = engine.load()
    assert (load.running_requests, load.waiting_requests, load.prefill_tokens, load.active_blocks) == (0, 0, 0, 0)
    # Whole blocks of 20 + 2 and 10 + 2 tokens: the KV of the last token is never computed.
    assert load.cached_blocks == 5 + 3


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"block_size": 0}, "block_size is 0"),
        ({"host_kv_blocks": -1}, "host_kv_blocks is -1"),
        ({"max_sequence_length": 1}, "max_sequence_length is 1"),
        ({"max_num_tokens": 3}, "max_num_tokens is 3"),
    ],
)
def test_impossible_limits_are_refused(changes: dict[str, int], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        make_limits(**changes)


# What happens, drawn at random: (arrival gap in ms, prompt family, prompt length, max tokens, priority, cancel after).
workloads = st.lists(
    st.tuples(
        st.floats(0, 120),
        st.integers(0, 2),
        st.integers(1, 40),
        st.integers(1, 30),
        st.integers(0, 1),
        st.none() | st.floats(0, 300),
    ),
    min_size=1,
    max_size=14,
)


def drive(
    workload: list[tuple[float, int, int, int, int, float | None]],
    recorder: Any,
    single_steps: bool,
    host_kv_blocks: int = 6,
    vocabulary: Vocabulary = VOCABULARY,
    report_tokens: bool = True,
) -> tuple[list[StepOutcome], SimulatedEngine, list[Generate], set[str]]:
    """Play a workload; a caller that wants single steps asks for no horizon."""
    limits = make_limits(total_kv_blocks=20, host_kv_blocks=host_kv_blocks, max_sequence_length=80)
    engine = SimulatedEngine(limits, vocabulary, recorder=recorder, report_tokens=report_tokens)
    happenings: list[tuple[float, int, Generate | str]] = []
    at = 0.0
    requests = []
    for number, (gap, family, isl, max_tokens, priority, cancel_after) in enumerate(workload):
        at += gap
        prompt = [family * 1000 + index for index in range(isl)]
        request = make_request(f"r{number}", prompt, max_tokens, priority, cache_salt="salt" if family == 2 else "")
        requests.append(request)
        happenings.append((at, number, request))
        if cancel_after is not None:
            happenings.append((at + cancel_after, number, request.request_id))
    happenings.sort(key=lambda happening: happening[:2])
    outcomes: list[StepOutcome] = []
    cancelled: set[str] = set()
    now = 0.0

    def run_until(moment: float) -> None:
        nonlocal now
        while now < moment:
            outcome = engine.step(now, None if single_steps else moment)
            if outcome is None:
                now = moment
                break
            outcomes.append(outcome)
            now = outcome.ended_ms

    for moment, _, what in happenings:
        run_until(moment)
        if isinstance(what, Generate):
            engine.submit(what, now)
        elif engine.cancel(what):
            cancelled.add(what)
    while (outcome := engine.step(now, None if single_steps else math.inf)) is not None:
        outcomes.append(outcome)
        now = outcome.ended_ms
    return outcomes, engine, requests, cancelled


@settings(max_examples=examples(60))
@given(workload=workloads, host_kv_blocks=st.sampled_from([0, 6]))
def test_running_over_uneventful_steps_equals_single_steps_to_the_bit(
    workload: list[tuple[float, int, int, int, int, float | None]], host_kv_blocks: int
) -> None:
    recorders = CacheRecorder(), CacheRecorder(), CacheRecorder()
    single, engine, _, cancelled = drive(workload, recorders[0], True, host_kv_blocks)
    leaping, leaper, _, cancelled_too = drive(workload, recorders[1], False, host_kv_blocks)
    quiet, _, _, _ = drive(workload, recorders[2], False, host_kv_blocks, report_tokens=False)

    def told(outcomes: list[StepOutcome]) -> list[tuple[float, object]]:
        return [(outcome.ended_ms, fact) for outcome in outcomes for fact in outcome.facts]

    assert told(leaping) == told(single) == told(quiet)
    assert recorders[1].take() == recorders[2].take()
    assert outputs(leaping) == outputs(single)
    assert sum(outcome.steps for outcome in leaping) == len([outcome for outcome in single if outcome.steps])
    assert cancelled == cancelled_too
    assert leaper.load() == engine.load()
    assert leaping[-1].ended_ms == single[-1].ended_ms


@settings(max_examples=examples(60))
@given(workload=workloads)
def test_whatever_happens_every_output_is_the_expected_one_and_nothing_is_left(
    workload: list[tuple[float, int, int, int, int, float | None]],
) -> None:
    vocabulary = Vocabulary(size=1000, first_token_id=10, eos_probability=0.05)
    recorder = CacheRecorder()
    outcomes, engine, requests, cancelled = drive(workload, recorder, False, vocabulary=vocabulary)

    joined = outputs(outcomes)
    reasons = {
        delta.request_id: delta.finish_reason
        for outcome in outcomes
        for delta in outcome.deltas
        if delta.finish_reason is not None
    }
    for request in requests:
        tokens, reason = expected_reply(request.token_ids, request.sampling, vocabulary)
        if request.request_id in cancelled:
            assert reasons[request.request_id] == "cancelled"
            assert pack_tokens(tokens).startswith(joined[request.request_id])
        else:
            assert (joined[request.request_id], reasons[request.request_id]) == (pack_tokens(tokens), reason)
    load = engine.load()
    assert (load.running_requests, load.waiting_requests, load.prefill_tokens, load.active_blocks) == (0, 0, 0, 0)
    held = fold(recorder.take())
    assert fold(engine.resident_blocks()) == held
    assert len(held[Tier.DEVICE]) == load.cached_blocks


@settings(max_examples=examples(60))
@given(workload=workloads)
def test_every_request_is_told_started_completed_and_finished_once_and_in_order(
    workload: list[tuple[float, int, int, int, int, float | None]],
) -> None:
    outcomes, _, requests, _ = drive(workload, CacheRecorder(), False)

    for request in requests:
        story = [
            type(fact)
            for outcome in outcomes
            for fact in outcome.facts
            if fact.request_id == request.request_id and not isinstance(fact, RequestProgressed)
        ]
        assert story in (
            [RequestStarted, PrefillCompleted, RequestFinished],
            [RequestStarted, RequestFinished],
            [RequestFinished],
        )


def test_a_request_with_media_that_moves_goes_on_with_the_same_output() -> None:
    picture = b"the bytes of a picture"
    item = MediaItem(MediaKind.EMBEDDINGS, picture, "application/x-safetensors", digest_media(picture), 2, 5)
    whole = msgspec.structs.replace(
        make_request("whole", range(11), max_tokens=9),
        multimodal=codec.multimodal.encode(MultimodalInput("a prompt", (item,))),
    )

    def answered(request: Generate) -> bytes:
        engine = SimulatedEngine(make_limits(), VOCABULARY, takes_media=True)
        engine.submit(request, 0.0)
        return outputs(run_to_end(engine))[request.request_id]

    output = answered(whole)
    assert output != expected(whole), "the picture changes the output"
    for emitted in range(1, 9):
        moved = msgspec.structs.replace(
            whole,
            token_ids=whole.token_ids + output[: 4 * emitted],
            sampling=Sampling(max_tokens=9 - emitted),
            routing=Routing(emitted_tokens=emitted),
        )
        assert answered(moved) == output[4 * emitted :]


CHAT = Vocabulary(size=1000, first_token_id=10, answers=AnswerLengths(40, 15))


def chat_engine() -> SimulatedEngine:
    return SimulatedEngine(make_limits(), CHAT, source=KvSource("tcp://127.0.0.1:1", "w", 1))


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_an_answer_ends_at_the_same_place_whole_in_two_legs_and_wherever_it_moves(seed: int | None) -> None:
    request = make_request(prompt=range(20), max_tokens=150, seed=seed)
    whole = chat_engine()
    whole.submit(request, 0.0)
    right = outputs(run_to_end(whole))["r"]
    assert right == pack_tokens(expected_output(request.token_ids, request.sampling, CHAT))
    assert right[-4:] == pack_tokens([CHAT.eos_token_id])

    leg, offer, now_ms = prefill(chat_engine(), request)
    decode = chat_engine()
    decode.submit(leg, now_ms, offer=offer)
    assert outputs(run_through(decode, now_ms))["r"] == right

    for emitted in (1, 7, len(right) // 4 - 1):
        moved = msgspec.structs.replace(
            request,
            token_ids=request.token_ids + right[: 4 * emitted],
            sampling=msgspec.structs.replace(request.sampling, max_tokens=150 - emitted),
            routing=Routing(emitted_tokens=emitted),
        )
        engine = chat_engine()
        engine.submit(moved, 0.0)
        outcomes = run_to_end(engine)
        assert outputs(outcomes)["r"] == right[4 * emitted :]
        assert last_of(outcomes).finish_reason == "stop"


def last_of(outcomes: list[StepOutcome]) -> TokenDelta:
    return [delta for outcome in outcomes for delta in outcome.deltas][-1]


def test_log_probabilities_of_the_prompt_come_once_with_the_first_token() -> None:
    request = make_request(prompt=range(1, 21), max_tokens=3)
    asked = msgspec.structs.replace(request.sampling, prompt_logprobs=2, logprobs=2)
    request = msgspec.structs.replace(request, sampling=asked)

    def reported(engine: SimulatedEngine, request: Generate, offer: KvOffered | None = None) -> list[int]:
        engine.submit(request, 0.0, offer=offer)
        deltas = [delta for outcome in run_through(engine) for delta in outcome.deltas]
        assert all(delta.prompt_logprobs is None for delta in deltas[1:])
        return [entry.token_id for entry in deltas[0].prompt_logprobs or ()]

    rest_of_prompt = list(range(2, 21))
    assert reported(SimulatedEngine(make_limits(), VOCABULARY), request) == rest_of_prompt
    assert reported(SimulatedEngine(make_limits(), VOCABULARY), prefill_leg(request)) == rest_of_prompt
    leg, offer, _ = prefill(chat_engine(), request)
    assert reported(chat_engine(), leg, offer) == []
    moved = msgspec.structs.replace(request, routing=Routing(emitted_tokens=4))
    assert reported(SimulatedEngine(make_limits(), VOCABULARY), moved) == []


def test_blocks_stay_as_long_as_their_request_says() -> None:
    def reused(
        retention: KvRetention | None,
        flood: KvRetention | None = None,
        return_ms: int = 0,
        keep_ms: int = 0,
        keep_tokens: int = 0,
    ) -> int:
        engine = make_engine(total_kv_blocks=8)
        turn = SessionTurn("agent", return_ms=return_ms, keep_ms=keep_ms, keep_tokens=keep_tokens)
        kept = msgspec.structs.replace(make_request("kept", range(16), 1), retention=retention, turn=turn)
        engine.submit(kept, 0.0)
        run_to_end(engine)
        for number in range(3):
            other = make_request(f"other {number}", range(100 * number + 100, 100 * number + 120), 1)
            engine.submit(msgspec.structs.replace(other, retention=flood), 1000.0)
            run_to_end(engine, 1000.0)
        engine.submit(make_request("again", range(16), 1), 10_000.0)
        (started,) = (
            fact for each in run_to_end(engine, 10_000.0) for fact in each.facts if isinstance(fact, RequestStarted)
        )
        return started.cached_tokens

    high = KvRetention((RetainedTokens(0, 8, 90),))
    assert reused(None) == 0
    assert reused(high) == 8
    assert reused(KvRetention((RetainedTokens(0, 8, 90, 5),))) == 0, "the priority lapsed after 5 ms"
    assert reused(None, KvRetention((RetainedTokens(0, None, 0),), 0)) == 12
    assert reused(None, return_ms=60_000) == 12, "all of it, as its session will be back from its tool"
    assert reused(None, return_ms=5) == 0
    assert reused(high, return_ms=5) == 8, "what the client asks counts"
    assert reused(None, keep_ms=300_000, keep_tokens=15) == 12, "as the client has it kept"
    assert reused(None, keep_ms=300_000, keep_tokens=8) == 8, "as far as the tenant's budget reaches"
    assert reused(None, keep_ms=5, keep_tokens=15) == 0
    assert reused(None, return_ms=60_000, keep_ms=5, keep_tokens=4) == 12, "the longer time counts"
    assert reused(None, return_ms=5, keep_ms=300_000, keep_tokens=8) == 8


def test_an_output_that_moved_here_stays_as_long_as_output() -> None:
    engine = make_engine(total_kv_blocks=16)
    moved = msgspec.structs.replace(
        make_request("moved", range(16), 2),
        routing=Routing(emitted_tokens=8),
        retention=KvRetention((RetainedTokens(0, None, 90),), decode_priority=0),
    )
    engine.submit(moved, 0.0)
    run_to_end(engine)
    engine.submit(make_request("flood", range(100, 155), 1), 0.0)
    run_to_end(engine)
    engine.submit(make_request("again", range(16), 1), 0.0)
    facts = [fact for each in run_to_end(engine) for fact in each.facts if isinstance(fact, RequestStarted)]
    assert facts[0].cached_tokens == 8, "the two blocks of the prompt, not those of its output"


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
