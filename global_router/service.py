"""The global router: picks a pool for each request, has its router reserve a worker, talks to the worker itself.

Rules
    1. All state is touched from one event loop. A request's *flight* is in exactly one place: being placed (one task),
       or on workers. What happens to it there, and what follows, is the table of ``poolgrid.serving.request_machine``.
    2. When no pool of its order can take a request and some are only full, it waits (``waiting_room``); when none can
       serve it, it is refused at once.
    3. A request that lost its worker moves to the same pool first, or with ``enable_priority_retry``, as long as the
       client has no token, to faster pools before it; then along the fallback order.
    4. A request is served under the revision of the document that was in force when it got its first worker.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from time import perf_counter

from poolgrid.global_router.books import FlightBooks
from poolgrid.global_router.configuration import Configuration
from poolgrid.global_router.core.choice.fallback import PoolStanding
from poolgrid.global_router.core.choice.request_hints import HintError, RequestHints, read_hints
from poolgrid.global_router.core.document.axis import StageName
from poolgrid.global_router.decisions import RequestDecision, RequestDecisions
from poolgrid.global_router.flight import Flight
from poolgrid.global_router.metrics import GlobalRouterMetrics
from poolgrid.global_router.placing import Placing
from poolgrid.global_router.pools import Pools
from poolgrid.global_router.settings import GlobalRouterSettings
from poolgrid.global_router.view import GlobalRouterView
from poolgrid.global_router.waiting_room import NEW, Attempt, Place, Waiting, WaitingRoom
from poolgrid.inference.inference_request import InferenceRequest
from poolgrid.inference.ports import Refused, ServedModel
from poolgrid.process.clock import Clock
from poolgrid.process.tasks import detached
from poolgrid.serving.admission.queued_request import QueuedRequest
from poolgrid.serving.effects import PlaceNext
from poolgrid.serving.happened import Happened
from poolgrid.serving.in_flight import InFlight
from poolgrid.serving.leg_times import LegWatch
from poolgrid.serving.request_machine import RequestMachine
from poolgrid.serving.token_delivery import TokenDelivery
from poolgrid.serving.worker_links import Link, Links
from poolgrid.wire.identifiers import Stage
from poolgrid.wire.requests import TokenDelta
from poolgrid.wire.trace_context import TraceContext

log = logging.getLogger(__name__)

HOUSEKEEPING_FRACTION = 4
"""Links are checked and reservations renewed four times per worker timeout."""

LOOP_INTERVAL_S = 1.0
"""The closed loop judges its cells once a second."""

SHUTTING_DOWN = "the global router is shutting down"


class GlobalRouterService:
    """Implements ``poolgrid.inference.ports.InferenceBackend`` over pools."""

    def __init__(
        self,
        settings: GlobalRouterSettings,
        configuration: Configuration,
        pools: Pools,
        links: Links,
        metrics: GlobalRouterMetrics,
        clock: Clock,
        not_kept: TraceContext | None = None,
    ) -> None:
        """``not_kept`` is what workers are told of requests whose traces are not kept, where any are."""
        self.configuration = configuration
        self.pools = pools
        self.decisions = RequestDecisions(settings.decision_log_length)
        self._settings = settings
        self._links = links
        self._metrics = metrics
        self._clock = clock
        self.waiting_room = WaitingRoom(settings, metrics, clock, self._ask_full_pools)
        self.books = FlightBooks(configuration, metrics, clock, self.waiting_room.changed, self._on_ended)
        self.in_flight = InFlight(
            self.books, self._place_next, links.get, lambda fault: metrics.stream_faults.labels(fault).inc()
        )
        self.placing = Placing(settings, pools, links, self.books, self.in_flight, metrics, clock, not_kept)
        self.view = GlobalRouterView(self, clock)
        self._stopping = False
        pools.listen(self.waiting_room.changed)

    # -- life ------------------------------------------------------------------------------------------------------

    async def run_housekeeping(self) -> None:
        """Check links, renew reservations, let the closed loop judge, again and again; runs until it is cancelled."""
        interval_s = min(LOOP_INTERVAL_S, self._settings.worker_timeout_ms / 1000 / HOUSEKEEPING_FRACTION)
        while True:
            await asyncio.sleep(interval_s)
            self._links.check()
            self.books.renew(self._clock.monotonic_ms())
            self.judge(self._clock.monotonic_ms())
            self.waiting_room.changed()  # breakers go by time

    def judge(self, now_ms: float) -> None:
        """Let closed loop and breakers take the steps that time brings."""
        self.books.judge(now_ms)
        for pool in self.pools.all():
            self.books.note_breaker(pool, pool.breaker.advance(now_ms))

    def stop(self) -> None:
        """End what is left with an error."""
        self._stopping = True
        self.waiting_room.close(Refused(503, "not_ready", SHUTTING_DOWN))
        self.books.full_workers.close()
        for flight in list(self.books.flights.values()):
            self._end(flight, Happened.SHUTDOWN, SHUTTING_DOWN)

    # -- requests in -----------------------------------------------------------------------------------------------

    async def submit(self, request: InferenceRequest) -> TokenDelivery:
        """Choose a pool, have a worker reserved, dispatch; waits for room if it must. Raises ``Refused``."""
        if self._stopping:
            raise self._refusal(503, "not_ready", SHUTTING_DOWN)
        if request.request_id in self.books.flights:
            raise self._refusal(409, "duplicate_request", f"request {request.request_id!r} is already being served")
        try:
            hints = read_hints(request.hints.get("nvext"), request.hints.get("headers"))
        except HintError as error:
            self._metrics.refused.labels("invalid_value").inc()
            raise Refused(400, "invalid_value", f"{error}. The request was not run.", param=error.field) from None
        flight = self._flight(request, hints)
        self.books.flights[request.request_id] = flight
        self.decisions.add(flight.record)
        trace = request.trace
        began_ms = 0.0 if trace is None else trace.now_ms()
        try:
            await self.placing.destination(flight, flight.admitted_by)
            place = self._place_in_line(flight, lambda: self._attempt_first(flight), NEW)
            try:
                await self.waiting_room.admit(place)
            finally:
                flight.record.queued_ms = place.item.waited_ms
                if trace is not None and place.item.waited_ms:
                    trace.add("queue", began_ms, began_ms + place.item.waited_ms)
        except Refused as refusal:
            self._metrics.refused.labels(refusal.code).inc()
            self._end(flight, Happened.CLIENT_LEFT)  # an attempt may be under way
            flight.record.outcome = f"refused: {refusal.code}"
            flight.record.note(str(refusal))
            raise
        except BaseException:
            self._end(flight, Happened.CLIENT_LEFT)
            raise
        return flight.machine.delivery

    def _flight(self, request: InferenceRequest, hints: RequestHints) -> Flight:
        config = self.configuration.active
        isl = len(request.token_ids) // 4
        expected = config.outputs.expected(
            request.lora_name or request.model,
            request.expected_output_tokens if hints.osl is None else hints.osl,
            request.sampling.max_tokens,
        )
        record = RequestDecision(
            request.request_id, self._clock.wall_ms(), request.model, isl, config.revision, hints, expected
        )
        delivery = TokenDelivery(request.request_id, self._on_client_left)
        machine = RequestMachine(request, delivery, self._settings.migration_limit)
        now_ms = self._clock.monotonic_ms()
        flight = Flight(machine, config, hints, expected, record, now_ms, LegWatch(perf_counter()))
        flight.waits_since_ms = now_ms
        return flight

    def _place_in_line(self, flight: Flight, attempt: Attempt, kind: object) -> Place:
        request = flight.machine.request
        flight.attempts = 0
        flight.lane = flight.lane or flight.destinations[flight.admitted_by].lane(request.model)
        return QueuedRequest(
            Waiting(attempt, kind, lambda: self._may_go(flight), asyncio.get_running_loop().create_future()),
            lane=flight.lane,
            tenant=request.tenant,
            weight=request.tenant_weight,
            priority=request.priority,
            prompt_tokens=flight.record.isl,
            entered_ms=self._clock.monotonic_ms(),
        )

    def _may_go(self, flight: Flight) -> bool:
        """Tell whether some pool may take a new request, or all are known to be unable to."""
        return flight.config is not self.configuration.active or self.placing.may_go(flight)

    async def _attempt_first(self, flight: Flight) -> Refused | None:
        """Place a new request; return why not when some pool may have room later, raise ``Refused`` when none can."""
        flight.attempts += 1
        if flight.config is not self.configuration.active and not flight.machine.plan.dispatches:
            # It waited, and nothing of it is under way: its pools may not even exist any more.
            flight.config = self.configuration.active
            flight.record.revision = flight.config.revision
            flight.destinations.clear()
        try:
            await self.placing.destination(flight, flight.admitted_by)
            await self.placing.first(flight)
        except Refused as refusal:
            if refusal.status != 429:
                raise
            flight.excluded.clear()  # a worker of the same name may be a new life by then
            return refusal
        return None

    # -- what follows from what happens ------------------------------------------------------------------------------

    def on_tokens(self, link: Link, deltas: Iterator[TokenDelta]) -> bool:
        """Take a worker's output, as much of it as one turn may; return whether that was all."""
        return self.in_flight.on_tokens(link, deltas)

    def on_link_down(self, endpoint: str, why: str) -> None:
        self.in_flight.on_lost(endpoint, Happened.LOST, why)

    def holds(self, endpoint: str) -> bool:
        return self.in_flight.holds(endpoint)

    def _place_next(self, machine: RequestMachine, place: PlaceNext) -> None:
        """Place what comes next in a task: pools must be asked."""
        flight = self.books.flights[machine.request.request_id]
        if not place.moved:
            if place.after.stage is Stage.PREFILL:
                flight.stage, flight.work = "decode", Stage.DECODE
            elif place.after.stage is Stage.ENCODE:
                flight.stage, flight.work = flight.after_encode
            move_timeout_ms = self._settings.move_timeout_ms
            self._start_placing(flight, place.why, flight.stage, flight.work, None, move_timeout_ms)
            return
        machine.delivery.pool = ""
        output = machine.delivery.tokens > 0
        if not place.for_room:
            self._metrics.moves.labels("amid_output" if output else "before_output").inc()
            self.decisions.seconds.add(self._clock.wall_ms(), 0, 0, 0, moves=1)
        stage, work = flight.stage, flight.work
        if work is Stage.ENCODE:
            stage, work = flight.after_encode
        if work is Stage.DECODE:
            # The blocks went with the withdrawal: prompt + output so far is prefilled again.
            stage, work = "prefill", Stage.PREFILL
        after_loss = None
        if stage == flight.stage:
            faster_first = not output and flight.config.document.enable_priority_retry
            after_loss = (flight.record.placements[-1].pool, faster_first)
        timeout_ms = self._settings.move_timeout_ms
        if place.for_room:
            now_ms = self._clock.monotonic_ms()
            if flight.waits_since_ms is None:
                flight.waits_since_ms = now_ms
            timeout_ms = max(0.0, self._settings.queue_timeout_ms - (now_ms - flight.waits_since_ms))
        self._start_placing(flight, place.why, stage, work, after_loss, timeout_ms)

    def _start_placing(
        self,
        flight: Flight,
        why: str,
        stage: StageName,
        work: Stage,
        after_loss: tuple[str, bool] | None,
        timeout_ms: float,
    ) -> None:
        flight.moving = detached(
            self._place_again(flight, why, stage, work, after_loss, timeout_ms), f"moving {flight.record.request_id}"
        )

    async def _place_again(
        self,
        flight: Flight,
        why: str,
        stage: StageName,
        work: Stage,
        after_loss: tuple[str, bool] | None,
        timeout_ms: float,
    ) -> None:
        """Place a flight whose client is being served already; waits a bounded time for a pool that can take it."""

        async def attempt() -> Refused | None:
            flight.attempts += 1
            if flight.machine.ended:
                return None
            try:
                if work is Stage.PREFILL:
                    await self.placing.prefill(flight, why, after_loss)
                else:
                    await self.placing.place(flight, stage, work, why, after_loss)
            except Refused as refusal:
                if flight.machine.refusal is not None and refusal.status != 429:
                    raise  # every worker that is there was asked, and refused
                flight.excluded.clear()  # a worker of the same name may be a new life by now
                return refusal
            return None

        try:
            place = self._place_in_line(flight, attempt, (stage, work))
            await self.waiting_room.resume(place, timeout_ms)
        except Refused as refusal:
            retry_after_s = refusal.retry_after_s if refusal.status == 429 else None
            self._end(flight, Happened.NOWHERE, f"{why}; {refusal}", retry_after_s)
        except Exception as error:
            request = flight.machine.request
            log.exception("moving request %s failed: this is a bug", request.request_id, extra=request.named())
            self._end(flight, Happened.NOWHERE, f"{why}; moving it failed: {type(error).__name__}")
        finally:
            if flight.moving is asyncio.current_task():
                flight.moving = None

    def _on_client_left(self, delivery: TokenDelivery) -> None:
        flight = self.books.flights.get(delivery.request_id)
        if flight is not None and flight.machine.delivery is delivery:
            self._end(flight, Happened.CLIENT_LEFT)

    def _end(self, flight: Flight, happened: Happened, why: str = "", retry_after_s: float | None = None) -> None:
        self.in_flight.carry_out(flight.machine, flight.machine.end(happened, why, retry_after_s))

    def _on_ended(self, flight: Flight) -> None:
        machine = flight.machine
        if machine.plan.dispatches:
            request = machine.request
            self.waiting_room.finished(
                flight.lane, request.tenant, request.tenant_weight, request.priority, machine.delivery.tokens
            )
        if flight.moving is not None and flight.moving is not asyncio.current_task():
            flight.moving.cancel()

    # -- views -----------------------------------------------------------------------------------------------------

    def _refusal(self, status: int, code: str, message: str) -> Refused:
        self._metrics.refused.labels(code).inc()
        return Refused(status, code, message)

    def _ask_full_pools(self) -> None:
        now_ms = self._clock.monotonic_ms()
        for pool in self.pools.all():
            if pool.overall_state(now_ms) is PoolStanding.SATURATED:
                pool.ask_status()

    def models(self) -> Sequence[ServedModel]:
        return self.view.models()

    def __len__(self) -> int:
        return len(self.books.flights)
