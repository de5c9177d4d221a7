"""The working set of a pool as a fold over what its router chooses and its workers report.

A turn begins when its decision is booked, and ends when its worker reports so or its router releases it. Legs that
compute no prompt take no place: their KV comes from a worker that has one for the session.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import ClassVar

from poolgrid.router.core.candidates import RoutingRequest
from poolgrid.router.core.decision import Decision
from poolgrid.router.core.observers import IsOpen, Observer
from poolgrid.router.core.working_set import Admission, Turn, WorkingSet
from poolgrid.wire.card import WorkerCard
from poolgrid.wire.identifiers import Stage, WorkerKey


class SessionPlaces(Observer):
    """Follows the turns of sessions for the ``WorkingSet``."""

    name: ClassVar[str] = "sessions"

    def __init__(self) -> None:
        self.working_set = WorkingSet()
        self._turns: dict[tuple[WorkerKey, str], str] = {}
        """Sessions of the turns that run, by worker and dispatch."""
        self._now_ms = 0.0

    def is_free(self, request: RoutingRequest) -> bool:
        """Tell whether a turn may go to any worker without ``offer``."""
        return self.working_set.is_free(turn_of(request))

    def offer(
        self, request: RoutingRequest, workers: Sequence[WorkerKey], common: int, now_ms: float, waited_ms: float
    ) -> Admission:
        return self.working_set.offer(turn_of(request), workers, common, now_ms, waited_ms)

    # -- what happens ----------------------------------------------------------------------------------------------

    def on_chosen(
        self, decision: Decision, card: WorkerCard, dispatch_id: str, path: Sequence[int], now_ms: float
    ) -> None:
        request, worker = decision.request, decision.worker
        if not request.session or request.stage not in (Stage.WHOLE, Stage.PREFILL):
            return
        self._now_ms = now_ms
        self.working_set.know(worker, card.limits.total_kv_blocks)
        self._turns[worker, dispatch_id] = request.session
        overlap = min(decision.overlap_blocks, len(path))
        self.working_set.begin(turn_of(request), worker, path, overlap, now_ms, decision.queued_ms)

    def on_finished(self, worker: WorkerKey, request_id: str, blocks: int | None, now_ms: float) -> None:
        session = self._turns.pop((worker, request_id), None)
        if session is not None:
            self._now_ms = now_ms
            self.working_set.end(session, blocks, now_ms)

    def on_released(self, worker: WorkerKey, request_id: str, blocks: int | None) -> None:
        session = self._turns.pop((worker, request_id), None)
        if session is not None:
            self.working_set.end(session, blocks, self._now_ms)

    def on_expired(self, is_open: IsOpen) -> None:
        for worker, request_id in [key for key in self._turns if not is_open(*key)]:
            self.on_released(worker, request_id, None)

    def on_cleared(self, worker: WorkerKey) -> None:
        self.working_set.clear(worker)

    def on_left(self, worker: WorkerKey) -> None:
        self.working_set.leave(worker)
        self._turns = {key: session for key, session in self._turns.items() if key[0] != worker}

    def on_snapshot(self, workers: Collection[WorkerKey], is_open: IsOpen) -> None:
        for worker in self.working_set.workers() - set(workers):
            self.on_left(worker)
        self.on_expired(is_open)


def turn_of(request: RoutingRequest) -> Turn:
    return Turn(request.session, request.blocks, request.priority, request.parent)
