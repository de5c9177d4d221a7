"""What the global router has on its books for each request: reservations at pools, breakers' tickets, latencies learnt.

Rules
    1. Every reservation ends: by the worker's events, by ``Release``, or by its lease.
    2. A pool's breaker hears of each ticket once: *succeeded* with a leg's first output, *failed* when the pool or its
       worker is to blame, *abandoned* when nothing was learnt. That a worker is busy or drains is no failure.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import perf_counter

from poolgrid.global_router.configuration import Configuration
from poolgrid.global_router.core.choice.attribution import Served
from poolgrid.global_router.core.choice.circuit_breaker import BreakerStep, Ticket
from poolgrid.global_router.core.choice.closed_loop import LoopStep
from poolgrid.global_router.flight import Flight
from poolgrid.global_router.metrics import GlobalRouterMetrics
from poolgrid.global_router.pools import PoolConnection
from poolgrid.process.clock import Clock
from poolgrid.process.log_lines import about
from poolgrid.serving.effects import Avoid, End, Full, Heard
from poolgrid.serving.full_workers import FullWorkers
from poolgrid.serving.legs import Dispatch
from poolgrid.serving.request_machine import RequestMachine
from poolgrid.wire.identifiers import Stage
from poolgrid.wire.requests import FinishReason
from poolgrid.wire.selection import Reservation, WorkerRank

log = logging.getLogger(__name__)

LOOP_STEPS_KEPT = 1000
BREAKER_STEPS_KEPT = 100


class FlightBooks:
    """Implements ``poolgrid.serving.in_flight.Books``."""

    def __init__(
        self,
        configuration: Configuration,
        metrics: GlobalRouterMetrics,
        clock: Clock,
        on_room: Callable[[], None],
        on_ended: Callable[[Flight], None],
    ) -> None:
        """``on_room`` is told when a worker may have room again, ``on_ended`` of each request that is over."""
        self.flights: dict[str, Flight] = {}
        """By request id, from arrival to end."""
        self.full_workers: FullWorkers[tuple[str, WorkerRank]] = FullWorkers(clock)
        """Workers that refused requests for lack of room, with their pools' names."""
        self.full_workers.observe(on_room)
        self.loop_steps: list[LoopStep] = []
        self._configuration = configuration
        self._metrics = metrics
        self._clock = clock
        self._on_room = on_room
        self._on_ended = on_ended

    # -- what happens to legs (``poolgrid.serving.in_flight.Books``) --------------------------------------------------

    def heard(self, machine: RequestMachine, heard: Heard) -> None:
        """Take note of a leg's first output, and of its end."""
        flight = self._flight(machine)
        now_ms = self._clock.monotonic_ms()
        self._metrics.leg_times.heard(flight.watch, heard, perf_counter())
        leg = flight.legs.get(heard.dispatch.id)
        if leg is not None and leg.ticket is not None:
            # Its first output: the worker has it, its events count from here, and the pool has done its part.
            ticket, leg.ticket = leg.ticket, None
            failed = heard.delta.finish_reason is FinishReason.ERROR
            result = leg.pool.breaker.abandoned if failed else leg.pool.breaker.succeeded
            self.note_breaker(leg.pool, result(ticket, now_ms))
        flight.waits_since_ms = None
        if heard.first and machine.delivery.tokens:
            flight.first_ms = now_ms
            flight.record.ttft_ms = now_ms - flight.arrived_ms
            self._observe(flight, flight.attribution.ttft, "ttft", flight.record.ttft_ms, now_ms)
        flight.last_ms = now_ms

    def release(self, machine: RequestMachine, dispatch: Dispatch) -> None:
        """Take a leg off its worker's books, at its pool and here."""
        flight = self._flight(machine)
        leg = flight.legs.pop(dispatch.id, None)
        if leg is not None:
            self.give_back(leg.pool, leg.reservation, flight.record.model, dispatch.stage)
            self._settle(leg.pool, leg.ticket, leg.pool.breaker.abandoned)

    def avoid(self, machine: RequestMachine, avoid: Avoid) -> None:
        """Have a leg's worker excluded when its pool is asked again."""
        flight = self._flight(machine)
        self._metrics.leg_times.withdrawn(flight.watch, perf_counter())
        leg = flight.legs[avoid.dispatch.id]
        excluded = flight.unable if avoid.for_good else flight.excluded
        excluded.setdefault(leg.pool.name, []).append(leg.reservation.worker)

    def full(self, machine: RequestMachine, full: Full) -> None:
        """Have a leg's worker excluded for every request, for the time that it reported."""
        flight = self._flight(machine)
        self._metrics.leg_times.withdrawn(flight.watch, perf_counter())
        leg = flight.legs[full.dispatch.id]
        self.full_workers.note((leg.pool.name, leg.reservation.worker), full.retry_after_ms)

    def blame(self, machine: RequestMachine, dispatch: Dispatch) -> None:
        """Hold a failure against a leg's pool."""
        leg = self._flight(machine).legs[dispatch.id]
        ticket, leg.ticket = leg.ticket, None
        self._settle(leg.pool, ticket, leg.pool.breaker.failed)

    def crowded(self, machine: RequestMachine, dispatch: Dispatch, booked_tokens: int) -> None:
        """Nothing is known here of what workers have promised: pools' routers keep the ledgers."""

    def ended(self, machine: RequestMachine, end: End) -> None:
        """Learn from a request that came to its end, and forget it."""
        flight = self._flight(machine)
        self._metrics.poison_requests.inc(end.last.poison)
        tokens = machine.delivery.tokens
        record, reason = flight.record, end.last.finish_reason or ""
        if end.by_worker and reason in (FinishReason.STOP, FinishReason.LENGTH):
            flight.config.outputs.finished(machine.request.lora_name or machine.request.model, tokens)
        if end.by_worker and flight.first_ms is not None and tokens > 1:
            record.itl_ms = (flight.last_ms - flight.first_ms) / (tokens - 1)
            self._observe(flight, flight.attribution.itl, "itl", record.itl_ms, flight.last_ms)
        record.outcome = reason
        record.output_tokens = tokens
        if end.last.error is not None and not end.by_worker:
            record.note(end.last.error)
        self.flights.pop(record.request_id, None)
        self._on_ended(flight)

    def _flight(self, machine: RequestMachine) -> Flight:
        return self.flights[machine.request.request_id]

    # -- pools -----------------------------------------------------------------------------------------------------

    def give_back(self, pool: PoolConnection, reservation: Reservation, model: str, work: Stage) -> None:
        """Let go of a worker that was reserved: others may wait for it."""
        pool.release(reservation)
        pool.note_freed(model, work)
        self._on_room()

    def renew(self, now_ms: float) -> None:
        """Renew the reservations of dispatches without output that are half way through their lease."""
        due: dict[PoolConnection, list[Reservation]] = {}
        for flight in self.flights.values():
            for leg in flight.legs.values():
                if leg.ticket is not None and now_ms - leg.renewed_ms > leg.lease_ms / 2:
                    leg.renewed_ms = now_ms
                    due.setdefault(leg.pool, []).append(leg.reservation)
        for pool, reservations in due.items():
            pool.renew(reservations)

    def note_breaker(self, pool: PoolConnection, steps: list[BreakerStep]) -> None:
        """Keep, count and log what a pool's breaker did."""
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
