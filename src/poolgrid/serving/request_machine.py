"""The life of a request as one table: what happens to each of its legs, and what follows from it. No I/O.

Both routers drive it. Events go in: what a worker sent (``on_delta``), a lost worker or connection (``on_lost``), the
client, a deadline, the end of the process (``end``). Effects come out, in the order in which they are to be carried
out; ``poolgrid.serving.in_flight`` does so. ``TABLE`` says which effects: one row for each standing of a request and
event.

Rules
    1. A request ends exactly once. After its end no event has an effect, and nothing is sent for it.
    2. Each token is delivered once, in order. Each dispatch numbers its output from 0; ``position`` must be exactly
       what this dispatch has delivered so far. A decode worker repeats the first token, which the client has from the
       prefill worker: the repetition must be equal, and is swallowed.
    3. Whatever was reserved or kept for a leg is released, once: when the leg after it has taken what it left, when the
       request moves, or when it ends. No leg outlives the others.
    4. A worker that is lost, refuses, or breaks its stream costs the client nothing while another one can go on: the
       request moves with prompt + output so far, at most ``migration_limit`` times. One that drains has not failed:
       moves because of that are not counted among these, up to ``DRAINS_MAX``. One without room has not failed
       either: the request is placed again, or waits in the router's queue, whose time-out is the bound.
    5. A request with which ``LOSSES_MAX`` workers were lost before its first token may be what ends them: it ends.
    6. A worker that refuses what the request asks for is asked once. When no other one takes it, the client gets that
       refusal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, StrEnum, auto
from typing import Final, final

from poolgrid.inference.inference_request import InferenceRequest
from poolgrid.inference.stream_delta import StreamDelta
from poolgrid.serving.effects import (
    NOTHING,
    Avoid,
    Blame,
    Cancel,
    Crowded,
    Effect,
    End,
    Full,
    Heard,
    PlaceNext,
    Release,
)
from poolgrid.serving.happened import Happened
from poolgrid.serving.legs import Dispatch, LegPlan
from poolgrid.serving.token_delivery import TokenDelivery
from poolgrid.wire.identifiers import Stage, WorkerKey
from poolgrid.wire.requests import FinishReason, Generate, KvRetention, RefusalKind, TokenDelta
from poolgrid.wire.trace_context import TraceContext


class Standing(StrEnum):
    """Where a request stands, seen from the leg to which something happens."""

    WHOLE = "whole"
    """One worker does all of it."""
    ENCODE = "encode"
    """A worker encodes the images."""
    PREFILL = "prefill"
    """A worker computes the prompt and the first token."""
    DECODE = "decode"
    """A worker goes on from a prefill leg."""
    AWAITING = "awaiting embeddings"
    """A whole or prefill leg that was given embeddings and has not shown yet that it has them."""
    KEPT = "kept"
    """The leg has had its last delta; what it left is kept for the leg after it."""
    PLACING = "placing"
    """No worker is at it: the next leg is being placed."""


class Do(Enum):
    """A step of a row."""

    HEAR = auto()
    """Tell the books what the worker said: its first output, cached tokens, the end of a leg."""
    DELIVER = auto()
    """Hand the tokens to the client."""
    KEEP_KV = auto()
    """The leg's blocks stay on its worker for the decode leg."""
    KEEP_EMBEDDINGS = auto()
    """The leg's embeddings stay on its worker for the leg that computes the prompt."""
    DROP_KV = auto()
    """The decode leg has the blocks: cancel and release the prefill leg."""
    DROP_EMBEDDINGS = auto()
    """The prompt is computed, so the embeddings have arrived: release the encode leg."""
    RELEASE = auto()
    """Take this leg off the books; its worker has nothing of it any more."""
    CHOOSE_AGAIN = auto()
    """Tell the ledger what the worker has booked, and place the leg anew; this is no migration."""
    ENCODE_ITSELF = auto()
    """Whoever computes the prompt next gets the images themselves."""
    COUNT_LOSS = auto()
    """If the client has no token yet: one more worker was lost while it had this request."""
    AVOID = auto()
    """This worker comes last when the request is placed again."""
    AVOID_FOR_GOOD = auto()
    """This worker is not asked again for this request."""
    NOTE_FULL = auto()
    """This worker gets nothing, of any request, until the time that it reported is over."""
    BLAME = auto()
    """The worker, and its pool, have failed."""
    WITHDRAW = auto()
    """Cancel and release every leg that some worker still has."""
    MOVE = auto()
    """Place the request on another worker with its prompt and the output so far, or end it if it may not move."""
    PLACE_OR_WAIT = auto()
    """Place the request on another worker with its prompt and the output so far, or have it wait for room."""
    NEXT_LEG = auto()
    """Place the next leg."""
    END = auto()
    """Deliver the last delta; the request is over."""


LEGS = (Standing.WHOLE, Standing.ENCODE, Standing.PREFILL, Standing.AWAITING, Standing.DECODE)
ANY: Final = tuple(Standing)
PROMPT_LEGS = (Standing.WHOLE, Standing.PREFILL)
GO_ELSEWHERE = (Do.AVOID, Do.WITHDRAW, Do.MOVE)
GO_ELSEWHERE_FOR_GOOD = (Do.AVOID_FOR_GOOD, Do.WITHDRAW, Do.MOVE)
GO_ELSEWHERE_AND_BLAME = (Do.AVOID, Do.BLAME, Do.WITHDRAW, Do.MOVE)
FAIL_OVER = (Do.COUNT_LOSS, *GO_ELSEWHERE_AND_BLAME)


@dataclass(frozen=True, slots=True)
class Row:
    """In these standings, when this happens, these steps follow."""

    standings: tuple[Standing, ...]
    happened: Happened
    steps: tuple[Do, ...]
    why: str


ROWS = (
    # -- it goes well ----------------------------------------------------------------------------------------------
    Row(
        (Standing.WHOLE,),
        Happened.OUTPUT,
        (
            Do.HEAR,
            Do.DELIVER,
        ),
        "the answer grows",
    ),
    Row((Standing.AWAITING,), Happened.OUTPUT, (Do.HEAR, Do.DELIVER, Do.DROP_EMBEDDINGS), "it has the embeddings"),
    Row(
        (Standing.PREFILL,),
        Happened.OUTPUT,
        (
            Do.HEAR,
            Do.DELIVER,
        ),
        "the answer begins",
    ),
    Row(
        (Standing.ENCODE,),
        Happened.OUTPUT,
        (
            Do.HEAR,
            Do.DELIVER,
        ),
        "it says that it has begun",
    ),
    Row(
        (Standing.DECODE,),
        Happened.OUTPUT,
        (Do.HEAR, Do.DELIVER, Do.DROP_KV),
        "its first output proves that it has the blocks",
    ),
    Row(
        (Standing.ENCODE,), Happened.ENCODED, (Do.HEAR, Do.KEEP_EMBEDDINGS, Do.NEXT_LEG), "the prompt is computed next"
    ),
    Row((Standing.PREFILL,), Happened.PREFILLED, (Do.HEAR, Do.DELIVER, Do.KEEP_KV, Do.NEXT_LEG), "decode comes next"),
    Row(
        (Standing.AWAITING,),
        Happened.PREFILLED,
        (Do.HEAR, Do.DELIVER, Do.DROP_EMBEDDINGS, Do.KEEP_KV, Do.NEXT_LEG),
        "decode comes next, and the embeddings are used up",
    ),
    Row(LEGS, Happened.FINISHED, (Do.HEAR, Do.WITHDRAW, Do.END), "whatever other legs keep is let go of"),
    # -- a worker says no --------------------------------------------------------------------------------------------
    Row(
        LEGS,
        Happened.BUSY,
        (Do.NOTE_FULL, Do.WITHDRAW, Do.PLACE_OR_WAIT),
        "another worker may have room, or this one later; no worker is to blame",
    ),
    Row(LEGS, Happened.DRAINING, GO_ELSEWHERE, "another worker goes on; nobody is to blame"),
    Row(LEGS, Happened.CROWDED, (Do.CHOOSE_AGAIN,), "the ledger knew too little; with the truth, choose anew"),
    Row(
        (Standing.WHOLE, Standing.PREFILL, Standing.ENCODE, Standing.DECODE),
        Happened.CANNOT_DO,
        GO_ELSEWHERE_FOR_GOOD,
        "another worker may be able to; when none is, the client gets the refusal",
    ),
    Row(
        (Standing.WHOLE, Standing.PREFILL, Standing.ENCODE, Standing.DECODE),
        Happened.BROKEN,
        GO_ELSEWHERE_AND_BLAME,
        "another worker may succeed",
    ),
    Row(
        (Standing.AWAITING,),
        Happened.CANNOT_DO,
        (Do.ENCODE_ITSELF, Do.WITHDRAW, Do.MOVE),
        "embeddings that cannot be taken are no fault of the worker",
    ),
    Row(
        (Standing.AWAITING,),
        Happened.BROKEN,
        (Do.ENCODE_ITSELF, Do.WITHDRAW, Do.MOVE),
        "embeddings that did not arrive are no fault of who waited for them",
    ),
    # -- a worker goes or fails ------------------------------------------------------------------------------------
    Row(LEGS, Happened.OUT_OF_PLACE, GO_ELSEWHERE_AND_BLAME, "a stream with a hole or a repetition is not believed"),
    Row(LEGS, Happened.CANCELLED, GO_ELSEWHERE_AND_BLAME, "nobody here asked for that"),
    Row((Standing.WHOLE,), Happened.LOST, FAIL_OVER, "another worker goes on from the last token"),
    Row((Standing.ENCODE,), Happened.LOST, FAIL_OVER, "another worker encodes the images"),
    Row((Standing.PREFILL,), Happened.LOST, FAIL_OVER, "another worker computes the prompt"),
    Row((Standing.AWAITING,), Happened.LOST, FAIL_OVER, "the images are encoded anew for another one"),
    Row(
        (Standing.DECODE,),
        Happened.LOST,
        FAIL_OVER,
        "the blocks went with the worker: prompt + output so far is computed again from the first leg on",
    ),
    Row(LEGS, Happened.LEFT, GO_ELSEWHERE_AND_BLAME, "as with a lost one, but it was not this request that ended it"),
    Row((Standing.KEPT,), Happened.LOST, (Do.RELEASE,), "who takes what it left has it already, or will say so"),
    Row((Standing.KEPT,), Happened.LEFT, (Do.RELEASE,), "who takes what it left has it already, or will say so"),
    # -- the request ends otherwise ----------------------------------------------------------------------------------
    Row(ANY, Happened.CLIENT_LEFT, (Do.WITHDRAW, Do.END), "no worker computes for nobody"),
    Row(ANY, Happened.NOWHERE, (Do.WITHDRAW, Do.END), "there is nobody to go on"),
    Row(ANY, Happened.SHUTDOWN, (Do.WITHDRAW, Do.END), "the process ends"),
)

TABLE: dict[tuple[Standing, Happened], tuple[Do, ...]] = {
    (standing, row.happened): row.steps for row in ROWS for standing in row.standings
}
"""What is not in it cannot happen to a leg in that standing, or has no effect: see ``RequestMachine.on_delta``."""

STANDING_OF: Final = {
    Stage.WHOLE: Standing.WHOLE,
    Stage.ENCODE: Standing.ENCODE,
    Stage.PREFILL: Standing.PREFILL,
    Stage.DECODE: Standing.DECODE,
}
ENDED_THERE: Final = frozenset(
    {
        Happened.FINISHED,
        Happened.BUSY,
        Happened.DRAINING,
        Happened.CROWDED,
        Happened.CANNOT_DO,
        Happened.BROKEN,
        Happened.CANCELLED,
    }
)
"""After these the worker has nothing of the leg any more, and is not told to stop it."""

LOSSES_MAX: Final = 2
"""Workers that may be lost with one request on them before its first token. One is chance, and under load hundreds of
requests were there; two in a row are what a request looks like that its workers die of."""

DRAINS_MAX: Final = 64
"""Moves because a worker drains that ``migration_limit`` does not count: half of a large pool may refuse a request one
after another before the router has heard that they drain, and an answer of an hour may outlive several restarts of the
whole pool. More than that is a worker that refuses without ever being known to drain."""

NEXT_LEG_WHY: Final = {Stage.ENCODE: "media encoded", Stage.PREFILL: "decode leg"}

NO_END_OF_A_LEG = (FinishReason.EXPIRED, FinishReason.MIGRATED)
"""Words of events, which no leg's output ends with."""

WELL: Final = {
    None: Happened.OUTPUT,
    FinishReason.PREFILLED: Happened.PREFILLED,
    FinishReason.ENCODED: Happened.ENCODED,
}
"""Deltas that are in their place; with any other finish reason the leg is ``FINISHED``."""

LAST_WORDS = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.ERROR)
"""What an answer ends with."""

_ENCODE: Final = Stage.ENCODE
_PREFILL: Final = Stage.PREFILL
_INVALID: Final = RefusalKind.INVALID
_ENCODED: Final = FinishReason.ENCODED
_PREFILLED: Final = FinishReason.PREFILLED
_FINISHED: Final = Happened.FINISHED
_ERROR: Final = FinishReason.ERROR
_CANCELLED: Final = FinishReason.CANCELLED

HAPPENED_OF: Final = {
    RefusalKind.BUSY: Happened.BUSY,
    RefusalKind.DRAINING: Happened.DRAINING,
    RefusalKind.CROWDED: Happened.CROWDED,
    RefusalKind.CANNOT_DO: Happened.CANNOT_DO,
    RefusalKind.BROKEN: Happened.BROKEN,
}
"""``INVALID`` is not among them: it ends the request like any last delta."""


@final
class _Event:
    """What happened to a request, and what has followed so far."""

    __slots__ = ("delta", "effects", "happened", "leg", "said", "why")

    def __init__(
        self, leg: Dispatch | None, happened: Happened, why: str, delta: TokenDelta | None, said: StreamDelta | None
    ) -> None:
        self.leg = leg
        """The leg it happened to; ``None`` for the request as a whole."""
        self.happened = happened
        self.why = why
        self.delta = delta
        """What a worker said."""
        self.said = said
        """What of it, or instead of it, is for the client."""
        self.effects: list[Effect] = []

    @property
    def dispatch(self) -> Dispatch:
        """The leg it happened to."""
        assert self.leg is not None, "it happened to a leg"
        return self.leg

    @property
    def word(self) -> TokenDelta:
        """What a worker said."""
        assert self.delta is not None, "a worker said something"
        return self.delta


class RequestMachine:
    """One request from its arrival to its end."""

    def __init__(self, request: InferenceRequest, delivery: TokenDelivery, migration_limit: int) -> None:
        self.request = request
        self.delivery = delivery
        self.plan = LegPlan(request)
        self.migrations = 0
        self.drains = 0
        """How many of them were made because a worker drains."""
        self.crowded = 0
        """How often a worker refused it because other routers were quicker."""
        self.refusal: TokenDelta | None = None
        """Of the last worker, when it could not do what the request asks for."""
        self.lost: list[WorkerKey] = []
        """Workers that were lost while they had it and it had no output."""
        self.ended = False
        self._migration_limit = migration_limit
        self._cached_tokens: int | None = None

    # -- placing ---------------------------------------------------------------------------------------------------

    def begin(
        self,
        worker: WorkerKey,
        endpoint: str,
        stage: Stage,
        overlap_tokens: int = 0,
        expected_prefill_tokens: int | None = None,
        trace: TraceContext | None = None,
        retention: KvRetention | None = None,
    ) -> Generate:
        """Start the next leg on a worker and return the message for it."""
        assert not self.ended, "nothing is sent for an ended request"
        self.refusal = None
        self.delivery.worker = str(worker)
        self.delivery.waits_for_room = False
        output = self.delivery.output
        return self.plan.begin(
            worker, endpoint, stage, output, overlap_tokens, expected_prefill_tokens, trace, retention
        )

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
            or not dispatch.position  # the first output says more: what other legs kept has arrived
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
        if finish is _ERROR and delta.refusal in HAPPENED_OF:
            happened = HAPPENED_OF[delta.refusal]
            if happened is Happened.CROWDED and (delta.booked_prefill_tokens is None or not dispatch.may_be_crowded):
                happened = Happened.BUSY
            self.refusal = delta if happened is Happened.CANNOT_DO else None
            return self._follow(dispatch, happened, delta.error or "the worker refused the request", delta)
        if finish is _CANCELLED:
            return self._follow(dispatch, Happened.CANCELLED, "the worker cancelled the request", delta)
        standing = self._standing(dispatch)  # before the output moves it on
        said = self._read(dispatch, delta)
        if said is None:
            return self._follow(dispatch, Happened.OUT_OF_PLACE, "its stream broke", delta)
        return self._steps(standing, dispatch, WELL.get(finish, _FINISHED), "", delta, said)

    def on_lost(self, dispatch_id: str, happened: Happened, why: str) -> tuple[Effect, ...]:
        """Take note that the worker of one of this request's legs is ``LOST``, or has ``LEFT``."""
        dispatch = self.plan.find(dispatch_id)
        if self.ended or dispatch is None:
            return NOTHING
        return self._follow(dispatch, happened, why)

    def end(self, happened: Happened, why: str = "", retry_after_s: float | None = None) -> tuple[Effect, ...]:
        """End the request because of the client, a deadline, the lack of workers, or a shutdown.

        ``retry_after_s`` is set where workers had no room in time.
        """
        if self.ended:
            return NOTHING
        if happened is Happened.CLIENT_LEFT:
            last = StreamDelta(b"", FinishReason.CANCELLED)
        elif happened is Happened.NOWHERE:
            last = self._failure(why, retry_after_s)
        else:
            last = StreamDelta(b"", FinishReason.ERROR, error=why, shutdown=happened is Happened.SHUTDOWN)
        return self._steps(Standing.PLACING, None, happened, why, None, last)

    # -- the table -------------------------------------------------------------------------------------------------

    def _standing(self, dispatch: Dispatch) -> Standing:
        plan = self.plan
        if dispatch is not plan.current:
            return Standing.KEPT
        if plan.encode_params is not None and plan.awaits_embeddings:
            return Standing.AWAITING
        return STANDING_OF[dispatch.stage]

    def _follow(
        self, dispatch: Dispatch, happened: Happened, why: str, delta: TokenDelta | None = None
    ) -> tuple[Effect, ...]:
        return self._steps(self._standing(dispatch), dispatch, happened, why, delta, None)

    def _steps(
        self,
        standing: Standing,
        dispatch: Dispatch | None,
        happened: Happened,
        why: str,
        delta: TokenDelta | None,
        said: StreamDelta | None,
    ) -> tuple[Effect, ...]:
        """Do what the table says, and return the effects for whoever carries them out."""
        event = _Event(dispatch, happened, why, delta, said)
        for step in STEPS[standing, happened]:
            step(self, event)
        return tuple(event.effects)

    def stays(self, why: str) -> StreamDelta | None:
        """Return the last delta of a request that may not move to another worker; ``None`` for one that may."""
        if self.delivery.tokens >= self.request.sampling.max_tokens:
            return StreamDelta(b"", FinishReason.LENGTH)
        if len(self.lost) >= LOSSES_MAX:
            return self._poison(why)
        if self.migrations - min(self.drains, DRAINS_MAX) >= self._migration_limit:
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

    def _failure(self, message: str, retry_after_s: float | None = None) -> StreamDelta:
        """Return the last delta of a request that cannot go on after a worker failed it."""
        refusal = self.refusal
        if refusal is None:
            return StreamDelta(b"", FinishReason.ERROR, error=message, retry_after_s=retry_after_s)
        return StreamDelta(
            b"",
            FinishReason.ERROR,
            error=refusal.error or message,
            unsupported=True,
            unknown_model=refusal.unknown_model,
        )

    def _read(self, dispatch: Dispatch, delta: TokenDelta) -> StreamDelta | None:
        """Return what a delta says to the client; ``None`` when it does not continue what came before."""
        tokens = delta.token_ids
        finish = delta.finish_reason
        if delta.position != dispatch.position or finish in NO_END_OF_A_LEG:
            return None
        if dispatch.stage is _ENCODE:
            # It makes no tokens, and ends well in one way only, which is no other leg's.
            if tokens or finish not in (None, FinishReason.ENCODED, FinishReason.ERROR):
                return None
        elif finish is _ENCODED or (finish is _PREFILLED and dispatch.stage is not _PREFILL):
            return None
        logprobs = delta.logprobs
        # Once: a later worker's prompt has the output so far in it.
        first = self._cached_tokens is None and not self.delivery.output
        of_prompt = delta.prompt_logprobs if first else None
        if dispatch.repeated and tokens:
            known = min(len(dispatch.repeated), len(tokens))
            if tokens[:known] != dispatch.repeated[:known]:
                return None
            dispatch.repeated = dispatch.repeated[known:]
            tokens = tokens[known:]
            logprobs = None if logprobs is None else logprobs[known // 4 :]
        dispatch.position += len(delta.token_ids) // 4
        cached = None
        if self._cached_tokens is None and delta.cached_tokens is not None:
            cached = self._cached_tokens = delta.cached_tokens
        ends = finish in LAST_WORDS
        return StreamDelta(
            tokens,
            finish if ends else None,
            cached,
            logprobs,
            delta.error if ends else None,
            of_prompt,
            delta.refusal is _INVALID,
        )


# -- steps ---------------------------------------------------------------------------------------------------------


def _hear(machine: RequestMachine, event: _Event) -> None:
    leg, delta = event.leg, event.delta
    assert leg is not None, "it happened to a leg"
    assert delta is not None, "a worker said something"
    event.effects.append(Heard(leg, delta, not machine.delivery.output))


def _deliver(machine: RequestMachine, event: _Event) -> None:
    said = event.said
    assert said is not None, "output was read"
    if said.token_ids or said.cached_tokens is not None or said.prompt_logprobs is not None:
        machine.delivery.deliver(said)


def _keep_kv(machine: RequestMachine, event: _Event) -> None:
    plan = machine.plan
    plan.kept, plan.current = event.dispatch, None
    plan.prefill_params = event.word.disaggregated_params or b""
    plan.prefill_emitted = bool(plan.kept.position)


def _keep_embeddings(machine: RequestMachine, event: _Event) -> None:
    plan = machine.plan
    plan.encoded, plan.current = event.dispatch, None
    plan.encode_params = event.word.disaggregated_params or b""


def _drop_kv(machine: RequestMachine, event: _Event) -> None:
    kept = machine.plan.kept
    if kept is not None:
        # Workers whose engines hand KV over by themselves hear it from here only; the others ignore it.
        event.effects += (Cancel(kept), Release(kept))
        machine.plan.kept = None


def _drop_embeddings(machine: RequestMachine, event: _Event) -> None:
    encoded = machine.plan.encoded
    if encoded is not None:
        event.effects.append(Release(encoded))
        machine.plan.encoded = None


def _release(machine: RequestMachine, event: _Event) -> None:
    plan = machine.plan
    if event.dispatch is plan.kept:
        plan.kept = None
    else:
        plan.encoded = None
    event.effects.append(Release(event.dispatch))


def _choose_again(machine: RequestMachine, event: _Event) -> None:
    booked_tokens = event.word.booked_prefill_tokens
    assert booked_tokens is not None, "a worker said what it has booked"
    machine.plan.current = None
    machine.crowded += 1
    event.effects += (
        Release(event.dispatch),
        Crowded(event.dispatch, booked_tokens),
        PlaceNext("its worker had more to do than was known", event.dispatch, moved=False),
    )


def _encode_itself(machine: RequestMachine, event: _Event) -> None:
    machine.plan.encodes_itself = True


def _count_loss(machine: RequestMachine, event: _Event) -> None:
    if not machine.delivery.output:
        machine.lost.append(event.dispatch.worker)


def _avoid(machine: RequestMachine, event: _Event) -> None:
    event.effects.append(Avoid(event.dispatch, event.why))


def _avoid_for_good(machine: RequestMachine, event: _Event) -> None:
    event.effects.append(Avoid(event.dispatch, event.why, for_good=True))


def _note_full(machine: RequestMachine, event: _Event) -> None:
    event.effects.append(Full(event.dispatch, event.word.retry_after_ms))


def _blame(machine: RequestMachine, event: _Event) -> None:
    event.effects.append(Blame(event.dispatch, event.happened, event.why))


def _withdraw(machine: RequestMachine, event: _Event) -> None:
    plan = machine.plan
    effects = event.effects
    for leg in (plan.current, plan.kept, plan.encoded):
        if leg is not None:
            if leg is not event.leg or event.happened not in ENDED_THERE:
                effects.append(Cancel(leg))
            effects.append(Release(leg))
    plan.clear()


def _move(machine: RequestMachine, event: _Event) -> None:
    machine.drains += event.happened is Happened.DRAINING
    if (last := machine.stays(event.why)) is not None:
        _finish(machine, event, last)
    else:
        machine.migrations += 1
        event.effects.append(PlaceNext(event.why, event.dispatch, moved=True))


def _place_or_wait(machine: RequestMachine, event: _Event) -> None:
    if machine.delivery.tokens >= machine.request.sampling.max_tokens:
        _finish(machine, event, StreamDelta(b"", FinishReason.LENGTH))
    else:
        machine.delivery.waits_for_room = True
        event.effects.append(PlaceNext(event.why, event.dispatch, moved=True, for_room=True))


def _next_leg(machine: RequestMachine, event: _Event) -> None:
    event.effects.append(PlaceNext(NEXT_LEG_WHY[event.dispatch.stage], event.dispatch, moved=False))


def _end(machine: RequestMachine, event: _Event) -> None:
    assert event.said is not None, "whoever ends a request says how"
    _finish(machine, event, event.said)


def _finish(machine: RequestMachine, event: _Event, last: StreamDelta) -> None:
    machine.ended = True
    event.effects.append(End(last, event.happened is _FINISHED))
    machine.delivery.finish(last)


_STEP_OF: dict[Do, Callable[[RequestMachine, _Event], None]] = {
    Do.HEAR: _hear,
    Do.DELIVER: _deliver,
    Do.KEEP_KV: _keep_kv,
    Do.KEEP_EMBEDDINGS: _keep_embeddings,
    Do.DROP_KV: _drop_kv,
    Do.DROP_EMBEDDINGS: _drop_embeddings,
    Do.RELEASE: _release,
    Do.CHOOSE_AGAIN: _choose_again,
    Do.ENCODE_ITSELF: _encode_itself,
    Do.COUNT_LOSS: _count_loss,
    Do.AVOID: _avoid,
    Do.AVOID_FOR_GOOD: _avoid_for_good,
    Do.NOTE_FULL: _note_full,
    Do.BLAME: _blame,
    Do.WITHDRAW: _withdraw,
    Do.MOVE: _move,
    Do.PLACE_OR_WAIT: _place_or_wait,
    Do.NEXT_LEG: _next_leg,
    Do.END: _end,
}

STEPS: Final = {key: tuple(_STEP_OF[step] for step in steps) for key, steps in TABLE.items()}
"""The table, each step as the function that does it."""
