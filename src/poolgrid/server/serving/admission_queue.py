"""The admission queue of a router: the bounds and order of ``FairQueue``, its refusals, and what operators see of it.

Each router decides when requests that wait are tried: the pool router whenever a worker may have room, in one go; the
global router by asking pools, which takes a while.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Generic, Protocol, TypeVar

from prometheus_client.metrics_core import GaugeMetricFamily, Metric

from poolgrid.kernel.requests.inference import Refused
from poolgrid.server.process.clock import Clock
from poolgrid.server.process.figures import counted
from poolgrid.server.serving.fair_queue import FairQueue, QueuedRequest, QueueOrder
from poolgrid.server.serving.metrics import ServingMetrics

AGING_TOKENS_PER_S: Final = 4_000.0
"""With shortest-uncached-work-first: how much work a second of waiting makes up for. A prompt with 60,000 tokens more
than another is overtaken only when the other comes less than 15 s later."""

DRAIN_WINDOW: Final = 64
"""Finished requests that the rate is measured over."""

RETRY_AFTER_MIN_S: Final = 1.0
RETRY_AFTER_MAX_S: Final = 60.0


class DrainRate:
    """The rate at which requests left workers lately, and so when a refused client should come back."""

    def __init__(self) -> None:
        self._finished_ms: deque[float] = deque(maxlen=DRAIN_WINDOW)

    def finished(self, now_ms: float) -> None:
        self._finished_ms.append(now_ms)

    @property
    def is_measured(self) -> bool:
        return len(self._finished_ms) >= 2

    def retry_after_s(self, ahead: int, now_ms: float) -> float:
        """Return when a client with ``ahead`` requests before it should come back, in whole seconds."""
        if not self.is_measured:
            return RETRY_AFTER_MIN_S
        time_s = (ahead + 1) / self._per_second(now_ms)
        return float(round(min(RETRY_AFTER_MAX_S, max(RETRY_AFTER_MIN_S, time_s))))

    def backlog_s(self, waiting: int, now_ms: float) -> float:
        """Return how long ``waiting`` requests will take; 0 while no rate is known. It grows while none finishes."""
        return waiting / self._per_second(now_ms) if self.is_measured else 0.0

    def _per_second(self, now_ms: float) -> float:
        span_s = max(0.001, (now_ms - self._finished_ms[0]) / 1000)
        return len(self._finished_ms) / span_s


@dataclass(frozen=True, slots=True)
class QueueView:
    """A queue at one moment, as operators see it."""

    requests: int
    """Requests that wait, those that must continue elsewhere included."""
    requests_max: int
    prompt_tokens: int
    prompt_tokens_max: int
    retry_after_s: float | None
    """When a client that is refused now should come back; ``None`` while no rate is known."""
    refused: Mapping[str, int]
    """Requests that the router refused since it started, by reason code."""

    @property
    def fill(self) -> float:
        """Return how full it is, from 0 to 1: the larger share of its two bounds."""
        bounds = ((self.requests, self.requests_max), (self.prompt_tokens, self.prompt_tokens_max))
        return max(min(1.0, used / bound) if bound else float(used > 0) for used, bound in bounds)


class Waiting(Protocol):
    """What a place in the queue is for."""

    placed: asyncio.Future[None] | None
    """Resolved when a worker has the request, or failed with a refusal; ``None`` if no task waits for it."""


T = TypeVar("T", bound=Waiting)


class AdmissionQueue(Generic[T]):
    """What the queues of both routers have in common."""

    def __init__(
        self,
        requests_max: int,
        prompt_tokens_max: int,
        timeout_ms: float,
        metrics: ServingMetrics,
        clock: Clock,
        order: QueueOrder = QueueOrder.ARRIVAL,
    ) -> None:
        self._queue: FairQueue[T] = FairQueue(requests_max, prompt_tokens_max, order, AGING_TOKENS_PER_S)
        self._timeout_ms = timeout_ms
        self._metrics = metrics
        self._clock = clock
        self._drain = DrainRate()

    def has_waiting(self, lane: str) -> bool:
        return self._queue.waiting(lane)

    def _enter(self, queued: QueuedRequest[T]) -> None:
        """Queue a request; the requests that give way for it are refused. Raises ``Refused`` when it does not fit."""
        for victim in self._queue.enter(queued):
            refusal = self.busy(
                f"waiting already: {counted(len(self._queue), 'request')} with "
                f"{counted(self._queue.prompt_tokens, 'prompt token')}, allowed are "
                f"{self._queue.requests_max} with {self._queue.prompt_tokens_max}",
                victim.item,
            )
            if victim is queued:
                raise refusal
            if self._refuse(victim.item, refusal):
                self._metrics.queue_evictions.inc()

    def close(self, refusal: Refused) -> None:
        for queued in list(self._queue):
            self._refuse(queued.item, refusal)

    def _refuse(self, item: T, refusal: Exception) -> bool:
        if item.placed is None or item.placed.done():
            return False
        item.placed.set_exception(refusal)
        return True

    def busy(self, message: str, item: T | None = None) -> Refused:
        return Refused(429, "busy", message, self.retry_after_s())

    def _count_wait(self, since_ms: float, cause: str) -> None:
        self._metrics.queue_seconds.labels(cause).observe((self._clock.monotonic_ms() - since_ms) / 1000)

    def count_finished(self, lane: str, tenant: str, weight: float, priority: int, output_tokens: int) -> None:
        """Count a request that was on a worker and has ended: its tokens count in its tenant's turns."""
        self._drain.finished(self._clock.monotonic_ms())
        if not self._queue.is_empty:  # else no tenant has turns
            self._queue.charge(lane, tenant, weight, priority, output_tokens)

    def retry_after_s(self) -> float:
        """Return when a refused client should come back."""
        return self._drain.retry_after_s(len(self._queue), self._clock.monotonic_ms())

    def backlog_s(self) -> float:
        return self._drain.backlog_s(len(self._queue), self._clock.monotonic_ms())

    def __len__(self) -> int:
        return len(self._queue)

    def view(self) -> QueueView:
        return QueueView(
            len(self._queue),
            self._queue.requests_max,
            self._queue.prompt_tokens,
            self._queue.prompt_tokens_max,
            self.retry_after_s() if self._drain.is_measured else None,
            self._metrics.refused.by_label(),
        )


def queue_metrics(prefix: str, active: int, queue: AdmissionQueue[Any]) -> Iterator[Metric]:
    """Yield what a router's requests and queue are at a scrape."""
    view = queue.view()
    gauges: tuple[tuple[str, str, float], ...] = (
        ("active_requests", "Requests on workers, or on their way to one.", active),
        (
            "queued_requests",
            "Requests waiting for a worker. At `max_queue_requests` the next one is refused.",
            view.requests,
        ),
        (
            "queued_prompt_tokens",
            "Prompt tokens of waiting requests. At `max_queue_prompt_tokens` the lowest priority gets 429.",
            view.prompt_tokens,
        ),
        (
            "queue_fill_ratio",
            "The larger used share of `max_queue_requests` and `max_queue_prompt_tokens`. At 1 the lowest priority "
            "gets 429.",
            view.fill,
        ),
        (
            "backlog_seconds",
            "Time that the waiting requests will take at the recent completion rate. Above several seconds for "
            "longer than a burst, add workers.",
            queue.backlog_s(),
        ),
    )
    for name, text, value in gauges:
        yield GaugeMetricFamily(f"{prefix}_{name}", text, value=value)


K = TypeVar("K", bound=Hashable)
"""How a router names a worker."""

FULL: Final = "it refused a request for lack of room"
"""Filter reason of such a worker."""

RETRY_AFTER_DEFAULT_MS: Final = 250
"""Pause before a worker is asked again that reported no time: room may come with the next request that ends there."""

RETRY_AFTER_MAX_MS: Final = 60_000
"""Longest time that is trusted."""


class FullWorkers(Generic[K]):
    """Workers that refused a request because they have no room, and when they may be asked again.

    A worker in front of a full engine passes the engine's ``Retry-After`` on. Until that time is over it gets nothing,
    and requests that only it could serve wait in the queue.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._until_ms: dict[K, float] = {}
        self._next_ms = float("inf")
        self._reasons: Mapping[K, str] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._on_room: Callable[[], None] = lambda: None

    def observe(self, on_room: Callable[[], None]) -> None:
        """Call ``on_room`` from now on whenever a worker may be asked again."""
        self._on_room = on_room

    def note(self, worker: K, retry_after_ms: int | None) -> None:
        """Leave a worker alone for the time that it reported."""
        pause_ms = RETRY_AFTER_DEFAULT_MS if retry_after_ms is None else min(retry_after_ms, RETRY_AFTER_MAX_MS)
        until_ms = self._clock.monotonic_ms() + max(1, pause_ms)
        self._until_ms[worker] = max(until_ms, self._until_ms.get(worker, 0.0))
        self._changed()
        self._arm()

    def at(self, now_ms: float) -> Mapping[K, str]:
        """Return the workers that are full at this time; the mapping is never changed afterwards."""
        if now_ms >= self._next_ms:
            self._until_ms = {worker: until_ms for worker, until_ms in self._until_ms.items() if until_ms > now_ms}
            self._changed()
        return self._reasons

    def retry_after_s(self, now_ms: float) -> float:
        """Return when the first of them may be asked again; 0 while none is full."""
        return max(0.0, self._next_ms - now_ms) / 1000 if self.at(now_ms) else 0.0

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _changed(self) -> None:
        self._reasons = dict.fromkeys(self._until_ms, FULL)
        self._next_ms = min(self._until_ms.values(), default=float("inf"))

    def _arm(self) -> None:
        """Have ``_on_time`` called at the next of these times.

        A call that is due earlier stays: ``at`` may have seen its cause already, and wakes no request.
        """
        if not self._until_ms:
            return
        loop = asyncio.get_running_loop()
        when_s = loop.time() + max(0.001, (self._next_ms - self._clock.monotonic_ms()) / 1000)
        if self._timer is not None:
            if self._timer.when() <= when_s:
                return
            self._timer.cancel()
        self._timer = loop.call_at(when_s, self._on_time)

    def _on_time(self) -> None:
        self._timer = None
        self.at(self._clock.monotonic_ms())
        self._arm()
        self._on_room()
