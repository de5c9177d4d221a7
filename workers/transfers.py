"""What passes between this worker and others: KV and embeddings of legs that run here, and KV that others come for.

Rules:

1. A decode leg first has its KV asked for (``KvFetcher``), a leg behind an encode worker its embeddings
   (``EmbeddingFetcher``); until the answer is here the engine knows nothing of the leg.
2. Such a leg ends here when it is cancelled, when its fetch fails, or when the engine refuses it with what arrived.
   Its maker is told of each end once, and never of a leg that the engine has.
3. The source of KV is released when the KV has arrived or the leg ends, for any reason.
4. An engine that hands no KV over answers that it has none.

Asks prefill workers for the KV of decode requests: ``poolgrid.kernel.worker_protocol.kv_fetches``, its sockets, its
timer.

One DEALER socket per prefill worker, made when it is first needed, closed when it was not needed for
``SOURCE_IDLE_MS``; at most ``SOURCES_MAX`` of them. No task: frames come by callback, time by one timer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import zmq

from poolgrid.kernel.requests.log_fields import about
from poolgrid.kernel.wire import codec
from poolgrid.kernel.wire.errors import DecodeError
from poolgrid.kernel.wire.identifiers import Stage
from poolgrid.kernel.wire.multimodal import TensorDescriptor
from poolgrid.kernel.wire.requests import FetchKv, FinishReason, Generate, KvOffered, RefusalKind, ReleaseKv, TokenDelta
from poolgrid.kernel.worker_protocol.engine import EmbeddingTaker, KvHandover
from poolgrid.kernel.worker_protocol.kv_fetches import Ask, Effect, Failed, KvFetches, KvWanted, Offered, ReleaseSource
from poolgrid.kernel.worker_protocol.refusal import BusyError, RefusedError
from poolgrid.kernel.worker_protocol.tensor_transfer import Tensor, TensorUnavailable
from poolgrid.server.process.clock import Clock
from poolgrid.server.process.log_lines import Complaints
from poolgrid.server.process.tasks import cancel_all, detached
from poolgrid.server.workers.adapters.sockets import PREFILL_WORKER, DealerSocket
from poolgrid.server.workers.endings import refused_delta
from poolgrid.server.workers.metrics import WorkerMetrics

if TYPE_CHECKING:
    from poolgrid.server.workers.tensor_transfer.zmq_transfer import TensorTransfer

log = logging.getLogger(__name__)


class EmbeddingFetcher:
    """The fetches of one worker; as many at a time as the service lets requests wait."""

    def __init__(
        self,
        transfer: TensorTransfer,
        fetches_max: int,
        read: Callable[[bytes], Sequence[TensorDescriptor]] = lambda params: codec.tensor_list.decode(params).tensors,
    ) -> None:
        """``read`` finds the tensors in a request's ``disaggregated_params``, or raises ``DecodeError``."""
        self._read = read
        self._transfer = transfer
        self._fetches_max = fetches_max
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._on_fetched: Callable[[str, Sequence[Tensor]], None] = _nobody
        self._on_failed: Callable[[str, str], None] = _nobody

    def start(self, on_fetched: Callable[[str, Sequence[Tensor]], None], on_failed: Callable[[str, str], None]) -> None:
        """Tell from now on what became of fetches: (request id, tensors in order) or (request id, why it failed)."""
        self._on_fetched = on_fetched
        self._on_failed = on_failed

    def begin(self, request: Generate) -> None:
        """Fetch what a request's parameters describe, or raise ``RefusedError``; the answer comes by callback."""
        assert request.disaggregated_params is not None, "the service looks before it asks"
        if len(self._tasks) >= self._fetches_max:
            raise BusyError(
                f"the embeddings of {len(self._tasks)} requests are being fetched, allowed are at most "
                f"{self._fetches_max}"
            )
        try:
            tensors = self._read(request.disaggregated_params)
        except DecodeError as error:
            raise RefusedError(
                f"the disaggregated_params of request {request.request_id!r} describe no embeddings ({error})"
            ) from None
        self._tasks[request.request_id] = detached(
            self._fetch(request.request_id, tensors), f"embeddings of {request.request_id}"
        )

    def end(self, request_id: str) -> None:
        """Give a fetch up, if there is one; its sources are released."""
        task = self._tasks.pop(request_id, None)
        if task is not None:
            task.cancel()

    async def close(self) -> None:
        """Give every fetch up."""
        tasks = list(self._tasks.values())
        for request_id in list(self._tasks):
            self.end(request_id)
        await cancel_all(tasks)

    async def _fetch(self, request_id: str, tensors: Sequence[TensorDescriptor]) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                fetches = [group.create_task(self._transfer.fetch(tensor)) for tensor in tensors]
        except* TensorUnavailable as unavailable:
            self._failed(request_id, str(unavailable.exceptions[0]))
        except* Exception as bug:
            named = about(request_id=request_id)
            log.exception("fetching the embeddings of request %s failed: this is a bug", request_id, extra=named)
            self._failed(request_id, f"fetching embeddings failed: {bug.exceptions[0]!r}")
        else:
            if self._is_awaited(request_id):
                self._on_fetched(request_id, [fetch.result() for fetch in fetches])

    def _failed(self, request_id: str, why: str) -> None:
        if self._is_awaited(request_id):
            log.warning("request %s: %s", request_id, why, extra=about(request_id=request_id))
            self._on_failed(request_id, why)

    def _is_awaited(self, request_id: str) -> bool:
        """Take this fetch off the list; return whether it was there: a caller that gave it up is not called."""
        if self._tasks.get(request_id) is not asyncio.current_task():
            return False
        del self._tasks[request_id]
        return True


def _nobody(*_: object) -> None:
    raise AssertionError("a fetch began before start")


SOURCES_MAX = 512
"""Prefill workers that are connected at a time: more than a pool has, and well below the file descriptors of a
process. When all are in use a request is refused as busy; else the one idle for longest makes room."""

SOURCE_IDLE_MS = 60_000.0
"""A connection costs milliseconds to make; the worker behind one that was not needed for a minute may be gone."""


@dataclass(slots=True)
class _Source:
    socket: DealerSocket
    fetches: int = 0
    idle_since_ms: float = 0.0


class KvFetcher:
    """The fetches of one worker, on its event loop."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        timeout_ms: float,
        fetches_max: int,
        clock: Clock,
        metrics: WorkerMetrics,
    ) -> None:
        self._context = context
        self._fetches = KvFetches(timeout_ms, fetches_max)
        self._clock = clock
        self._complaints = Complaints(log, clock)
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._sources: dict[str, _Source] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._idle_timer: asyncio.TimerHandle | None = None
        self._on_offered: Callable[[str, KvOffered], None] = _nobody
        self._on_failed: Callable[[str, str], None] = _nobody
        self._closed = False

    def start(self, on_offered: Callable[[str, KvOffered], None], on_failed: Callable[[str, str], None]) -> None:
        """Tell from now on what became of fetches: (request id, offer) or (request id, why it failed)."""
        self._on_offered = on_offered
        self._on_failed = on_failed

    @property
    def sources(self) -> int:
        return len(self._sources)

    def begin(self, request_id: str, wanted: KvWanted) -> None:
        """Ask for the KV of a request, or raise ``RefusedError``; the answer comes by callback, never from here."""
        source = self._source(wanted.endpoint)
        effects = self._fetches.begin(request_id, wanted, self._clock.monotonic_ms())
        source.fetches += 1
        self._do(effects)

    def end(self, request_id: str) -> None:
        self._do(self._fetches.end(request_id))

    def close(self, orderly: bool) -> None:
        """End; an orderly end lets the last frames leave."""
        self._closed = True
        for timer in (self._timer, self._idle_timer):
            if timer is not None:
                timer.cancel()
        for source in self._sources.values():
            source.socket.close(orderly)
        self._sources.clear()

    def _source(self, endpoint: str) -> _Source:
        source = self._sources.get(endpoint)
        if source is not None:
            return source
        if len(self._sources) >= SOURCES_MAX:
            idle = [
                (source.idle_since_ms, endpoint) for endpoint, source in self._sources.items() if not source.fetches
            ]
            if not idle:
                raise BusyError(
                    f"KV is being fetched from {SOURCES_MAX} prefill workers, allowed are at most {SOURCES_MAX}"
                )
            self._sources.pop(min(idle)[1]).socket.close(orderly=True)
        try:
            socket = DealerSocket(
                self._context, PREFILL_WORKER, endpoint, lambda frames: self._on_frames(endpoint, frames)
            )
        except ValueError as error:
            raise RefusedError(str(error)) from error
        source = self._sources[endpoint] = _Source(socket, idle_since_ms=self._clock.monotonic_ms())
        if self._idle_timer is None:
            self._idle_timer = self._loop.call_later(SOURCE_IDLE_MS / 1e3, self._close_idle)
        return source

    def _close_idle(self) -> None:
        self._idle_timer = None
        idle_before = self._clock.monotonic_ms() - SOURCE_IDLE_MS
        for endpoint, source in list(self._sources.items()):
            if not source.fetches and source.idle_since_ms <= idle_before:
                del self._sources[endpoint]
                source.socket.close(orderly=True)
        if self._sources:
            self._idle_timer = self._loop.call_later(SOURCE_IDLE_MS / 1e3, self._close_idle)

    def _on_frames(self, endpoint: str, frames: list[bytes]) -> None:
        try:
            message = codec.from_worker.decode(frames[-1])
        except DecodeError as error:
            self._metrics.undecodable_frames.labels("kv").inc()
            self._complaints.about(f"the prefill worker at {endpoint}", error)
            return
        if isinstance(message, KvOffered):
            self._do(self._fetches.receive(endpoint, message, self._clock.monotonic_ms()))

    def _on_timer(self) -> None:
        self._timer = None
        self._do(self._fetches.tick(self._clock.monotonic_ms()))

    def _do(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Ask):
                # A question that does not leave is one without an answer.
                self._send(effect.endpoint, codec.to_worker.encode(FetchKv(effect.transfer_id)))
            elif isinstance(effect, ReleaseSource):
                self._send(effect.endpoint, codec.to_worker.encode(ReleaseKv(effect.transfer_id)))
                self._end_one(effect.endpoint)
            elif isinstance(effect, Offered):
                self._on_offered(effect.request_id, effect.offer)
            else:
                self._fail(effect)
        self._set_timer()

    def _fail(self, failed: Failed) -> None:
        self._metrics.kv_fetch_failures.labels(failed.cause).inc()
        log.warning("request %s: %s", failed.request_id, failed.reason, extra=about(request_id=failed.request_id))
        self._on_failed(failed.request_id, failed.reason)

    def _send(self, endpoint: str, frame: bytes) -> None:
        source = self._sources.get(endpoint)
        if source is not None and not source.socket.send([frame]):
            log.warning("the prefill worker at %s takes no more frames; one was dropped", endpoint)

    def _end_one(self, endpoint: str) -> None:
        source = self._sources.get(endpoint)
        if source is not None:
            source.fetches -= 1
            source.idle_since_ms = self._clock.monotonic_ms()

    def _set_timer(self) -> None:
        moment_ms = self._fetches.next_moment_ms()
        if self._closed or moment_ms is None:
            return
        when = self._loop.time() + max(0.001, (moment_ms - self._clock.monotonic_ms()) / 1e3)
        if self._timer is not None:
            # Moments mostly move away; the timer then finds nothing due and sets itself again.
            if self._timer.when() <= when:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(when, self._on_timer)


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


class Transfers:
    """The transfers of one worker, on its event loop."""

    def __init__(
        self,
        kv: KvExchange | None,
        embeddings: EmbeddingExchange | None,
        metrics: WorkerMetrics,
        on_ended: Callable[[Generate, TokenDelta, FinishReason], None],
        on_failed: Callable[[str, str], None],
    ) -> None:
        """Begin to take the fetchers' answers.

        ``on_ended`` is called for each leg that ended here: its request, its only delta, and why for the pool.
        ``on_failed`` is called for a request whose fetch failed, and why; the leg may be here still, or in the engine,
        or gone.
        """
        self.fetching: dict[str, Generate] = {}
        """Legs whose KV or embeddings were asked for and are not here yet."""
        self._kv = kv
        self._embeddings = embeddings
        self._metrics = metrics
        self._on_ended = on_ended
        if kv is not None:
            kv.fetcher.start(self._on_offered, on_failed)
        if embeddings is not None:
            embeddings.fetcher.start(self._on_embeddings, on_failed)

    # -- for legs that run here ----------------------------------------------------------------------------------------

    def begin(self, request: Generate) -> bool:
        """Ask for what a leg needs before the engine may have it; return ``False`` when it needs nothing.

        Raises ``RefusedError`` when it cannot be asked for.
        """
        kv = self._kv
        if kv is not None and request.stage is Stage.DECODE:
            kv.fetcher.begin(request.request_id, kv.handover.wanted(request))
        elif (
            self._embeddings is not None
            and request.disaggregated_params is not None
            and request.stage is not Stage.DECODE
        ):
            self._embeddings.fetcher.begin(request)
        else:
            return False
        self.fetching[request.request_id] = request
        return True

    def end(self, request_id: str, delta: TokenDelta, event_reason: FinishReason) -> None:
        """End a leg that the engine does not know."""
        request = self.fetching.pop(request_id)
        self.release_source(request_id)
        if self._embeddings is not None:
            self._embeddings.fetcher.end(request_id)
        self._on_ended(request, delta, event_reason)

    def release_source(self, request_id: str) -> None:
        if self._kv is not None:
            self._kv.fetcher.end(request_id)

    def _on_offered(self, request_id: str, offer: KvOffered) -> None:
        assert self._kv is not None
        handover = self._kv.handover
        self._submit(request_id, lambda request: handover.submit_offered(request, offer))

    def _on_embeddings(self, request_id: str, tensors: Sequence[Tensor]) -> None:
        assert self._embeddings is not None
        taker = self._embeddings.taker
        self._submit(request_id, lambda request: taker.submit_embedded(request, tensors))

    def _submit(self, request_id: str, submit: Callable[[Generate], None]) -> None:
        request = self.fetching.pop(request_id)
        try:
            submit(request)
        except RefusedError as refusal:
            self.fetching[request_id] = request
            if refusal.kind is None or refusal.kind is RefusalKind.INVALID:
                self._metrics.kv_fetch_failures.labels("wrong").inc()
            delta = refused_delta(request_id, refusal.reason, refusal.kind)
            self.end(request_id, delta, FinishReason.ERROR)

    # -- for legs that run elsewhere -----------------------------------------------------------------------------------

    def offer(self, transfer_id: str) -> KvOffered:
        """Return what is kept here under a transfer id, or that nothing is."""
        return KvOffered(transfer_id, False) if self._kv is None else self._kv.handover.offer(transfer_id)

    def release(self, transfer_id: str) -> None:
        if self._kv is not None:
            self._kv.handover.release(transfer_id)
