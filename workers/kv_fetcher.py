"""Asks prefill workers for the KV of decode requests: ``poolgrid.workers.core.kv_fetches``, its sockets, its timer.

One DEALER socket per prefill worker, made when it is first needed, closed when it was not needed for
``SOURCE_IDLE_MS``; at most ``SOURCES_MAX`` of them. No task: frames come by callback, time by one timer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

import zmq

from poolgrid.process.clock import Clock
from poolgrid.process.log_lines import Complaints, about
from poolgrid.wire import codec
from poolgrid.wire.errors import DecodeError
from poolgrid.wire.requests import FetchKv, KvOffered, ReleaseKv
from poolgrid.workers.adapters.sockets import PREFILL_WORKER, DealerSocket
from poolgrid.workers.core.kv_fetches import Ask, Effect, Failed, KvFetches, KvWanted, Offered, ReleaseSource
from poolgrid.workers.core.refusal import BusyError, RefusedError
from poolgrid.workers.metrics import WorkerMetrics

log = logging.getLogger(__name__)

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


def _nobody(*_: object) -> None:
    raise AssertionError("a fetch began before start")
