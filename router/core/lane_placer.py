"""Which of the requests that wait in a lane of the queue are tried, in the order of their turns.

Rules
    1. Requests are tried in the fair order, ``PLANNED_MAX`` of them. One that finds every worker busy holds up all
       behind it.
    2. One whose engine has enough to compute waits for that engine: it is *reserved*, and none behind it gets it, so a
       long prompt is not passed by short ones for ever. Those behind it may go to other workers. After ``MISSES_MAX``
       such requests no other is tried.
    3. With a policy that plans, rule 1 is for requests that have waited for the limit, and those whose turn comes before
       theirs. Where none of these can go, all are planned together.

Nothing here reads a clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum, auto
from math import inf
from typing import Final, Generic, TypeVar

from poolgrid.router.core.policy import PLANNED_MAX
from poolgrid.serving.fair_queue import FairQueue, QueuedRequest
from poolgrid.wire.identifiers import WorkerKey

MISSES_MAX: Final = 8
"""Requests that find no room before a lane is left alone until something changes: each costs a choice, a tenth of a
millisecond."""

T = TypeVar("T")


class Tried(Enum):
    """What came of trying a request."""

    GONE = auto()
    """It is on a worker, or waits no longer."""
    BUSY = auto()
    """Every worker that could serve it is busy."""
    BACKLOGGED = auto()
    """The engine where it would go has enough to compute; it is reserved."""


class LanePlacer(Generic[T]):
    """Tries the requests of one queue's lanes."""

    def __init__(
        self,
        queue: FairQueue[T],
        hold_limit_ms: float,
        try_one: Callable[[QueuedRequest[T]], Tried],
        plan: Callable[[Sequence[QueuedRequest[T]]], bool],
        reserved: set[WorkerKey],
    ) -> None:
        """``plan`` plans requests together and returns whether any of them went; ``try_one`` adds to ``reserved``."""
        self._queue = queue
        self._hold_limit_ms = hold_limit_ms
        self._try_one = try_one
        self._plan = plan
        self._reserved = reserved

    def place(self, lane: str, now_ms: float, plans: bool) -> bool:
        """Try the requests of a lane; return whether any waits for an engine that has enough to compute."""
        due_ms = now_ms - self._hold_limit_ms if plans else inf
        moved = True
        try:
            while moved:
                taken: list[QueuedRequest[T]] = []
                try:
                    moved = self._go(lane, taken, due_ms, plans)
                finally:
                    for each in taken:
                        self._queue.put_back(each)
            return bool(self._reserved)
        finally:
            self._reserved.clear()

    def _go(self, lane: str, taken: list[QueuedRequest[T]], due_ms: float, plans: bool) -> bool:
        turns: Iterable[QueuedRequest[T]] = self._turns(lane, taken)
        if plans:
            last = max((place for place, each in enumerate(turns, 1) if each.entered_ms <= due_ms), default=0)
            turns = taken[:last]
        moved, misses = False, 0
        for each in turns:
            tried = self._try_one(each)
            if tried is Tried.GONE:
                moved = True
                continue
            misses += 1
            if misses == MISSES_MAX or (tried is Tried.BUSY and not plans):
                break
        return moved or (plans and bool(taken) and self._plan(taken))

    def _turns(self, lane: str, taken: list[QueuedRequest[T]]) -> Iterator[QueuedRequest[T]]:
        """Take requests in the order of their turns."""
        while len(taken) < PLANNED_MAX and (queued := self._queue.take(lane)) is not None:
            taken.append(queued)
            yield queued
