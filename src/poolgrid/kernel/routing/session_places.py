"""The working set of a pool as a fold over what its router chooses and its workers report.

A turn begins when its decision is booked, one of another router when its worker reports it (``TurnBegan``), with what
that router knew: so the routers of a pool have one working set, but for what is on its way. A turn ends when its worker
reports so or its router releases it; workers end the turns of a router that died. A snapshot replaces all turns. Legs
that compute no prompt take no place: their KV comes from a worker that has one for the session.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Final

import msgspec

from poolgrid.kernel.decision.decision import Decision
from poolgrid.kernel.decision.policy import RoutingRequest
from poolgrid.kernel.projection.fleet import Worker
from poolgrid.kernel.projection.observers import IsOpen, Observer
from poolgrid.kernel.projection.projection import SnapshotLoad
from poolgrid.kernel.routing.engine_times import refill_ms
from poolgrid.kernel.routing.working_set import LEASE_MAX_MS, Admission, OfferedTurn, SessionKey, WorkingSet
from poolgrid.kernel.wire.card import WorkerCard
from poolgrid.kernel.wire.events import TurnBegan
from poolgrid.kernel.wire.identifiers import Role, Stage, WorkerId, WorkerKey
from poolgrid.kernel.wire.limits import SESSIONS_DISPLACED_MAX, U32_MAX
from poolgrid.kernel.wire.sessions import Footprint, Turn, TurnPlace

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

    def place_of(
        self, decision: Decision, card: WorkerCard, path: Sequence[int], displaced: Sequence[SessionKey] = ()
    ) -> TurnPlace:
        """Return what a turn takes where it is sent."""
        worker, request, forecast = decision.worker, decision.request, decision.choice.forecast
        held = min(decision.overlap_blocks, len(path))
        prefix = self.working_set.shared_prefix(turn_of(request), worker, path[held - 1] if held else 0)
        pace = 1.0 if forecast is None else forecast.pace
        refill_ms = min(U32_MAX, round(self._refill_ms(worker, card) * pace))
        waited_ms = min(U32_MAX, round(decision.queued_ms))
        lost = tuple(displaced[:SESSIONS_DISPLACED_MAX])
        return TurnPlace(held, prefix, request.priority, waited_ms, refill_ms, lost)

    # -- what happens ----------------------------------------------------------------------------------------------

    def on_chosen(
        self, decision: Decision, card: WorkerCard, dispatch_id: str, path: Sequence[int], now_ms: float
    ) -> None:
        request, worker = decision.request, decision.worker
        if not request.session or request.stage not in WITH_PLACE:
            return
        self._now_ms = now_ms
        offered, place = turn_of(request), self.place_of(decision, card, path)
        self._turns[worker, dispatch_id] = RunningTurn(offered.session)
        self.working_set.know(worker, card.limits.total_kv_blocks, place.refill_ms)
        self.working_set.begin(offered, worker, place.common, place.prefix, now_ms, decision.queued_ms)

    def on_turn_began(self, worker: Worker, event: TurnBegan, now_ms: float) -> None:
        turn, key = event.turn, (worker.key, event.request_id)
        place = turn.place
        if place is None:
            return
        session, places, card = (turn.tenant, turn.session), self.working_set, worker.card
        places.know(worker.key, card.limits.total_kv_blocks, place.refill_ms)
        # Also for a turn of this router: what it displaced may have come back by a turn that it had not read.
        places.displace(place.displaced)
        if key in self._turns:
            return
        self._now_ms = now_ms
        self._turns[key] = RunningTurn(session, is_started=True)
        parent = (turn.tenant, turn.parent) if turn.parent else None
        offered = OfferedTurn(session, -(-event.isl // card.block_size), place.priority, parent)
        places.begin(offered, worker.key, place.common, place.prefix, now_ms, place.waited_ms)

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

    def adopt(self, load: SnapshotLoad, now_ms: float, time_ms: int) -> None:
        """Replace turns and places by those of a snapshot; what was learned of pauses stays.

        Its times are the consolidator's, and count from ``time_ms`` on, or from the latest where that is later. A
        parent's lease counts from its own last turn.
        """
        self._now_ms = now_ms
        self._turns.clear()
        self._refill_times.clear()
        places, cards = self.working_set, dict[tuple[str, int], WorkerCard]()
        places.reset()
        for worker, state in zip(load.keys, load.workers, strict=True):
            card = state.card
            places.know(worker, card.limits.total_kv_blocks, round(self._refill_ms(worker, card)))
            if card.role not in (Role.DECODE, Role.ENCODE):
                cards[worker.worker_id, worker.dp_rank] = card
        snapshot = load.sessions
        as_of_ms = max((each.last_ms for each in snapshot.sessions), default=0)
        as_of_ms = max(as_of_ms, time_ms)
        running: dict[SessionKey, list[Turn]] = {}
        for turn in snapshot.turns:
            if (turn.worker_id, turn.dp_rank) in cards:
                session = (turn.tenant, turn.session)
                running.setdefault(session, []).append(turn)
                worker = WorkerKey(WorkerId(turn.worker_id), turn.dp_rank)
                self._turns[worker, turn.request_id] = RunningTurn(session, is_started=True)
        for known in snapshot.sessions:
            turns = running.get((known.tenant, known.name), ())
            left = [each for each in known.footprints if (each.worker_id, each.dp_rank) in cards]
            if not turns and not left:
                continue
            at: Turn | Footprint = turns[-1] if turns else left[0]
            block_size = cards[at.worker_id, at.dp_rank].block_size
            parent = (known.tenant, known.parent) if known.parent else None
            blocks = -(-known.isl // block_size) if turns else at.blocks
            places.enter(
                OfferedTurn((known.tenant, known.name), blocks, known.priority, parent),
                WorkerKey(WorkerId(at.worker_id), at.dp_rank),
                at.common,
                at.prefix,
                since_ms=now_ms - (as_of_ms - known.began_ms),
                used_ms=now_ms - (as_of_ms - (known.last_ms if turns else known.ended_ms or known.last_ms)),
                running=len(turns),
                has_returned=known.turns > 1,
                is_slow=known.pause_ms > LEASE_MAX_MS,
                is_displaced=known.is_displaced,
            )
        places.settle(now_ms)

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
