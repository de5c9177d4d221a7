"""The life of a request as one table: what happens to each of its legs, and what follows from it. No I/O.

Both routers drive it. Events go in: what a worker sent (``on_delta``), a lost worker or connection (``on_lost``), the
client, a deadline, the end of the process (``end``). Effects come out, in the order in which they are to be carried
out; ``poolgrid.server.serving.request_tracker`` does so. ``TABLE`` has the effects: one row for each state of a leg and
event.

Rules
    1. A request ends exactly once. After its end no event has an effect, and nothing is sent for it.
    2. Each token is delivered once, in order. Each dispatch numbers its output from 0; ``position`` must be exactly
       what this dispatch has delivered so far. A decode worker repeats the first token, which the client has from the
       prefill worker: the repetition must be equal, and is swallowed.
    3. Whatever was reserved or kept for a leg is released, once: when the leg after it has taken what it left, when the
       request moves, or when it ends. No leg outlives the others.
    4. A worker that is lost, refuses, or breaks its stream costs the client nothing while another one can continue: the
       request moves with prompt + output so far, at most ``migration_limit`` times. One that drains, left the pool, or
       was lost together with another of its process has not failed: moves because of that are not counted among these,
       up to ``DEPARTURES_MAX``. One without room has not failed either: the request is placed again, or waits in the
       router's queue, whose time-out is the bound.
    5. A request with which ``LOSSES_MAX`` workers were lost before its first token may be what ends them: it ends.
    6. A worker that refuses what the request asks for is asked once. When no other one takes it, the client gets that
       refusal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import msgspec

from poolgrid.kernel.requests.inference import InferenceRequest, StreamDelta
from poolgrid.kernel.requests.legs import (
    NOTHING,
    AvoidWorker,
    CancelLeg,
    Dispatch,
    Effect,
    EndRequest,
    LegEvent,
    LegPlan,
    LegState,
    PlaceNext,
    RecordFailure,
    ReleaseLeg,
    WorkerFull,
    WorkerOvercommitted,
    WorkerReported,
)
from poolgrid.kernel.requests.token_delivery import TokenDelivery
from poolgrid.kernel.wire.identifiers import Stage, WorkerKey
from poolgrid.kernel.wire.requests import FinishReason, Generate, RefusalKind, TokenDelta
from poolgrid.kernel.wire.tasks import TASK_ROLES
from poolgrid.kernel.wire.trace_context import TraceContext

STATE_OF: Final = {
    Stage.WHOLE: LegState.WHOLE,
    Stage.ENCODE: LegState.ENCODE,
    Stage.PREFILL: LegState.PREFILL,
    Stage.DECODE: LegState.DECODE,
    **dict.fromkeys(TASK_ROLES, LegState.WHOLE),
}
EVENT_OF: Final = {
    RefusalKind.BUSY: LegEvent.BUSY,
    RefusalKind.DRAINING: LegEvent.DRAINING,
    RefusalKind.CROWDED: LegEvent.STALE_LOAD,
    RefusalKind.CANNOT_DO: LegEvent.CANNOT_DO,
    RefusalKind.BROKEN: LegEvent.BROKEN,
}
"""``INVALID`` is not among them: it ends the request like any last delta."""

ENDED_THERE: Final = frozenset({LegEvent.FINISHED, LegEvent.CANCELLED, *EVENT_OF.values()})
"""After these the worker has nothing of the leg any more, and gets no order to stop it."""

LOSSES_MAX: Final = 2
"""Workers that may be lost with one request on them before its first token. One is chance, and under load hundreds of
requests were there; two in a row are what a request looks like that its workers die of."""

DEPARTURES_MAX: Final = 64
"""Moves because a worker drains or left that ``migration_limit`` does not count: half of a large pool may refuse a
request one after another before the router knows that they drain, the connections to all workers of one process break
one after another, and an answer of an hour may outlive several restarts of the whole pool. More than that is a worker
that refuses without ever being known to drain."""

DEPARTED: Final = (LegEvent.DRAINING, LegEvent.LEFT)

NEXT_LEG_WHY: Final = {Stage.ENCODE: "media encoded", Stage.PREFILL: "decode leg"}

_ENDS: Final = {None, *FinishReason} - {FinishReason.EXPIRED, FinishReason.MIGRATED}  # those are of events only
ENDS_OF: Final = {
    Stage.WHOLE: _ENDS - {FinishReason.PREFILLED, FinishReason.ENCODED},
    Stage.ENCODE: {None, FinishReason.ENCODED, FinishReason.ERROR},
    Stage.PREFILL: _ENDS - {FinishReason.ENCODED},
    Stage.DECODE: _ENDS - {FinishReason.PREFILLED, FinishReason.ENCODED},
    **{stage: {None, FinishReason.STOP, FinishReason.ERROR} for stage in TASK_ROLES},
}
"""The finish reasons that the output of a leg may have, by its stage."""

WELL: Final = {
    None: LegEvent.OUTPUT,
    FinishReason.PREFILLED: LegEvent.PREFILLED,
    FinishReason.ENCODED: LegEvent.ENCODED,
}
"""Deltas that are in their place; with any other finish reason the leg is ``FINISHED``."""

FINAL_REASONS = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.ERROR)
"""What an answer ends with."""


class Transition(msgspec.Struct):
    """What happened to a request, and what has followed so far."""

    leg: Dispatch | None
    """The leg it happened to; ``None`` for the request as a whole."""
    event: LegEvent
    why: str
    worker_delta: TokenDelta | None
    client_delta: StreamDelta | None
    """What of the worker's delta, or instead of it, is for the client."""
    effects: list[Effect]

    @property
    def dispatch(self) -> Dispatch:
        assert self.leg is not None, "it happened to a leg"
        return self.leg

    @property
    def reported(self) -> TokenDelta:
        assert self.worker_delta is not None, "a worker sent something"
        return self.worker_delta


class RequestMachine:
    """One request from its arrival to its end."""

    # Most of it stays as it is here while all goes well.
    migrations = 0
    departures = 0
    """How many of them were made because a worker drains or left."""
    stale_loads = 0
    """How often a worker refused it because other routers were quicker."""
    refusal: TokenDelta | None = None
    """Of the last worker, when it could not do what the request asks for."""
    lost: tuple[WorkerKey, ...] = ()
    """Workers that were lost while they had it and it had no output."""
    ended = False
    _cached_tokens: int | None = None

    def __init__(self, request: InferenceRequest, delivery: TokenDelivery, migration_limit: int) -> None:
        self.request = request
        self.delivery = delivery
        self.plan = LegPlan(request)
        self._migration_limit = migration_limit

    # -- placing ---------------------------------------------------------------------------------------------------

    def begin(
        self,
        worker: WorkerKey,
        endpoint: str,
        stage: Stage,
        overlap_tokens: int = 0,
        expected_prefill_tokens: int | None = None,
        trace: TraceContext | None = None,
    ) -> Generate:
        """Start the next leg on a worker and return the message for it."""
        assert not self.ended, "nothing is sent for an ended request"
        self.refusal = None
        delivery = self.delivery
        delivery.worker = str(worker)
        delivery.waits_for_room = False
        return self.plan.begin(worker, endpoint, stage, delivery.output, overlap_tokens, expected_prefill_tokens, trace)

    def not_sent(self) -> None:
        """Take back the leg that was begun last: its message could not be sent."""
        self.plan.current = None

    # -- events ----------------------------------------------------------------------------------------------------

    def extend(self, delta: TokenDelta) -> bool:
        """Take a delta that is more tokens of the current leg, in their place, and nothing else, as nearly all are;
        return False, and change nothing, when it is anything more. A short cut through ``OUTPUT``'s rows."""
        dispatch = self.plan.current
        if (
            dispatch is None
            or dispatch.id != delta.request_id
            or delta.position != dispatch.position
            or not dispatch.position  # the first output means more: what other legs kept has arrived
            or delta.finish_reason is not None
            or delta.cached_tokens is not None
            or delta.logprobs is not None
            or delta.prompt_logprobs is not None
            or not delta.token_ids
        ):
            return False
        tokens = delta.token_ids
        dispatch.position += len(tokens) >> 2
        self.delivery.append(tokens)
        return True

    def on_delta(self, delta: TokenDelta) -> tuple[Effect, ...]:
        """Take what a worker sent of one of this request's legs."""
        plan = self.plan
        dispatch = plan.current
        if self.ended or dispatch is None or dispatch.id != delta.request_id:
            return NOTHING  # the end of a leg that has given what it had to the next
        finish = delta.finish_reason
        if finish is FinishReason.ERROR and delta.refusal in EVENT_OF:
            event = EVENT_OF[delta.refusal]
            if event is LegEvent.STALE_LOAD and (delta.booked_prefill_tokens is None or not dispatch.states_load):
                event = LegEvent.BUSY
            self.refusal = delta if event is LegEvent.CANNOT_DO else None
            return self._follow(dispatch, event, delta.error or "the worker refused the request", delta)
        if finish is FinishReason.CANCELLED:
            return self._follow(dispatch, LegEvent.CANCELLED, "the worker cancelled the request", delta)
        # Before the output moves it on.
        state = STATE_OF[dispatch.stage] if plan.encode_params is None else self._state_of(dispatch)
        client_delta = self._read(dispatch, delta)
        if client_delta is None:
            return self._follow(dispatch, LegEvent.OUT_OF_PLACE, "its stream broke", delta)
        return self._take(state, dispatch, WELL.get(finish, LegEvent.FINISHED), "", delta, client_delta)

    def on_lost(self, dispatch_id: str, event: LegEvent, why: str) -> tuple[Effect, ...]:
        """Take note that the worker of one of this request's legs is ``LOST``, or has ``LEFT``."""
        dispatch = self.plan.find(dispatch_id)
        if self.ended or dispatch is None:
            return NOTHING
        return self._follow(dispatch, event, why)

    def end(self, event: LegEvent, why: str = "", retry_after_s: float | None = None) -> tuple[Effect, ...]:
        """End the request because of the client, a deadline, the lack of workers, or a shutdown.

        ``retry_after_s`` is set where workers had no room in time.
        """
        if self.ended:
            return NOTHING
        if event is LegEvent.CLIENT_LEFT:
            last = StreamDelta(b"", FinishReason.CANCELLED)
        elif event is LegEvent.NOWHERE:
            last = self._failure(why, retry_after_s, no_worker=retry_after_s is None)
        else:
            last = StreamDelta(b"", FinishReason.ERROR, error=why, shutdown=event is LegEvent.SHUTDOWN)
        return self._take(LegState.PLACING, None, event, why, None, last)

    # -- the table -------------------------------------------------------------------------------------------------

    def _state_of(self, dispatch: Dispatch) -> LegState:
        plan = self.plan
        if dispatch is not plan.current:
            return LegState.KEPT
        if plan.encode_params is not None and plan.awaits_embeddings:
            return LegState.AWAITING
        return STATE_OF[dispatch.stage]

    def _follow(
        self, dispatch: Dispatch, event: LegEvent, why: str, delta: TokenDelta | None = None
    ) -> tuple[Effect, ...]:
        return self._take(self._state_of(dispatch), dispatch, event, why, delta, None)

    def _take(
        self,
        state: LegState,
        dispatch: Dispatch | None,
        event: LegEvent,
        why: str,
        delta: TokenDelta | None,
        client_delta: StreamDelta | None,
    ) -> tuple[Effect, ...]:
        """Apply the table, and return the effects for the router to carry out."""
        effects: list[Effect] = []
        transition = Transition(dispatch, event, why, delta, client_delta, effects)
        for step in TABLE[state, event]:
            step(self, transition)
        return tuple(effects)

    def migration_refusal(self, why: str) -> StreamDelta | None:
        """Return the last delta of a request that may not move to another worker; ``None`` for one that may."""
        if self.delivery.tokens >= self.request.sampling.max_tokens:
            return StreamDelta(b"", FinishReason.LENGTH)
        if len(self.lost) >= LOSSES_MAX:
            return self._poison(why)
        if self.migrations - min(self.departures, DEPARTURES_MAX) >= self._migration_limit:
            return self._failure(f"{why}; moved {self.migrations} times already")
        return None

    def _poison(self, why: str) -> StreamDelta:
        """Return the last delta of a request that its workers may have died of."""
        workers = ", ".join(map(str, self.lost))
        return StreamDelta(
            b"",
            FinishReason.ERROR,
            error=f"{why}; {len(self.lost)} workers ({workers}) were lost one after another while they had this "
            "request, before its first token. It may be what ended them: it is not tried on another, and should "
            "not be sent again as it is",
            poison=True,
        )

    def _failure(self, message: str, retry_after_s: float | None = None, no_worker: bool = False) -> StreamDelta:
        """Return the last delta of a request that cannot continue after a worker failed it."""
        refusal = self.refusal
        if refusal is None:
            error = FinishReason.ERROR
            message = self._with_cause(message)
            return StreamDelta(b"", error, error=message, retry_after_s=retry_after_s, no_worker=no_worker)
        return StreamDelta(
            b"",
            FinishReason.ERROR,
            error=self._with_cause(refusal.error or message),
            unsupported=True,
            unknown_model=refusal.unknown_model,
        )

    def _with_cause(self, message: str) -> str:
        """Return an error that has why there are no embeddings: a worker that lacks them cannot know it."""
        failure = self.plan.encode_failure
        return f"{message}; its media were not encoded: {failure}" if failure else message

    def _read(self, dispatch: Dispatch, delta: TokenDelta) -> StreamDelta | None:
        """Return the client's part of a delta; ``None`` when it does not continue what came before."""
        tokens = delta.token_ids
        finish = delta.finish_reason
        if delta.position != dispatch.position or finish not in ENDS_OF[dispatch.stage]:
            return None
        if self.request.task is not None:
            if tokens or (finish is FinishReason.STOP) is (delta.result is None):
                return None  # a task makes no tokens; it ends with its result, and with nothing else
        elif tokens and dispatch.stage is Stage.ENCODE:
            return None  # it makes no tokens
        logprobs, of_prompt = delta.logprobs, delta.prompt_logprobs
        if of_prompt is not None and (self._cached_tokens is not None or self.delivery.output):
            of_prompt = None  # once: a later worker's prompt has the output so far in it
        if dispatch.repeated and tokens:
            known = min(len(dispatch.repeated), len(tokens))
            if tokens[:known] != dispatch.repeated[:known]:
                return None
            dispatch.repeated = dispatch.repeated[known:]
            tokens = tokens[known:]
            logprobs = None if logprobs is None else logprobs[known // 4 :]
        dispatch.position += len(delta.token_ids) // 4
        cached = None
        if self._cached_tokens is None:
            cached = self._cached_tokens = delta.cached_tokens
        if finish not in FINAL_REASONS:
            return StreamDelta(tokens, None, cached, logprobs, prompt_logprobs=of_prompt, progress=delta.progress)
        error = self._with_cause(delta.error) if delta.error else delta.error
        last = StreamDelta(tokens, finish, cached, logprobs, error, of_prompt, result=delta.result)
        last.unsupported = delta.refusal is RefusalKind.INVALID
        last.progress = delta.progress
        return last


# -- steps of the table --------------------------------------------------------------------------------------------


def notify(machine: RequestMachine, at: Transition) -> None:
    """Report to the tracker what the worker sent: its first output, cached tokens, the end of a leg."""
    leg, delta = at.leg, at.worker_delta
    assert leg is not None, "it happened to a leg"
    assert delta is not None, "a worker sent something"
    at.effects.append(WorkerReported(leg, delta, not machine.delivery.output))


def deliver(machine: RequestMachine, at: Transition) -> None:
    """Hand the tokens to the client."""
    delta = at.client_delta
    assert delta is not None, "output was read"
    if (
        delta.token_ids
        or delta.cached_tokens is not None
        or delta.prompt_logprobs is not None
        or delta.progress is not None
    ):
        machine.delivery.deliver(delta)


def keep_kv(machine: RequestMachine, at: Transition) -> None:
    """The leg's blocks stay on its worker for the decode leg."""
    plan = machine.plan
    plan.kept, plan.current = at.dispatch, None
    plan.prefill_params = at.reported.disaggregated_params or b""
    plan.prefill_emitted = bool(plan.kept.position)


def keep_embeddings(machine: RequestMachine, at: Transition) -> None:
    """The leg's embeddings stay on its worker for the leg that computes the prompt."""
    plan = machine.plan
    plan.encoded, plan.current = at.dispatch, None
    plan.encode_params = at.reported.disaggregated_params or b""


def drop_kv(machine: RequestMachine, at: Transition) -> None:
    """The decode leg has the blocks: cancel and release the prefill leg."""
    kept = machine.plan.kept
    if kept is not None:
        # Workers whose engines hand KV over by themselves learn it only from this; the others ignore it.
        at.effects += (CancelLeg(kept), ReleaseLeg(kept))
        machine.plan.kept = None


def drop_embeddings(machine: RequestMachine, at: Transition) -> None:
    """The prompt is computed, so the embeddings have arrived: release the encode leg."""
    encoded = machine.plan.encoded
    if encoded is not None:
        at.effects.append(ReleaseLeg(encoded))
        machine.plan.encoded = None


def release(machine: RequestMachine, at: Transition) -> None:
    """Release this leg; its worker has nothing of it any more."""
    plan = machine.plan
    if at.dispatch is plan.kept:
        plan.kept = None
    else:
        plan.encoded = None
    at.effects.append(ReleaseLeg(at.dispatch))


def choose_again(machine: RequestMachine, at: Transition) -> None:
    """Correct the ledger by what the worker has booked, and place the leg again; this is no migration."""
    booked_tokens = at.reported.booked_prefill_tokens
    assert booked_tokens is not None, "a worker reported what it has booked"
    machine.plan.current = None
    machine.stale_loads += 1
    at.effects += (
        ReleaseLeg(at.dispatch),
        WorkerOvercommitted(at.dispatch, booked_tokens),
        PlaceNext("its worker had more to do than was known", at.dispatch, moved=False),
    )


def encode_itself(machine: RequestMachine, at: Transition) -> None:
    """The next worker that computes the prompt gets the images themselves."""
    machine.plan.encodes_itself = True
    machine.plan.encode_failure = f"{at.dispatch.worker}: {at.why}"


def count_loss(machine: RequestMachine, at: Transition) -> None:
    """If the client has no token yet: one more worker was lost while it had this request."""
    if not machine.delivery.output:
        machine.lost = (*machine.lost, at.dispatch.worker)


def avoid(machine: RequestMachine, at: Transition) -> None:
    """This worker comes last when the request is placed again."""
    at.effects.append(AvoidWorker(at.dispatch, at.why))


def avoid_for_good(machine: RequestMachine, at: Transition) -> None:
    """This worker is not asked again for this request."""
    at.effects.append(AvoidWorker(at.dispatch, at.why, for_good=True))


def note_full(machine: RequestMachine, at: Transition) -> None:
    """This worker gets nothing, of any request, until the time that it reported is over."""
    at.effects.append(WorkerFull(at.dispatch, at.reported.retry_after_ms))


def record_failure(machine: RequestMachine, at: Transition) -> None:
    """The worker, and its pool, have failed."""
    at.effects.append(RecordFailure(at.dispatch, at.event, at.why))


def withdraw(machine: RequestMachine, at: Transition) -> None:
    """Cancel and release every leg that some worker still has."""
    plan = machine.plan
    effects = at.effects
    for leg in plan.legs:
        if leg is not at.leg or at.event not in ENDED_THERE:
            effects.append(CancelLeg(leg))
        effects.append(ReleaseLeg(leg))
    plan.clear()


def move(machine: RequestMachine, at: Transition) -> None:
    """Place the request on another worker with its prompt and the output so far, or end it if it may not move."""
    machine.departures += at.event in DEPARTED
    if at.dispatch.stage is Stage.ENCODE:
        machine.plan.encode_failure = f"{at.dispatch.worker}: {at.why}"
    if (last := machine.migration_refusal(at.why)) is not None:
        _finish(machine, at, last)
    else:
        machine.migrations += 1
        at.effects.append(PlaceNext(at.why, at.dispatch, moved=True))


def place_or_wait(machine: RequestMachine, at: Transition) -> None:
    """Place the request on another worker with its prompt and the output so far, or have it wait for room."""
    if machine.delivery.tokens >= machine.request.sampling.max_tokens:
        _finish(machine, at, StreamDelta(b"", FinishReason.LENGTH))
    else:
        machine.delivery.waits_for_room = True
        at.effects.append(PlaceNext(at.why, at.dispatch, moved=True, for_room=True))


def next_leg(machine: RequestMachine, at: Transition) -> None:
    """Place the next leg."""
    at.effects.append(PlaceNext(NEXT_LEG_WHY[at.dispatch.stage], at.dispatch, moved=False))


def end(machine: RequestMachine, at: Transition) -> None:
    """Deliver the last delta; the request is over."""
    assert at.client_delta is not None, "the end of a request has a last delta"
    _finish(machine, at, at.client_delta)


def _finish(machine: RequestMachine, at: Transition, last: StreamDelta) -> None:
    machine.ended = True
    at.effects.append(EndRequest(last, at.event is LegEvent.FINISHED))
    machine.delivery.finish(last)


LEGS = (LegState.WHOLE, LegState.ENCODE, LegState.PREFILL, LegState.AWAITING, LegState.DECODE)
ANY: Final = tuple(LegState)

Step = Callable[[RequestMachine, Transition], None]

GO_ELSEWHERE = (avoid, withdraw, move)
GO_ELSEWHERE_FOR_GOOD = (avoid_for_good, withdraw, move)
GO_ELSEWHERE_AND_RECORD = (avoid, record_failure, withdraw, move)
FAIL_OVER = (count_loss, *GO_ELSEWHERE_AND_RECORD)


@dataclass(frozen=True, slots=True)
class Row:
    """In these states, when this happens, these steps follow."""

    states: tuple[LegState, ...]
    event: LegEvent
    steps: tuple[Step, ...]
    why: str


ROWS = (
    # -- it goes well ----------------------------------------------------------------------------------------------
    Row(
        (LegState.WHOLE,),
        LegEvent.OUTPUT,
        (notify, deliver),
        "the answer grows",
    ),
    Row((LegState.AWAITING,), LegEvent.OUTPUT, (notify, deliver, drop_embeddings), "it has the embeddings"),
    Row(
        (LegState.PREFILL,),
        LegEvent.OUTPUT,
        (notify, deliver),
        "the answer begins",
    ),
    Row(
        (LegState.ENCODE,),
        LegEvent.OUTPUT,
        (notify, deliver),
        "it reports that it has begun",
    ),
    Row(
        (LegState.DECODE,),
        LegEvent.OUTPUT,
        (notify, deliver, drop_kv),
        "its first output proves that it has the blocks",
    ),
    Row((LegState.ENCODE,), LegEvent.ENCODED, (notify, keep_embeddings, next_leg), "the prompt is computed next"),
    Row((LegState.PREFILL,), LegEvent.PREFILLED, (notify, deliver, keep_kv, next_leg), "decode comes next"),
    Row(
        (LegState.AWAITING,),
        LegEvent.PREFILLED,
        (notify, deliver, drop_embeddings, keep_kv, next_leg),
        "decode comes next, and the embeddings are used up",
    ),
    Row(LEGS, LegEvent.FINISHED, (notify, withdraw, end), "whatever other legs keep is released"),
    # -- a worker refuses --------------------------------------------------------------------------------------------
    Row(
        LEGS,
        LegEvent.BUSY,
        (note_full, withdraw, place_or_wait),
        "another worker may have room, or this one later; no worker has failed",
    ),
    Row(LEGS, LegEvent.DRAINING, GO_ELSEWHERE, "another worker continues; no worker has failed"),
    Row(LEGS, LegEvent.STALE_LOAD, (choose_again,), "the ledger was outdated; choose again with the real load"),
    Row(
        (LegState.WHOLE, LegState.PREFILL, LegState.ENCODE, LegState.DECODE),
        LegEvent.CANNOT_DO,
        GO_ELSEWHERE_FOR_GOOD,
        "another worker may be able to; when none is, the client gets the refusal",
    ),
    Row(
        (LegState.WHOLE, LegState.PREFILL, LegState.ENCODE, LegState.DECODE),
        LegEvent.BROKEN,
        GO_ELSEWHERE_AND_RECORD,
        "another worker may succeed",
    ),
    Row(
        (LegState.AWAITING,),
        LegEvent.CANNOT_DO,
        (encode_itself, withdraw, move),
        "embeddings that cannot be taken are no fault of the worker",
    ),
    Row(
        (LegState.AWAITING,),
        LegEvent.BROKEN,
        (encode_itself, withdraw, move),
        "embeddings that did not arrive are no fault of the worker that waited for them",
    ),
    # -- a worker goes or fails ------------------------------------------------------------------------------------
    Row(LEGS, LegEvent.OUT_OF_PLACE, GO_ELSEWHERE_AND_RECORD, "a stream with a gap or a repetition cannot be trusted"),
    Row(LEGS, LegEvent.CANCELLED, GO_ELSEWHERE_AND_RECORD, "no client or router asked for that"),
    Row((LegState.WHOLE,), LegEvent.LOST, FAIL_OVER, "another worker continues from the last token"),
    Row((LegState.ENCODE,), LegEvent.LOST, FAIL_OVER, "another worker encodes the images"),
    Row((LegState.PREFILL,), LegEvent.LOST, FAIL_OVER, "another worker computes the prompt"),
    Row((LegState.AWAITING,), LegEvent.LOST, FAIL_OVER, "the images are encoded again for another one"),
    Row(
        (LegState.DECODE,),
        LegEvent.LOST,
        FAIL_OVER,
        "the blocks went with the worker: prompt + output so far is computed again from the first leg on",
    ),
    Row(LEGS, LegEvent.LEFT, GO_ELSEWHERE_AND_RECORD, "as with a lost one, but it was not this request that ended it"),
    Row(
        (LegState.KEPT,),
        LegEvent.LOST,
        (release,),
        "the decode worker already has the KV, or reports that it is missing",
    ),
    Row(
        (LegState.KEPT,),
        LegEvent.LEFT,
        (release,),
        "the decode worker already has the KV, or reports that it is missing",
    ),
    Row(
        (LegState.KEPT,),
        LegEvent.BROKEN,
        GO_ELSEWHERE_AND_RECORD,
        "what the decode leg waits for will not come: both begin again",
    ),
    # -- the request ends otherwise ----------------------------------------------------------------------------------
    Row(ANY, LegEvent.CLIENT_LEFT, (withdraw, end), "no worker computes without a client"),
    Row(ANY, LegEvent.NOWHERE, (withdraw, end), "no worker can continue"),
    Row(ANY, LegEvent.SHUTDOWN, (withdraw, end), "the process ends"),
)

TABLE: dict[tuple[LegState, LegEvent], tuple[Step, ...]] = {
    (state, row.event): row.steps for row in ROWS for state in row.states
}
"""What is not in it cannot happen to a leg in that state, or has no effect: see ``RequestMachine.on_delta``."""
