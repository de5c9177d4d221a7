"""The requests of one router, and the legs of each on workers: what links report becomes events whose effects follow.

Both routers have one (``RequestTracker`` with its router's own load accounting). A leg is sent here in one go: begun,
encoded, given to its link. What happens to it there, and what follows, is the table of
``poolgrid.kernel.requests.request_machine``.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator
from time import perf_counter
from typing import Any, Final, Generic, Protocol, TypeVar, assert_never

import msgspec

from poolgrid.kernel.requests.inference import Carrier
from poolgrid.kernel.requests.legs import (
    AvoidWorker,
    CancelLeg,
    Dispatch,
    Effect,
    EndRequest,
    LegEvent,
    PlaceNext,
    RecordFailure,
    ReleaseLeg,
    WorkerFull,
    WorkerOvercommitted,
    WorkerReported,
)
from poolgrid.kernel.requests.request_machine import RequestMachine
from poolgrid.kernel.requests.token_delivery import TokenDelivery
from poolgrid.kernel.requests.trace_record import SpanKind, TraceRecord
from poolgrid.kernel.wire.identifiers import STAGE_WORD, Stage, WorkerKey
from poolgrid.kernel.wire.requests import FinishReason, TokenDelta
from poolgrid.kernel.wire.trace_context import TraceContext
from poolgrid.server.process.clock import Clock
from poolgrid.server.serving.links import LinkTable, WorkerLink
from poolgrid.server.serving.metrics import LegTimer, ServingMetrics

log: Final = logging.getLogger(__name__)

_NO_REQUESTS: Final[dict[str, Any]] = {}

CHANGES_PER_TURN: Final = 16
"""First outputs and ends that are taken before the loop gets its turn: each costs a tenth of a millisecond, and the
sequences of one request, up to 128 of them, mostly begin and end in one step of an engine."""

CONTINUES: Final = frozenset({None, FinishReason.PREFILLED, FinishReason.ENCODED})
"""Finish reasons behind which a worker still computes, or keeps something."""


class RoutedRequest(msgspec.Struct, eq=False):
    """A request at its router, from its arrival to its end."""

    machine: RequestMachine
    timer: LegTimer
    """Where it stands among the times of its legs."""


R = TypeVar("R", bound=RoutedRequest)
P = TypeVar("P", bound=RoutedRequest, contravariant=True)


class Placer(Protocol[P]):
    """Finds workers for requests: from the router's own pool, or from pools that it asks."""

    def place_next(self, routed: P, place: PlaceNext) -> None:
        """Place what comes next, at once or when there is room."""
        ...

    def room_changed(self, soon: bool = False) -> None:
        """Look whether requests that wait have room, now or (``soon``) at the end of this turn of the loop."""
        ...

    def ended(self, routed: P, was_placed: bool) -> None:
        """Forget a request that is over; ``was_placed``: some worker had it."""
        ...


LOST_TOGETHER_MS: Final = 100.0
"""Workers of a host that are lost within this time are one loss: a process may have several, whose connections break
one after the other. A request that was moved between two of them has ended neither. On a router that gets no CPU for
longer, so are those whose connections are found broken in the same turns of the event loop."""

LOST_TOGETHER_TURNS: Final = 3
"""Turns of the event loop until all has been read that had arrived when the first loss was found."""


CANCEL_ANSWER_MS: Final = 30_000.0
"""Time until the end of a cancelled leg is read here: output that its worker sent before is no fault. A worker takes a
cancellation within a step of its engine, below a second; a router that stood still reads what came meanwhile later."""

CANCELLED_MAX: Final = 16_384
"""Cancelled legs without an end that are remembered, 2 MB; beyond it output of the oldest counts as a fault."""


class RequestTracker(ABC, Generic[R]):
    """Follows requests to their ends."""

    def __init__(
        self,
        links: LinkTable,
        metrics: ServingMetrics,
        clock: Clock,
        placer: Placer[R],
        not_sampled: TraceContext | None = None,
    ) -> None:
        """``not_sampled`` is the trace context that workers get with requests whose traces are not kept, if any are."""
        self.requests: dict[str, R] = {}
        """By request id."""
        self._on_link: dict[str, dict[str, R]] = {}
        """By endpoint and dispatch id."""
        self._cancelled: dict[str, float] = {}
        """Dispatches whose end has not come since they were cancelled, the first one first, and when they were."""
        self._last_loss = "", 0.0
        """Host of the worker that was lost last by itself, and when."""
        self._turns_after_loss = 0
        """Turns of the event loop that are left until what is lost is no part of the last loss."""
        self._links = links
        self._serving_metrics = metrics
        self._leg_times = metrics.leg_times
        self._clock = clock
        self._placer = placer
        self._not_sampled = not_sampled
        links.attach(self.on_tokens, self.on_lost, self.has_legs, placer.room_changed)

    # -- legs ------------------------------------------------------------------------------------------------------

    def send(
        self,
        routed: R,
        link: WorkerLink,
        worker: WorkerKey,
        stage: Stage,
        overlap_tokens: int,
        expected_prefill_tokens: int | None = None,
        pool: str = "",
    ) -> Dispatch | None:
        """Send a request's next leg to a worker; return ``None``, and change nothing, when its link takes nothing now.

        A worker on whose link no request runs gets it at once. One with something to do would wait for its engine's
        step: for it what is sent in one turn of the loop leaves together.
        """
        machine = routed.machine
        trace = machine.request.trace
        if trace is None:
            context = machine.request.trace_context or self._not_sampled
        else:
            context = begin_leg(trace, machine, worker, stage, pool)
        endpoint = link.endpoint
        message = machine.begin(worker, endpoint, stage, overlap_tokens, expected_prefill_tokens, context)
        on_link = self._on_link.get(endpoint)
        if not link.generate(message, on_link is None):
            machine.not_sent()
            if trace is not None:
                trace.close(message.request_id, "not sent")
            return None
        dispatch = machine.plan.current
        assert dispatch is not None, "a leg was begun"
        if on_link is None:
            on_link = self._on_link[endpoint] = {}
        on_link[dispatch.id] = routed
        self._leg_times.sent(routed.timer, dispatch.number, perf_counter())
        return dispatch

    def carry(
        self,
        routed: R,
        carrier: Carrier,
        worker: WorkerKey,
        endpoint: str,
        stage: Stage,
        overlap_tokens: int,
        pool: str = "",
    ) -> Dispatch:
        """Send a request's next leg to a worker's server through its carrier, which reports to ``on_carried``."""
        machine = routed.machine
        trace = machine.request.trace
        if trace is not None:
            begin_leg(trace, machine, worker, stage, pool)
        machine.begin(worker, endpoint, stage, overlap_tokens)
        dispatch = machine.plan.current
        assert dispatch is not None, "a leg was begun"
        carrier.send(dispatch.id, worker, stage, machine.plan.prefill_params or b"")
        self._leg_times.sent(routed.timer, dispatch.number, perf_counter())
        return dispatch

    def on_carried(self, request_id: str, delta: TokenDelta) -> None:
        """Take what a carrier reports of one of its dispatches."""
        routed = self.requests.get(request_id)
        if routed is not None:
            self.carry_out(routed, routed.machine.on_delta(delta))

    def on_carried_broken(self, request_id: str, dispatch_id: str, why: str) -> None:
        """Take note that a carrier's prefill leg has failed whose decode leg has begun."""
        routed = self.requests.get(request_id)
        if routed is not None:
            self.carry_out(routed, routed.machine.on_lost(dispatch_id, LegEvent.BROKEN, why))

    def has_legs(self, endpoint: str) -> bool:
        return bool(self._on_link.get(endpoint))

    def endpoints(self) -> list[str]:
        return list(self._on_link)

    def legs_on(self, endpoint: str) -> list[str]:
        return list(self._on_link.get(endpoint, _NO_REQUESTS))

    # -- events ----------------------------------------------------------------------------------------------------

    def on_tokens(self, link: WorkerLink, deltas: Iterator[TokenDelta]) -> bool:
        """Take a worker's output, as much of it as one turn may; return whether that was all."""
        on_link = self._on_link.get(link.endpoint, _NO_REQUESTS)
        changes = 0
        for delta in deltas:
            routed = on_link.get(delta.request_id)
            if routed is None:
                if delta.finish_reason in CONTINUES:
                    self._take_unwanted(link, delta.request_id)
                else:
                    self._cancelled.pop(delta.request_id, None)
                continue
            try:
                machine = routed.machine
                if machine.extend(delta):
                    continue
                self.carry_out(routed, machine.on_delta(delta))
            except Exception as error:
                self._move_broken(routed, delta.request_id, error)
            changes += 1
            if changes == CHANGES_PER_TURN:
                return False
        return True

    def _take_unwanted(self, link: WorkerLink, dispatch_id: str) -> None:
        """Cancel a leg that no request waits for: no worker computes, or keeps KV, without a client."""
        cancelled_ms = self._cancelled.get(dispatch_id)
        if cancelled_ms is not None and self._clock.monotonic_ms() - cancelled_ms < CANCEL_ANSWER_MS:
            return  # sent before the cancellation arrived
        self._count_fault("unknown_request")
        self._cancel(link, dispatch_id)

    def _cancel(self, link: WorkerLink, dispatch_id: str) -> None:
        link.cancel(dispatch_id)
        cancelled = self._cancelled
        cancelled.pop(dispatch_id, None)
        cancelled[dispatch_id] = self._clock.monotonic_ms()
        if len(cancelled) > CANCELLED_MAX:
            del cancelled[next(iter(cancelled))]

    def _move_broken(self, routed: R, dispatch_id: str, error: Exception) -> None:
        """Move one request whose output could not be handled: the rest of the message is other requests'."""
        self._count_fault("exception")
        request = routed.machine.request
        log.error(
            "request %s: handling output failed: this is a bug", dispatch_id, exc_info=error, extra=request.named()
        )
        why = f"handling output failed: {error!r}"
        self.carry_out(routed, routed.machine.on_lost(dispatch_id, LegEvent.BROKEN, why))

    def on_lost(self, endpoint: str, event: LegEvent, why: str) -> None:
        """Have the legs of a worker that is ``LOST``, or has ``LEFT``, continue elsewhere."""
        if event is LegEvent.LOST and self._is_lost_with_another(endpoint):
            event = LegEvent.LEFT  # none of its requests ended it
        for dispatch_id, routed in list(self._on_link.get(endpoint, _NO_REQUESTS).items()):
            self.carry_out(routed, routed.machine.on_lost(dispatch_id, event, why))

    def _is_lost_with_another(self, endpoint: str) -> bool:
        now_ms, host = self._clock.monotonic_ms(), endpoint.rpartition(":")[0]
        lost_host, lost_ms = self._last_loss
        if host == lost_host and (self._turns_after_loss or now_ms - lost_ms <= LOST_TOGETHER_MS):
            return True
        self._last_loss = host, now_ms
        if not self._turns_after_loss:
            asyncio.get_running_loop().call_soon(self._count_turn)
        self._turns_after_loss = LOST_TOGETHER_TURNS
        return False

    def _count_turn(self) -> None:
        self._turns_after_loss -= 1
        if self._turns_after_loss:
            asyncio.get_running_loop().call_soon(self._count_turn)

    def on_client_left(self, delivery: TokenDelivery) -> None:
        routed = self.requests.get(delivery.request_id)
        if routed is not None and routed.machine.delivery is delivery:
            self.end(routed, LegEvent.CLIENT_LEFT)

    def end(self, routed: R, event: LegEvent, why: str = "", retry_after_s: float | None = None) -> None:
        """End a request for another reason than its worker's last delta."""
        self.carry_out(routed, routed.machine.end(event, why, retry_after_s))

    def end_all(self, why: str) -> None:
        for routed in list(self.requests.values()):
            self.end(routed, LegEvent.SHUTDOWN, why)

    # -- effects ---------------------------------------------------------------------------------------------------

    def carry_out(self, routed: R, effects: tuple[Effect, ...]) -> None:
        request = routed.machine.request
        if request.trace is not None:
            follow_legs(request.trace, routed.machine, effects)  # first: what is placed next is linked to what was lost
        for effect in effects:
            # Those of every request first, and without their fields in the pattern, which Python looks up each time.
            match effect:
                case WorkerReported():
                    self._leg_times.reported(routed.timer, effect, perf_counter())
                    routed.timer.waits_since_ms = None
                    self.reported(routed, effect)
                case ReleaseLeg():
                    self._forget(routed, effect.dispatch)
                    self.release(routed, effect.dispatch)
                case EndRequest():
                    last = effect.last
                    if last.poison:
                        self._serving_metrics.poison_requests.inc()
                        log.error(
                            "request %s is not moved again: %s", request.request_id, last.error, extra=request.named()
                        )
                    was_placed = self.requests.get(request.request_id) is routed
                    if was_placed:
                        del self.requests[request.request_id]
                        self.ended(routed, effect)
                    self._placer.ended(routed, was_placed)
                case CancelLeg(dispatch) if request.carrier is not None:
                    request.carrier.withdraw(dispatch.id)
                case CancelLeg(dispatch):
                    link = self._links.get(dispatch.endpoint)
                    if link is not None and link.is_up:
                        self._cancel(link, dispatch.id)
                case AvoidWorker():
                    self._leg_times.withdrawn(routed.timer, perf_counter())
                    self.avoid(routed, effect)
                case WorkerFull():
                    self._leg_times.withdrawn(routed.timer, perf_counter())
                    if routed.timer.waits_since_ms is None:
                        routed.timer.waits_since_ms = self._clock.monotonic_ms()
                    self.worker_full(routed, effect)
                case RecordFailure(dispatch, event):
                    if event is LegEvent.OUT_OF_PLACE:
                        self._count_fault("position")
                        worker = str(dispatch.worker)
                        named = request.named(worker=worker)
                        log.warning("request %s: output of %s is out of place", dispatch.id, worker, extra=named)
                    self.record_failure(routed, dispatch)
                case WorkerOvercommitted():
                    self.overcommitted(routed, effect)
                case PlaceNext():
                    self._placer.place_next(routed, effect)
                case _:
                    assert_never(effect)

    @abstractmethod
    def reported(self, routed: R, report: WorkerReported) -> None:
        """Take note of a leg's first output, its cached tokens, or its end."""

    @abstractmethod
    def release(self, routed: R, dispatch: Dispatch) -> None:
        """Take a leg out of the load of its worker."""

    @abstractmethod
    def avoid(self, routed: R, avoid: AvoidWorker) -> None:
        """Have a leg's worker come last when the request is placed again, or not at all."""

    @abstractmethod
    def worker_full(self, routed: R, full: WorkerFull) -> None:
        """Send a leg's worker nothing for the time that it reported."""

    def record_failure(self, routed: R, dispatch: Dispatch) -> None:
        """Record a failure of a leg's worker beyond this request."""

    def overcommitted(self, routed: R, effect: WorkerOvercommitted) -> None:
        """Take note of what a worker has really promised to compute."""

    @abstractmethod
    def ended(self, routed: R, end: EndRequest) -> None:
        """Learn from a request that is over."""

    def _forget(self, routed: R, dispatch: Dispatch) -> None:
        on_link = self._on_link.get(dispatch.endpoint)
        if on_link is not None and on_link.get(dispatch.id) is routed:
            del on_link[dispatch.id]
            if not on_link:
                del self._on_link[dispatch.endpoint]

    def _count_fault(self, kind: str) -> None:
        self._serving_metrics.stream_faults.labels(kind).inc()


KEPT = (FinishReason.PREFILLED, FinishReason.ENCODED)
"""What a leg ends with whose result is kept for the next one."""


def begin_leg(
    trace: TraceRecord, machine: RequestMachine, worker: WorkerKey, stage: Stage, pool: str = ""
) -> TraceContext:
    """Begin the span of the leg that is about to be sent; return the context for its worker.

    A leg's span begins when it is sent, and ends with its worker's part in it: its last delta, or whatever took it
    from that worker. The span of a leg that replaces a lost one is linked to it.
    """
    plan = machine.plan
    span = trace.begin(f"leg {STAGE_WORD[stage]}", SpanKind.CLIENT)
    span.attributes |= {
        "poolgrid.stage": STAGE_WORD[stage],
        "poolgrid.worker": str(worker),
        "poolgrid.dispatch_id": plan.next_dispatch_id,
        "poolgrid.output_tokens_before": machine.delivery.tokens,
    }
    if pool:
        span.attributes["poolgrid.pool"] = pool
    lost = trace.lost.pop(machine.request.request_id, None)
    if lost is not None:
        span.links.append(lost.place)
    trace.open[plan.next_dispatch_id] = span
    return trace.context(span)


def follow_legs(trace: TraceRecord, machine: RequestMachine, effects: tuple[Effect, ...]) -> None:
    """Take note of what follows from an event, before it is carried out."""
    moves = next((effect for effect in effects if isinstance(effect, PlaceNext) and effect.moved), None)
    left, failed = ("", "") if moves is None else (moves.after.id, "refused")
    for effect in effects:
        match effect:
            case RecordFailure(dispatch, event):
                left, failed = dispatch.id, event.value
            case WorkerOvercommitted(dispatch):
                left, failed = dispatch.id, "crowded"
            case _:
                pass
    for effect in effects:
        match effect:
            case WorkerReported():
                _reported(trace, effect)
            case ReleaseLeg(dispatch):
                is_left = dispatch.id == left
                span = trace.close(dispatch.id, failed if is_left else "")
                if span is not None and is_left and moves is not None:
                    trace.lost[machine.request.request_id] = span
            case _:
                pass
    if moves is not None:
        trace.root.event(
            "moved",
            trace.now_ms(),
            {
                "poolgrid.worker": str(moves.after.worker),
                "poolgrid.cause": failed,
                "poolgrid.output_tokens_before": machine.delivery.tokens,
            },
        )


def _reported(trace: TraceRecord, report: WorkerReported) -> None:
    span = trace.open.get(report.dispatch.id)
    if span is None:
        return
    delta = report.delta
    if not span.events and (delta.token_ids or delta.cached_tokens is not None):
        span.event("first output", trace.now_ms())
    if delta.cached_tokens is not None:
        span.attributes["poolgrid.cached_tokens"] = delta.cached_tokens
    if delta.finish_reason is not None:
        span.attributes["poolgrid.finish_reason"] = delta.finish_reason.value
    if delta.finish_reason in KEPT:
        trace.close(report.dispatch.id)
