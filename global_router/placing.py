"""From where a request may go to a worker that has it: cells, pools in their order, reservations, the request plane.

Rules
    1. ``kernel.pool_grids.destination`` gives the wanted pool of a request and the alternatives; it is asked once per
       request and stage. A pool that cannot be used is passed over, and the record has which and why.
    2. A pool is asked for a worker (``Select``), which reserves it; then the worker is reached and sent the request.
       A worker that is not reached, or not needed any more, is given back.
    3. A request with a carrier goes to the pool's router at once. A pool that failed it is not used for it again.
    4. Between an answer and what is done with it nothing is awaited but the link; a request that ended meanwhile takes
       nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace

from poolgrid.kernel.pool_grids.axis import StageName
from poolgrid.kernel.pool_grids.circuit_breaker import Ticket
from poolgrid.kernel.pool_grids.destination import Destination, destination
from poolgrid.kernel.pool_grids.grid import FallbackChoice, GridRequest, PoolStanding
from poolgrid.kernel.requests.inference import Carrier, Refused
from poolgrid.kernel.requests.trace_record import SpanKind, SpanRecord, TraceRecord
from poolgrid.kernel.wire.hashing import HASH_SPEC, pack_hashes, stable_u64
from poolgrid.kernel.wire.identifiers import Stage, WorkerId, WorkerKey
from poolgrid.kernel.wire.limits import BLOCKS_PER_EVENT_MAX, WORKERS_EXCLUDED_MAX
from poolgrid.kernel.wire.selection import (
    Probe,
    Reservation,
    Select,
    Selected,
    SelectRefusal,
    SelectRefused,
    WorkerRank,
)
from poolgrid.kernel.wire.trace_context import TraceContext
from poolgrid.server.global_router.decisions import PoolPlacement, Refusal
from poolgrid.server.global_router.metrics import GlobalRouterMetrics
from poolgrid.server.global_router.pools import PoolConnection, Pools, model_status
from poolgrid.server.global_router.router_link import PoolLost
from poolgrid.server.global_router.settings import GlobalRouterSettings, Timings
from poolgrid.server.global_router.tracker import Flight, ForwardedLeg, GlobalRouterTracker, ReservedLeg
from poolgrid.server.process.clock import Clock
from poolgrid.server.serving.links import LinksOnDemand
from poolgrid.server.serving.prompt_paths import TenantPaths, media_hashes, media_kinds, prompt_path

WORKERS_TRIED_PER_POOL_MAX = 4
"""Workers of one pool that may turn out to be out of reach before the next pool is asked."""

RETRY_AFTER_DEFAULT_S = 1.0

WORK_OF = {"prefill": Stage.PREFILL, "decode": Stage.DECODE, "aggregated": Stage.WHOLE}
"""What the workers of a stage's pools are asked to do."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A worker has the request, or the router of a pool."""

    dispatch_id: str
    worker: str
    """Empty until the head of the answer names it."""
    reason: str = ""
    """Of the pool's choice."""
    overlap_blocks: int = 0
    block_size: int = 0
    select_ms: float = 0.0


class PoolPlacer:
    """Places flights on workers of pools."""

    def __init__(
        self,
        settings: GlobalRouterSettings,
        pools: Pools,
        links: LinksOnDemand,
        tracker: GlobalRouterTracker,
        metrics: GlobalRouterMetrics,
        clock: Clock,
        timings: Timings,
    ) -> None:
        self._settings = settings
        self._pools = pools
        self._links = links
        self._tracker = tracker
        self._timings = timings
        self._metrics = metrics
        self._clock = clock
        self._paths = TenantPaths()

    # -- legs ------------------------------------------------------------------------------------------------------

    async def first(self, flight: Flight) -> None:
        """Place a new request; raises ``Refused``."""
        if flight.machine.request.carrier is not None:
            await self.forward(flight, "first")
            return
        if flight.config.document.mode == "aggregated":
            await self.place(flight, "aggregated", Stage.WHOLE, "first")
            return
        local = flight.record.isl <= self._settings.local_prefill_max_tokens
        if local and flight.machine.request.multimodal is None and await self._is_served_whole(flight):
            flight.record.note("a short prompt is prefilled where it is decoded")
            await self.place(flight, "decode", Stage.WHOLE, "first")
            return
        # A prefill without a possible decode would be wasted work.
        choice = self._choice(flight, await self.destination(flight, "decode"), Stage.DECODE)
        if choice.pool is None:
            raise self._none_left(flight, choice, [])
        await self.prefill(flight, "first")

    async def forward(self, flight: Flight, cause: str, after_loss: tuple[str, bool] | None = None) -> None:
        """Have a request carried to a pool's router: one pool does all of it, in a disaggregated fleet a prefill pool
        or, where none can, a decode pool. Raises ``Refused``."""
        refused: list[Refused] = []
        only = flight.machine.request.only_worker
        if only:
            after_loss = (only, False)
        for stage in forwarding_stages(flight):
            try:
                await self.place(
                    flight, stage, Stage.WHOLE, cause, after_loss if only or stage == flight.stage else None
                )
            except Refused as refusal:
                refused.append(refusal)
            else:
                for each in refused:
                    flight.record.note(str(each))
                return
        raise next((each for each in refused if each.status == 429), refused[0])

    async def _is_served_whole(self, flight: Flight) -> bool:
        """Tell whether any decode pool takes whole requests, once it has room."""
        choice = self._choice(flight, await self.destination(flight, "decode"), Stage.WHOLE)
        return choice.pool is not None or choice.may_have_room_later

    async def prefill(self, flight: Flight, cause: str, after_loss: tuple[str, bool] | None = None) -> None:
        """Begin with a prefill leg; without any prefill pool the decode pool does the whole."""
        try:
            await self.place(flight, "prefill", Stage.PREFILL, cause, after_loss)
        except Refused as refusal:
            if not await self._is_served_whole(flight):
                raise
            flight.record.note(f"prefilled where it is decoded: {refusal}")
            await self.place(flight, "decode", Stage.WHOLE, cause)

    async def place(
        self,
        flight: Flight,
        stage: StageName,
        work: Stage,
        cause: str,
        after_loss: tuple[str, bool] | None = None,
    ) -> None:
        """Put a flight on a worker of the first pool that can take it. Raises ``Refused``.

        ``after_loss`` names the pool that lost the request, and whether faster ones come before it. Media are
        encoded first, by one of the same pools, where one can.
        """
        machine = flight.machine
        if machine.plan.wants_encode and work is not Stage.ENCODE:
            flight.after_encode = (stage, work)
            try:
                await self.place(flight, stage, Stage.ENCODE, cause, after_loss)
                return
            except Refused as refusal:
                flight.record.note(f"media are encoded where the prompt is computed: {refusal}")
                machine.plan.encodes_itself = True
                machine.plan.encode_failure = machine.plan.encode_failure or str(refusal)
        where = await self.destination(flight, stage)
        if after_loss is not None:
            where = where.after_loss(*after_loss)
        refusals: list[Refusal] = []
        given_up: dict[str, PoolStanding] = {}
        while True:
            choice = self._choice(flight, where, work, given_up)
            if choice.pool is None:
                raise self._none_left(flight, choice, refusals)
            pool = self._pools.get(choice.pool)
            assert pool is not None, "a pool without a connection has no state, and is down"
            placed = await self._ask_pool(flight, pool, work)
            if machine.ended:
                return
            if isinstance(placed, Placed):
                break
            refusals.append(placed)
            given_up[choice.pool] = PoolStanding(placed.state)
        how = where.how(pool.name)
        flight.stage, flight.work = stage, work
        delivery = machine.delivery
        delivery.decision_reason = f"{how}-{placed.reason}" if placed.reason else how
        if work in (Stage.WHOLE, Stage.PREFILL):
            delivery.promised_tokens = placed.overlap_blocks * placed.block_size
        before = delivery.pool if work is Stage.DECODE or machine.plan.encoded else ""
        delivery.pool = ",".join(filter(None, [before, pool.name]))
        if work is not Stage.ENCODE:
            fresh = machine.plan.dispatches - machine.plan.encode_legs == 1
            flight.attribution.placed(where, pool.name, work, fresh, machine.migrations > 0)
            if not machine.migrations:
                self._metrics.targets.placed(where.selection, pool.name, flight.config.revision)
        flight.record.placements.append(
            PoolPlacement(
                stage,
                work.name.lower(),
                cause,
                how,
                where.selection,
                where.spill,
                choice,
                tuple(refusals),
                placed.dispatch_id,
                pool.name,
                placed.worker,
                placed.reason,
                placed.overlap_blocks,
                placed.block_size,
                placed.select_ms,
            )
        )
        self._metrics.dispatches.labels(pool.name, stage, how).inc()
        self._count_passed_over(choice)

    # -- where to --------------------------------------------------------------------------------------------------

    async def destination(self, flight: Flight, stage: StageName) -> Destination:
        """Return where a request may go, asking pools what they have cached if the document wants to know."""
        found = flight.destinations.get(stage)
        if found is not None:
            return found
        config = flight.config
        grid = config.grid.stages[stage]
        cached: Mapping[str, int] = {}
        if config.document.isl_basis == "uncached" and any(axis.name == "isl" for axis in grid.axes):
            cached = await self._cached_tokens(flight, stage)
        asked = GridRequest(flight.record.isl, flight.hints, flight.expected, cached)
        draw = stable_u64(flight.record.request_id) / 2**64
        found = destination(grid, config.loop, asked, draw)
        if not config.document.adapt and found.spill is not None:
            found = replace(found, spill=None)
        flight.destinations[stage] = found
        return found

    def may_go(self, flight: Flight) -> bool:
        """Return whether some pool may take a new request, or all are known to be unable to."""
        stages: tuple[StageName, ...] = (flight.admitted_by,)
        work = Stage.DECODE if flight.admitted_by == "decode" else Stage.WHOLE
        if flight.machine.request.carrier is not None:
            stages = forwarding_stages(flight)
        known = [flight.destinations[stage] for stage in stages if stage in flight.destinations]
        choices = [self._choice(flight, where, work) for where in known]
        return any(each.pool is not None for each in choices) or not any(each.may_have_room_later for each in choices)

    def _choice(
        self, flight: Flight, where: Destination, work: Stage, given_up: Mapping[str, PoolStanding] | None = None
    ) -> FallbackChoice:
        now_ms = self._clock.monotonic_ms()
        states: dict[str, PoolStanding] = {}
        only = flight.machine.request.only_worker
        for name in where.pools:
            pool = self._pools.get(name)
            if pool is not None and name not in flight.failed and (not only or name == only):
                states[name] = pool.state(flight.record.model, work, now_ms)
        return where.choose({**states, **(given_up or {})})

    def _none_left(self, flight: Flight, choice: FallbackChoice, refusals: list[Refusal]) -> Refused:
        detail = ", ".join(f"{fallen.pool} is {fallen.state.value}" for fallen in choice.passed_over)
        if refusals:
            detail += f" ({'; '.join(refusal.message for refusal in refusals)})"
        message = f"choosing a pool for model {flight.record.model!r}: {detail}"
        if flight.attempts <= 1:
            self._count_passed_over(choice)  # once, however often it is tried again
        if not choice.may_have_room_later:
            return Refused(503, "no_worker", message)
        waits = [
            pool.status.retry_after_s or RETRY_AFTER_DEFAULT_S
            for fallen in choice.passed_over
            if (pool := self._pools.get(fallen.pool)) is not None and pool.status is not None
        ]
        return Refused(429, "busy", message, min(waits, default=RETRY_AFTER_DEFAULT_S))

    def _count_passed_over(self, choice: FallbackChoice) -> None:
        for fallen in choice.passed_over:
            self._metrics.passed_over.labels(fallen.pool, fallen.state.value).inc()

    async def _cached_tokens(self, flight: Flight, stage: StageName) -> dict[str, int]:
        """Ask every pool of a stage what it has cached of the prompt; a pool that does not answer has nothing."""
        asked: list[tuple[str, PoolConnection]] = []
        for name in [pool.name for pool in flight.config.document.stages[stage].pools]:
            pool = self._pools.get(name)
            if pool is not None and model_status(pool.status, flight.record.model) is not None:
                asked.append((name, pool))
        timeout_s = self._timings.probe_timeout_ms / 1000

        async def overlap(pool: PoolConnection) -> int:
            path = self._path(flight, pool)
            if not path or flight.machine.request.by_text:
                return 0  # hashes of text are for a router's own index
            message = Probe(pool.next_ask(), flight.record.model, WORK_OF[stage], flight.record.isl, path)
            try:
                answer = await pool.probe(message, timeout_s)
            except PoolLost as lost:
                flight.record.note(f"what is cached is not known: {lost}")
                return 0
            return answer.overlap_blocks * answer.block_size

        overlaps = await asyncio.gather(*(overlap(pool) for _, pool in asked))
        return {name: tokens for (name, _), tokens in zip(asked, overlaps, strict=True)}

    def _path(self, flight: Flight, pool: PoolConnection) -> bytes:
        """Return the packed sequence hashes of the prompt in a pool's blocks; empty when it hashes otherwise."""
        served = model_status(pool.status, flight.record.model)
        if served is None or served.hash_spec != HASH_SPEC or served.block_size < 1:
            return b""
        key = (served.hash_spec, served.block_size)
        path = flight.paths.get(key)
        if path is None:
            hashes = prompt_path(flight.machine.request, served.block_size, self._paths)
            path = flight.paths[key] = pack_hashes(hashes[:BLOCKS_PER_EVENT_MAX])
        return path

    # -- to a worker -----------------------------------------------------------------------------------------------

    async def _ask_pool(self, flight: Flight, pool: PoolConnection, work: Stage) -> Placed | Refusal:
        """Have a pool reserve a worker, reach it, send the request; or return why not."""
        ticket, steps = pool.breaker.admit(self._clock.monotonic_ms())
        self._tracker.note_breaker(pool, steps)
        if ticket is None:
            return Refusal(pool.name, PoolStanding.BREAKER_OPEN.value, "its circuit breaker is open")
        carrier = flight.machine.request.carrier
        if carrier is not None:
            return self._forward_admitted(flight, carrier, pool, work, ticket)
        try:
            placed = await self._ask_admitted(flight, pool, work, ticket)
        except BaseException:
            self._tracker.note_breaker(pool, pool.breaker.abandoned(ticket, self._clock.monotonic_ms()))
            raise
        if isinstance(placed, Refusal):
            result = pool.breaker.failed if placed.blames_pool else pool.breaker.abandoned
            self._tracker.note_breaker(pool, result(ticket, self._clock.monotonic_ms()))
        return placed

    def _forward_admitted(
        self, flight: Flight, carrier: Carrier, pool: PoolConnection, work: Stage, ticket: Ticket
    ) -> Placed:
        """Have a request carried to a pool's router, which chooses the server."""
        asked = pool.note_sent(flight.record.model, work)
        router = WorkerKey(WorkerId(pool.name))
        dispatch = self._tracker.carry(flight, carrier, router, pool.url, Stage.WHOLE, 0, pool.name)
        flight.legs[dispatch.id] = ForwardedLeg(pool, asked, ticket)
        return Placed(dispatch.id, "")

    async def _ask_admitted(
        self, flight: Flight, pool: PoolConnection, work: Stage, ticket: Ticket
    ) -> Placed | Refusal:
        machine = flight.machine
        request = machine.request
        for _ in range(WORKERS_TRIED_PER_POOL_MAX):
            trace = request.trace
            asking = None if trace is None else trace.begin("select", SpanKind.CLIENT)
            context = None if trace is None or asking is None else trace.context(asking)
            select = self._question(flight, pool, work, context)
            asked_ms = self._clock.monotonic_ms()
            asked = pool.note_asked(request.model, work)
            try:
                answer = await pool.select(select, self._timings.select_timeout_ms / 1000)
                if trace is not None and asking is not None:
                    _tell_answer(trace, asking, pool.name, answer)
            except PoolLost as lost:
                if trace is not None and asking is not None:
                    asking.end(trace.now_ms(), "pool lost")
                return Refusal(pool.name, PoolStanding.DOWN.value, str(lost), blames_pool=True)
            select_ms = self._clock.monotonic_ms() - asked_ms
            self._metrics.select_seconds.observe(select_ms / 1000)
            if isinstance(answer, SelectRefused):
                if answer.code in NOBODY_LEFT and self._full_in(flight, pool):
                    return Refusal(pool.name, PoolStanding.SATURATED.value, answer.message)
                if answer.code is SelectRefusal.BUSY:
                    pool.note_full(request.model, work, asked)
                elif asked.counted_on:
                    pool.note_freed(request.model, work)  # it is not for this request, but there
                not_ready = answer.code is SelectRefusal.NOT_READY
                return Refusal(pool.name, STATE_OF[answer.code].value, answer.message, not_ready)
            reservation = Reservation(select.request_id, answer.worker)
            try:
                link = await self._links.up(answer.request_endpoint, self._timings.connect_timeout_ms / 1000)
            except BaseException:
                self._tracker.give_back(pool, reservation, request.model, work)
                raise
            if machine.ended:
                self._tracker.give_back(pool, reservation, request.model, work)
                return Refusal(pool.name, PoolStanding.SATURATED.value, "the client left")
            if link is not None:
                worker = WorkerKey(WorkerId(answer.worker.worker_id), answer.worker.dp_rank)
                overlap_tokens = answer.overlap_blocks * answer.block_size
                dispatch = self._tracker.send(flight, link, worker, work, overlap_tokens, pool=pool.name)
                if dispatch is not None:
                    now_ms = self._clock.monotonic_ms()
                    flight.legs[dispatch.id] = ReservedLeg(pool, reservation, ticket, answer.lease_ms, now_ms)
                    return Placed(
                        dispatch.id, str(worker), answer.reason, answer.overlap_blocks, answer.block_size, select_ms
                    )
            pool.release(reservation)
            flight.excluded.setdefault(pool.name, []).append(answer.worker)
            flight.record.note(f"worker {answer.worker.worker_id} of {pool.name} could not be reached")
        return Refusal(pool.name, PoolStanding.DOWN.value, "no worker that it chose could be reached", blames_pool=True)

    def _question(self, flight: Flight, pool: PoolConnection, work: Stage, trace: TraceContext | None) -> Select:
        machine = flight.machine
        request = machine.request
        return Select(
            pool.next_ask(),
            machine.plan.next_dispatch_id,
            request.model,
            work,
            len(request.token_ids) // 4 + machine.delivery.tokens,
            self._path(flight, pool),
            self._excluded(flight, pool),
            request.priority,
            media_hashes=pack_hashes(media_hashes(request)),
            media_kinds=() if work is Stage.DECODE else media_kinds(request),
            trace=trace,
        )

    def _excluded(self, flight: Flight, pool: PoolConnection) -> tuple[WorkerRank, ...]:
        failed, unable = flight.excluded.get(pool.name, ()), flight.unable.get(pool.name, ())
        excluded = (*self._full_in(flight, pool), *failed, *unable)
        return tuple(dict.fromkeys(excluded))[-WORKERS_EXCLUDED_MAX:]

    def _full_in(self, flight: Flight, pool: PoolConnection) -> list[WorkerRank]:
        """Return the workers of a pool that have no room for the moment, and could do what a flight asks for."""
        full = self._tracker.full_workers.at(self._clock.monotonic_ms())
        unable = flight.unable.get(pool.name, ())
        return [worker for name, worker in full if name == pool.name and worker not in unable]


def forwarding_stages(flight: Flight) -> tuple[StageName, ...]:
    """Return the stages whose pools a request may be forwarded to, in order."""
    return ("aggregated",) if flight.config.document.mode == "aggregated" else ("prefill", "decode")


def _tell_answer(trace: TraceRecord, span: SpanRecord, pool: str, answer: Selected | SelectRefused) -> None:
    span.attributes["poolgrid.pool"] = pool
    if isinstance(answer, Selected):
        span.attributes |= {
            "poolgrid.worker": answer.worker.worker_id,
            "poolgrid.decision.reason": answer.reason,
            "poolgrid.overlap_blocks": answer.overlap_blocks,
            "poolgrid.block_size": answer.block_size,
        }
    span.end(trace.now_ms(), answer.code.value if isinstance(answer, SelectRefused) else "")


NOBODY_LEFT = (SelectRefusal.NO_WORKER, SelectRefusal.DRAINING)
"""Refusals that may be due to the workers that were excluded."""

STATE_OF = {
    SelectRefusal.BUSY: PoolStanding.SATURATED,
    SelectRefusal.DRAINING: PoolStanding.DRAINING,
    SelectRefusal.NO_WORKER: PoolStanding.DOWN,
    SelectRefusal.NOT_READY: PoolStanding.DOWN,
    SelectRefusal.POLICY_FAILED: PoolStanding.DOWN,
}
"""What a refusal means for the pool, for this request."""
