"""Requests that wait in a router's line for the worker that is best for them, with a policy that plans.

Rules
    1. A request is held until the worker that a plan gave it has no prompt to compute, and at most ``hold_limit_ms``.
       Then it goes to a worker as it is, like one that is not held.
    2. Those whose turn it is, up to ``PLANNED_MAX``, are planned together (``core.policy.Planner``): at the
       end of a turn of the event loop in which one came or a first token was seen, and when events were applied. A plan
       is forgotten at once: who it does not place is planned anew.
    3. Nobody is refused because others are held. Where that takes the room, those whose turn it is go to workers.
"""

from __future__ import annotations

from collections.abc import Callable

from poolgrid.process.clock import Clock
from poolgrid.router.choosing import Chooser
from poolgrid.router.core.policy import HELD_MAX, PLANNED_MAX
from poolgrid.router.routed import Routed
from poolgrid.serving.admission.admission_queue import AdmissionQueue
from poolgrid.serving.admission.queued_request import QueuedRequest


class HeldRequests:
    """Those of one router, which are in the queue of its line."""

    def __init__(
        self,
        queue: AdmissionQueue[Routed],
        chooser: Chooser,
        clock: Clock,
        hold_limit_ms: float,
        place: Callable[[Routed], bool],
    ) -> None:
        """``place`` puts a request on a worker, and returns whether it waits no more."""
        self._queue = queue
        self._chooser = chooser
        self._clock = clock
        self._hold_limit_ms = hold_limit_ms
        self._place = place

    def make_room(self, newcomer: QueuedRequest[Routed]) -> None:
        """Place those whose turn it is until a newcomer has room in the queue, or workers have none."""
        while not self._queue.has_room(newcomer, HELD_MAX):
            head = self._queue.head(newcomer.lane)
            if head is None or not self._place(head.item):
                return

    def place(self, lane: str) -> None:
        """Place those of a lane that a plan says, and those that were held long enough."""
        held_since_ms = self._clock.monotonic_ms() - self._hold_limit_ms
        moved = True
        while moved and (
            self._chooser.takes_held(lane) or any(queued.entered_ms <= held_since_ms for queued in self._queue)
        ):
            taken: list[QueuedRequest[Routed]] = []
            while len(taken) < PLANNED_MAX and (queued := self._queue.take(lane)) is not None:
                taken.append(queued)
            moved = False
            for each in taken:
                if is_over(each.item) or each.entered_ms <= held_since_ms:
                    moved = self._place(each.item) or moved
            if not moved:
                moved = self._place_planned([each.item for each in taken])
            for each in taken:
                self._queue.put_back(each)

    def _place_planned(self, waiting: list[Routed]) -> bool:
        moved = False
        for routed, behind in self._chooser.plan(waiting):
            routed.behind = behind
            moved = self._place(routed) or moved
            routed.behind = {}
        return moved


def is_over(routed: Routed) -> bool:
    """Tell whether a request that waits needs no worker any more."""
    return routed.machine.ended or (routed.dispatched is not None and routed.dispatched.done())
