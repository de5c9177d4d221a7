"""How fast requests finish, and so when whoever was refused should come back. Pure: times are arguments."""

from __future__ import annotations

from collections import deque
from typing import Final

DRAIN_WINDOW: Final = 64
"""Finished requests that the rate is measured over."""

RETRY_AFTER_MIN_S: Final = 1.0
RETRY_AFTER_MAX_S: Final = 60.0


class DrainRate:
    """The rate at which requests left workers lately."""

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
        """Return how long ``waiting`` requests will take; 0 while no rate is known. It grows while nothing finishes."""
        return waiting / self._per_second(now_ms) if self.is_measured else 0.0

    def _per_second(self, now_ms: float) -> float:
        span_s = max(0.001, (now_ms - self._finished_ms[0]) / 1000)
        return len(self._finished_ms) / span_s
