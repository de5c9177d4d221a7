"""The working set of a pool as a fold over what its router chooses and its workers report.

A turn begins when its decision is booked, and ends when its worker reports so or its router releases it. Legs that
compute no prompt take no place: their KV comes from a worker that has one for the session.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, ClassVar, Final

import msgspec

from poolgrid.kernel.decision.decision import Decision
from poolgrid.kernel.decision.policy import RoutingRequest
from poolgrid.kernel.projection.observers import IsOpen, Observer
from poolgrid.kernel.routing.engine_times import refill_ms
from poolgrid.kernel.routing.working_set import Admission, OfferedTurn, SessionKey, WorkingSet
from poolgrid.kernel.wire.card import WorkerCard
from poolgrid.kernel.wire.identifiers import Stage, WorkerId, WorkerKey

NOTHING_KNOWN: Final = WorkingSet().checkpoint()

WITH_PLACE: Final = (Stage.WHOLE, Stage.PREFILL)
"""Legs that compute a prompt."""


class RunningTurn(msgspec.Struct, eq=False, gc=False):
    """A turn on a worker."""

    session: SessionKey
    is_started: bool = False
    """Whether its worker has reported it: then it reports its end, too."""
    blocks: int | None = None
    """That it had when its router released it."""


class SessionPlaces(Observer):
    """Follows the turns of sessions for the ``WorkingSet``."""

    name: ClassVar[str] = "sessions"

    def __init__(self) -> None:
        self.working_set = WorkingSet()
        self._turns: dict[tuple[WorkerKey, str], RunningTurn] = {}
        """By worker and dispatch."""
        self._now_ms = 0.0
        self._refill_times: dict[WorkerKey, tuple[WorkerCard, float]] = {}
        """By the card of each worker: how long it takes to compute a cache full, at pace 1."""

    def offer(
        self,
        request: RoutingRequest,
        workers: Sequence[WorkerKey],
        held: Sequence[int],
        now_ms: float,
        waited_ms: float,
        is_behind: bool,
    ) -> Admission:
        """``held`` are the leading blocks of its prompt that some worker holds."""
        prefix = held[-1] if held else 0
        return self.working_set.offer(turn_of(request), workers, len(held), prefix, now_ms, waited_ms, is_behind)

    def _refill_ms(self, worker: WorkerKey, card: WorkerCard) -> float:
        known = self._refill_times.get(worker)
        if known is None or known[0] is not card:
            known = self._refill_times[worker] = card, refill_ms(card)
        return known[1]

    # -- what happens ----------------------------------------------------------------------------------------------

    def on_chosen(
        self, decision: Decision, card: WorkerCard, dispatch_id: str, path: Sequence[int], now_ms: float
    ) -> None:
        request, worker = decision.request, decision.worker
        if not request.session or request.stage not in WITH_PLACE:
            return
        self._now_ms = now_ms
        offered, forecast, places = turn_of(request), decision.choice.forecast, self.working_set
        self._turns[worker, dispatch_id] = RunningTurn(offered.session)
        pace = 1.0 if forecast is None else forecast.pace
        places.know(worker, card.limits.total_kv_blocks, round(self._refill_ms(worker, card) * pace))
        overlap = min(decision.overlap_blocks, len(path))
        places.begin(offered, worker, path, overlap, now_ms, decision.queued_ms)

    def on_started(self, worker: WorkerKey, request_id: str, cached_tokens: int) -> None:
        turn = self._turns.get((worker, request_id))
        if turn is not None:
            turn.is_started = True

    def on_finished(self, worker: WorkerKey, request_id: str, blocks: int | None, now_ms: float) -> None:
        turn = self._turns.pop((worker, request_id), None)
        if turn is not None:
            self._now_ms = now_ms
            self.working_set.end(turn.session, turn.blocks if blocks is None else blocks, now_ms)

    def on_released(self, worker: WorkerKey, request_id: str, blocks: int | None) -> None:
        turn = self._turns.get((worker, request_id))
        if turn is None:
            return
        if turn.is_started:
            turn.blocks = blocks  # the worker reports the end, with its time
            return
        del self._turns[worker, request_id]
        self.working_set.end(turn.session, None, self._now_ms)

    def on_expired(self, is_open: IsOpen) -> None:
        for worker, request_id in [
            key for key, turn in self._turns.items() if not turn.is_started and not is_open(*key)
        ]:
            self.on_released(worker, request_id, None)

    def on_cleared(self, worker: WorkerKey) -> None:
        self.working_set.clear(worker)

    def on_left(self, worker: WorkerKey) -> None:
        self.working_set.leave(worker)
        self._refill_times.pop(worker, None)
        self._turns = {key: turn for key, turn in self._turns.items() if key[0] != worker}

    def on_snapshot(self, workers: Collection[WorkerKey], is_open: IsOpen) -> None:
        for worker in self.working_set.workers() - set(workers):
            self.on_left(worker)
        for worker, request_id in [key for key in self._turns if not is_open(*key)]:
            self.working_set.end(self._turns.pop((worker, request_id)).session, None, self._now_ms)

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def checkpoint(self) -> Any:
        turns = [
            (worker.worker_id, worker.dp_rank, request_id, *turn.session, turn.is_started, turn.blocks)
            for (worker, request_id), turn in self._turns.items()
        ]
        known = self.working_set.checkpoint()
        # What was learned outlives those it was learned from.
        return {"now_ms": self._now_ms, "turns": turns, **known} if turns or known != NOTHING_KNOWN else None

    def restore(self, state: Any) -> None:
        self._now_ms = float(state["now_ms"])
        self._turns = {
            (WorkerKey(WorkerId(worker_id), rank), request_id): RunningTurn((tenant, name), is_started, blocks)
            for worker_id, rank, request_id, tenant, name, is_started, blocks in state["turns"]
        }
        self.working_set.restore(state)


def turn_of(request: RoutingRequest) -> OfferedTurn:
    """Return what the working set has to know of a request."""
    parent = (request.tenant, request.parent) if request.parent else None
    return OfferedTurn((request.tenant, request.session), request.blocks, request.priority, parent)
