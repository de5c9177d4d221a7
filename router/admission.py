"""Requests that wait for a worker with room: a bounded queue in order of arrival, and how fast it drains.

``Admission`` holds no sockets and reads no clock. When it is full the newest request is refused, with an estimate of
when to come back: the requests ahead of it divided by the rate at which requests finished lately.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")

DRAIN_WINDOW = 64
"""Finished requests that the drain rate is measured over."""

RETRY_AFTER_MIN_S = 1.0
RETRY_AFTER_MAX_S = 60.0


class Admission(Generic[T]):
    """A bounded first-in-first-out queue."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiting: deque[T] = deque()
        self._finished_ms: deque[float] = deque(maxlen=DRAIN_WINDOW)

    def enter(self, request: T) -> bool:
        """Queue a request; return False when the queue is full."""
        if len(self._waiting) >= self._limit:
            return False
        self._waiting.append(request)
        return True

    def leave(self, request: T) -> None:
        """Take a request out, wherever it stands; one that is not there is ignored."""
        try:
            self._waiting.remove(request)
        except ValueError:
            pass  # it was dispatched in the same turn of the loop

    def head(self) -> T | None:
        """Return the request whose turn it is."""
        return self._waiting[0] if self._waiting else None

    def finished(self, now_ms: float) -> None:
        """Note that a request left a worker."""
        self._finished_ms.append(now_ms)

    def retry_after_s(self, now_ms: float) -> float:
        """Return when a refused client should come back, in whole seconds."""
        if len(self._finished_ms) < 2:
            return RETRY_AFTER_MIN_S
        span_s = max(0.001, (now_ms - self._finished_ms[0]) / 1000)
        per_second = len(self._finished_ms) / span_s
        return float(round(min(RETRY_AFTER_MAX_S, max(RETRY_AFTER_MIN_S, (len(self._waiting) + 1) / per_second))))

    def __iter__(self) -> Iterator[T]:
        """Iterate over the waiting requests, oldest first."""
        return iter(self._waiting)

    def __len__(self) -> int:
        """Return how many requests wait."""
        return len(self._waiting)
