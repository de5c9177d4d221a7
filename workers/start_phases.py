"""What a worker's start is made of, and how far it is: for metrics, probes, the pool and people.

A phase ends when the next one begins. Its time is kept, also of one that is entered again.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

from poolgrid.server.process.clock import Clock
from poolgrid.server.process.figures import size
from poolgrid.server.workers.metrics import WorkerMetrics


class Phase(StrEnum):
    """In their order; a worker whose model has no hub's name begins with ``load``."""

    FETCH = "fetch"
    LOAD = "load"
    WARM_UP = "warm_up"
    REGISTER = "register"


class StartPhases:
    """The start of one worker process."""

    def __init__(self, metrics: WorkerMetrics, clock: Clock, say: Callable[[str], None]) -> None:
        """``say`` shows people what the start waits for."""
        self._clock = clock
        self._say = say
        self._seconds = metrics.start_seconds
        self._left = metrics.start_left_bytes
        self._since_ms = 0.0
        self.phase: Phase | None = None
        """The current phase; ``None`` before the first, and when the worker is registered."""
        self.done_bytes = 0
        self.total_bytes = 0
        """Of the phase; 0 = not reported."""

    @property
    def left_bytes(self) -> int:
        return max(0, self.total_bytes - self.done_bytes)

    def enter(self, phase: Phase, total_bytes: int = 0) -> None:
        self._leave()
        self.phase = phase
        self._since_ms = self._clock.monotonic_ms()
        self._seconds.labels(phase.value).inc(0)
        self.move(0, total_bytes)

    def move(self, done_bytes: int, total_bytes: int) -> None:
        self.done_bytes, self.total_bytes = done_bytes, total_bytes
        self._left.set(self.left_bytes)
        if self.phase is not None:
            self._say(self.words())

    def words(self) -> str:
        assert self.phase is not None
        of = f": {size(self.done_bytes)} of {size(self.total_bytes)}" if self.total_bytes else ""
        return f"{WORDS[self.phase]}{of}"

    def end(self) -> None:
        self._leave()
        self.phase = None
        self.move(0, 0)

    def _leave(self) -> None:
        if self.phase is not None:
            self._seconds.labels(self.phase.value).inc((self._clock.monotonic_ms() - self._since_ms) / 1e3)


WORDS = {
    Phase.FETCH: "the model is fetched",
    Phase.LOAD: "the engine loads its model",
    Phase.WARM_UP: "the engine computes its first token",
    Phase.REGISTER: "the consolidator has not welcomed the worker yet",
}
