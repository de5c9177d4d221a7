"""The router: one task owns the projection, chooses workers, dispatches, and follows every request to its end.

Rules
    1. All state is touched from one event loop, in callbacks that never await: a decision is read, booked and sent in
       one go.
    2. A request is in exactly one place: waiting (``poolgrid.router.waiting``), or on workers
       (``poolgrid.serving.in_flight``). What happens to it there, and what follows, is the table of
       ``poolgrid.serving.request_machine``; this service carries it out.
    3. A worker that failed a request, or refused it, comes last for it.
    4. What is decided while the router catches up with its journal (``poolgrid.router.catching_up``) is marked as
       behind.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Final

from poolgrid.inference.inference_request import InferenceRequest
from poolgrid.inference.ports import Refused, ServedModel
from poolgrid.process.bulk_work import BulkWork
from poolgrid.process.clock import Clock
from poolgrid.process.figures import counted
from poolgrid.process.tasks import Restart, cancel_all, supervised
from poolgrid.process.tracing.record import TraceRecord
from poolgrid.router.books import RequestBooks
from poolgrid.router.catching_up import CatchingUp
from poolgrid.router.choosing import Chooser
from poolgrid.router.chosen import Chosen
from poolgrid.router.core.decision import Decision
from poolgrid.router.core.router_state import RouterState
from poolgrid.router.core.selector import PROMPT_STAGES
from poolgrid.router.decision_span import tell_decision
from poolgrid.router.fleet_links import FIRST_CONTACT_MS, FleetLinks, Objection, OpenLink
from poolgrid.router.metrics import RouterMetrics
from poolgrid.router.placement import Lack, NotPlaced, WaitCause
from poolgrid.router.ports import JournalFeed
from poolgrid.router.routed import Routed
from poolgrid.router.settings import RouterSettings
from poolgrid.router.view import RouterView
from poolgrid.router.waiting import WaitingLine, queue_span
from poolgrid.serving.effects import PlaceNext
from poolgrid.serving.full_workers import FullWorkers
from poolgrid.serving.happened import Happened
from poolgrid.serving.in_flight import InFlight
from poolgrid.serving.leg_spans import begin_leg
from poolgrid.serving.leg_times import LegWatch
from poolgrid.serving.link_budget import LINKS_MAX
from poolgrid.serving.request_machine import RequestMachine
from poolgrid.serving.token_delivery import TokenDelivery
from poolgrid.serving.worker_links import Link
from poolgrid.wire.events import JournalRecord, RequestFinished, RequestStarted
from poolgrid.wire.identifiers import WorkerKey
from poolgrid.wire.trace_context import TraceContext

log: Final = logging.getLogger(__name__)

# A compiled module looks up what it imports at each use.
_perf_counter: Final = perf_counter

HOUSEKEEPING_FRACTION: Final = 4
"""Links are checked and reservations expired four times per worker timeout."""

_BEHIND_OTHERS: Final = WaitCause.BEHIND_OTHERS

REBUILDING: Final = "the router is still rebuilding its state; try again"
SHUTTING_DOWN: Final = "the router is shutting down"


class RouterService:
    """Implements ``poolgrid.inference.ports.InferenceBackend`` over a pool of workers."""

    def __init__(
        self,
        settings: RouterSettings,
        state: RouterState,
        feed: JournalFeed,
        metrics: RouterMetrics,
        clock: Clock,
        open_link: OpenLink,
        links_max: int = LINKS_MAX,
        objection: Objection = lambda _: "",
        not_kept: TraceContext | None = None,
    ) -> None:
        """``not_kept`` is what workers are told of requests whose traces are not kept, where any are."""
        self.projection = state.projection
        self.ready = False
        self._not_ready = REBUILDING
        self._settings = settings
        self._migration_limit = settings.migration_limit
        self._crowding_retries = settings.crowding_retries
        self._feed = feed
        self._metrics = metrics
        self._clock = clock
        self._not_kept = not_kept
        self._choosing_ms = 0.0
        """When the choice that is being made began, of a request whose trace is kept."""
        self._full: FullWorkers[WorkerKey] = FullWorkers(clock)
        self.books = RequestBooks(
            settings,
            state,
            metrics,
            clock,
            self._on_ended,
            lambda: self.line.pump_soon(),  # noqa: PLW0108  (the line is made below)
            self._full,
        )
        self.in_flight = InFlight(
            self.books,
            self._place_next,
            self._link_of,
            lambda fault: metrics.stream_faults.labels(fault).inc(),
        )
        self.links = FleetLinks(
            open_link,
            links_max,
            self.in_flight.on_tokens,
            self._on_reachable,
            self.in_flight.on_lost,
            self.in_flight.holds,
            objection,
        )
        self.catching_up = CatchingUp(state, clock, BulkWork(clock), self._on_applied, self._on_loaded, feed.resync)
        catching_up = self.catching_up
        self._behind_records: Callable[[], int] = lambda: catching_up.behind() + feed.behind()
        self.chooser = Chooser(settings, state, self.links, clock, self._behind_records, self._full)
        self.line = WaitingLine(settings, self.chooser, metrics, clock, self._dispatch, self._give_up)
        self._full.observe(self.line.pump)
        self._fleet_version = -1
        self._housekeeping: asyncio.Task[None] | None = None
        self.view = RouterView(self, clock)
        self._troubled = False
        self._loop: asyncio.AbstractEventLoop | None = None
        """That of this router, once it has started."""

    # -- life ------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Follow the journal; returns when the state is that of the pool, its workers are reached, and it may serve."""
        self._loop = asyncio.get_running_loop()
        await self._feed.start(self.catching_up)
        await self.catching_up.level.wait()
        if not await self.links.first_contact(self._clock):
            log.warning(
                "ready, and %s of the pool cannot be reached yet: no answer within %.0f ms",
                counted(len(self.links.away), "worker"),
                FIRST_CONTACT_MS,
            )
        self.ready = True
        self._housekeeping = supervised(self._run_housekeeping, "router housekeeping", Restart())

    async def stop(self) -> None:
        """End what is left, close every connection, stop following."""
        self.end_requests()
        self.catching_up.stop()
        if self._housekeeping is not None:
            await cancel_all([self._housekeeping])
        self.books.reservations.stop()
        self._full.close()
        self.links.close()
        await self._feed.stop()

    def end_requests(self) -> None:
        """End every request with an error, and take none any more."""
        self.ready = False
        self._not_ready = SHUTTING_DOWN
        self.line.close(Refused(503, "not_ready", SHUTTING_DOWN))
        for routed in list(self.books.active.values()):
            self._end(routed.machine, Happened.SHUTDOWN, SHUTTING_DOWN)

    async def _run_housekeeping(self) -> None:
        interval_s = self._settings.worker_timeout_ms / 1000 / HOUSEKEEPING_FRACTION
        while True:
            await asyncio.sleep(interval_s)
            now_ms = self._clock.monotonic_ms()
            self._note_trouble(self.trouble)
            self.links.check(now_ms)
            self.books.reservations.expire()
            self.line.expire(now_ms)
            self.line.pump()

    def _note_trouble(self, trouble: str) -> None:
        if trouble and not self._troubled:
            log.error("routing on what is known, which is no longer current: %s", trouble)
        elif self._troubled and not trouble:
            log.warning("the state is current again, at journal offset %d", self.projection.next_offset)
        self._troubled = bool(trouble)

    # -- the journal -----------------------------------------------------------------------------------------------

    def _on_loaded(self) -> None:
        self._metrics.snapshots_loaded.inc()
        self._after_records()

    def _on_applied(self, records: Sequence[JournalRecord]) -> None:
        for record in records:
            for event in record.events:
                # Also of requests that were only placed here, and whose tokens go past this router.
                if type(event) is RequestStarted:
                    if not event.cached_later:
                        self.books.realised(event.request_id, event.cached_tokens)
                elif type(event) is RequestFinished and event.cached_tokens is not None:
                    self.books.realised(event.request_id, event.cached_tokens)
        self._metrics.records_applied.value += len(records)
        self._after_records()

    def _after_records(self) -> None:
        if self.projection.fleet.version != self._fleet_version:
            self._fleet_version = self.projection.fleet.version
            self.links.sync(self.projection.fleet.workers)
        self.line.pump()

    # -- requests in -----------------------------------------------------------------------------------------------

    async def submit(self, request: InferenceRequest) -> TokenDelivery:
        """Choose a worker and dispatch; waits for room if it must. Raises ``Refused``."""
        if not self.ready:
            self._metrics.refused.labels("not_ready").inc()
            raise Refused(503, "not_ready", self._not_ready)
        if request.request_id in self.books.active:
            self._metrics.refused.labels("duplicate_request").inc()
            raise Refused(409, "duplicate_request", f"request {request.request_id!r} is already being served")
        started = _perf_counter()
        watch = LegWatch(started)
        chooser = self.chooser
        path = chooser.path_now(request) if chooser.is_quick(request) else await chooser.path(request)
        self._metrics.hash_seconds.observe(_perf_counter() - started)
        delivery = TokenDelivery(request.request_id, self._on_client_left, self._loop)
        routed = Routed(RequestMachine(request, delivery, self._migration_limit), path, watch)
        cause = _BEHIND_OTHERS
        if chooser.plans and chooser.can_be_planned(routed):
            cause = WaitCause.HELD
        elif not self.line.is_before(request.model):
            missing = self._dispatch(routed)
            if missing is None:
                return delivery
            if missing.lack is not Lack.BUSY:
                raise self.line.refusal(missing)
            cause = missing.wait_cause
        try:
            await self.line.wait(routed, cause)
        except asyncio.CancelledError:
            self._end(routed.machine, Happened.CLIENT_LEFT)
            raise
        return delivery

    def preview(self, request: InferenceRequest) -> Decision:
        """Return the decision that a request would get now; nothing is booked, sent, counted or recorded.

        Raises ``Refused`` where the request would be refused, or would wait.
        """
        if not self.ready:
            raise Refused(503, "not_ready", self._not_ready)
        found = self.chooser.preview(request)
        if isinstance(found, NotPlaced):
            raise self.line.refusal(found)
        return found

    def _dispatch(self, routed: Routed) -> NotPlaced | None:
        """Choose, book and send, in one go; or say why not."""
        started = _perf_counter()
        trace = routed.machine.request.trace
        if trace is not None:
            self._choosing_ms = trace.now_ms()
        missing = self.chooser.place(routed, self._send)
        if missing is None:
            self._metrics.decision_seconds.observe(_perf_counter() - started)
        return missing

    def _send(self, routed: Routed, chosen: Chosen) -> bool:
        machine, decision, leg = routed.machine, chosen.decision, chosen.leg
        link = self.links.to_worker(decision.worker)
        believed = (
            int(decision.candidates.prefill_tokens[decision.choice.row])
            if leg.stage in PROMPT_STAGES and machine.crowded < self._crowding_retries
            else None
        )
        trace = machine.request.trace
        context = self._not_kept if trace is None else self._begin_leg(trace, machine, chosen)
        generate = machine.begin(
            decision.worker, link.endpoint, leg.stage, chosen.overlap_tokens(), believed, context, decision.retention
        )
        if not self.in_flight.generate(link, generate):
            machine.not_sent()
            if trace is not None:
                trace.close(generate.request_id, "not sent")
            return False
        machine.delivery.decision_reason = chosen.reason()
        self.books.enter(routed, chosen, generate.request_id)
        self.in_flight.sent(machine)
        return True

    def _begin_leg(self, trace: TraceRecord, machine: RequestMachine, chosen: Chosen) -> TraceContext:
        trace.close(queue_span(machine.request.request_id))
        tell_decision(trace.add("choose", self._choosing_ms), chosen.decision)
        return begin_leg(trace, machine, chosen.decision.worker, chosen.leg.stage)

    # -- what follows from what happens --------------------------------------------------------------------------------

    def _place_next(self, machine: RequestMachine, place: PlaceNext) -> None:
        """Dispatch a request whose client is being served already; it queues when every worker is busy."""
        if place.moved and not place.for_room:
            cause = "amid_output" if machine.delivery.tokens else "before_output"
            self._metrics.migrations.labels(cause).inc()
            self.line.pump_soon()  # the worker that it left may have room for another
        routed = self.books.active[machine.request.request_id]
        missing = self._dispatch(routed)
        if missing is None:
            return
        if missing.lack is Lack.BUSY:
            waits_for = missing.wait_cause if place.for_room else WaitCause.WORKER_LOST
            self.line.resume(routed, waits_for if place.moved else WaitCause.NEXT_LEG)
        else:
            self._give_up(routed, f"{place.why}; {missing}")

    def _on_ended(self, routed: Routed | None) -> None:
        if routed is not None:
            # First of all: its own end must not find it still waiting, and send it to a worker once more.
            self.line.leave(routed)
            self.line.finished(routed)
        self.line.pump()

    def _give_up(self, routed: Routed, why: str, retry_after_s: float | None = None) -> None:
        self._end(routed.machine, Happened.NOWHERE, why, retry_after_s)

    def _end(
        self, machine: RequestMachine, happened: Happened, why: str = "", retry_after_s: float | None = None
    ) -> None:
        self.in_flight.carry_out(machine, machine.end(happened, why, retry_after_s))

    def _link_of(self, endpoint: str) -> Link | None:
        return self.links.get(endpoint)

    def _on_reachable(self) -> None:
        self.line.pump()

    def _on_client_left(self, delivery: TokenDelivery) -> None:
        routed = self.books.active.get(delivery.request_id)
        if routed is not None and routed.machine.delivery is delivery:
            self._end(routed.machine, Happened.CLIENT_LEFT)

    # -- views -----------------------------------------------------------------------------------------------------

    def models(self) -> Sequence[ServedModel]:
        """Return the models that some worker serves now; the front end asks with every request."""
        return self.view.models()

    @property
    def behind_records(self) -> int:
        """Return how many records the pool's journal is known to hold beyond those applied; 0 when level with it."""
        return self._behind_records()

    @property
    def trouble(self) -> str:
        """Return why the router's state may not be current, in words; empty when all is well."""
        return self._feed.trouble(self._clock.monotonic_ms()) if self.ready else ""

    def counts(self) -> tuple[int, int]:
        return len(self.books.active), len(self.line)
