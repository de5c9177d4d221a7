"""The router: one task owns the projection, chooses workers, dispatches, and follows every request to its end.

Rules
    1. All state is touched from one event loop, in callbacks that never await: a decision is read, sent and booked in
       one go.
    2. A request is in exactly one place: waiting (``poolgrid.server.router.queue``), or on workers
       (``poolgrid.server.router.tracker``). What happens to it there, and what follows, is the table of
       ``poolgrid.kernel.requests.request_machine``.
    3. A worker that failed a request, or refused it, comes last for it.
    4. What is decided while the router catches up with its journal (``poolgrid.server.router.journal_applier``) is
       marked as behind.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Final

from poolgrid.kernel.decision.decision import Decision, DecisionLog
from poolgrid.kernel.projection.approximate_index import ApproximateIndex
from poolgrid.kernel.projection.fleet import Worker, chat_of, inabilities_of, media_of, tasks_of
from poolgrid.kernel.projection.load_ledger import CROWDING_RETRIES
from poolgrid.kernel.requests.inference import InferenceRequest, Refused, ServedModel
from poolgrid.kernel.requests.legs import Dispatch, LegEvent, PlaceNext
from poolgrid.kernel.requests.request_machine import RequestMachine
from poolgrid.kernel.requests.token_delivery import CarriedDelivery, TokenDelivery
from poolgrid.kernel.routing.router_state import RouterState
from poolgrid.kernel.routing.selector import PROMPT_STAGES
from poolgrid.kernel.wire.identifiers import Role, StreamState, WorkerKey
from poolgrid.kernel.wire.requests import TokenDelta
from poolgrid.kernel.wire.tasks import TASK_ROLES
from poolgrid.kernel.wire.trace_context import TraceContext
from poolgrid.server.process.clock import Clock
from poolgrid.server.process.figures import counted
from poolgrid.server.process.tasks import SLICE_MS, BulkWork, Restart, cancel_all, supervised
from poolgrid.server.proxy.ports import ServerPlace
from poolgrid.server.router.admission_review import REVIEW_MS, AdmissionReview
from poolgrid.server.router.choosing import Chooser
from poolgrid.server.router.feeds import JournalFeed
from poolgrid.server.router.fleet_links import FIRST_CONTACT_MS, CompatibilityCheck, FleetLinks
from poolgrid.server.router.journal_applier import JournalApplier
from poolgrid.server.router.metrics import RouterMetrics
from poolgrid.server.router.placement import LocalRequest, Placement, PlacementFailure, WaitCause, tell_decision
from poolgrid.server.router.queue import RouterQueue, lane_of, queue_span
from poolgrid.server.router.settings import RouterSettings
from poolgrid.server.router.tracker import RouterTracker
from poolgrid.server.serving.admission_queue import FullWorkers
from poolgrid.server.serving.links import LINKS_MAX, OpenLink
from poolgrid.server.serving.metrics import LegTimer

log: Final = logging.getLogger(__name__)

HOUSEKEEPING_FRACTION: Final = 4
"""Links are checked and reservations expired four times per worker timeout."""

REBUILDING: Final = "the router is still rebuilding its state; try again"
SHUTTING_DOWN: Final = "the router is shutting down"
LINK_FULL: Final = "its connection is full"

FORWARDED_ROLES: Final = (Role.AGGREGATED, Role.PREFILL, Role.DECODE)
"""Roles of engine servers that take clients' requests as they are."""


class RouterService:
    """Implements ``poolgrid.kernel.requests.inference.InferenceBackend`` and
    ``poolgrid.server.serving.request_tracker.Placer`` over one pool of workers."""

    def __init__(
        self,
        settings: RouterSettings,
        state: RouterState,
        feed: JournalFeed,
        metrics: RouterMetrics,
        clock: Clock,
        open_link: OpenLink,
        links_max: int = LINKS_MAX,
        compatibility_check: CompatibilityCheck = lambda _: "",
        not_sampled: TraceContext | None = None,
    ) -> None:
        """``not_sampled`` is the trace context that workers get with requests whose traces are not kept, if any are."""
        self.projection = state.projection
        self.ready = False
        self._not_ready = REBUILDING
        self._settings = settings
        self._feed = feed
        self.metrics = self._metrics = metrics
        self._clock = clock
        self._bulk = BulkWork(clock)
        self.journal = JournalApplier(state, clock, self._bulk, self._after_records, feed.resync)
        journal = self.journal
        self._behind_records: Callable[[], int] = lambda: journal.behind() + feed.behind()
        self._full: FullWorkers[WorkerKey] = FullWorkers(clock)
        self.links = FleetLinks(open_link, links_max, compatibility_check)
        self.chooser = Chooser(settings, state, self.links, clock, self._behind_records, self._full)
        naming = self.chooser.naming
        self.tracker = RouterTracker(state, self.links, metrics, clock, self, self._full, naming, not_sampled)
        self.admission: AdmissionReview | None = None
        """Whether turns wait for places in caches; ``None`` where they never do."""
        if settings.session_admission:
            self.admission = AdmissionReview(state.sessions.working_set)
            state.projection.attach(self.admission.log)
        self.queue = RouterQueue(settings, self.chooser, metrics, clock, self._place, self._give_up, self.admission)
        self._full.observe(self.queue.pump)
        self._fleet_version = -1
        self._tasks: list[asyncio.Task[None]] = []
        self._created_s = clock.wall_ms() // 1000
        self._served: list[ServedModel] = []
        self._served_version = -1
        self._forwarded: frozenset[str] = frozenset()
        """Models whose requests are forwarded."""
        self._forwarded_version = -1
        self._troubled = False
        self._loop: asyncio.AbstractEventLoop | None = None
        """That of this router, once it has started."""

    # -- life ------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Follow the journal; returns when the state is that of the pool, its workers are reached, and it may serve."""
        self._loop = asyncio.get_running_loop()
        await self._feed.start(self.journal)
        await self.journal.level.wait()
        if not await self.links.first_contact(self._clock):
            log.warning(
                "ready, and %s of the pool cannot be reached yet: no answer within %.0f ms",
                counted(len(self.links.away), "worker"),
                FIRST_CONTACT_MS,
            )
        self.ready = True
        self._tasks.append(supervised(self._run_housekeeping, "router housekeeping", Restart()))
        if self.admission is not None:
            self.admission.log.clear()  # what was read at once says nothing about times
            self._tasks.append(supervised(partial(self._run_reviews, self.admission), "admission reviews", Restart()))

    async def stop(self) -> None:
        """End what is left, close every connection, stop following."""
        self.end_requests()
        self.journal.stop()
        await cancel_all(self._tasks)
        self.tracker.stop()
        self._full.close()
        self.links.close()
        await self._feed.stop()

    def end_requests(self) -> None:
        """End every request with an error, and take none any more."""
        self.ready = False
        self._not_ready = SHUTTING_DOWN
        self.queue.close(Refused(503, "not_ready", SHUTTING_DOWN))
        self.tracker.end_all(SHUTTING_DOWN)

    async def _run_housekeeping(self) -> None:
        interval_s = self._settings.worker_timeout_ms / 1000 / HOUSEKEEPING_FRACTION
        while True:
            await asyncio.sleep(interval_s)
            now_ms = self._clock.monotonic_ms()
            self._note_trouble(self.trouble)
            self.links.check(now_ms)
            self.tracker.expire()
            self.queue.expire(now_ms)
            self.queue.pump()

    async def _run_reviews(self, admission: AdmissionReview) -> None:
        """Review admission at each full minute, as the other routers of the pool do."""
        monotonic_ms = self._clock.monotonic_ms
        while True:
            await asyncio.sleep((REVIEW_MS - self._clock.wall_ms() % REVIEW_MS) / 1000)
            rested = admission.rests
            cards = {key: worker.card for key, worker in self.projection.fleet.workers.items()}
            ends_ms = monotonic_ms() + SLICE_MS
            for _ in admission.review(cards, monotonic_ms()):
                if monotonic_ms() >= ends_ms:
                    await self._bulk.turn()
                    ends_ms = monotonic_ms() + SLICE_MS
            if admission.rests is not rested:
                log.info("session admission %s: %s", "rests" if admission.rests else "works again", admission.reason())
                if admission.rests:
                    self.queue.release_turns()

    def _note_trouble(self, trouble: str) -> None:
        if trouble and not self._troubled:
            log.error("routing on a state that is no longer current: %s", trouble)
        elif self._troubled and not trouble:
            log.warning("the state is current again, at journal offset %d", self.projection.next_offset)
        self._troubled = bool(trouble)

    # -- the journal -----------------------------------------------------------------------------------------------

    def _after_records(self) -> None:
        if self.projection.fleet.version != self._fleet_version:
            self._fleet_version = self.projection.fleet.version
            self.links.sync(self.projection.fleet.workers)
        self.links.note_listed(self.projection.fleet.workers)
        self.queue.pump()

    # -- requests --------------------------------------------------------------------------------------------------

    async def submit(self, request: InferenceRequest) -> TokenDelivery:
        """Choose a worker and dispatch; waits for room if it must. Raises ``Refused``."""
        try:
            return await self._submit(request)
        except Refused as refusal:
            self._metrics.refused.labels(refusal.code).inc()
            raise

    async def _submit(self, request: InferenceRequest) -> TokenDelivery:
        self._check_admissible(request)
        timer = LegTimer(perf_counter())
        chooser = self.chooser
        block_size = chooser.block_size(request.model)
        if chooser.is_quick(request):
            path = chooser.path_now(request, block_size)
        else:
            path = await chooser.path(request, block_size)
            self._check_admissible(request)  # the router may have ended meanwhile, or have taken the same id
        delivery = self._delivery_of(request)
        if request.task is None:
            request.turn = chooser.naming.turn_of(request, path, block_size)
        machine = RequestMachine(request, delivery, self._settings.migration_limit)
        routed = LocalRequest(machine, timer, path, block_size)
        cause = self._wait_cause(routed)
        if cause is not None:
            try:
                await self.queue.wait(routed, cause)
            except asyncio.CancelledError:
                self.tracker.end(routed, LegEvent.CLIENT_LEFT)
                raise
        return delivery

    def _delivery_of(self, request: InferenceRequest) -> TokenDelivery:
        carrier, on_client_left = request.carrier, self.tracker.on_client_left
        if carrier is not None:
            return CarriedDelivery(request.request_id, on_client_left, carrier.ended)
        return TokenDelivery(request.request_id, on_client_left, self._loop)

    def _check_admissible(self, request: InferenceRequest) -> None:
        """Raise ``Refused`` for a request that cannot be taken now."""
        if not self.ready:
            raise Refused(503, "not_ready", self._not_ready)
        if request.request_id in self.tracker.requests:
            raise Refused(409, "duplicate_request", f"request {request.request_id!r} is already being served")

    def _wait_cause(self, routed: LocalRequest) -> WaitCause | None:
        """Place a new request, or return why it waits. Raises ``Refused``."""
        chooser, request = self.chooser, routed.machine.request
        if request.may_wait:
            if self.queue.must_wait(routed):
                return WaitCause.WORKING_SET
            if self.queue.has_waiting(lane_of(request)):
                return WaitCause.HELD if chooser.plans and chooser.can_be_planned(routed) else WaitCause.BEHIND_OTHERS
        found = chooser.choose(routed)
        if request.may_wait and chooser.holds(found):
            return WaitCause.HELD
        failure = self._place(routed, found)
        if failure is None:
            return None
        if not failure.busy or not request.may_wait:
            raise self.queue.refusal(failure)
        return failure.wait_cause

    def preview(self, request: InferenceRequest) -> Decision:
        """Return the decision that a request would get now; nothing is booked, sent, counted or recorded.

        Raises ``Refused`` where the request would be refused, or would wait.
        """
        if not self.ready:
            raise Refused(503, "not_ready", self._not_ready)
        found = self.chooser.preview(request)
        if isinstance(found, PlacementFailure):
            raise self.queue.refusal(found)
        return found

    def _place(
        self, routed: LocalRequest, found: Placement | PlacementFailure | None = None
    ) -> PlacementFailure | None:
        """Choose, send and book a request's next leg, in one go; or return why not. ``found`` is what was chosen in
        this turn."""
        started_s = perf_counter()
        trace = routed.machine.request.trace
        began_ms = 0.0 if trace is None else trace.now_ms()
        forgiven = False
        while True:
            found = found or self.chooser.choose(routed)
            if isinstance(found, Placement):
                if self._send(routed, found, began_ms):
                    self._metrics.decision_seconds.observe(perf_counter() - started_s)
                    return None
                routed.tried[found.decision.worker] = LINK_FULL
                found = None
                continue
            if found.busy or forgiven or not routed.tried or found.is_policy_failure:
                if LINK_FULL in routed.tried.values():
                    # A connection that is full, or has broken in this moment: it may wait for it.
                    routed.tried = {worker: why for worker, why in routed.tried.items() if why != LINK_FULL}
                    return replace(found, busy=not found.is_policy_failure)
                return found
            # A worker that failed it once comes last, not never, unlike one that cannot do it. It may have been
            # another's fault (a prefill worker that died before its KV moved), or be a new epoch by now. The migration
            # limit ends what does not end.
            forgiven, found = True, None
            routed.tried.clear()

    def _send(self, routed: LocalRequest, chosen: Placement, began_ms: float) -> bool:
        machine, decision, leg = routed.machine, chosen.decision, chosen.leg
        has_prompt = leg.stage in PROMPT_STAGES
        expected_prefill_tokens = (
            decision.prefill_tokens if has_prompt and machine.stale_loads < CROWDING_RETRIES else None
        )
        trace = machine.request.trace
        if trace is not None:
            trace.close(queue_span(machine.request.request_id))
            tell_decision(trace.add("choose", began_ms), decision)
        if machine.request.turn is not None:
            place = self.chooser.place_of(routed, decision) if has_prompt else None
            self.chooser.naming.placed(machine.request, self.projection.fleet.workers[decision.worker].card, place)
        dispatch: Dispatch | None
        if machine.request.carrier is not None:
            endpoint = self.projection.fleet.workers[decision.worker].card.request_endpoint
            dispatch = self.tracker.carry(
                routed, machine.request.carrier, decision.worker, endpoint, leg.stage, decision.overlap_tokens
            )
        else:
            dispatch = self.tracker.send(
                routed,
                self.links.to_worker(decision.worker),
                decision.worker,
                leg.stage,
                decision.overlap_tokens,
                expected_prefill_tokens,
            )
        if dispatch is None:
            return False
        machine.delivery.decision_reason = chosen.reason()
        if has_prompt:
            machine.delivery.promised_tokens = decision.overlap_tokens
        self.tracker.enter(routed, chosen, dispatch.id)
        return True

    # -- the port of the tracker -----------------------------------------------------------------------------------

    def place_next(self, routed: LocalRequest, place: PlaceNext) -> None:
        """Place a request whose client is being served already; it queues when every worker is busy."""
        if place.moved and not place.for_room:
            cause = "amid_output" if routed.machine.delivery.tokens else "before_output"
            self._metrics.migrations.labels(cause).inc()
            self.tracker.failed(routed, place)
            self.queue.pump_soon()  # the worker that it left may have room for another
        failure = self._place(routed)
        if failure is None:
            return
        if failure.busy and routed.machine.request.may_wait:
            waits_for = failure.wait_cause if place.for_room else WaitCause.WORKER_LOST
            self.queue.resume(routed, waits_for if place.moved else WaitCause.NEXT_LEG)
        else:
            retry_after_s = self.retry_after_s() if failure.busy else None
            self._give_up(routed, f"{place.why}; {failure}", retry_after_s)

    def room_changed(self, soon: bool = False) -> None:
        if soon:
            self.queue.pump_soon()
        else:
            self.queue.pump()

    def ended(self, routed: LocalRequest, was_placed: bool) -> None:
        if was_placed:
            # First of all: its own end must not find it still waiting, and send it to a worker once more.
            self.queue.leave(routed)
            request = routed.machine.request
            self.queue.count_finished(
                lane_of(request),
                request.payer,
                request.tenant_weight,
                request.priority,
                routed.machine.delivery.tokens,
            )
        self.queue.pump()

    def _give_up(self, routed: LocalRequest, why: str, retry_after_s: float | None = None) -> None:
        self.tracker.end(routed, LegEvent.NOWHERE, why, retry_after_s)

    # -- the port of gateways and global routers -----------------------------------------------------------------------

    def reserved(self, decision: Decision, path: Sequence[int]) -> None:
        self.tracker.reserved(decision, path)

    def retry_after_s(self) -> float:
        return self.queue.retry_after_s()

    # -- views -----------------------------------------------------------------------------------------------------

    def models(self) -> Sequence[ServedModel]:
        """Return the models that some worker serves now; the front end asks with every request."""
        fleet = self.projection.fleet
        if self._served_version != fleet.version:
            self._served = [
                ServedModel(
                    name,
                    self._created_s,
                    max(worker.card.limits.max_sequence_length for worker in workers),
                    tuple(sorted({lora for worker in workers for lora in worker.card.loras})),
                    media_of(workers),
                    chat_of(workers),
                    tuple(sorted({alias for worker in workers for alias in worker.card.aliases})),
                    inabilities_of(workers),
                    any(worker.card.role not in TASK_ROLES.values() for worker in workers),
                    tasks_of(workers),
                )
                for name, workers in fleet.models().items()
            ]
            self._served_version = fleet.version
        return self._served

    # -- engine servers --------------------------------------------------------------------------------------------

    def forwards(self, model: str) -> bool:
        """Return whether requests for a model go to engine servers as their clients wrote them; with an empty name,
        whether those of any model do."""
        fleet = self.projection.fleet
        if self._forwarded_version != fleet.version:
            self._forwarded_version = fleet.version
            self._forwarded = frozenset(
                name
                for name, workers in fleet.models().items()
                if any(worker.card.server_url and worker.card.role in FORWARDED_ROLES for worker in workers)
            )
        return model in self._forwarded if model else bool(self._forwarded)

    def place_of(self, worker: WorkerKey) -> ServerPlace | None:
        """Return a worker's server; ``None`` once it has left the pool."""
        known = self.projection.fleet.workers.get(worker)
        return None if known is None else _place(known)

    def places(self, model: str, lora: str = "") -> Sequence[ServerPlace]:
        """Return the servers of a model that have an adapter, of all models for an empty name, the least busy first;
        each server once."""
        fleet, ledger, index = self.projection.fleet, self.projection.ledger, self.projection.index
        workers = fleet.models().get(model, ()) if model else fleet.workers.values()
        full = self._full.at(self._clock.monotonic_ms())
        found: dict[str, tuple[bool, float, Worker]] = {}
        for worker in workers:
            url = worker.card.server_url
            if not url or (lora and lora not in worker.card.loras):
                continue
            slot = index.slot(worker.key)
            ledger.ensure_slot(slot)
            rank = (worker.draining or worker.key in full, float(ledger.requests[slot]))
            if url not in found or rank < found[url][:2]:
                found[url] = (*rank, worker)
        return [_place(worker) for _, _, worker in sorted(found.values(), key=lambda each: each[:2])]

    def server_urls(self) -> Collection[str]:
        return {worker.card.server_url for worker in self.projection.fleet.workers.values()}

    def follows(self, worker: WorkerKey) -> bool:
        """Return whether what is promised of a worker's cache comes from the events of its own engine."""
        trust = self.projection.trust
        is_live = trust.stream(worker)[0] is StreamState.LIVE and worker not in trust.untrusted
        return is_live and not any(isinstance(each, ApproximateIndex) for each in self.projection.observers)

    def on_carried(self, request_id: str, delta: TokenDelta) -> None:
        self.tracker.on_carried(request_id, delta)

    def on_carried_broken(self, request_id: str, dispatch_id: str, why: str) -> None:
        self.tracker.on_carried_broken(request_id, dispatch_id, why)

    def on_answered(self, request_id: str, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """Engine servers choose nothing."""

    @property
    def unreachable(self) -> Mapping[WorkerKey, str]:
        """Return the workers that the pool knows and this router cannot talk to, and why."""
        return self.links.unreachable

    @property
    def decisions(self) -> DecisionLog:
        return self.tracker.decisions

    @property
    def behind_records(self) -> int:
        """Return how many records the pool's journal is known to hold beyond those applied; 0 when level with it."""
        return self._behind_records()

    @property
    def trouble(self) -> str:
        """Return why the router's state may not be current, in words; empty when all is well."""
        return self._feed.trouble(self._clock.monotonic_ms()) if self.ready else ""

    def counts(self) -> tuple[int, int]:
        return len(self.tracker.requests), len(self.queue)


def _place(worker: Worker) -> ServerPlace:
    card, rank = worker.card, worker.key.dp_rank
    return ServerPlace(
        worker.key,
        card.server_url,
        card.server_kind,
        card.server_version,
        None if card.dp_size == 1 else card.server_ranks[rank] if card.server_ranks else rank,
        card.role,
        card.kv_bootstrap_port,
    )
