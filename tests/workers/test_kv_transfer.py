"""Two legs on two simulated engines: the same answer as on one, the right blocks or an error, and nothing left over."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poolgrid.kernel.wire.events import PrefillCompleted, RequestFinished, RequestProgressed, RequestStarted
from poolgrid.kernel.wire.hashing import pack_hashes, pack_tokens, unpack_hashes
from poolgrid.kernel.wire.identifiers import Stage, Tier
from poolgrid.kernel.wire.requests import Generate, KvOffered, RefusalKind
from poolgrid.kernel.worker_protocol.refusal import RefusedError
from poolgrid.plugins.simulated.core.engine import SimulatedEngine, SimulatedLimits, StepOutcome
from poolgrid.plugins.simulated.core.kv_groups import CacheRecorder
from poolgrid.plugins.simulated.core.kv_transfer import KvSource, KvTicket, TransferModel, read_ticket
from poolgrid.plugins.simulated.core.next_token import Vocabulary, expected_output, expected_reply
from tests.examples import examples
from tests.workers.builders import (
    VOCABULARY,
    decode_leg,
    fold,
    make_request,
    outputs,
    prefill,
    prefill_leg,
    run_through,
    run_to_end,
)

BLOCK_SIZE = 4
TRANSFER = TransferModel(latency_ms=2.0, gigabytes_per_s=1.0, bytes_per_token=250_000, timeout_ms=1000.0, kept_max=3)
"""A millisecond per block."""


def make_engine(
    name: str = "p",
    vocabulary: Vocabulary = VOCABULARY,
    recorder: CacheRecorder | None = None,
    report_tokens: bool = True,
    transfer: TransferModel = TRANSFER,
    **changes: int,
) -> SimulatedEngine:
    fields: dict[str, Any] = {
        "block_size": BLOCK_SIZE,
        "total_kv_blocks": 64,
        "max_batch_size": 4,
        "max_num_tokens": 16,
        "max_sequence_length": 256,
    }
    return SimulatedEngine(
        SimulatedLimits(**(fields | changes)),
        vocabulary,
        recorder=recorder,
        report_tokens=report_tokens,
        transfer=transfer,
        source=KvSource(f"tcp://{name}", name, 7),
    )


def expected(request: Generate) -> bytes:
    return pack_tokens(expected_output(request.token_ids, request.sampling, VOCABULARY, request.stop_token_ids))


def facts(outcomes: list[StepOutcome]) -> list[object]:
    return [fact for outcome in outcomes for fact in outcome.facts]


def assert_empty(engine: SimulatedEngine) -> None:
    load = engine.load()
    assert (load.running_requests, load.waiting_requests, load.prefill_tokens, load.active_blocks) == (0, 0, 0, 0)
    assert (engine.active_requests, engine.kept_transfers, engine.next_moment_ms) == (0, 0, None)


def test_the_decode_leg_goes_on_from_the_first_token_and_the_release_frees_the_source() -> None:
    source, target = make_engine("p"), make_engine("d")
    request = make_request("a", range(10), max_tokens=6)
    leg, offer, now = prefill(source, request)
    target.submit(leg, now, offer=offer)

    outcomes = run_through(target, now)

    assert outputs(outcomes)["a"] == expected(request)
    first = next(delta for outcome in outcomes for delta in outcome.deltas)
    assert (first.position, first.cached_tokens) == (0, 0)
    assert facts(outcomes)[:2] == [RequestStarted("a", 10, 10, 3), PrefillCompleted("a")]
    assert sum(outcome.prefill_tokens for outcome in outcomes) == 0
    (arrival,) = (arrival for outcome in outcomes for arrival in outcome.arrivals)
    assert (arrival.moved_blocks, arrival.present_blocks, arrival.moved_bytes) == (3, 0, 3_000_000)
    assert source.release(offer.transfer_id)
    assert not source.release(offer.transfer_id)
    assert facts(run_through(source, now)) == [RequestFinished("a", "prefilled")]
    assert_empty(source)
    assert_empty(target)


def test_blocks_that_are_there_already_are_not_moved_and_moved_ones_are_reusable() -> None:
    recorder = CacheRecorder()
    source, target = make_engine("p"), make_engine("d", recorder=recorder)
    leg, offer, now = prefill(source, make_request("a", range(12), max_tokens=2))
    target.submit(leg, now, offer=offer)
    now = run_through(target, now)[-1].ended_ms
    again, offer, _ = prefill(source, make_request("b", range(18), max_tokens=2), now)
    target.submit(again, now, offer=offer)

    outcomes = run_through(target, now)

    (arrival,) = (arrival for outcome in outcomes for arrival in outcome.arrivals)
    # Twelve tokens of the prompt were here; a whole block and the rest of the prompt come.
    assert (arrival.present_blocks, arrival.moved_blocks) == (3, 2)
    assert arrival.duration_ms == pytest.approx(2.0 + 2 * 1.0)
    assert next(delta for outcome in outcomes for delta in outcome.deltas).cached_tokens == 12
    assert fold(recorder.take())[Tier.DEVICE] >= set(unpack_hashes(offer.sequence_hashes))


def test_a_transfer_takes_its_time_and_nobody_else_waits_for_it() -> None:
    source = make_engine("p")
    slow = TransferModel(latency_ms=100.0, gigabytes_per_s=1.0, bytes_per_token=1)
    target = make_engine("d", transfer=slow)
    target.submit(make_request("other", range(50, 54), max_tokens=30), 0.0)
    leg, offer, _ = prefill(source, make_request("a", range(12), max_tokens=3))
    target.submit(leg, 0.0, offer=offer)

    outcomes = run_through(target)

    first = next(outcome for outcome in outcomes if any(delta.request_id == "a" for delta in outcome.deltas))
    assert first.started_ms >= 100.0
    before = [outcome for outcome in outcomes if outcome.started_ms < 100.0]
    assert len(before) > 5
    assert all(delta.request_id == "other" for outcome in before for delta in outcome.deltas)
    assert outputs(outcomes)["a"] == expected(make_request("a", range(12), max_tokens=3))


def with_ticket(leg: Generate, **changes: object) -> Generate:
    ticket = msgspec.msgpack.decode(leg.disaggregated_params or b"", type=KvTicket)
    return msgspec.structs.replace(
        leg, disaggregated_params=msgspec.msgpack.encode(msgspec.structs.replace(ticket, **changes))
    )


@pytest.mark.parametrize(
    ("change", "named", "kind"),
    [
        (lambda leg, offer: (leg, KvOffered(offer.transfer_id, False)), "no longer keeps", RefusalKind.BROKEN),
        (lambda leg, offer: (leg, None), "no longer keeps", RefusalKind.BROKEN),
        (lambda leg, offer: (leg, KvOffered("other", True)), "answered for transfer 'other'", None),
        (lambda leg, offer: (with_ticket(leg, block_size=8), offer), "block size is 8", None),
        (lambda leg, offer: (with_ticket(leg, isl=11), offer), "prompt length is 11", None),
        (lambda leg, offer: (with_ticket(leg, prompt_digest=1), offer), "digest of the prompt is 1", None),
        (lambda leg, offer: (with_ticket(leg, last_hash=None), offer), "last sequence hash is None", None),
        (lambda leg, offer: (with_ticket(leg, first_token=5), offer), "first token is 5", None),
        (
            lambda leg, offer: (leg, msgspec.structs.replace(offer, tail_tokens=3)),
            "tokens beyond whole blocks is 3",
            None,
        ),
        (
            lambda leg, offer: (leg, msgspec.structs.replace(offer, sequence_hashes=offer.sequence_hashes[:8])),
            "number of blocks is 1",
            None,
        ),
        (
            lambda leg, offer: (
                leg,
                msgspec.structs.replace(
                    offer, sequence_hashes=pack_hashes([1, unpack_hashes(offer.sequence_hashes)[1]])
                ),
            ),
            "sequence hashes are not those",
            None,
        ),
        (
            lambda leg, offer: (msgspec.structs.replace(leg, token_ids=leg.token_ids[:-4] + b"\x63\0\0\0"), offer),
            "digest of the prompt",
            None,
        ),
        (
            lambda leg, offer: (
                msgspec.structs.replace(leg, sampling=msgspec.structs.replace(leg.sampling, seed=5)),
                offer,
            ),
            "first token",
            None,
        ),
        (
            lambda leg, offer: (msgspec.structs.replace(leg, disaggregated_params=None), offer),
            "without disaggregated_params",
            None,
        ),
        (
            lambda leg, offer: (msgspec.structs.replace(leg, disaggregated_params=b"\x93\x01"), offer),
            "are not those of a simulated engine",
            None,
        ),
        (lambda leg, offer: (with_ticket(leg, timeout_ms=math.nan), offer), "are not those", None),
    ],
)
def test_kv_that_is_not_that_of_the_prompt_is_refused_and_changes_nothing(
    change: Any, named: str, kind: RefusalKind | None
) -> None:
    target = make_engine("d")
    leg, offer = change(*prefill(make_engine("p"), make_request("a", range(10), max_tokens=6))[:2])

    with pytest.raises(RefusedError, match=named) as refusal:
        target.submit(leg, 0.0, offer=offer)

    assert refusal.value.kind is kind
    assert_empty(target)


@given(packed=st.binary(max_size=200))
def test_any_bytes_as_disaggregated_params_are_a_refusal(packed: bytes) -> None:
    request = msgspec.structs.replace(make_request(), stage=Stage.DECODE, disaggregated_params=packed)

    with pytest.raises(RefusedError):
        read_ticket(request)


def test_tenants_never_get_each_others_kv() -> None:
    source, target = make_engine("p"), make_engine("d")
    leg, offer, _ = prefill(source, make_request("a", range(12), max_tokens=3, cache_salt="x"))
    other = msgspec.structs.replace(leg, routing=make_request(cache_salt="y").routing)

    with pytest.raises(RefusedError, match="digest of the prompt"):
        target.submit(other, 0.0, offer=offer)


def test_kept_blocks_expire_when_nobody_asks_and_live_on_when_somebody_does() -> None:
    engine = make_engine()
    _, offer, ended = prefill(engine, make_request("a", range(10), max_tokens=6))
    assert engine.next_moment_ms == ended + 1000.0
    assert engine.offer(offer.transfer_id, ended + 600.0).known
    assert engine.step(ended + 1000.0) is None
    assert engine.next_moment_ms == ended + 1600.0

    outcome = engine.step(ended + 1600.0)

    assert outcome is not None
    assert (outcome.facts, outcome.expired, outcome.released) == ([RequestFinished("a", "expired")], 1, ["a"])
    assert not engine.offer(offer.transfer_id, ended + 1600.0).known
    assert_empty(engine)


def test_no_more_transfers_are_kept_than_allowed() -> None:
    engine = make_engine()
    for number in range(5):
        engine.submit(prefill_leg(make_request(f"r{number}", range(number, number + 5))), 0.0)

    outcomes = run_to_end(engine)

    assert engine.kept_transfers == 3
    assert engine.load().waiting_requests == 2
    with pytest.raises(RefusedError, match=r"the KV of 3 requests is kept .* at most 3") as refusal:
        engine.submit(prefill_leg(make_request("late")), 0.0)
    assert refusal.value.kind is RefusalKind.BUSY
    now = outcomes[-1].ended_ms
    outcomes += run_through(engine, now)
    assert [fact.request_id for fact in facts(outcomes) if isinstance(fact, PrefillCompleted)] == [
        f"r{number}" for number in range(5)
    ]
    assert_empty(engine)


@dataclass
class Story:
    """What one request does and suffers; ticks count rounds of both engines."""

    family: int
    isl: int
    max_tokens: int
    priority: int
    arrives: int
    cancelled: int | None
    is_lost: bool
    """Its router is gone between the legs."""


stories = st.lists(
    st.builds(
        Story,
        st.integers(0, 2),
        st.integers(1, 40),
        st.integers(1, 24),
        st.integers(0, 1),
        st.integers(0, 12),
        st.none() | st.integers(0, 40),
        st.integers(0, 9).map(lambda number: number == 0),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=examples(50))
@given(told=stories, host_kv_blocks=st.sampled_from([0, 6]))
def test_two_legs_give_what_one_worker_gives_and_leave_nothing_behind(told: list[Story], host_kv_blocks: int) -> None:
    vocabulary = Vocabulary(size=1000, first_token_id=10, eos_probability=0.05)
    recorders = {"p": CacheRecorder(), "d": CacheRecorder()}
    engines = {
        name: make_engine(name, vocabulary, recorder, total_kv_blocks=20, host_kv_blocks=host_kv_blocks)
        for name, recorder in recorders.items()
    }
    source, target = engines["p"], engines["d"]
    requests = {
        f"r{number}": make_request(
            f"r{number}",
            [story.family * 1000 + index for index in range(story.isl)],
            story.max_tokens,
            story.priority,
            cache_salt="salt" if story.family == 2 else "",
        )
        for number, story in enumerate(told)
    }
    output = dict.fromkeys(requests, b"")
    ended: dict[str, str] = {}
    transfers: dict[str, str] = {}
    arrivals = [story.arrives for story in told]
    now, tick = 0.0, 0
    while tick <= max(arrivals) or source.active_requests or target.active_requests:
        for (request_id, request), story in zip(requests.items(), told, strict=True):
            if story.arrives == tick:
                try:
                    source.submit(prefill_leg(request), now)
                except RefusedError:
                    ended[request_id] = "refused"
            if story.cancelled is not None and story.arrives + story.cancelled == tick:
                hit = source.cancel(request_id), target.cancel(request_id)
                if any(hit) and request_id not in ended:
                    ended[request_id] = "cancelled"
        latest = now
        for name, engine in engines.items():
            outcome = engine.step(now)
            if outcome is None:
                continue
            latest = max(latest, outcome.ended_ms)
            for arrival in outcome.arrivals:
                source.release(transfers[arrival.request_id])
            for delta in outcome.deltas:
                request_id = delta.request_id
                story = told[int(request_id[1:])]
                if delta.finish_reason == "prefilled":
                    assert name == "p"
                    leg = decode_leg(requests[request_id], delta)
                    transfers[request_id] = read_ticket(leg).transfer_id
                    if story.is_lost:
                        ended.setdefault(request_id, "lost")
                    elif request_id not in ended:
                        target.submit(leg, now, offer=source.offer(transfers[request_id], now))
                    continue
                if name == "d" or delta.finish_reason not in (None, "cancelled"):
                    assert delta.position == len(output[request_id]) // 4
                    output[request_id] += delta.token_ids
                if delta.finish_reason is not None:
                    ended.setdefault(request_id, delta.finish_reason)
        if latest == now:
            moments = [engine.next_moment_ms for engine in engines.values() if engine.next_moment_ms is not None]
            latest = max(now, min(moments)) if moments else now
        now = latest
        tick += 1

    for request_id, request in requests.items():
        tokens, reason = expected_reply(request.token_ids, request.sampling, vocabulary)
        if ended[request_id] in ("cancelled", "lost", "refused"):
            assert pack_tokens(tokens).startswith(output[request_id])
        else:
            assert (output[request_id], ended[request_id]) == (pack_tokens(tokens), reason)
    for name, engine in engines.items():
        assert_empty(engine)
        held = fold(recorders[name].take())
        assert fold(engine.resident_blocks()) == held


Happening = tuple[str, int, int, int, int, float, float | None]
happenings = st.lists(
    st.tuples(
        st.sampled_from(["whole", "prefill", "decode"]),
        st.integers(0, 2),
        st.integers(1, 40),
        st.integers(2, 30),
        st.integers(0, 1),
        st.floats(0, 120),
        st.none() | st.floats(0, 400),
    ),
    min_size=1,
    max_size=12,
)


def play(
    script: list[Happening], single_steps: bool, report_tokens: bool = True
) -> tuple[list[StepOutcome], SimulatedEngine, CacheRecorder]:
    """Play legs of all kinds on one engine; the last number of a happening is when it is released or cancelled."""
    recorder = CacheRecorder()
    transfer = TransferModel(latency_ms=3.0, gigabytes_per_s=1.0, bytes_per_token=500_000, timeout_ms=150.0, kept_max=3)
    engine = make_engine(
        "x", recorder=recorder, report_tokens=report_tokens, transfer=transfer, total_kv_blocks=20, host_kv_blocks=4
    )
    moments: list[tuple[float, int, Any]] = []
    at = 0.0
    order = 0
    for number, (kind, family, isl, max_tokens, priority, gap, after) in enumerate(script):
        at += gap
        prompt = [family * 1000 + index for index in range(isl)]
        request = make_request(f"r{number}", prompt, max_tokens, priority)
        offer = None
        if kind == "prefill":
            request = prefill_leg(request)
        elif kind == "decode":
            request, offer, _ = prefill(make_engine(), request)
        moments.append((at, number, (request, offer)))
        if after is not None:
            moments.append((at + after, number, f"r{number}" if number % 2 else (number,)))
    moments.sort(key=lambda moment: moment[:2])
    outcomes: list[StepOutcome] = []
    now = 0.0
    transfers: dict[int, str] = {}

    def run_until(moment: float) -> None:
        nonlocal now
        while now < moment:
            outcome = engine.step(now, None if single_steps else moment)
            if outcome is not None:
                outcomes.append(outcome)
                now = outcome.ended_ms
                continue
            wakes = engine.next_moment_ms
            if wakes is None and moment == math.inf:
                return
            now = moment if wakes is None else min(moment, wakes)

    for moment, number, what in moments:
        run_until(moment)
        if isinstance(what, str):
            engine.cancel(what)
        elif len(what) == 1:
            engine.release(transfers.get(number, ""))
        else:
            request, offer = what
            try:
                engine.submit(request, now, offer=offer)
            except RefusedError:
                continue
            transfers[number] = f"7-{order}"
            order += 1
    run_until(math.inf)
    return outcomes, engine, recorder


@settings(max_examples=examples(50))
@given(script=happenings)
def test_running_over_uneventful_steps_equals_single_steps_to_the_bit_with_legs_too(script: list[Happening]) -> None:
    single, engine, recorder = play(script, single_steps=True)
    leaping, leaper, recorder_too = play(script, single_steps=False)
    quiet, _, recorder_as_well = play(script, single_steps=False, report_tokens=False)

    def told(outcomes: list[StepOutcome]) -> list[tuple[float, object]]:
        return [
            (outcome.ended_ms, told)
            for outcome in outcomes
            for told in [*outcome.facts, *outcome.arrivals, *outcome.released, outcome.expired]
            if told
        ]

    assert told(leaping) == told(single) == told(quiet)
    assert outputs(leaping) == outputs(single)
    assert sum(outcome.steps for outcome in leaping) == sum(outcome.steps for outcome in single)
    assert recorder.take() == recorder_too.take() == recorder_as_well.take()
    assert leaper.load() == engine.load()
    assert_empty(engine)
    assert_empty(leaper)


@settings(max_examples=examples(30))
@given(script=happenings)
def test_every_leg_is_told_started_completed_and_finished_once_and_in_order(script: list[Happening]) -> None:
    outcomes, _, _ = play(script, single_steps=False)

    for number in range(len(script)):
        story = [
            type(fact)
            for outcome in outcomes
            for fact in outcome.facts
            if fact.request_id == f"r{number}" and not isinstance(fact, RequestProgressed)
        ]
        assert story in (
            [RequestStarted, PrefillCompleted, RequestFinished],
            [RequestStarted, RequestFinished],
            [RequestFinished],
            [],  # refused: the transfers that are kept were at their bound
        )


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"latency_ms": -1.0}, "latency_ms is -1.0"),
        ({"latency_ms": math.nan}, "latency_ms is nan"),
        ({"gigabytes_per_s": 0.0}, "gigabytes_per_s is 0.0"),
        ({"bytes_per_token": 0}, "bytes_per_token is 0"),
        ({"timeout_ms": 0.0}, "timeout_ms is 0.0"),
        ({"kept_max": 0}, "kept_max is 0"),
    ],
)
def test_impossible_transfer_models_are_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        TransferModel(**changes)
