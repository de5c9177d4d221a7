"""The life of a request: its table row by row, and a state machine that drives it through every order of events."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lab.website.request_life_page import page
from poolgrid.kernel.requests.inference import InferenceRequest, StreamDelta
from poolgrid.kernel.requests.legs import (
    NOTHING,
    AvoidWorker,
    CancelLeg,
    Dispatch,
    Effect,
    EndRequest,
    LegEvent,
    LegState,
    PlaceNext,
    RecordFailure,
    ReleaseLeg,
    WorkerFull,
    WorkerReported,
)
from poolgrid.kernel.requests.request_machine import (
    ANY,
    DEPARTURES_MAX,
    LEGS,
    TABLE,
    RequestMachine,
    avoid,
    count_loss,
    move,
    record_failure,
    withdraw,
)
from poolgrid.kernel.requests.token_delivery import TokenDelivery
from poolgrid.kernel.wire.hashing import pack_tokens, unpack_tokens
from poolgrid.kernel.wire.identifiers import Stage, WorkerId, WorkerKey
from poolgrid.kernel.wire.multimodal import MediaItem, MediaKind, MultimodalInput, digest_media
from poolgrid.kernel.wire.requests import FinishReason, RefusalKind, Sampling, TokenDelta
from tests.examples import examples

MAX_TOKENS = 6
PICTURE = MultimodalInput("", (MediaItem(MediaKind.IMAGE, b"pixels", "image/png", digest_media(b"pixels"), 2, 4),))


def machine(media: bool = False, migration_limit: int = 2, max_tokens: int = MAX_TOKENS) -> RequestMachine:
    request = InferenceRequest(
        "r", "m", pack_tokens(range(8)), Sampling(max_tokens), multimodal=PICTURE if media else None
    )
    return RequestMachine(request, TokenDelivery("r", lambda delivery: None), migration_limit)


def place(made: RequestMachine, stage: Stage, worker: str = "w", expected: int | None = None) -> Dispatch:
    made.begin(WorkerKey(WorkerId(worker)), f"tcp://{worker}", stage, 0, expected)
    assert made.plan.current is not None
    return made.plan.current


def delta(dispatch: Dispatch, *tokens: int, position: int | None = None, **more: Any) -> TokenDelta:
    return TokenDelta(dispatch.id, dispatch.position if position is None else position, pack_tokens(tokens), **more)


def kinds(effects: tuple[Effect, ...]) -> list[str]:
    return [type(effect).__name__ for effect in effects]


def to_decode(made: RequestMachine) -> tuple[Dispatch, Dispatch]:
    """Bring a request to its decode leg, of which no output came yet."""
    prefill = place(made, Stage.PREFILL, "p")
    made.on_delta(delta(prefill, 100, finish_reason=FinishReason.PREFILLED, disaggregated_params=b"kv"))
    return prefill, place(made, Stage.DECODE, "d")


def test_a_worker_lost_after_the_first_token_of_a_decode_leg_has_one_row() -> None:
    assert TABLE[LegState.DECODE, LegEvent.LOST] == (
        count_loss,
        avoid,
        record_failure,
        withdraw,
        move,
    )
    made = machine()
    _, decode = to_decode(made)
    made.on_delta(delta(decode, 100, 101, cached_tokens=8))

    effects = made.on_lost(decode.id, LegEvent.LOST, "connection lost")

    assert kinds(effects) == ["AvoidWorker", "RecordFailure", "CancelLeg", "ReleaseLeg", "PlaceNext"]
    assert effects[-1] == PlaceNext("connection lost", decode, moved=True)
    assert not made.plan.wants_decode, "prompt + output so far is computed again"
    again = made.begin(WorkerKey(WorkerId("p2")), "tcp://p2", Stage.PREFILL)
    assert list(unpack_tokens(again.token_ids)) == [*range(8), 100, 101]
    assert again.sampling.max_tokens == MAX_TOKENS - 2


def test_the_first_output_of_a_decode_leg_lets_go_of_what_the_prefill_worker_kept() -> None:
    made = machine()
    prefill, decode = to_decode(made)

    effects = made.on_delta(delta(decode, 100))

    assert effects[1:] == (CancelLeg(prefill), ReleaseLeg(prefill))
    assert list(unpack_tokens(bytes(made.delivery.output))) == [100], "the repeated token is swallowed"


def test_a_prefill_leg_may_leave_the_first_token_to_the_decode_leg() -> None:
    made = machine()
    prefill = place(made, Stage.PREFILL, "p")
    made.on_delta(delta(prefill, finish_reason=FinishReason.PREFILLED, disaggregated_params=b"kv"))

    generate = made.begin(WorkerKey(WorkerId("d")), "tcp://d", Stage.DECODE)
    decode = made.plan.current
    assert decode is not None
    made.on_delta(delta(decode, 100, 101))

    assert list(unpack_tokens(generate.token_ids)) == list(range(8))
    assert generate.sampling.max_tokens == MAX_TOKENS
    assert list(unpack_tokens(bytes(made.delivery.output))) == [100, 101]


def test_losing_who_keeps_the_blocks_does_not_move_the_request() -> None:
    made = machine()
    prefill, decode = to_decode(made)

    assert made.on_lost(prefill.id, LegEvent.LOST, "gone") == (ReleaseLeg(prefill),)
    assert made.plan.current is decode


def test_a_request_with_which_two_workers_are_lost_before_its_first_token_takes_no_third_one_along() -> None:
    made = machine()
    first = place(made, Stage.WHOLE, "one")
    assert isinstance(made.on_lost(first.id, LegEvent.LOST, "connection lost")[-1], PlaceNext)
    second = place(made, Stage.WHOLE, "two")

    end = made.on_lost(second.id, LegEvent.LOST, "connection lost")[-1]

    assert isinstance(end, EndRequest)
    assert end.last.poison
    assert "one, two" in (end.last.error or "")


def test_workers_that_leave_or_are_lost_after_the_first_token_make_no_poison() -> None:
    made = machine(migration_limit=9)
    for number in range(3):
        leg = place(made, Stage.WHOLE, f"leaves{number}")
        assert isinstance(made.on_lost(leg.id, LegEvent.LEFT, "left")[-1], PlaceNext)
    leg = place(made, Stage.WHOLE)
    made.on_delta(delta(leg, 100))
    for _ in range(3):
        assert isinstance(made.on_lost(leg.id, LegEvent.LOST, "lost")[-1], PlaceNext)
        leg = place(made, Stage.WHOLE)


@pytest.mark.parametrize("kind", [RefusalKind.DRAINING, RefusalKind.CANNOT_DO])
def test_who_is_draining_or_unable_is_avoided_and_not_blamed(kind: RefusalKind) -> None:
    made = machine()
    leg = place(made, Stage.WHOLE)

    effects = made.on_delta(delta(leg, finish_reason=FinishReason.ERROR, error="no", refusal=kind))

    assert kinds(effects) == ["AvoidWorker", "ReleaseLeg", "PlaceNext"], (
        "it has nothing of the leg that one could cancel"
    )


def test_a_worker_that_cannot_do_it_is_avoided_for_good_and_its_refusal_is_the_clients() -> None:
    made = machine(migration_limit=1)

    def refused(worker: str, unknown: bool) -> Effect:
        leg = place(made, Stage.WHOLE, worker)
        refusal = RefusalKind.CANNOT_DO
        said = delta(
            leg, finish_reason=FinishReason.ERROR, error=f"no {worker}", refusal=refusal, unknown_model=unknown
        )
        effects = made.on_delta(said)
        assert effects[0] == AvoidWorker(leg, f"no {worker}", for_good=True)
        return effects[-1]

    assert isinstance(refused("one", False), PlaceNext)
    end = refused("two", True)

    assert isinstance(end, EndRequest)
    assert (end.last.error, end.last.unsupported, end.last.unknown_model) == ("no two", True, True)


def test_a_busy_worker_is_left_alone_for_its_time_and_costs_no_migration_however_often() -> None:
    made = machine(migration_limit=0)
    for retry_after_ms in [None, *[2000] * 100]:
        leg = place(made, Stage.WHOLE)
        refusal = delta(
            leg,
            finish_reason=FinishReason.ERROR,
            error="full",
            refusal=RefusalKind.BUSY,
            retry_after_ms=retry_after_ms,
        )

        effects = made.on_delta(refusal)

        assert effects == (
            WorkerFull(leg, retry_after_ms),
            ReleaseLeg(leg),
            PlaceNext("full", leg, moved=True, for_room=True),
        )
    assert made.migrations == 0

    end = made.end(LegEvent.NOWHERE, "no room in time", 7.0)[-1]

    assert end == EndRequest(StreamDelta(b"", FinishReason.ERROR, error="no room in time", retry_after_s=7.0), False)


def test_a_request_for_which_there_is_no_worker_says_so() -> None:
    made = machine()
    place(made, Stage.WHOLE, "one")

    end = made.end(LegEvent.NOWHERE, "only small workers are left")[-1]

    last = StreamDelta(b"", FinishReason.ERROR, error="only small workers are left", no_worker=True)
    assert end == EndRequest(last, False)


def test_workers_that_drain_cost_no_migration_up_to_a_bound() -> None:
    """Half of a large pool may refuse a request one after another before its router knows that they drain."""
    made = machine(migration_limit=0)

    def refused(number: int) -> Effect:
        leg = place(made, Stage.WHOLE, f"w{number}")
        refusal = delta(leg, finish_reason=FinishReason.ERROR, error="no", refusal=RefusalKind.DRAINING)
        return made.on_delta(refusal)[-1]

    assert all(isinstance(refused(number), PlaceNext) for number in range(DEPARTURES_MAX))
    assert isinstance(refused(DEPARTURES_MAX), EndRequest)


def test_moves_away_from_workers_that_drain_leave_the_others_as_many_as_before() -> None:
    made = machine(migration_limit=1)
    drained = place(made, Stage.WHOLE, "drains")
    made.on_delta(delta(drained, 100))
    made.on_delta(delta(drained, finish_reason=FinishReason.ERROR, error="no", refusal=RefusalKind.DRAINING))

    assert isinstance(made.on_lost(place(made, Stage.WHOLE, "one").id, LegEvent.LOST, "lost")[-1], PlaceNext)
    assert isinstance(made.on_lost(place(made, Stage.WHOLE, "two").id, LegEvent.LOST, "lost")[-1], EndRequest)


def test_workers_that_are_lost_with_the_one_before_leave_all_migrations_for_others() -> None:
    """The connections to the workers of one process break one after another, and a request may follow all of them."""
    made = machine(migration_limit=1)
    first = place(made, Stage.WHOLE, "first")
    made.on_delta(delta(first, 100))
    assert isinstance(made.on_lost(first.id, LegEvent.LOST, "lost")[-1], PlaceNext)

    for name in ("second", "third", "fourth"):
        assert isinstance(made.on_lost(place(made, Stage.WHOLE, name).id, LegEvent.LEFT, "lost")[-1], PlaceNext)


@pytest.mark.parametrize(
    ("stage", "finish"),
    [
        (Stage.WHOLE, FinishReason.PREFILLED),
        (Stage.DECODE, FinishReason.PREFILLED),
        (Stage.WHOLE, FinishReason.ENCODED),
        (Stage.ENCODE, FinishReason.PREFILLED),
        (Stage.ENCODE, FinishReason.STOP),
        (Stage.WHOLE, FinishReason.EXPIRED),
    ],
)
def test_an_end_that_is_another_legs_is_out_of_place(stage: Stage, finish: FinishReason) -> None:
    made = machine(media=stage is Stage.ENCODE)
    leg = place(made, stage)

    effects = made.on_delta(delta(leg, finish_reason=finish))

    assert [effect.event for effect in effects if isinstance(effect, RecordFailure)] == [LegEvent.OUT_OF_PLACE]


def test_every_standing_of_a_leg_has_a_row_for_whatever_a_worker_can_do() -> None:
    of_workers = set(LegEvent) - {LegEvent.PREFILLED, LegEvent.ENCODED}
    missing = [
        (standing, happened) for standing in LEGS for happened in of_workers if (standing, happened) not in TABLE
    ]
    ends = (LegEvent.CLIENT_LEFT, LegEvent.NOWHERE, LegEvent.SHUTDOWN)

    assert not missing
    assert all((standing, happened) in TABLE for standing in ANY for happened in ends)
    assert {happened for _, happened in TABLE} == set(LegEvent)


def test_the_page_prints_this_table() -> None:
    printed = (Path(__file__).parents[2] / "docs" / "internals" / "request_life.md").read_text()

    assert printed == page(), "make docs writes it"


@settings(
    max_examples=examples(30), stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
class EveryOrderOfEvents(RuleBasedStateMachine):
    """Workers that answer rightly, wrongly, twice, late, or not at all, under a request with any plan of legs.

    The right output is 100, 101, 102 and so on, whoever generates it.
    """

    @initialize(media=st.booleans(), limit=st.integers(0, 4), disaggregated=st.booleans())
    def begin(self, media: bool, limit: int, disaggregated: bool) -> None:
        self.made = machine(media, limit)
        self.disaggregated = disaggregated
        self.booked: list[Dispatch] = []
        self.begun: list[Dispatch] = []
        self.ends = 0
        self.placing = True
        self.client: list[int] = []
        self.finishes: list[StreamDelta] = []

    def follow(self, effects: tuple[Effect, ...]) -> None:
        for place, effect in enumerate(effects):
            assert self.ends == 0, "nothing follows the end"
            if isinstance(effect, ReleaseLeg):
                assert effect.dispatch in self.booked, "what is released was booked, and is released once"
                self.booked.remove(effect.dispatch)
            elif isinstance(effect, PlaceNext):
                assert place == len(effects) - 1
                assert not self.placing
                self.placing = True
            elif isinstance(effect, EndRequest):
                assert place == len(effects) - 1
                self.ends += 1
                self.placing = False
            elif isinstance(effect, WorkerReported | CancelLeg | AvoidWorker | WorkerFull | RecordFailure):
                assert effect.dispatch in self.booked, "it is about a leg that is on the books"

    def running(self) -> Dispatch | None:
        return self.made.plan.current

    def answer(self, sent: TokenDelta) -> None:
        if not self.made.extend(sent):
            self.follow(self.made.on_delta(sent))

    @precondition(lambda self: self.placing)
    @rule()
    def a_worker_is_found(self) -> None:
        plan = self.made.plan
        if plan.wants_decode:
            stage = Stage.DECODE
        elif plan.wants_encode:
            stage = Stage.ENCODE
        else:
            stage = Stage.PREFILL if self.disaggregated else Stage.WHOLE
        self.placing = False
        leg = place(self.made, stage, f"w{plan.dispatches % 3}", expected=5)
        self.booked.append(leg)
        self.begun.append(leg)

    @precondition(lambda self: self.placing)
    @rule()
    def a_message_is_not_taken(self) -> None:
        place(self.made, Stage.WHOLE)
        self.made.not_sent()

    @precondition(lambda self: self.placing)
    @rule(happened=st.sampled_from([LegEvent.NOWHERE, LegEvent.SHUTDOWN]))
    def no_worker_is_found(self, happened: LegEvent) -> None:
        self.follow(self.made.end(happened, "nobody"))

    @precondition(lambda self: self.running() is not None)
    @rule(count=st.integers(0, 3), ends=st.booleans(), cached=st.booleans())
    def it_answers_rightly(self, count: int, ends: bool, cached: bool) -> None:
        leg = self.running()
        assert leg is not None
        out = self.made.delivery.tokens
        start = out - 1 if leg.stage is Stage.DECODE and leg.position == 0 else out
        if leg.stage is Stage.ENCODE:
            finish = FinishReason.ENCODED if ends else None
            self.answer(delta(leg, finish_reason=finish, disaggregated_params=b"e" if ends else None))
            return
        left = MAX_TOKENS - start
        count = min(count, left)
        finish = None
        if ends and leg.stage is Stage.PREFILL and start + count < MAX_TOKENS:
            count = max(count, 1) if left > 1 else 0
            finish = FinishReason.PREFILLED if count else None
        elif ends:
            finish = FinishReason.STOP
        tokens = range(100 + start, 100 + start + count)
        params = b"kv" if finish is FinishReason.PREFILLED else None
        self.answer(
            delta(leg, *tokens, finish_reason=finish, disaggregated_params=params, cached_tokens=3 if cached else None)
        )

    @precondition(lambda self: self.running() is not None)
    @rule(
        refusal=st.sampled_from([None, *RefusalKind]),
        booked=st.sampled_from([None, 900]),
    )
    def it_refuses_or_fails(self, refusal: RefusalKind | None, booked: int | None) -> None:
        leg = self.running()
        assert leg is not None
        self.answer(
            delta(leg, finish_reason=FinishReason.ERROR, error="no", refusal=refusal, booked_prefill_tokens=booked)
        )

    @precondition(lambda self: self.running() is not None)
    @rule(finish=st.sampled_from([FinishReason.CANCELLED, FinishReason.EXPIRED, FinishReason.MIGRATED]))
    def it_ends_without_being_asked(self, finish: FinishReason) -> None:
        leg = self.running()
        assert leg is not None
        self.answer(delta(leg, finish_reason=finish))

    @precondition(lambda self: self.running() is not None)
    @rule(shift=st.sampled_from([-1, 1, 5]), token=st.integers(0, 300))
    def its_output_has_a_hole_or_a_repetition(self, shift: int, token: int) -> None:
        leg = self.running()
        assert leg is not None
        wrong = leg.position + shift
        self.answer(delta(leg, token, position=wrong if wrong >= 0 else 1))

    @precondition(lambda self: self.begun)
    @rule(data=st.data(), finish=st.sampled_from([None, *FinishReason]), token=st.booleans())
    def an_earlier_leg_says_something_late(self, data: st.DataObject, finish: FinishReason | None, token: bool) -> None:
        leg = data.draw(st.sampled_from(self.begun))
        if leg is self.running():
            return
        before = len(self.made.delivery.output)
        sent = TokenDelta(leg.id, leg.position, pack_tokens([7] if token else []), finish)
        assert not self.made.extend(sent)
        assert self.made.on_delta(sent) == NOTHING
        assert len(self.made.delivery.output) == before

    @precondition(lambda self: self.begun)
    @rule(data=st.data())
    def the_worker_of_some_leg_is_lost(self, data: st.DataObject) -> None:
        leg = data.draw(st.sampled_from(self.begun))
        happened = data.draw(st.sampled_from([LegEvent.LOST, LegEvent.LEFT]))
        self.follow(self.made.on_lost(leg.id, happened, "gone"))

    @rule()
    def the_client_leaves(self) -> None:
        self.follow(self.made.end(LegEvent.CLIENT_LEFT))

    @invariant()
    def what_is_booked_is_what_some_worker_has(self) -> None:
        if not hasattr(self, "made"):
            return
        assert sorted(leg.id for leg in self.booked) == sorted(leg.id for leg in self.made.plan.legs)

    @invariant()
    def the_client_has_each_token_once_and_in_order(self) -> None:
        if not hasattr(self, "made"):
            return
        delivery = self.made.delivery
        for said in delivery._deltas:
            self.client += unpack_tokens(said.token_ids)
            if said.finish_reason is not None:
                self.finishes.append(said)
        delivery._deltas = []
        assert self.client == list(range(100, 100 + len(self.client)))
        assert self.client == list(unpack_tokens(bytes(delivery.output)))

        # It ends once, and leaves nothing.
        assert self.ends == len(self.finishes) == int(self.made.ended) <= 1
        if self.made.ended:
            assert not self.booked
            assert self.made.end(LegEvent.SHUTDOWN, "again") == NOTHING
        else:
            assert self.placing == (self.running() is None)


TestEveryOrderOfEvents = EveryOrderOfEvents.TestCase


def test_a_worker_that_was_told_no_expectation_cannot_call_itself_crowded_for_ever() -> None:
    made = machine(migration_limit=0)
    leg = place(made, Stage.WHOLE)
    refusal = delta(leg, finish_reason=FinishReason.ERROR, refusal=RefusalKind.CROWDED, booked_prefill_tokens=900)

    assert made.on_delta(refusal)[0] == WorkerFull(leg, None), "it counts as busy"
