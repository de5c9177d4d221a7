"""The worker process: takes requests from routers, drives one engine, tells the pool what happens.

Each of the engine's ranks has an event stream of its own; they share the request plane and a life.

Rules:

1. A request belongs to the peer (router connection) that sent it; only that peer may cancel it. Peers are known while
   they have requests here.
2. A peer that is silent for its lease, cannot be reached or stops reading has its requests cancelled: nobody would
   take the tokens. A peer that stood still and speaks again is told then, so that it continues them elsewhere.
3. Per engine step: one frame to each peer that gets tokens, one batch to each rank's event stream when there is
   something to say. Never one per token.
4. Draining: ``WorkerDraining`` goes out, new requests are refused as ``draining``, running ones finish. What is left at
   the drain timeout ends with the refusal ``draining``, so that routers continue it elsewhere.
5. The role says which stages are taken. A prefill leg that ended with ``prefilled`` belongs to its peer until its KV is
   taken, cancelled or expired; a drain waits for it. A new request with its id takes its place.
6. A decode leg first has its KV asked for (``KvFetcher``); until the answer is here the engine knows nothing of it. The
   source is let go of when the KV has arrived or the leg ends, whatever ended it.
7. While the engine is not well new requests are refused as ``broken``; it may recover.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field

import msgspec

from runtime.clock import Clock
from runtime.complaints import Complaints, shown_peer
from runtime.tasks import owned
from wire import codec
from wire.card import WorkerCard
from wire.errors import DecodeError
from wire.events import AnyEvent, RequestFinished, SnapshotEnded, WorkerDraining
from wire.hashing import unpack_hashes
from wire.identifiers import Role, Stage
from wire.limits import TEXT_CHARS_MAX
from wire.requests import (
    Cancel,
    FetchKv,
    FinishReason,
    Generate,
    KvOffered,
    Ping,
    Pong,
    RefusalKind,
    ReleaseKv,
    TokenBatch,
    TokenDelta,
)
from workers.adapters.sockets import RequestSocket
from workers.core.booked_prefill import BookedPrefill
from workers.core.joined_output import JoinedOutput
from workers.core.refusal import BrokenError, BusyError, CrowdedError, DrainingError, RefusedError, UnableError
from workers.embedding_fetcher import EmbeddingFetcher
from workers.engines.engine import EmbeddingTaker, Engine, EngineReport, KvHandover
from workers.kv_fetcher import KvFetcher
from workers.metrics import WorkerMetrics
from workers.publisher import EventPublisher
from workers.tensor_transfer.port import Tensor

log = logging.getLogger(__name__)

GOODBYE_TIMEOUT_S = 2.0
"""How long the end waits for the consolidator's last acknowledgements; without them the lease ends the membership."""

HAND_OVER_TIMEOUT_S = 1.0
"""How long the engine may take to end cancelled requests at the drain timeout."""

LEASE_CHECKS = 4
"""Looks at the peers' leases per lease."""


CANCELLED = FinishReason.CANCELLED

PROMPT_STAGES = (Stage.WHOLE, Stage.PREFILL)
"""Stages in which a prompt is computed."""

ROUTERS_MAX = 1024
"""Routers that are counted; beyond it they are served, and not known to be several, which they are anyway."""

ABANDONED_MAX = 65_536
"""Requests of silent peers that are remembered until the peer speaks again, the oldest forgotten first: what a hundred
routers may have here together. A peer whose connection broke never asks."""

STAGES = {
    Role.AGGREGATED: frozenset({Stage.WHOLE, Stage.PREFILL, Stage.DECODE}),
    Role.PREFILL: frozenset({Stage.PREFILL}),
    # A prompt that is short or cached is better computed where it decodes.
    Role.DECODE: frozenset({Stage.DECODE, Stage.WHOLE}),
    Role.ENCODE: frozenset({Stage.ENCODE}),
}
"""What each role takes."""


@dataclass(frozen=True, slots=True)
class Ending:
    """What the engine's ``cancelled`` means when it was not the peer who asked for it."""

    error: str
    event_reason: FinishReason
    kind: RefusalKind


@dataclass(frozen=True, slots=True)
class KvExchange:
    """The service's part in handing KV over, for an engine that needs one."""

    handover: KvHandover
    fetcher: KvFetcher


@dataclass(frozen=True, slots=True)
class EmbeddingExchange:
    """The service's part in taking embeddings, for an engine that works behind encode workers."""

    taker: EmbeddingTaker
    fetcher: EmbeddingFetcher


@dataclass(slots=True)
class Peer:
    """A router connection with requests here."""

    heard_ms: float
    requests: dict[str, None] = field(default_factory=dict)
    """Ids in order of arrival."""


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
    ) -> None:
        self._worker_id = worker_id
        self._epoch = epoch
        self._card = card
        self._engine = engine
        self._requests = requests
        self._limits = limits
        self._clock = clock
        self._complaints = Complaints(log, clock)
        self._metrics = metrics
        self._publishers: Sequence[EventPublisher] = ()
        self._peers: dict[bytes, Peer] = {}
        self._abandoned: dict[str, bytes] = {}
        """Requests that were cancelled because their peer was silent, and the peer; oldest first."""
        self._silent: dict[bytes, dict[str, None]] = {}
        """The same by peer."""
        self._owners: dict[str, bytes | None] = {}
        """Whom each request that the engine has belongs to; ``None`` when nobody takes its tokens any more."""
        self._kv = kv
        self._fetching: dict[str, Generate] = {}
        """Decode legs whose KV was asked for, and legs whose embeddings were, not answered yet."""
        self._kept: set[str] = set()
        """Prefill legs that have had their last delta and whose KV is kept."""
        self._endings: dict[str, Ending] = {}
        """Requests that are cancelled so that another worker continues them."""
        if kv is not None:
            kv.fetcher.start(self._on_offered, self._on_fetch_failed)
        self._embeddings = embeddings
        if embeddings is not None:
            embeddings.fetcher.start(self._on_embeddings, self._on_fetch_failed)
        self._joined = JoinedOutput()
        self._books = [BookedPrefill() for _ in range(engine.dp_size)]
        self._routers: dict[bytes, float] = {}
        """When each router was last heard of; a lone one knows what is here."""
        self._steps = 0
        self._draining = False
        self._empty = asyncio.Event()
        self._empty.set()
        self._lease_timer: asyncio.TimerHandle | None = None
        for dp_rank in range(engine.dp_size):
            metrics.observe_load(dp_rank, engine.load(dp_rank))

    # -- what others see -----------------------------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        """Whether requests may be sent here."""
        registered = bool(self._publishers) and all(publisher.is_registered for publisher in self._publishers)
        return registered and not self._draining and self.is_healthy

    @property
    def is_healthy(self) -> bool:
        """Whether the engine does its work."""
        return not self._engine.ailment

    def describe(self) -> dict[str, object]:
        """Return the state for people and probes, as JSON values."""
        loads = [self._engine.load(dp_rank) for dp_rank in range(self._engine.dp_size)]
        ailment = self._engine.ailment
        state: dict[str, object] = {
            "status": "unhealthy"
            if ailment
            else "draining"
            if self._draining
            else "ready"
            if self.is_ready
            else "registering",
            "worker_id": self._worker_id,
            "epoch": self._epoch,
            "model": self._card.model,
            "role": self._card.role.name.lower(),
            "request_endpoint": self._card.request_endpoint,
            "running_requests": sum(load.running_requests for load in loads),
            "waiting_requests": sum(load.waiting_requests for load in loads),
            "fetching_requests": len(self._fetching),
            "kept_transfers": len(self._kept),
            "active_blocks": sum(load.active_blocks for load in loads),
            "cached_blocks": sum(load.cached_blocks for load in loads),
            "total_blocks": sum(load.total_blocks for load in loads),
            "dp_size": len(loads),
        }
        if ailment:
            state["reason"] = ailment
        return state | self._engine.describe()

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
        after: list[AnyEvent] = [WorkerDraining()] if self._draining else []
        return [*self._engine.restate(dp_rank), SnapshotEnded()], [*after, self._engine.load(dp_rank)]

    # -- its life ------------------------------------------------------------------------------------------------------

    async def run(self, publishers: Sequence[EventPublisher], stop: asyncio.Event) -> None:
        """Serve until ``stop`` is set and the drain is over; raises what breaks the engine.

        ``publishers`` carry the events of the ranks, in their order.
        """
        self._publishers = publishers
        engine = owned(self._engine.run(self._deliver), "engine")
        self._requests.start(self._on_frames)
        for publisher in publishers:
            publisher.start()
        try:
            await _first(engine, stop.wait())
            if engine.done():
                await self._give_up(engine)
            await _first(engine, self._drain())
            if engine.done():
                await self._give_up(engine)
        finally:
            engine.cancel()
            if self._lease_timer is not None:
                self._lease_timer.cancel()

    async def _give_up(self, engine: asyncio.Task[None]) -> None:
        """Tell everyone that the engine is broken, and raise what broke it."""
        error = engine.exception()
        reason = f"the engine of {self._worker_id} failed: {error!r}"[:TEXT_CHARS_MAX]
        log.error("%s", reason)
        for request_id, owner in self._owners.items():
            if owner is not None and request_id not in self._kept:
                self._answer(owner, _ended(request_id, reason, RefusalKind.BROKEN))
        await self._say_goodbye(reason)
        raise RuntimeError(reason) from error

    async def _drain(self) -> None:
        """Finish what is here, hand over what does not finish in time, leave the pool."""
        self._draining = True
        self._metrics.draining.set(1)
        log.info("draining: %d requests, at most %.0f ms", len(self._owners), self._limits.drain_timeout_ms)
        for publisher in self._publishers:
            publisher.publish([WorkerDraining()])
        if not await self._until_empty(self._limits.drain_timeout_ms / 1e3):
            log.warning("the drain timed out: handing over %d requests", len(self._owners))
            ending = Ending(
                f"worker {self._worker_id} ended before the request did", FinishReason.MIGRATED, RefusalKind.DRAINING
            )
            for request_id in list(self._owners):
                self._end_elsewhere(request_id, ending)
            await self._until_empty(HAND_OVER_TIMEOUT_S)
        if not await self._say_goodbye("drained"):
            log.warning("the consolidator did not acknowledge the end; the lease will tell it")

    async def _say_goodbye(self, reason: str) -> bool:
        """End every rank's stream; say whether all were acknowledged in time."""
        return all(await asyncio.gather(*(each.say_goodbye(reason, GOODBYE_TIMEOUT_S) for each in self._publishers)))

    async def _until_empty(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True

    # -- from routers --------------------------------------------------------------------------------------------------

    def _on_frames(self, frames: list[bytes]) -> None:
        peer_id = frames[0]
        try:
            message = codec.to_worker.decode(frames[-1])
        except DecodeError as error:
            self._metrics.undecodable_frames.labels("requests").inc()
            self._complaints.about(f"{shown_peer(peer_id)} on the request plane", error)
            return
        peer = self._peers.get(peer_id)
        if peer is not None:
            peer.heard_ms = self._clock.monotonic_ms()
        if self._silent and peer_id in self._silent:
            self._own_up(peer_id)
        if isinstance(message, Generate):
            self._generate(peer_id, message)
        elif isinstance(message, Ping):
            if peer_id in self._routers or len(self._routers) < ROUTERS_MAX:
                self._routers[peer_id] = self._clock.monotonic_ms()
            self._send(peer_id, codec.from_worker.encode(Pong(message.nonce, self._epoch, self._draining)))
        elif isinstance(message, Cancel):
            self._cancel(peer_id, message)
        elif isinstance(message, FetchKv):
            self._offer(peer_id, message)
        else:
            self._release(message)

    def _generate(self, peer_id: bytes, request: Generate) -> None:
        try:
            self._check(peer_id, request)
            kv = self._kv
            if kv is not None and request.stage is Stage.DECODE:
                kv.fetcher.begin(request.request_id, kv.handover.wanted(request))
                self._fetching[request.request_id] = request
            elif self._embeddings is not None and request.disaggregated_params is not None:
                self._embeddings.fetcher.begin(request)
                self._fetching[request.request_id] = request
            else:
                self._engine.submit(request)
        except RefusedError as refusal:
            self._metrics.refusals.labels("final" if refusal.kind is None else refusal.kind.value).inc()
            self._answer(
                peer_id,
                _ended(
                    request.request_id,
                    refusal.reason,
                    refusal.kind,
                    refusal.booked_tokens if isinstance(refusal, CrowdedError) else None,
                ),
            )
            return
        self._metrics.requests.inc()
        self._joined.begin(request)
        if request.stage in PROMPT_STAGES:
            uncached = len(request.token_ids) // 4 - request.routing.overlap_tokens
            self._books[request.routing.dp_rank].accept(request.request_id, uncached)
        peer = self._peers.get(peer_id)
        if peer is None:
            peer = self._peers[peer_id] = Peer(self._clock.monotonic_ms())
            self._watch_leases()
        peer.requests[request.request_id] = None
        self._owners[request.request_id] = peer_id
        self._empty.clear()

    def _check(self, peer_id: bytes, request: Generate) -> None:
        """Refuse what the service itself cannot honour."""
        if request.stage not in STAGES[self._card.role]:
            raise BrokenError(
                f"worker {self._worker_id} has the role {self._card.role.name.lower()}, it does not take the stage "
                f"{request.stage.name.lower()}"
            )
        if self._draining:
            raise DrainingError(f"worker {self._worker_id} is draining and takes no new requests")
        if self._engine.ailment:
            raise BrokenError(f"worker {self._worker_id} is not well: {self._engine.ailment}")
        if request.request_id in self._kept and self._owners[request.request_id] == peer_id:
            # Nobody dispatches a leg again while its first result is of use.
            self._let_go(request.request_id)
        if request.request_id in self._owners:
            # When nobody owns it any more it is on its way out, and the id will be free in a moment.
            leaving = self._owners[request.request_id] is None
            raise (BusyError if leaving else RefusedError)(
                f"request id {request.request_id!r} is already active on worker {self._worker_id}"
            )
        routing = request.routing
        if routing.dp_rank >= self._card.dp_size:
            raise RefusedError(
                f"dp_rank is {routing.dp_rank}, worker {self._worker_id} has ranks 0 to {self._card.dp_size - 1}"
            )
        if routing.lora_name and routing.lora_name not in self._card.loras:
            raise UnableError(
                f"lora_name is {routing.lora_name!r}, worker {self._worker_id} serves "
                f"{', '.join(self._card.loras[:20]) or 'none'}"
            )
        self._check_crowding(request)

    def _check_crowding(self, request: Generate) -> None:
        """Refuse what was chosen on a belief too far from the truth, where several routers choose."""
        expected = request.routing.expected_prefill_tokens
        if expected is None or len(self._routers) < 2 or request.stage not in PROMPT_STAGES:
            return
        booked = self._books[request.routing.dp_rank].crowding(expected)
        if booked is None:
            return
        silent_since = self._clock.monotonic_ms() - self._limits.peer_lease_ms
        for router in [router for router, heard_ms in self._routers.items() if heard_ms < silent_since]:
            del self._routers[router]
        if len(self._routers) > 1:
            raise CrowdedError(
                f"worker {self._worker_id} has {booked} prompt tokens to compute, the router expected {expected}",
                booked,
            )

    def _cancel(self, peer_id: bytes, cancel: Cancel) -> None:
        request_id = cancel.request_id
        if self._owners.get(request_id) != peer_id:
            return
        if request_id in self._fetching:
            self._end_fetching(
                request_id, TokenDelta(request_id, 0, b"", FinishReason.CANCELLED), FinishReason.CANCELLED
            )
        else:
            self._stop(request_id)

    def _stop(self, request_id: str) -> None:
        """Cancel what the engine has."""
        if request_id in self._kept:
            self._let_go(request_id)
        else:
            self._engine.cancel(request_id)

    def _let_go(self, request_id: str) -> None:
        """Cancel a kept prefill leg; its last delta is out, so it is forgotten at once."""
        self._engine.cancel(request_id)
        self._forget(request_id)

    def _end_elsewhere(self, request_id: str, ending: Ending) -> None:
        """End a request so that its router continues it on another worker."""
        if request_id in self._fetching:
            delta = _ended(request_id, ending.error, ending.kind)
            self._end_fetching(request_id, delta, ending.event_reason)
            return
        if request_id not in self._owners:
            return  # it ended meanwhile: what was to be fetched for it may fail after it
        if request_id not in self._kept:
            self._endings[request_id] = ending
        self._stop(request_id)

    # -- KV from and to other workers ----------------------------------------------------------------------------------

    def _offer(self, peer_id: bytes, fetch: FetchKv) -> None:
        offer = KvOffered(fetch.transfer_id, False) if self._kv is None else self._kv.handover.offer(fetch.transfer_id)
        self._send(peer_id, codec.from_worker.encode(offer))

    def _release(self, release: ReleaseKv) -> None:
        if self._kv is not None:
            self._kv.handover.release(release.transfer_id)

    def _on_offered(self, request_id: str, offer: KvOffered) -> None:
        assert self._kv is not None
        handover = self._kv.handover
        self._submit_fetched(request_id, lambda request: handover.submit_offered(request, offer))

    def _on_embeddings(self, request_id: str, tensors: Sequence[Tensor]) -> None:
        assert self._embeddings is not None
        taker = self._embeddings.taker
        self._submit_fetched(request_id, lambda request: taker.submit_embedded(request, tensors))

    def _submit_fetched(self, request_id: str, submit: Callable[[Generate], None]) -> None:
        request = self._fetching.pop(request_id)
        try:
            submit(request)
        except RefusedError as refusal:
            self._fetching[request_id] = request
            if refusal.kind is None or refusal.kind is RefusalKind.INVALID:
                self._metrics.kv_fetch_failures.labels("wrong").inc()
            self._end_fetching(request_id, _ended(request_id, refusal.reason, refusal.kind), FinishReason.ERROR)

    def _on_fetch_failed(self, request_id: str, reason: str) -> None:
        self._end_elsewhere(request_id, Ending(reason, FinishReason.ERROR, RefusalKind.BROKEN))

    def _end_fetching(self, request_id: str, delta: TokenDelta, event_reason: FinishReason) -> None:
        """End a leg that the engine does not know."""
        dp_rank = self._fetching.pop(request_id).routing.dp_rank
        if self._kv is not None:
            self._kv.fetcher.end(request_id)
        if self._embeddings is not None:
            self._embeddings.fetcher.end(request_id)
        assert delta.finish_reason is not None
        self._metrics.finished.labels(delta.finish_reason).inc()
        owner = self._owners[request_id]
        self._forget(request_id)
        self._publishers[dp_rank].publish([RequestFinished(request_id, event_reason)])
        if owner is not None:
            self._answer(owner, delta)
        self._note_if_empty()

    # -- from the engine -----------------------------------------------------------------------------------------------

    def _deliver(self, report: EngineReport) -> None:
        self._steps += report.steps
        if self._endings:
            self._rewrite_endings(report)
        # Before the deltas: what is kept anew in this report is not what was let go of.
        for request_id in report.released:
            if request_id in self._kept:
                self._forget(request_id)
        if self._kv is not None:
            for arrival in report.arrivals:
                self._kv.fetcher.end(arrival.request_id)
        by_peer: dict[bytes, list[TokenDelta]] = {}
        for delta in report.deltas:
            request_id = delta.request_id
            owner = self._owners.get(request_id)
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
                    self._forget(request_id)
                    if self._kv is not None:
                        self._kv.fetcher.end(request_id)
        for peer_id, deltas in by_peer.items():
            if not deltas:
                continue  # all of it is kept back
            self._send(peer_id, codec.from_worker.encode(TokenBatch(self._steps, deltas)))
        for dp_rank, rank in report.ranks.items():
            self._books[dp_rank].observe(rank.events)
            self._publishers[dp_rank].publish(rank.events, rank.load)
            self._metrics.observe_load(dp_rank, rank.load)
        self._metrics.observe_report(report)
        # Last, so that a drain finds everything published.
        self._note_if_empty()

    def _note_if_empty(self) -> None:
        if not self._owners:
            self._empty.set()

    def _rewrite_endings(self, report: EngineReport) -> None:
        """Turn the engine's ``cancelled`` into what it means here: go on elsewhere."""
        endings = self._endings
        report.deltas = [
            msgspec.structs.replace(
                delta,
                finish_reason=FinishReason.ERROR,
                error=endings[delta.request_id].error[:TEXT_CHARS_MAX],
                refusal=endings[delta.request_id].kind,
            )
            if delta.finish_reason is CANCELLED and delta.request_id in endings
            else delta
            for delta in report.deltas
        ]
        for rank in report.ranks.values():
            rank.events = [
                RequestFinished(event.request_id, endings[event.request_id].event_reason)
                if isinstance(event, RequestFinished)
                and event.reason == FinishReason.CANCELLED
                and event.request_id in endings
                else event
                for event in rank.events
            ]

    def _forget(self, request_id: str) -> None:
        owner = self._owners.pop(request_id, None)
        for books in self._books:
            books.remove(request_id)
        self._joined.forget(request_id)
        self._endings.pop(request_id, None)
        self._kept.discard(request_id)
        if owner is not None:
            peer = self._peers.get(owner)
            if peer is not None:
                peer.requests.pop(request_id, None)
                if not peer.requests:
                    del self._peers[owner]

    # -- peers ---------------------------------------------------------------------------------------------------------

    def _answer(self, peer_id: bytes, delta: TokenDelta) -> None:
        self._send(peer_id, codec.from_worker.encode(TokenBatch(self._steps, [delta])))

    def _send(self, peer_id: bytes, frame: bytes) -> None:
        if not self._requests.send(peer_id, frame) and peer_id in self._peers:
            self._metrics.lost_peers.inc()
            self._abandon(peer_id, "it cannot be reached or reads nothing")

    def _abandon(self, peer_id: bytes, why: str) -> None:
        """Cancel the requests of a peer that is gone."""
        peer = self._peers.pop(peer_id)
        log.warning("a router with %d requests is gone (%s): cancelling them", len(peer.requests), why)
        for request_id in peer.requests:
            self._owners[request_id] = None
            if request_id not in self._kept:
                self._remember_abandoned(peer_id, request_id)
            if request_id in self._fetching:
                self._end_fetching(
                    request_id, TokenDelta(request_id, 0, b"", FinishReason.CANCELLED), FinishReason.CANCELLED
                )
            else:
                self._stop(request_id)

    def _remember_abandoned(self, peer_id: bytes, request_id: str) -> None:
        while len(self._abandoned) >= ABANDONED_MAX:
            self._forget_abandoned(next(iter(self._abandoned)))
        self._forget_abandoned(request_id)
        self._abandoned[request_id] = peer_id
        self._silent.setdefault(peer_id, {})[request_id] = None

    def _forget_abandoned(self, request_id: str) -> None:
        peer_id = self._abandoned.pop(request_id, None)
        if peer_id is not None:
            of_peer = self._silent[peer_id]
            del of_peer[request_id]
            if not of_peer:
                del self._silent[peer_id]

    def _own_up(self, peer_id: bytes) -> None:
        """Tell a peer that was silent, and is there again, which of its requests have ended here."""
        request_ids = list(self._silent[peer_id])
        log.warning("a router that was silent is there again: it is told that %d requests ended", len(request_ids))
        for request_id in request_ids:
            self._forget_abandoned(request_id)
            error = f"worker {self._worker_id} let it go: its router was silent"
            self._answer(peer_id, _ended(request_id, error, RefusalKind.BUSY))

    def _watch_leases(self) -> None:
        if self._lease_timer is None:
            interval_s = self._limits.peer_lease_ms / LEASE_CHECKS / 1e3
            self._lease_timer = asyncio.get_running_loop().call_later(interval_s, self._check_leases)

    def _check_leases(self) -> None:
        self._lease_timer = None
        silent_since = self._clock.monotonic_ms() - self._limits.peer_lease_ms
        for peer_id in [peer_id for peer_id, peer in self._peers.items() if peer.heard_ms < silent_since]:
            self._metrics.lease_expiries.inc()
            self._abandon(peer_id, f"silent for more than {self._limits.peer_lease_ms:.0f} ms")
        if self._peers:
            self._watch_leases()


def _ended(
    request_id: str, error: str, kind: RefusalKind | None, booked_prefill_tokens: int | None = None
) -> TokenDelta:
    """Return the only delta of a leg that was not taken, or that was given up before its first token."""
    return TokenDelta(
        request_id,
        0,
        b"",
        FinishReason.ERROR,
        error=error[:TEXT_CHARS_MAX],
        refusal=kind,
        booked_prefill_tokens=booked_prefill_tokens,
    )


async def _first(task: asyncio.Task[None], other: Coroutine[object, object, object]) -> None:
    """Wait until either is done; what is left of ``other`` is cancelled, what it raised is raised."""
    waiting = owned(other, "what the engine goes on beside")
    try:
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if waiting.done():
            waiting.result()
    finally:
        waiting.cancel()
