"""The global router: picks a pool for each request, has its router reserve a worker, talks to the worker itself.

Rules
    1. All state is touched from one event loop. A request is in exactly one place: being placed (one task), or on
       workers. What happens to it there, and what follows, is the table of
       ``poolgrid.kernel.requests.request_machine``.
    2. When no pool of its order can take a request and some are only full, it waits (``queue``); when none can
       serve it, it is refused at once.
    3. A request that lost its worker moves to the same pool first, or with ``enable_priority_retry``, as long as the
       client has no token, to faster pools before it; then along the fallback order.
    4. A request is served under the revision of the document that was in force when it got its first worker.
    5. In front of pools of engine servers a request has a carrier, which takes it to the router of the chosen pool as
       its client wrote it. No worker is reserved; what the router answers decides what follows.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

from poolgrid.kernel.pool_grids.axis import StageName
from poolgrid.kernel.pool_grids.grid import PoolStanding
from poolgrid.kernel.pool_grids.request_hints import HintError, RequestHints, read_hints
from poolgrid.kernel.requests.inference import OUTPUT_LIMIT, InferenceRequest, Refused, ServedModel, header_priority
from poolgrid.kernel.requests.legs import LegEvent, PlaceNext
from poolgrid.kernel.requests.request_machine import RequestMachine
from poolgrid.kernel.requests.token_delivery import CarriedDelivery, TokenDelivery
from poolgrid.kernel.wire.answers import EndpointRow
from poolgrid.kernel.wire.card import NO_CHAT_SPEC, ChatSpec, Inability, MediaSpec, common
from poolgrid.kernel.wire.identifiers import Stage, WorkerId, WorkerKey
from poolgrid.kernel.wire.requests import TokenDelta
from poolgrid.kernel.wire.selection import ModelStatus, PoolStatus
from poolgrid.kernel.wire.sessions import SessionTurn, tenant_key
from poolgrid.kernel.wire.tasks import TASK_ROLES
from poolgrid.kernel.wire.trace_context import TraceContext
from poolgrid.server.forwarding.hop import OWN_HEADERS, WORKER_HEADER
from poolgrid.server.global_router.configuration import Configuration
from poolgrid.server.global_router.decisions import RequestDecision, RequestDecisions
from poolgrid.server.global_router.metrics import GlobalRouterMetrics
from poolgrid.server.global_router.placing import PoolPlacer
from poolgrid.server.global_router.pools import PoolConnection, Pools, model_status
from poolgrid.server.global_router.queue import NEW, Attempt, GlobalRouterQueue, Place, WaitingFlight
from poolgrid.server.global_router.settings import TIMINGS, GlobalRouterSettings, Timings
from poolgrid.server.global_router.tracker import Flight, ForwardedLeg, GlobalRouterTracker
from poolgrid.server.process.clock import Clock
from poolgrid.server.process.tasks import detached
from poolgrid.server.proxy.changes import POOLGRID
from poolgrid.server.proxy.ports import ServerPlace
from poolgrid.server.serving.fair_queue import QueuedRequest
from poolgrid.server.serving.links import LinksOnDemand
from poolgrid.server.serving.metrics import LegTimer

log = logging.getLogger(__name__)

NOT_THERE = (PoolStanding.DOWN, PoolStanding.LOADING, PoolStanding.CONNECTING, PoolStanding.DRAINING)
"""States of pools that take no request. One whose breaker is open is not among them: requests are what closes it."""


class PoolsView:
    """The pools of the document in force."""

    def __init__(self, pools: Pools, configuration: Configuration, clock: Clock) -> None:
        self._pools = pools
        self._configuration = configuration
        self._clock = clock
        self._created_s = clock.wall_ms() // 1000
        self._contradicting: dict[tuple[str, str], list[tuple[str, str, str]]] = {}

    def models(self) -> list[ServedModel]:
        chats: dict[str, ChatSpec] = {}
        lengths: dict[str, int] = {}
        loras: dict[str, dict[str, None]] = {}
        aliases: dict[str, dict[str, None]] = {}
        media: dict[str, MediaSpec] = {}
        inabilities: dict[str, list[Sequence[Inability]]] = {}
        for pool in self._pools.all():
            for served in pool.status.models if pool.status is not None else ():
                if served.roles and all(each.role in TASK_ROLES.values() for each in served.roles):
                    continue  # tasks are for the router of the pool
                lengths[served.model] = max(lengths.get(served.model, 0), served.max_sequence_length)
                loras.setdefault(served.model, {}).update(dict.fromkeys(served.loras))
                aliases.setdefault(served.model, {}).update(dict.fromkeys(served.aliases))
                inabilities.setdefault(served.model, []).append(served.inabilities)
                if served.media.kinds:
                    media.setdefault(served.model, served.media)
                if served.chat != NO_CHAT_SPEC:
                    chats[served.model] = self._joined(chats.get(served.model, NO_CHAT_SPEC), served, pool.name)
        return [
            ServedModel(
                name,
                self._created_s,
                length,
                tuple(sorted(loras[name])),
                media.get(name, MediaSpec()),
                chats.get(name, NO_CHAT_SPEC),
                tuple(sorted(aliases[name])),
                common(inabilities[name]),
            )
            for name, length in sorted(lengths.items())
        ]

    def _joined(self, chat: ChatSpec, served: ModelStatus, pool: str) -> ChatSpec:
        """Return what pools report of a model's chats: the first that reports it counts, and others are logged once."""
        told = chat.contradictions(served.chat)
        if told and self._contradicting.get((pool, served.model)) != told:
            # Kept for each pool and model that there is, so it stays as small as they are.
            self._contradicting[pool, served.model] = told
            for field, value, other in told:
                log.warning(
                    "pool %s reports of model %r: %s %s; an earlier pool of the document reports %s, which is used",
                    pool,
                    served.model,
                    field,
                    other,
                    value,
                )
        return chat.filled(served.chat)

    def endpoints(self) -> list[EndpointRow]:
        return [
            EndpointRow(
                endpoint=pool.name,
                model=served.model,
                role=role.role.name.lower(),
                workers=role.ready + role.draining + role.unreachable,
                ready=role.ready,
                instances=[],
            )
            for pool in self._pools.all()
            for served in (pool.status.models if pool.status is not None else ())
            for role in served.roles
        ]

    def missing(self) -> str | None:
        """Return ``None`` when every stage has a pool that is up, else what is missing."""
        now_ms = self._clock.monotonic_ms()
        for name, stage in self._configuration.active.document.stages.items():
            pools = [self._pools.get(pool.name) for pool in stage.pools]
            if all(pool is None or pool.overall_state(now_ms) in NOT_THERE for pool in pools):
                return f"no {name} pool is up"
        return None

    def pool_states(self) -> Mapping[str, PoolStanding]:
        now_ms = self._clock.monotonic_ms()
        return {pool.name: pool.overall_state(now_ms) for pool in self._pools.all()}


HOUSEKEEPING_FRACTION = 4
"""Links are checked and reservations renewed four times per worker timeout."""

LOOP_INTERVAL_S = 1.0
"""The closed loop judges its cells once a second."""

DECISIONS_KEPT = 10_000
"""Decisions kept for ``/v1/decisions``; the oldest is forgotten first."""

SHUTTING_DOWN = "the global router is shutting down"


@dataclass(frozen=True, slots=True)
class NextLeg:
    """A leg of a request whose client is being served already, that is to be placed."""

    why: str
    stage: StageName
    work: Stage
    timeout_ms: float
    after_loss: tuple[str, bool] | None = None
    """The pool that lost the request, and whether faster ones come before it."""


class GlobalRouterService:
    """Implements ``poolgrid.kernel.requests.inference.InferenceBackend`` and
    ``poolgrid.server.serving.request_tracker.Placer`` over pools."""

    def __init__(
        self,
        settings: GlobalRouterSettings,
        configuration: Configuration,
        pools: Pools,
        links: LinksOnDemand,
        metrics: GlobalRouterMetrics,
        clock: Clock,
        not_sampled: TraceContext | None = None,
        timings: Timings = TIMINGS,
    ) -> None:
        """``not_sampled`` is the trace context that workers get with requests whose traces are not kept, if any are."""
        self.configuration = configuration
        self.pools = pools
        self.decisions = RequestDecisions(DECISIONS_KEPT)
        self._settings = settings
        self._timings = timings
        self._links = links
        self._metrics = metrics
        self._clock = clock
        self.queue = GlobalRouterQueue(settings, metrics, clock, self._ask_full_pools, timings.status_interval_ms)
        self.tracker = GlobalRouterTracker(configuration, links, metrics, clock, self, not_sampled)
        self.placer = PoolPlacer(settings, pools, links, self.tracker, metrics, clock, timings)
        self.view = PoolsView(pools, configuration, clock)
        self._stopping = False
        pools.listen(self.queue.changed)

    # -- life ------------------------------------------------------------------------------------------------------

    async def run_housekeeping(self) -> None:
        """Check links, renew reservations, let the closed loop judge, again and again; runs until it is cancelled."""
        interval_s = min(LOOP_INTERVAL_S, self._settings.worker_timeout_ms / 1000 / HOUSEKEEPING_FRACTION)
        while True:
            await asyncio.sleep(interval_s)
            self._links.check()
            self.tracker.renew(self._clock.monotonic_ms())
            self.judge(self._clock.monotonic_ms())
            self.queue.changed()  # breakers go by time

    def judge(self, now_ms: float) -> None:
        """Let closed loop and breakers take the steps that time brings."""
        self.tracker.judge(now_ms)
        for pool in self.pools.all():
            self.tracker.note_breaker(pool, pool.breaker.advance(now_ms))

    def stop(self) -> None:
        self._stopping = True
        self.queue.close(Refused(503, "not_ready", SHUTTING_DOWN))
        self.tracker.full_workers.close()
        self.tracker.end_all(SHUTTING_DOWN)

    # -- requests in -----------------------------------------------------------------------------------------------

    async def submit(self, request: InferenceRequest) -> TokenDelivery:
        """Choose a pool, have a worker reserved, dispatch; waits for room if it must. Raises ``Refused``."""
        try:
            return await self._submit(request)
        except Refused as refusal:
            self._metrics.refused.labels(refusal.code).inc()
            raise

    async def _submit(self, request: InferenceRequest) -> TokenDelivery:
        if self._stopping:
            raise Refused(503, "not_ready", SHUTTING_DOWN)
        if request.request_id in self.tracker.requests:
            raise Refused(409, "duplicate_request", f"request {request.request_id!r} is already being served")
        headers = request.hints.get("headers")
        try:
            hints = read_hints(request.hints.get("nvext"), headers)
        except HintError as error:
            raise Refused(400, "invalid_value", f"{error}. The request was not run.", param=error.field) from None
        if (priority := header_priority(headers)) is not None:
            hints = replace(hints, priority=priority)
        session = request.session
        if session.name:  # lineage is for the routers of pools, which know what their workers hold
            key = tenant_key(request.tenant)
            request.turn = SessionTurn(session.name, key, session.parent, session.after_tool)
        flight = self._flight(request, hints)
        self.tracker.requests[request.request_id] = flight
        self.decisions.add(flight.record)
        trace = request.trace
        began_ms = 0.0 if trace is None else trace.now_ms()
        try:
            await self.placer.destination(flight, flight.admitted_by)
            place = self._queued(flight, lambda: self._attempt_first(flight), NEW)
            try:
                await self.queue.admit(place)
            finally:
                flight.record.queued_ms = place.item.waited_ms
                if trace is not None and place.item.waited_ms:
                    trace.add("queue", began_ms, began_ms + place.item.waited_ms)
        except Refused as refusal:
            self.tracker.end(flight, LegEvent.CLIENT_LEFT)  # an attempt may be in progress
            flight.record.outcome = f"refused: {refusal.code}"
            flight.record.note(str(refusal))
            raise
        except BaseException:
            self.tracker.end(flight, LegEvent.CLIENT_LEFT)
            raise
        return flight.machine.delivery

    def _flight(self, request: InferenceRequest, hints: RequestHints) -> Flight:
        config = self.configuration.active
        isl = len(request.token_ids) // 4
        expected = config.outputs.expected(
            request.lora_name or request.model,
            request.expected_output_tokens if hints.osl is None else hints.osl,
            request.hints.get(OUTPUT_LIMIT, request.sampling.max_tokens),
        )
        record = RequestDecision(
            request.request_id, self._clock.wall_ms(), request.model, isl, config.revision, hints, expected
        )
        carrier, on_client_left = request.carrier, self.tracker.on_client_left
        delivery = (
            TokenDelivery(request.request_id, on_client_left)
            if carrier is None
            else CarriedDelivery(request.request_id, on_client_left, carrier.ended)
        )
        machine = RequestMachine(request, delivery, self._settings.migration_limit)
        now_ms = self._clock.monotonic_ms()
        timer = LegTimer(perf_counter())
        timer.waits_since_ms = now_ms
        return Flight(machine, timer, config, hints, expected, record, now_ms)

    def _queued(self, flight: Flight, attempt: Attempt, kind: object) -> Place:
        request = flight.machine.request
        flight.attempts = 0
        flight.lane = flight.lane or flight.destinations[flight.admitted_by].lane(request.model)
        return QueuedRequest(
            WaitingFlight(attempt, kind, lambda: self._may_go(flight), asyncio.get_running_loop().create_future()),
            lane=flight.lane,
            tenant=request.payer,
            weight=request.tenant_weight,
            priority=request.priority,
            prompt_tokens=flight.record.isl,
            entered_ms=self._clock.monotonic_ms(),
        )

    def _may_go(self, flight: Flight) -> bool:
        """Return whether some pool may take a new request, or all are known to be unable to."""
        return flight.config is not self.configuration.active or self.placer.may_go(flight)

    async def _attempt_first(self, flight: Flight) -> Refused | None:
        """Place a new request; return why not when some pool may have room later, raise ``Refused`` when none can."""
        flight.attempts += 1
        if flight.config is not self.configuration.active and not flight.machine.plan.dispatches:
            # It waited, and no leg of it has started: its pools may not even exist any more.
            flight.config = self.configuration.active
            flight.record.revision = flight.config.revision
            flight.destinations.clear()
        try:
            await self.placer.destination(flight, flight.admitted_by)
            await self.placer.first(flight)
        except Refused as refusal:
            if refusal.status != 429:
                raise
            flight.excluded.clear()  # a worker of the same name may be a new life by then
            return refusal
        return None

    # -- the port of the tracker -----------------------------------------------------------------------------------

    def place_next(self, routed: Flight, place: PlaceNext) -> None:
        """Place what comes next in a task: pools must be asked."""
        flight, delivery = routed, routed.machine.delivery
        timeout_ms = self._timings.move_timeout_ms
        if not place.moved:
            if place.after.stage is Stage.PREFILL:
                flight.stage, flight.work = "decode", Stage.DECODE
            elif place.after.stage is Stage.ENCODE:
                flight.stage, flight.work = flight.after_encode
            self._start_placing(flight, NextLeg(place.why, flight.stage, flight.work, timeout_ms))
            return
        delivery.pool = ""
        output = delivery.tokens > 0
        if not place.for_room:
            self._metrics.moves.labels("amid_output" if output else "before_output").inc()
            self.decisions.seconds.add(self._clock.wall_ms(), (0, 0, 0, 1))
        elif flight.timer.waits_since_ms is not None:
            waited_ms = self._clock.monotonic_ms() - flight.timer.waits_since_ms
            timeout_ms = max(0.0, self._settings.queue_timeout_ms - waited_ms)
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
        self._start_placing(flight, NextLeg(place.why, stage, work, timeout_ms, after_loss))

    def _start_placing(self, flight: Flight, leg: NextLeg) -> None:
        flight.moving = detached(self._place_again(flight, leg), f"moving {flight.record.request_id}")

    async def _place_again(self, flight: Flight, leg: NextLeg) -> None:
        """Place a flight whose client is being served already; waits a bounded time for a pool that can take it."""

        async def attempt() -> Refused | None:
            flight.attempts += 1
            if flight.machine.ended:
                return None
            try:
                if flight.machine.request.carrier is not None:
                    await self.placer.forward(flight, leg.why, leg.after_loss)
                elif leg.work is Stage.PREFILL:
                    await self.placer.prefill(flight, leg.why, leg.after_loss)
                else:
                    await self.placer.place(flight, leg.stage, leg.work, leg.why, leg.after_loss)
            except Refused as refusal:
                is_final = flight.machine.refusal is not None or flight.machine.request.carrier is not None
                if is_final and refusal.status != 429:
                    raise  # every worker that is there was asked, and refused
                flight.excluded.clear()  # a worker of the same name may have a new epoch by now
                return refusal
            return None

        try:
            await self.queue.resume(self._queued(flight, attempt, (leg.stage, leg.work)), leg.timeout_ms)
        except Refused as refusal:
            retry_after_s = refusal.retry_after_s if refusal.status == 429 else None
            self.tracker.end(flight, LegEvent.NOWHERE, f"{leg.why}; {refusal}", retry_after_s)
        except Exception as error:
            request = flight.machine.request
            log.exception("moving request %s failed: this is a bug", request.request_id, extra=request.named())
            why = f"{leg.why}; moving it failed: {type(error).__name__}"
            self.tracker.end(flight, LegEvent.NOWHERE, why)
        finally:
            if flight.moving is asyncio.current_task():
                flight.moving = None

    def room_changed(self, soon: bool = False) -> None:
        self.queue.changed()

    def ended(self, routed: Flight, was_placed: bool) -> None:
        machine = routed.machine
        if machine.plan.dispatches:
            request = machine.request
            self.queue.count_finished(
                routed.lane, request.payer, request.tenant_weight, request.priority, routed.output_tokens
            )
        if routed.moving is not None and routed.moving is not asyncio.current_task():
            routed.moving.cancel()

    def _ask_full_pools(self) -> None:
        now_ms = self._clock.monotonic_ms()
        for pool in self.pools.all():
            if pool.overall_state(now_ms) is PoolStanding.SATURATED:
                pool.ask_status()

    # -- pools of engine servers ---------------------------------------------------------------------------------------

    def forwards(self, model: str) -> bool:
        """Return whether requests go to pools as their clients wrote them: all do, once a pool has engine servers. The
        routers of other pools answer them too."""
        return any(pool.has_servers for pool in self.pools.all())

    def place_of(self, worker: WorkerKey) -> ServerPlace | None:
        """Return the router of a pool; ``None`` once it has left the document."""
        pool = self.pools.get(worker.worker_id)
        return None if pool is None else _place(pool)

    def places(self, model: str, lora: str = "") -> Sequence[ServerPlace]:
        """Return the routers of a model's pools that have an adapter, of all pools for an empty name: first those that
        take requests."""
        now_ms, in_flight = self._clock.monotonic_ms(), self.in_flight()
        there = [
            (pool.overall_state(now_ms) in NOT_THERE, in_flight[pool.name], place, pool)
            for place, pool in enumerate(self.pools.all())
            if pool.status is not None and (not model or _serves(pool.status, model, lora))
        ]
        return [_place(pool) for *_, pool in sorted(there, key=lambda each: each[:3])]

    def on_carried(self, request_id: str, delta: TokenDelta) -> None:
        self.tracker.on_carried(request_id, delta)

    def on_carried_broken(self, request_id: str, dispatch_id: str, why: str) -> None:
        self.tracker.on_carried_broken(request_id, dispatch_id, why)

    def follows(self, worker: WorkerKey) -> bool:
        """Return ``False``: what a pool holds is known to its own router."""
        return False

    def server_urls(self) -> Collection[str]:
        return {pool.url for pool in self.pools.all()}

    def on_answered(self, request_id: str, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """Take what a pool's router chose, or that it has no room by itself."""
        flight = self.tracker.requests.get(request_id)
        if flight is None or not flight.record.placements:
            return
        told = {name: value.decode("latin-1") for name, value in headers if name.startswith(OWN_HEADERS)}
        placement, delivery = flight.record.placements[-1], flight.machine.delivery
        placement.worker = delivery.worker = told.get(WORKER_HEADER, "")
        current = flight.machine.plan.current
        leg = None if current is None else flight.legs.get(current.id)
        if isinstance(leg, ForwardedLeg):
            leg.is_full = status == 429 and not placement.worker
        placement.pool_reason = told.get(b"x-poolgrid-decision", "")
        delivery.decision_reason = "-".join(filter(None, (placement.how, placement.pool_reason)))

    # -- views -----------------------------------------------------------------------------------------------------

    def models(self) -> Sequence[ServedModel]:
        return self.view.models()

    def in_flight(self) -> Mapping[str, int]:
        counts = {pool.name: 0 for pool in self.pools.all()}
        for flight in list(self.tracker.requests.values()):
            for leg in list(flight.legs.values()):
                counts[leg.pool.name] = counts.get(leg.pool.name, 0) + 1
        return counts

    def counts(self) -> tuple[int, int]:
        """Return requests that have begun, and requests that wait for a pool with room."""
        waiting = len(self.queue)
        return len(self.tracker.requests) - waiting, waiting

    def __len__(self) -> int:
        return len(self.tracker.requests)


def _serves(status: PoolStatus, model: str, lora: str) -> bool:
    served = model_status(status, model)
    return served is not None and (not lora or lora in served.loras)


def _place(pool: PoolConnection) -> ServerPlace:
    status = pool.status
    kinds = {each.server_kind for each in status.models if each.server_kind} if status is not None else set()
    kind = "openai" if "openai" in kinds else min(kinds, default=POOLGRID)
    return ServerPlace(WorkerKey(WorkerId(pool.name)), pool.url, kind, "", None, is_router=True)
