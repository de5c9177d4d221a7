"""The worker process: takes requests from routers, drives one engine, tells the pool what happens.

Each of the engine's ranks has an event stream of its own; they share the request plane and a life.

Rules:

1. A request belongs to the peer (router connection) that sent it; only that peer may cancel it. The requests of a peer
   that is gone (``poolgrid.server.workers.peers``) are cancelled.
2. Per engine step: one frame to each peer that gets tokens, one batch to each rank's event stream when there is
   something to say. Never one per token.
3. Draining (``poolgrid.server.workers.endings``): ``WorkerDraining`` goes out, new requests are refused as
   ``draining``, running ones finish. What is left in the end is refused as ``draining``, so that routers continue it
   elsewhere. It begins when the process is to end, or by order; then the worker stays, out of use, until its process is
   to end.
4. The role says which stages are taken. A prefill leg that ended with ``prefilled`` belongs to its peer until its KV is
   taken, cancelled or expired; a drain waits for it. A new request with its id takes its place.
5. A leg that needs something of another worker first has it fetched (``poolgrid.server.workers.transfers``); until then
   the engine knows nothing of it.
6. While the engine is not well new requests are refused as ``broken``; it may recover.
7. A worker joins the pool once it knows what its engine held before; it joins with all of that, as one statement.
8. While it is silent the worker is not in the pool: it leaves as soon as the engine has given its requests up, and
   comes back in another life, with all that its cache holds, when the engine is well.

What became of legs here whose traces are kept: a record for each, from its acceptance to its last delta.

The engine is told of the leg's own span, so that what it traces itself stands below it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from poolgrid.kernel.requests.trace_record import SpanRecord, TraceRecord
from poolgrid.kernel.wire import codec
from poolgrid.kernel.wire.card import WorkerCard
from poolgrid.kernel.wire.errors import DecodeError
from poolgrid.kernel.wire.events import AnyEvent, RequestFinished, SnapshotEnded, TurnBegan, TurnEnded, WorkerDraining
from poolgrid.kernel.wire.hashing import TOKEN_BYTES, unpack_hashes
from poolgrid.kernel.wire.identifiers import STAGE_WORD, Role, Stage
from poolgrid.kernel.wire.limits import TEXT_CHARS_MAX
from poolgrid.kernel.wire.requests import (
    Cancel,
    FetchKv,
    FinishReason,
    Forwarded,
    Generate,
    Ping,
    Pong,
    RefusalKind,
    Routing,
    TokenDelta,
)
from poolgrid.kernel.wire.requests import Drain as DrainOrder
from poolgrid.kernel.wire.tasks import TASK_ROLES
from poolgrid.kernel.worker_protocol.engine import Engine, EngineReport, ForwardBooks, UntilKnown
from poolgrid.kernel.worker_protocol.push_stream import TokenCoalescer
from poolgrid.kernel.worker_protocol.refusal import (
    BrokenError,
    BusyError,
    CrowdedError,
    DrainingError,
    RefusedError,
    UnknownModelError,
)
from poolgrid.server.process.clock import Clock
from poolgrid.server.process.log_lines import Complaints, shown_peer
from poolgrid.server.process.tasks import owned
from poolgrid.server.process.tracing.tracing import Tracing
from poolgrid.server.workers.adapters.sockets import RequestSocket
from poolgrid.server.workers.booked_prefill import BookedPrefill
from poolgrid.server.workers.endings import Ending, Endings, WorkerDrain, cancelled_delta, refused_delta
from poolgrid.server.workers.metrics import WorkerMetrics
from poolgrid.server.workers.peers import Peers
from poolgrid.server.workers.publisher import EventPublisher, Membership
from poolgrid.server.workers.transfers import EmbeddingExchange, KvExchange, Transfers

WORK = "work"
"""Under this name a record has the span of what the engine is at."""


class LegTraces:
    """The records of one worker."""

    def __init__(self, tracing: Tracing, worker_id: str, role: str) -> None:
        self.records: dict[str, TraceRecord] = {}
        """By request id; of most workers, at most times, none."""
        self._tracing = tracing
        self._who = {"poolgrid.worker": worker_id, "poolgrid.role": role}

    def begin(self, request: Generate) -> tuple[Generate, bool]:
        """Begin the record of an accepted leg, if it is kept; return the leg as the engine is told of it, and whether
        there is a record."""
        word = STAGE_WORD[request.stage]
        record = self._tracing.begin_work(f"worker {word}", request.trace)
        if record is None:
            return request, False
        routing = request.routing
        record.root.attributes |= {
            **self._who,
            "poolgrid.stage": word,
            "poolgrid.dispatch_id": request.request_id,
            "poolgrid.dp_rank": routing.dp_rank,
            "poolgrid.overlap_tokens": routing.overlap_tokens,
            "gen_ai.usage.input_tokens": len(request.token_ids) // 4,
        }
        self.records[request.request_id] = record
        record.open[WORK] = record.begin("prefill" if request.stage is not Stage.DECODE else "decode")
        return msgspec.structs.replace(request, trace=record.context(record.root)), True

    def fetching(self, request_id: str) -> None:
        """Take note that a leg's KV or embeddings are fetched before the engine gets it."""
        record = self.records.get(request_id)
        if record is not None:
            work = record.open.pop(WORK)
            work.name = "transfer"
            record.open[WORK] = work

    def follow(self, report: EngineReport) -> None:
        """Take note of what an engine step made visible; only asked while there are records."""
        for arrival in report.arrivals:
            record = self.records.get(arrival.request_id)
            if record is not None:
                transfer = self._next(record, "decode")
                transfer.attributes |= {
                    "poolgrid.kv.moved_bytes": arrival.moved_bytes,
                    "poolgrid.kv.present_blocks": arrival.present_blocks,
                }
        for delta in report.deltas:
            record = self.records.get(delta.request_id)
            if record is None:
                continue
            root = record.root
            if delta.cached_tokens is not None:
                root.attributes["gen_ai.usage.cache_read.input_tokens"] = delta.cached_tokens
            if delta.token_ids:
                tokens = root.attributes.get("gen_ai.usage.output_tokens")
                if tokens is None:
                    root.event("first output", record.now_ms())
                    if record.open[WORK].name != "decode" and delta.finish_reason is None:
                        self._next(record, "decode")
                before = tokens if isinstance(tokens, int) else 0
                root.attributes["gen_ai.usage.output_tokens"] = before + len(delta.token_ids) // 4
            if delta.finish_reason is not None:
                root.attributes["poolgrid.finish_reason"] = delta.finish_reason.value
                error = delta.refusal.value if delta.refusal is not None else "error"
                self.end(delta.request_id, error if delta.finish_reason is FinishReason.ERROR else "")

    def end(self, request_id: str, error: str = "") -> None:
        record = self.records.pop(request_id, None)
        if record is not None:
            self._tracing.end(record, error)

    def _next(self, record: TraceRecord, name: str) -> SpanRecord:
        """End what the engine was at, and begin what it is at now."""
        work = record.open[WORK]
        work.end(record.now_ms())
        record.open[WORK] = record.begin(name)
        return work


log = logging.getLogger(__name__)

FINISH_REASONS = frozenset(FinishReason)
"""Labels of metrics: what a router reports of a forwarded request may be anything."""

PROMPT_STAGES = (Stage.WHOLE, Stage.PREFILL)
"""Stages in which a prompt is computed."""

STAGES = {
    Role.AGGREGATED: frozenset({Stage.WHOLE, Stage.PREFILL, Stage.DECODE}),
    Role.PREFILL: frozenset({Stage.PREFILL}),
    # A prompt that is short or cached is better computed where it decodes.
    Role.DECODE: frozenset({Stage.DECODE, Stage.WHOLE}),
    Role.ENCODE: frozenset({Stage.ENCODE}),
    **{role: frozenset({stage}) for stage, role in TASK_ROLES.items()},
}
"""What each role takes."""


@dataclass(frozen=True, slots=True)
class ServiceLimits:
    """Times and bounds of the service."""

    peer_lease_ms: float = 10_000.0
    drain_timeout_ms: float = 30_000.0


class WorkerService:
    """One worker, all its ranks, at its request plane; made on a running event loop."""

    def __init__(
        self,
        worker_id: str,
        epoch: int,
        card: WorkerCard,
        engine: Engine,
        requests: RequestSocket,
        limits: ServiceLimits,
        clock: Clock,
        metrics: WorkerMetrics,
        kv: KvExchange | None = None,
        embeddings: EmbeddingExchange | None = None,
        tracing: Tracing | None = None,
        forward_books: ForwardBooks | None = None,
    ) -> None:
        """``forward_books`` is for engines whose servers get clients' requests from routers."""
        self._worker_id = worker_id
        self._membership = Membership(epoch)
        self.card = card
        """What the worker reports of itself now; adapters come and go."""
        self._engine = engine
        self._requests = requests
        self._limits = limits
        self._clock = clock
        self._complaints = Complaints(log, clock)
        self._metrics = metrics
        self._peers = Peers(worker_id, requests, limits.peer_lease_ms, clock, metrics, self._on_peer_gone, self._break)
        self._transfers = Transfers(
            kv,
            embeddings,
            metrics,
            self._on_fetch_ended,
            lambda request_id, reason: self._end_elsewhere(
                request_id, Ending(reason, FinishReason.ERROR, RefusalKind.BROKEN)
            ),
        )
        self._kept: set[str] = set()
        """Prefill legs that have had their last delta and whose KV is kept."""
        self._forward_books = forward_books
        self._forwards: set[str] = set()
        """Requests that routers sent straight to the engine's server."""
        self._turns: dict[int, list[AnyEvent]] = {}
        """Turns that began and are not published yet, by rank: they go with the engine's next step, which is soon."""
        self._endings = Endings()
        self._joined = TokenCoalescer()
        self._traces = None if tracing is None else LegTraces(tracing, worker_id, card.role.name.lower())
        self._books = [BookedPrefill() for _ in range(engine.dp_size)]
        self._fault: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Fails when a report cannot be delivered."""
        self._empty = asyncio.Event()
        self._empty.set()
        self._drain = WorkerDrain(
            worker_id, limits.drain_timeout_ms, self._peers.owners, self._empty, self._end_elsewhere, self._refuse_all
        )
        engine.observe_health(self._on_health)
        for dp_rank in range(engine.dp_size):
            metrics.observe_load(dp_rank, engine.load(dp_rank))

    # -- what others see -----------------------------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        return self._membership.is_registered and not self._drain.is_on and self.is_healthy

    @property
    def is_healthy(self) -> bool:
        return not self._engine.unhealthy_reason

    def describe(self) -> dict[str, object]:
        """Return the state for people and probes, as JSON values."""
        loads = [self._engine.load(dp_rank) for dp_rank in range(self._engine.dp_size)]
        unhealthy_reason = self._engine.unhealthy_reason
        state: dict[str, object] = {
            "status": "unhealthy"
            if unhealthy_reason
            else self._drain.word
            if self._drain.is_on
            else "ready"
            if self.is_ready
            else "registering",
            "worker_id": self._worker_id,
            "epoch": self._membership.epoch,
            "model": self.card.model,
            "role": self.card.role.name.lower(),
            "endpoint": self.card.endpoint_name,
            "request_endpoint": self.card.request_endpoint,
            "running_requests": sum(load.running_requests for load in loads),
            "waiting_requests": sum(load.waiting_requests for load in loads),
            "fetching_requests": len(self._transfers.fetching),
            "kept_transfers": len(self._kept),
            "active_blocks": sum(load.active_blocks for load in loads),
            "cached_blocks": sum(load.cached_blocks for load in loads),
            "total_blocks": sum(load.total_blocks for load in loads),
            "dp_size": len(loads),
        }
        wrong = {"reason": unhealthy_reason, "cache_events_fault": self.card.cache_events_fault}
        return state | {name: words for name, words in wrong.items() if words} | self._engine.describe()

    def blocks(self, dp_rank: int = 0) -> list[str]:
        """Return what a rank really holds, a line per block and tier, sorted, as the router lists its belief.

        Raises ``ValueError`` when there is no such rank.
        """
        if not 0 <= dp_rank < self._engine.dp_size:
            raise ValueError(f"dp_rank is {dp_rank}, this worker has ranks 0 to {self._engine.dp_size - 1}")
        return sorted(
            f"{sequence_hash:016x} {chain.tier.name.lower()}"
            for chain in self._engine.resident_blocks(dp_rank)
            for sequence_hash in unpack_hashes(chain.sequence_hashes)
        )

    def restate(self, dp_rank: int = 0) -> tuple[list[AnyEvent], list[AnyEvent]]:
        """Return what a restatement of a rank says before and after the requests."""
        after: list[AnyEvent] = [WorkerDraining()] if self._drain.is_on else []
        return [*self._engine.restate(dp_rank), SnapshotEnded()], [*after, self._engine.load(dp_rank)]

    # -- its life ------------------------------------------------------------------------------------------------------

    async def run(
        self, publishers: Sequence[EventPublisher], stop: asyncio.Event, until_known: UntilKnown | None = None
    ) -> None:
        """Serve until ``stop`` is set and the drain is over; raises what breaks the engine.

        ``publishers`` carry the events of the ranks, in their order; it joins the pool after ``until_known``.
        """

        async def leave() -> None:
            await self._drain.over()
            if not await self._membership.say_goodbye("drained"):
                log.warning("the consolidator did not acknowledge the end; the lease will expire")

        engine = owned(self._engine.run(_guarded(self._deliver, self._fault)), "engine")
        ends = (engine, self._fault)
        self._requests.start(self._on_frames)
        try:
            await _first(ends, self._membership.join(publishers, until_known, stop))
            self._on_health()
            await _first(ends, stop.wait())
            await self._give_up_if_broken(ends)
            self.drain()
            await _first(ends, leave())
            await self._give_up_if_broken(ends)
        finally:
            engine.cancel()
            self._drain.close()
            self._peers.close()

    async def _give_up_if_broken(self, ends: Sequence[asyncio.Future[None]]) -> None:
        """Tell everyone that the engine is broken, or its reports, and raise what broke them; else return."""
        broken = [each for each in ends if each.done()]
        if not broken:
            return
        error = broken[0].exception()
        reason = f"the engine of {self._worker_id} failed: {error!r}"[:TEXT_CHARS_MAX]
        log.error("%s", reason)
        self._refuse_all(reason, RefusalKind.BROKEN)
        await self._membership.say_goodbye(reason)
        raise RuntimeError(reason) from error

    def drain(self, timeout_ms: float | None = None) -> None:
        """Take nothing new; what is here after ``timeout_ms`` (by default the limits' time) continues elsewhere."""
        if self._drain.order(timeout_ms):
            self._metrics.draining.set(1)
            for publisher in self._membership.publishers:
                publisher.publish([WorkerDraining()])

    def _refuse_all(self, reason: str, kind: RefusalKind) -> None:
        """Tell every peer that its requests continue elsewhere, without the engine."""
        self._peers.refuse_all(reason, kind, self._kept | self._forwards)

    def _on_health(self) -> None:
        if self._engine.is_silent:
            if self._membership.is_away or not self._membership.publishers:
                return
            why = self._engine.unhealthy_reason
            reason = f"the engine of {self._worker_id} does not answer: {why}"[:TEXT_CHARS_MAX]
            log.error("leaving the pool until it is well again: %s", reason)
            ending = Ending(f"the engine of {self._worker_id} does not answer", FinishReason.ERROR, RefusalKind.BROKEN)
            for request_id in list(self._transfers.fetching):
                self._end_elsewhere(request_id, ending)
            self._turns.clear()
            self._membership.leave(reason)
        elif self._membership.is_away and not self._engine.unhealthy_reason and not self._drain.is_on:
            log.warning("the engine is well again: joining the pool with a new epoch")
            self._membership.rejoin()

    # -- from routers --------------------------------------------------------------------------------------------------

    def _on_frames(self, frames: list[bytes]) -> None:
        peer_id = frames[0]
        try:
            message = codec.to_worker.decode(frames[-1])
        except DecodeError as error:
            self._metrics.undecodable_frames.labels("requests").inc()
            self._complaints.about(f"{shown_peer(peer_id)} on the request plane", error)
            return
        self._peers.heard(peer_id)
        match message:
            case Generate():
                self._generate(peer_id, message)
            case Ping():
                self._peers.pinged(peer_id)
                pong = Pong(message.nonce, self._membership.epoch, self._drain.is_on)
                self._peers.send(peer_id, codec.from_worker.encode(pong))
            case Cancel():
                if message.answered:
                    self._membership.publishers[0].publish([TurnEnded(answer) for answer in message.answered])
                elif self._peers.owners.get(message.request_id) == peer_id:
                    self._end_here(message.request_id)
            case FetchKv():
                self._peers.send(peer_id, codec.from_worker.encode(self._transfers.offer(message.transfer_id)))
            case DrainOrder():
                self.drain(message.timeout_ms)
            case Forwarded():
                self._forwarded(peer_id, message)
            case _:
                self._transfers.release(message.transfer_id)

    def _generate(self, peer_id: bytes, request: Generate) -> None:
        traces, is_traced = self._traces, False
        try:
            self._check(peer_id, request)
            if traces is not None:
                request, is_traced = traces.begin(request)
            if not self._transfers.begin(request):
                self._engine.submit(request)
            elif traces is not None:
                traces.fetching(request.request_id)
        except RefusedError as refusal:
            if traces is not None and is_traced:
                traces.end(request.request_id, "invalid" if refusal.kind is None else refusal.kind.value)
            self._metrics.refusals.labels("final" if refusal.kind is None else refusal.kind.value).inc()
            delta = refused_delta(
                request.request_id,
                refusal.reason,
                refusal.kind,
                refusal.booked_tokens,
                refusal.retry_after_ms,
                refusal.unknown_model,
            )
            self._peers.send_tokens(peer_id, [delta])
            return
        except Exception as error:
            # The socket would drop the message, and its router would wait without end.
            if traces is not None and is_traced:
                traces.end(request.request_id, RefusalKind.BROKEN.value)
            self._peers.send_tokens(peer_id, [self._break(request.request_id, error)])
            return
        self._metrics.requests.inc()
        if request.turn is not None:
            began = TurnBegan(request.request_id, len(request.token_ids) // TOKEN_BYTES, request.turn)
            self._turns.setdefault(request.routing.dp_rank, []).append(began)
        self._joined.begin(request)
        if request.stage in PROMPT_STAGES:
            uncached = len(request.token_ids) // 4 - request.routing.overlap_tokens
            self._books[request.routing.dp_rank].accept(request.request_id, uncached)
        self._peers.add(peer_id, request.request_id)
        self._empty.clear()

    def _forwarded(self, peer_id: bytes, message: Forwarded) -> None:
        """Book requests that a router sent straight to the engine's server. They belong to it as others do: when it
        falls silent they are taken to be over."""
        books, owners = self._forward_books, self._peers.owners
        if books is None:
            return
        for began in message.began:
            if began.request_id in owners or began.dp_rank >= self._engine.dp_size:
                continue
            self._peers.add(peer_id, began.request_id)
            self._forwards.add(began.request_id)
            if began.turn is not None:
                turns = self._turns.setdefault(began.dp_rank, [])
                turns.append(TurnBegan(began.request_id, began.isl, began.turn))
            books.began(began)
            self._metrics.requests.inc()
        for request_id in message.computed:
            if request_id in self._forwards and owners.get(request_id) == peer_id:
                books.computed(request_id)
        for ended in message.ended:
            if ended.request_id in self._forwards and owners.get(ended.request_id) == peer_id:
                self._end_forward(ended.request_id, ended.reason, ended.cached_tokens)
        if owners:
            self._empty.clear()
        else:
            self._note_if_empty()

    def _end_forward(self, request_id: str, reason: str, cached_tokens: int | None) -> None:
        assert self._forward_books is not None, "it was booked"
        self._forward_books.ended(request_id, reason, cached_tokens)
        self._metrics.finished.labels(reason if reason in FINISH_REASONS else FinishReason.ERROR).inc()
        self._forget(request_id)

    def _check(self, peer_id: bytes, request: Generate) -> None:
        _check_stage(self._worker_id, self.card, request.stage)
        if self._drain.is_on:
            raise DrainingError(f"worker {self._worker_id} is draining and takes no new requests")
        if self._engine.unhealthy_reason:
            raise BrokenError(f"the engine of worker {self._worker_id} is not well")
        owners = self._peers.owners
        if request.request_id in self._kept and owners[request.request_id] == peer_id:
            # No router dispatches a leg again while its first result is of use.
            self._let_go(request.request_id)
        if request.request_id in owners:
            # Only a router's own second use is its fault. What has no owner is on its way out; what another peer
            # took may be a forged message, and a dispatch to another worker has another id.
            is_own = owners[request.request_id] == peer_id
            raise (RefusedError if is_own else BusyError)(
                f"request id {request.request_id!r} is already active on worker {self._worker_id}"
            )
        _check_routing(self._worker_id, self.card, request.routing)
        expected = request.routing.expected_prefill_tokens
        if expected is None or request.stage not in PROMPT_STAGES:
            return
        # What was chosen on a belief too far from the truth, where several routers choose.
        if self._peers.several_routers():
            _check_crowding(self._worker_id, self._books[request.routing.dp_rank], expected)

    def _on_peer_gone(self, request_id: str) -> bool:
        """Cancel a request that is not waited for; return whether its peer has not heard of an end yet."""
        if request_id in self._forwards:
            self._end_forward(request_id, FinishReason.CANCELLED, None)
            return False
        is_unheard = request_id not in self._kept
        self._end_here(request_id)
        return is_unheard

    def _end_here(self, request_id: str) -> None:
        if request_id in self._transfers.fetching:
            self._transfers.end(request_id, cancelled_delta(request_id), FinishReason.CANCELLED)
        else:
            self._stop(request_id)

    def _stop(self, request_id: str) -> None:
        if request_id in self._kept:
            self._let_go(request_id)
        else:
            self._engine.cancel(request_id)

    def _let_go(self, request_id: str) -> None:
        """Cancel a kept prefill leg; its last delta is out, so it is forgotten at once."""
        self._engine.cancel(request_id)
        self._forget(request_id)

    def _end_elsewhere(self, request_id: str, ending: Ending) -> None:
        if request_id in self._transfers.fetching:
            delta = refused_delta(request_id, ending.error, ending.kind)
            self._transfers.end(request_id, delta, ending.event_reason)
            return
        if request_id not in self._peers.owners:
            return  # it ended meanwhile: what was to be fetched for it may fail after it
        if request_id not in self._kept:
            self._endings[request_id] = ending
        self._stop(request_id)

    def _on_fetch_ended(self, request: Generate, delta: TokenDelta, event_reason: FinishReason) -> None:
        """Follow the end of a leg that the engine does not know."""
        request_id = request.request_id
        assert delta.finish_reason is not None
        self._metrics.finished.labels(delta.finish_reason).inc()
        if self._traces is not None:
            self._traces.end(request_id, event_reason.value)
        owner = self._peers.owners[request_id]
        self._forget(request_id)
        rank = request.routing.dp_rank
        turns = self._turns.pop(rank, [])
        self._membership.publishers[rank].publish([*turns, RequestFinished(request_id, event_reason)])
        if owner is not None:
            self._peers.send_tokens(owner, [delta])
        self._note_if_empty()

    # -- from the engine -----------------------------------------------------------------------------------------------

    def _deliver(self, report: EngineReport) -> None:
        self._peers.steps += report.steps
        owners = self._peers.owners
        if self._endings:
            self._endings.rewrite(report)
        if self._traces is not None and self._traces.records:
            self._traces.follow(report)
        # Before the deltas: what is kept again in this report is not what was released.
        for request_id in report.released:
            if request_id in self._kept:
                self._forget(request_id)
        for arrival in report.arrivals:
            self._transfers.release_source(arrival.request_id)
        by_peer: dict[bytes, list[TokenDelta]] = {}
        ended: list[str] = []
        for delta in report.deltas:
            request_id = delta.request_id
            owner = owners.get(request_id)
            try:
                if delta.cached_tokens:
                    self._metrics.cached_tokens.inc(delta.cached_tokens)
                if owner is not None:
                    deltas = by_peer.get(owner)
                    if deltas is None:
                        deltas = by_peer[owner] = []
                    self._joined.add(delta, deltas)
                if delta.finish_reason is not None:
                    self._metrics.finished.labels(delta.finish_reason).inc()
                    kept = delta.finish_reason is FinishReason.PREFILLED or (
                        delta.finish_reason is FinishReason.ENCODED and report.keeps_encoded
                    )
                    if kept and owner is not None:
                        self._kept.add(request_id)
                    else:
                        ended.append(request_id)
                        self._transfers.release_source(request_id)
            except Exception as error:
                if owner is not None:
                    by_peer.setdefault(owner, []).append(self._break(request_id, error))
        for peer_id, deltas in by_peer.items():
            if not deltas:
                continue  # all of it is kept back
            self._peers.send_tokens(peer_id, deltas)
        for request_id in ended:
            self._forget(request_id)  # not before: until its end is sent it is among those that a fault gives up
        for dp_rank, rank in report.ranks.items():
            self._books[dp_rank].observe(rank.events)
            turns = self._turns.pop(dp_rank, None) if self._turns else None
            events = [*turns, *rank.events] if turns else rank.events
            self._membership.publish(dp_rank, events, rank.load)
            if rank.events:
                self._metrics.observe_events(rank.events)
            self._metrics.observe_load(dp_rank, rank.load)
        self._metrics.observe_report(report)
        if ended or report.released:
            # Last, so that a drain finds everything published.
            self._note_if_empty()

    def _break(self, request_id: str, error: Exception) -> TokenDelta:
        """End one request whose output could not be handled; return its last delta."""
        log.error("request %s: handling its output failed: this is a bug", request_id, exc_info=error)
        self._metrics.request_faults.inc()
        if request_id in self._peers.owners:
            self._engine.cancel(request_id)
            self._forget(request_id)
        reason = f"handling the output of {self._worker_id} failed: {error!r}"
        return refused_delta(request_id, reason, RefusalKind.BROKEN)

    def _note_if_empty(self) -> None:
        if not self._peers.owners:
            self._empty.set()

    def _forget(self, request_id: str) -> None:
        self._peers.forget(request_id)
        for books in self._books:
            books.remove(request_id)
        self._joined.forget(request_id)
        if self._traces is not None:
            self._traces.end(request_id, "cancelled")  # unless its last delta has ended it
        self._endings.pop(request_id, None)
        self._kept.discard(request_id)
        self._forwards.discard(request_id)


def _check_crowding(worker_id: str, books: BookedPrefill, expected: int) -> None:
    booked = books.crowding(expected)
    if booked is not None:
        raise CrowdedError(
            f"worker {worker_id} has {booked} prompt tokens to compute, the router expected {expected}", booked
        )


def _check_stage(worker_id: str, card: WorkerCard, stage: Stage) -> None:
    if stage not in STAGES[card.role] or (card.decodes_only and stage is not Stage.DECODE):
        role = card.role.name.lower()
        raise BrokenError(f"worker {worker_id} has the role {role}, it does not take the stage {STAGE_WORD[stage]}")


def _check_routing(worker_id: str, card: WorkerCard, routing: Routing) -> None:
    """Refuse ranks and adapters that this worker does not have."""
    if routing.dp_rank >= card.dp_size:
        raise RefusedError(f"dp_rank is {routing.dp_rank}, worker {worker_id} has ranks 0 to {card.dp_size - 1}")
    if routing.lora_name and routing.lora_name not in card.loras:
        raise UnknownModelError(
            f"lora_name is {routing.lora_name!r}, worker {worker_id} serves {', '.join(card.loras[:20]) or 'none'}"
        )


def _guarded(deliver: Callable[[EngineReport], None], fault: asyncio.Future[None]) -> Callable[[EngineReport], None]:
    """Return ``deliver`` for an engine, whose loop callbacks would lose what it raises: ``fault`` fails with it."""

    def guarded(report: EngineReport) -> None:
        try:
            deliver(report)
        except Exception as error:
            if not fault.done():
                fault.set_exception(error)

    return guarded


async def _first(ends: Sequence[asyncio.Future[None]], other: Coroutine[object, object, object]) -> None:
    """Wait until any is done; what is left of ``other`` is cancelled, what it raised is raised."""
    waiting = owned(other, "what the engine runs next to")
    try:
        every: set[asyncio.Future[Any]] = {*ends, waiting}
        await asyncio.wait(every, return_when=asyncio.FIRST_COMPLETED)
        if waiting.done():
            waiting.result()
    finally:
        waiting.cancel()
