"""Conditions of a simulation that a router has to find out by itself: how fast each worker is, and what clients expect.

A speed divides all step times: 1 is the value on the worker's card, 0.25 a quarter of it. A change holds for the steps
that begin in its time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from poolgrid.wire.hashing import stable_u64
from poolgrid.workers.core.timing import SPEEDUP_MAX, TimingModel

SPEED_FORM = f"above 0 to {SPEEDUP_MAX:g}"


class SpeedError(ValueError):
    """A description of speeds cannot be used; the message names the place."""


@dataclass(frozen=True, slots=True)
class SpeedChange:
    """One worker's speed for a while."""

    worker: int
    from_ms: float
    to_ms: float
    speed: float


@dataclass(frozen=True, slots=True)
class WorkerSpeeds:
    """The speeds of all workers at all times."""

    pattern: tuple[float, ...] = (1.0,)
    """Speeds of the first workers; the next ones begin with the first again."""
    changes: tuple[SpeedChange, ...] = ()

    @classmethod
    def parse(cls, pattern: str) -> WorkerSpeeds:
        """Return the speeds of ``1,1,0.33``; raises ``SpeedError``."""
        return cls(tuple(_speed(each, f"worker_speeds[{at}]") for at, each in enumerate(pattern.split(","))))

    def at(self, worker: int, now_ms: float) -> float:
        """Return the speed with which a worker begins a step; of changes that overlap the last named one holds."""
        for change in reversed(self.changes):
            if change.worker == worker and change.from_ms <= now_ms < change.to_ms:
                return change.speed
        return self.pattern[worker % len(self.pattern)]

    def next_change_ms(self, worker: int, now_ms: float) -> float:
        """Return when a worker's speed changes next; infinity when it does not."""
        moments = [
            moment
            for change in self.changes
            if change.worker == worker
            for moment in (change.from_ms, change.to_ms)
            if moment > now_ms
        ]
        return min(moments, default=float("inf"))


class ChangingTiming:
    """Another model's times divided by a speed that the caller sets before each step."""

    def __init__(self, model: TimingModel) -> None:
        self._model = model
        self.speed = 1.0

    def prefill_ms(self, new_tokens: int) -> float:
        return self._model.prefill_ms(new_tokens) / self.speed

    def decode_ms(self, used_share: float) -> float:
        return self._model.decode_ms(used_share) / self.speed


def changing(timings: Sequence[TimingModel]) -> list[ChangingTiming]:
    """Return one such timing for each worker."""
    return [ChangingTiming(timing) for timing in timings]


def _speed(text: str, place: str) -> float:
    try:
        speed = float(text)
    except ValueError:
        speed = 0.0
    if not 0.0 < speed <= SPEEDUP_MAX:
        raise SpeedError(f"{place} is {text!r}, allowed are numbers {SPEED_FORM}")
    return speed


@dataclass(frozen=True, slots=True)
class TtftTargets:
    """TTFT targets in milliseconds, each as likely as the others; drawn by the request's id, for every policy alike."""

    values_ms: tuple[float, ...]
    told: bool = True
    """Whether requests say their target to the router."""

    def of(self, request_id: str) -> float:
        return self.values_ms[stable_u64(f"ttft target of {request_id}") % len(self.values_ms)]
