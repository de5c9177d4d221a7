"""The requests of a global router: their reservations at pools, breakers' tickets, latencies learnt.

Rules
    1. Every reservation ends: by the worker's events, by ``Release``, or by its lease.
    2. A forwarded request has no reservation. Its end makes room at its pool.
    3. A pool's breaker gets the result of each ticket once: *succeeded* with a leg's first output, *failed* when the
       pool or its worker failed, *abandoned* when nothing was learnt. That a worker is busy or drains is no failure.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from poolgrid.kernel.pool_grids.axis import StageName
from poolgrid.kernel.pool_grids.circuit_breaker import BreakerStep, Ticket
from poolgrid.kernel.pool_grids.closed_loop import LoopStep
from poolgrid.kernel.pool_grids.destination import Attribution, Destination, Served
from poolgrid.kernel.pool_grids.request_hints import ExpectedOutput, RequestHints
from poolgrid.kernel.requests.legs import AvoidWorker, Dispatch, EndRequest, WorkerFull, WorkerReported
from poolgrid.kernel.requests.log_fields import about
from poolgrid.kernel.wire.identifiers import Stage
from poolgrid.kernel.wire.requests import FinishReason
from poolgrid.kernel.wire.selection import ALL_RANKS, Reservation, WorkerRank
from poolgrid.kernel.wire.trace_context import TraceContext
from poolgrid.server.global_router.configuration import Active, Configuration
from poolgrid.server.global_router.decisions import RequestDecision
from poolgrid.server.global_router.metrics import GlobalRouterMetrics
from poolgrid.server.global_router.pools import PoolConnection, RoomAsked
from poolgrid.server.process.clock import Clock
from poolgrid.server.serving.admission_queue import FullWorkers
from poolgrid.server.serving.links import LinksOnDemand
from poolgrid.server.serving.request_tracker import Placer, RequestTracker, RoutedRequest


@dataclass(slots=True)
class ReservedLeg:
    """One dispatch and what it holds at its pool."""

    pool: PoolConnection
    reservation: Reservation
    ticket: Ticket | None
    """``None`` once the pool's breaker knows the result."""
    lease_ms: float
    renewed_ms: float


@dataclass(slots=True)
class ForwardedLeg:
    """One dispatch that went to a pool's router as its client wrote it."""

    pool: PoolConnection
    asked: RoomAsked
    ticket: Ticket | None
    """``None`` once the pool's breaker knows the result."""
    is_full: bool = False
    """Whether the pool's router has refused it for lack of room; no server has seen it then."""


class Flight(RoutedRequest, eq=False):
    """One request; served under the revision of the document that was in force when it got its first worker."""

    config: Active
    hints: RequestHints
    expected: ExpectedOutput
    record: RequestDecision
    arrived_ms: float
    destinations: dict[StageName, Destination] = msgspec.field(default_factory=dict)
    """By stage, once it is known."""
    legs: dict[str, ReservedLeg | ForwardedLeg] = msgspec.field(default_factory=dict)
    """By dispatch id: the current one, and those kept for the leg after them."""
    excluded: dict[str, list[WorkerRank]] = msgspec.field(default_factory=dict)
    """By pool, the workers that failed this request."""
    failed: list[str] = msgspec.field(default_factory=list)
    """Pools that did not serve it when it was forwarded, for another reason than room: they are not asked again."""
    unable: dict[str, list[WorkerRank]] = msgspec.field(default_factory=dict)
    """By pool, the workers that cannot do what it asks for: they are not asked again."""
    paths: dict[tuple[str, int], bytes] = msgspec.field(default_factory=dict)
    """The prompt's packed sequence hashes, by hash spec and block size."""
    lane: str = ""
    """The lane of the queue that it waits in."""
    attempts: int = 0
    """How often it was tried to place it where it is to go next."""
    stage: StageName = "aggregated"
    work: Stage = Stage.WHOLE
    after_encode: tuple[StageName, Stage] = ("aggregated", Stage.WHOLE)
    """What follows a running encode leg."""
    moving: asyncio.Task[None] | None = None
    attribution: Attribution = msgspec.field(default_factory=Attribution)
    """The cells whose loops this request's latencies count for."""
    first_ms: float | None = None
    last_ms: float = 0.0

    @property
    def admitted_by(self) -> StageName:
        """Return the stage whose pools decide whether there is room: those that generate the output, or are asked
        first to forward the request."""
        if self.config.document.mode == "aggregated":
            return "aggregated"
        return "decode" if self.machine.request.carrier is None else "prefill"

    @property
    def output_tokens(self) -> int:
        carrier = self.machine.request.carrier
        return self.machine.delivery.tokens if carrier is None else carrier.output_tokens or 0


log = logging.getLogger(__name__)

LOOP_STEPS_KEPT = 1000
BREAKER_STEPS_KEPT = 100


class GlobalRouterTracker(RequestTracker[Flight]):
    """The requests of one global router, from arrival to end."""

    def __init__(
        self,
        configuration: Configuration,
        links: LinksOnDemand,
        metrics: GlobalRouterMetrics,
        clock: Clock,
        placer: Placer[Flight],
        not_sampled: TraceContext | None,
    ) -> None:
        super().__init__(links, metrics, clock, placer, not_sampled)
        self.full_workers: FullWorkers[tuple[str, WorkerRank]] = FullWorkers(clock)
        """Workers that refused requests for lack of room, with their pools' names."""
        self.full_workers.observe(placer.room_changed)
        self.loop_steps: list[LoopStep] = []
        self._configuration = configuration
        self._metrics = metrics

    # -- effects ---------------------------------------------------------------------------------------------------

    def reported(self, routed: Flight, report: WorkerReported) -> None:
        now_ms = self._clock.monotonic_ms()
        leg = routed.legs.get(report.dispatch.id)
        if leg is not None and leg.ticket is not None:
            # Its first output: the worker has it, its events count from here, and the pool has done its part.
            ticket, leg.ticket = leg.ticket, None
            failed = report.delta.finish_reason is FinishReason.ERROR
            result = leg.pool.breaker.abandoned if failed else leg.pool.breaker.succeeded
            self.note_breaker(leg.pool, result(ticket, now_ms))
        if report.first and routed.machine.delivery.tokens:
            routed.first_ms = now_ms
            routed.record.ttft_ms = now_ms - routed.arrived_ms
            self._observe(routed, routed.attribution.ttft, "ttft", routed.record.ttft_ms, now_ms)
        routed.last_ms = now_ms

    def release(self, routed: Flight, dispatch: Dispatch) -> None:
        leg = routed.legs.pop(dispatch.id, None)
        if leg is not None:
            reservation = leg.reservation if isinstance(leg, ReservedLeg) else None
            self.give_back(leg.pool, reservation, routed.record.model, dispatch.stage)
            self._settle(leg.pool, leg.ticket, leg.pool.breaker.abandoned)

    def avoid(self, routed: Flight, avoid: AvoidWorker) -> None:
        """Have a leg's worker excluded when its pool is asked again."""
        leg = routed.legs[avoid.dispatch.id]
        if isinstance(leg, ForwardedLeg):
            routed.failed.append(leg.pool.name)  # a client's own bytes are never sent twice to what failed
            return
        excluded = routed.unable if avoid.for_good else routed.excluded
        workers = excluded.setdefault(leg.pool.name, [])
        workers.append(leg.reservation.worker)
        if avoid.for_good:
            # What one rank cannot do, no rank of that engine can.
            workers.append(WorkerRank(leg.reservation.worker.worker_id, ALL_RANKS))

    def worker_full(self, routed: Flight, full: WorkerFull) -> None:
        """Have a leg's worker excluded for every request, for the time that it reported."""
        leg = routed.legs[full.dispatch.id]
        if isinstance(leg, ForwardedLeg) and leg.is_full:
            del routed.legs[full.dispatch.id]  # it has not made room by its end
            leg.pool.note_refused(routed.record.model, full.dispatch.stage, leg.asked)
            self._settle(leg.pool, leg.ticket, leg.pool.breaker.abandoned)
            return
        if isinstance(leg, ForwardedLeg):
            routed.failed.append(leg.pool.name)  # each of its servers was asked, or it has none
            return
        self.full_workers.note((leg.pool.name, leg.reservation.worker), full.retry_after_ms)

    def record_failure(self, routed: Flight, dispatch: Dispatch) -> None:
        """Count a failure for the breaker of a leg's pool."""
        leg = routed.legs[dispatch.id]
        ticket, leg.ticket = leg.ticket, None
        self._settle(leg.pool, ticket, leg.pool.breaker.failed)

    def ended(self, routed: Flight, end: EndRequest) -> None:
        machine, record = routed.machine, routed.record
        tokens, reason = routed.output_tokens, end.last.finish_reason or ""
        if end.by_worker and reason in (FinishReason.STOP, FinishReason.LENGTH):
            routed.config.outputs.finished(machine.request.lora_name or machine.request.model, tokens)
        if end.by_worker and routed.first_ms is not None and tokens > 1:
            record.itl_ms = (routed.last_ms - routed.first_ms) / (tokens - 1)
            self._observe(routed, routed.attribution.itl, "itl", record.itl_ms, routed.last_ms)
        record.outcome = reason
        record.output_tokens = tokens
        if end.last.error is not None and not end.by_worker:
            record.note(end.last.error)

    # -- pools -----------------------------------------------------------------------------------------------------

    def give_back(self, pool: PoolConnection, reservation: Reservation | None, model: str, work: Stage) -> None:
        """Release a worker that was reserved, or what a forwarded request had: other requests may wait for it."""
        if reservation is not None:
            pool.release(reservation)
        pool.note_freed(model, work)
        self._placer.room_changed()

    def renew(self, now_ms: float) -> None:
        """Renew the reservations of dispatches without output that are half way through their lease."""
        due: dict[PoolConnection, list[Reservation]] = {}
        for flight in self.requests.values():
            for leg in flight.legs.values():
                if (
                    isinstance(leg, ReservedLeg)
                    and leg.ticket is not None
                    and now_ms - leg.renewed_ms > leg.lease_ms / 2
                ):
                    leg.renewed_ms = now_ms
                    due.setdefault(leg.pool, []).append(leg.reservation)
        for pool, reservations in due.items():
            pool.renew(reservations)

    def note_breaker(self, pool: PoolConnection, steps: list[BreakerStep]) -> None:
        for step in steps:
            self._metrics.breaker_steps.labels(pool.name, step.after.value).inc()
            pool.breaker_steps = [*pool.breaker_steps, step][-BREAKER_STEPS_KEPT:]
            pool_name = about(pool=pool.name)
            log.warning("circuit breaker of pool %s: %s, %s", pool.name, step.after.value, step.reason, extra=pool_name)

    def _settle(
        self, pool: PoolConnection, ticket: Ticket | None, result: Callable[[Ticket, float], list[BreakerStep]]
    ) -> None:
        if ticket is not None:
            self.note_breaker(pool, result(ticket, self._clock.monotonic_ms()))

    # -- latencies -------------------------------------------------------------------------------------------------

    def judge(self, now_ms: float) -> None:
        """Let the closed loop of the document in force take its steps."""
        for step in self._configuration.active.loop.evaluate(now_ms):
            self._note_loop(step)

    def _observe(self, flight: Flight, served: Served | None, metric: str, value_ms: float, now_ms: float) -> None:
        if served is not None:
            selection = flight.destinations[served.cell.stage].selection
            self._metrics.targets.judged(selection, served, metric, value_ms, flight.config.revision)
            for step in flight.config.loop.observe(served.cell, metric, value_ms, now_ms, served.pool):
                self._note_loop(step)

    def _note_loop(self, step: LoopStep) -> None:
        self._metrics.loop_steps.labels(step.key.pool).inc()
        log.info("closed loop: %s", step.explanation().to_json())
        self.loop_steps = [*self.loop_steps, step][-LOOP_STEPS_KEPT:]
