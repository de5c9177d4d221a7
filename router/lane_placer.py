"""Which of the requests that wait in a lane of the queue are tried, in the order of their turns.

Rules
    1. Requests are tried in the fair order, ``PLANNED_MAX`` of them. One that finds every worker busy holds up all
       behind it.
    2. One whose engine has enough to compute waits for that engine. Those behind it may go to others. After
       ``MISSES_MAX`` such requests no other is tried.
    3. With a policy that plans, rule 1 is for requests that have waited for the limit, and those whose turn comes
       before theirs. Where none of these can go, all are planned together. A plan knows no tenants: where one of
       several has more than ``BACKLOG_REQUESTS``, the limit is ``PASSED_MS``.

Turns that wait for places in caches:
    4. The turn that asked first is offered one, and after it others in the fair order, up to ``OFFERED_MAX``.
    5. Once the first has waited ``HEAD_MS``, no other is: places that end one by one would all go to small turns.

Nothing here reads a clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum, auto
from math import inf
from typing import Final, Generic, TypeVar

from poolgrid.kernel.decision.policy import PLANNED_MAX
from poolgrid.server.router.engine_backlog import BACKLOG_MS
from poolgrid.server.serving.fair_queue import FairQueue, QueuedRequest

MISSES_MAX: Final = 16
"""Requests that find no room before a lane is left alone until something changes: each costs a choice, a tenth of a
millisecond."""

BACKLOG_REQUESTS: Final = PLANNED_MAX // 2
"""A tenant with more requests would have most of a plan."""

PASSED_MS: Final = BACKLOG_MS
"""How long a request waits at most for a plan together with such a tenant: as long as prompts may wait in an engine."""

HEAD_MS: Final = 60_000.0
"""Simulated at two to four times the capacity: without a limit single requests wait a third longer at the 99th
percentile, with half of it agents gain less."""

OFFERED_MAX: Final = 64
"""Places that are offered each time that one may be free."""

T = TypeVar("T")


class Tried(Enum):
    """What came of trying a request."""

    GONE = auto()
    """It is on a worker, or waits no longer."""
    BUSY = auto()
    """Every worker that could serve it is busy, or its engine has enough to compute."""
    BACKLOGGED = auto()
    """The engine of the worker that is best for it has enough to compute; others may be free."""


class LanePlacer(Generic[T]):
    """Tries the requests of one queue's lanes."""

    def __init__(
        self,
        queue: FairQueue[T],
        hold_limit_ms: float,
        try_one: Callable[[QueuedRequest[T]], Tried],
        plan: Callable[[Sequence[QueuedRequest[T]]], bool],
    ) -> None:
        """``plan`` plans requests together and returns whether any of them went."""
        self._queue = queue
        self._hold_limit_ms = hold_limit_ms
        self._try_one = try_one
        self._plan = plan
        self._waits_for_engine = False

    def place(self, lane: str, now_ms: float, plans: bool) -> bool:
        """Try the requests of a lane; return whether any waits for an engine that has enough to compute."""
        due_ms = now_ms - self.hold_limit_ms(lane) if plans else inf
        moved, self._waits_for_engine = True, False
        while moved:
            taken: list[QueuedRequest[T]] = []
            try:
                moved = self._go(lane, taken, due_ms, plans)
            finally:
                for each in taken:
                    self._queue.put_back(each)
        return self._waits_for_engine

    def hold_limit_ms(self, lane: str) -> float:
        """Return how long requests of a lane wait for a plan at most."""
        return (
            min(self._hold_limit_ms, PASSED_MS)
            if self._queue.has_backlog(lane, BACKLOG_REQUESTS)
            else self._hold_limit_ms
        )

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
            self._waits_for_engine = self._waits_for_engine or tried is Tried.BACKLOGGED
            if misses == MISSES_MAX or (tried is Tried.BUSY and not plans):
                break
        return moved or (plans and bool(taken) and self._plan(taken))

    def _turns(self, lane: str, taken: list[QueuedRequest[T]]) -> Iterator[QueuedRequest[T]]:
        """Take requests in the order of their turns."""
        while len(taken) < PLANNED_MAX and (queued := self._queue.take(lane)) is not None:
            taken.append(queued)
            yield queued


def place_turns(queue: FairQueue[T], lane: str, now_ms: float, offer: Callable[[QueuedRequest[T]], bool]) -> None:
    """Offer places in caches to the turns of a lane until none goes; ``offer`` returns whether one went."""
    moved = True
    while moved and (head := queue.first(lane)) is not None:
        moved = offer(head)
        if moved or is_long(head.entered_ms, now_ms):
            continue
        taken: list[QueuedRequest[T]] = []
        try:
            while not moved and len(taken) < OFFERED_MAX and (each := queue.take(lane)) is not None:
                taken.append(each)
                moved = each is not head and offer(each)
        finally:
            for each in taken:
                queue.put_back(each)


def is_long(entered_ms: float, now_ms: float) -> bool:
    """Return whether a turn has waited for a place so long that none behind it may take one."""
    return now_ms - entered_ms >= HEAD_MS
