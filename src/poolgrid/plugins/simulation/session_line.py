"""Where turns of agents wait in a simulation, by the rules and the queue of a router; and what others do instead."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from msgspec.structs import replace

from poolgrid.kernel.decision.policy import Candidates, Choice, IndexArray, RoutingRequest
from poolgrid.kernel.index.prefix_index import PrefixIndex
from poolgrid.kernel.projection.fleet import Worker
from poolgrid.kernel.routing.engine_times import Engines, FewEngines, refill_ms
from poolgrid.kernel.routing.kv_policy import KvAware
from poolgrid.kernel.routing.learned_speeds import LearnedSpeeds
from poolgrid.kernel.routing.working_set import AGE_MS, OfferedTurn, SessionKey, WorkingSet
from poolgrid.kernel.wire.card import WorkerCard
from poolgrid.kernel.wire.identifiers import WorkerKey
from poolgrid.kernel.wire.sessions import TurnPlace
from poolgrid.plugins.simulation.workload import NEVER, SimulatedRequest
from poolgrid.server.router.admission_review import REVIEW_MS, AdmissionReview
from poolgrid.server.router.lane_placer import is_long, place_turns
from poolgrid.server.serving.fair_queue import FairQueue, QueuedRequest

CROWDED = "its sessions fill its cache"
LANE = "sessions"
_NONE_CROWDED: Mapping[WorkerKey, str] = {}
Overlap = Callable[[SimulatedRequest], int]


class SessionLine:
    """The working set of a pool, and the turns that wait for room in it."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self.working_set = WorkingSet()
        self._displaced: dict[str, tuple[SessionKey, ...]] = {}
        """By request, the sessions that lost their places to it."""
        self._tried = (-1, 0.0)
        """Changes of the working set when turns were last offered places, and when to offer again without any."""
        self._queue: FairQueue[SimulatedRequest] = FairQueue(10**9, 2**60)
        self.admission = AdmissionReview(self.working_set)
        """Whether the pool gains from waiting here; where it does not, none waits."""
        self.cards: dict[WorkerKey, WorkerCard] = {}
        self._review_ms = REVIEW_MS

    def another(self) -> SessionLine:
        """Return the line of another router."""
        return SessionLine(self._block_size)

    @property
    def holds(self) -> bool:
        return not self._queue.is_empty

    def review(self, now: float) -> list[SimulatedRequest]:
        """Decide whether turns wait at all, if it is time; return those that wait no longer for a place."""
        if now < self._review_ms:
            return []
        self._review_ms = now - now % REVIEW_MS + REVIEW_MS
        for _ in self.admission.review(self.cards, now):
            pass
        released = list(self._queue) if self.admission.rests else []
        for each in released:
            self._queue.leave(each)
        return [each.item for each in released]

    def arrive(
        self, request: SimulatedRequest, workers: Sequence[WorkerKey], overlap: Overlap, now: float
    ) -> Mapping[WorkerKey, str] | None:
        """Return the workers that a turn must leave alone, or ``None`` where it waits."""
        turn = None if self.admission.rests else self._turn(request)
        first_ms = self._queue.first_entered_ms(LANE)
        is_behind = first_ms is not None and is_long(first_ms, now)
        if turn is None or (not is_behind and self.working_set.is_free(turn.blocks)):
            return _NONE_CROWDED
        crowded = self._offer(request, turn, workers, overlap, now, 0.0, is_behind)
        if crowded is not None:
            return crowded
        assert request.session is not None, "it has a turn"
        tokens = turn.blocks * self._block_size
        queued = QueuedRequest(
            request,
            LANE,
            request.session.tenant,
            prompt_tokens=tokens,
            uncached_tokens=tokens,
            entered_ms=now,
            waits_for_place=True,
        )
        self._queue.enter(queued)
        self._tried = (-1, 0.0)  # it may be its turn
        return None

    def place_turns(
        self,
        workers: Sequence[WorkerKey],
        overlap: Overlap,
        now: float,
        send: Callable[[SimulatedRequest, Mapping[WorkerKey, str]], None],
    ) -> None:
        """Send those that wait and now have room; ``send`` is also told which workers they must leave alone."""
        if self._tried[0] == self.working_set.changes and now < self._tried[1]:
            return

        def offer(queued: QueuedRequest[SimulatedRequest]) -> bool:
            turn = self._turn(queued.item)
            assert turn is not None, "it is of a session"
            crowded = self._offer(queued.item, turn, workers, overlap, now, now - queued.entered_ms)
            if crowded is None:
                return False
            self._queue.leave(queued, dispatched=True)
            send(queued.item, crowded)
            return True

        place_turns(self._queue, LANE, now, offer)
        first_ms = self._queue.first_entered_ms(LANE)
        if first_ms is not None:
            self._tried = (self.working_set.changes, min(self.working_set.next_ms(), first_ms + AGE_MS))

    def place(
        self, request: SimulatedRequest, worker: WorkerKey, overlap_blocks: int, pace: float, now: float
    ) -> tuple[OfferedTurn, WorkerKey, TurnPlace] | None:
        """Return what other routers learn of a turn that begins."""
        turn = self._turn(request)
        if turn is None:
            return None
        prefix = request.path[overlap_blocks - 1] if overlap_blocks else 0
        prefix = self.working_set.shared_prefix(turn, worker, prefix)
        waited_ms = now - request.arrival_ms
        card = self.cards[worker]
        place = TurnPlace(overlap_blocks, prefix, 0, round(waited_ms), round(pace * refill_ms(card)))
        self.working_set.know(worker, card.limits.total_kv_blocks, place.refill_ms)
        self.working_set.begin(turn, worker, overlap_blocks, prefix, now, waited_ms)
        self._note(request, turn, worker, place.common, now)
        displaced = self._displaced.pop(request.request_id, ())
        return turn, worker, replace(place, displaced=displaced)

    def follow(self, request: SimulatedRequest, begun: tuple[OfferedTurn, WorkerKey, TurnPlace], now: float) -> None:
        """Take note of a turn that another router sent."""
        turn, worker, place = begun
        self.working_set.know(worker, self.cards[worker].limits.total_kv_blocks, place.refill_ms)
        self.working_set.displace(place.displaced)
        self.working_set.begin(turn, worker, place.common, place.prefix, now, place.waited_ms)
        self._note(request, turn, worker, place.common, now)

    def _note(self, request: SimulatedRequest, turn: OfferedTurn, worker: WorkerKey, held: int, now: float) -> None:
        """Have the review know of a turn, by its prompt alone."""
        prompt = replace(turn, blocks=-(-request.isl // self._block_size))
        model, waited_ms = self.cards[worker].model, now - request.arrival_ms
        self.admission.log.begin(worker, request.request_id, prompt, held, model, now, waited_ms)

    def finish(self, request: SimulatedRequest, now: float) -> None:
        turn = self._turn(request)
        if turn is not None:
            self.working_set.end(turn.session, turn.blocks, now)

    def _offer(
        self,
        request: SimulatedRequest,
        turn: OfferedTurn,
        workers: Sequence[WorkerKey],
        overlap: Overlap,
        now: float,
        waited_ms: float,
        is_behind: bool = False,
    ) -> Mapping[WorkerKey, str] | None:
        held = overlap(request)
        prefix = request.path[held - 1] if held else 0
        found = self.working_set.offer(turn, workers, held, prefix, now, waited_ms, is_behind)
        if found.displaced:
            self._displaced[request.request_id] = found.displaced
        if not found.admitted:
            return None
        return dict.fromkeys(found.crowded, CROWDED) if found.crowded else _NONE_CROWDED

    def _turn(self, request: SimulatedRequest) -> OfferedTurn | None:
        session = request.session
        if session is None:
            return None
        blocks = -(-(request.isl + request.osl) // self._block_size)
        parent = (0, session.parent_id) if session.parent_id else None
        return OfferedTurn((0, session.session_id), blocks, 0, parent)


ADMISSIONS = ("sessions",)
"""What may follow a policy behind a plus: whose turns wait while sessions would evict each other."""


def split_admission(name: str) -> tuple[str, str]:
    """Return the policy of ``policy+admission``, and the admission; empty where the name has none."""
    policy, _, admission = name.rpartition("+")
    return (policy, admission) if policy and admission in ADMISSIONS else (name, "")


def line_of(admission: str, block_size: int) -> SessionLine | None:
    """Return where turns wait by an admission; ``None`` for an empty one, by which none waits."""
    return SessionLine(block_size) if admission else None


class SpeedsAt(LearnedSpeeds):
    """Learned speeds that keep the time at which they were asked for last."""

    def __init__(self) -> None:
        super().__init__()
        self.now_ms = 0.0

    def describe_few(self, workers: Sequence[Worker], rows: Sequence[int] | None, now_ms: float) -> FewEngines:
        self.now_ms = now_ms
        return super().describe_few(workers, rows, now_ms)

    def describe(self, workers: Sequence[Worker], rows: IndexArray, now_ms: float) -> Engines:
        self.now_ms = now_ms
        return super().describe(workers, rows, now_ms)


class Sticky:
    """A turn goes to the worker of its session's last one, whatever waits there; ``kv`` chooses the first."""

    compares_numbers = True
    needs_overlap = True

    def __init__(self, kv: KvAware, kept_ms: float = NEVER) -> None:
        """A session that has been silent for ``kept_ms`` has no worker any more."""
        self.name = "sticky" if kept_ms == NEVER else "affinity"
        self._kv = kv
        self._kept_ms = kept_ms
        self._homes: dict[str, tuple[WorkerKey, float]] = {}
        self._speeds = SpeedsAt()

    def observer(self, index: PrefixIndex) -> LearnedSpeeds:
        self._speeds = SpeedsAt()
        return self._speeds

    def choose(self, request: RoutingRequest, candidates: Candidates) -> Choice:
        home, used_ms = self._homes.get(request.session, (None, 0.0))
        now_ms = self._speeds.now_ms
        if home in candidates.workers and now_ms - used_ms <= self._kept_ms:
            choice = Choice(candidates.workers.index(home), "sticky", None, {})
        else:
            choice = self._kv.choose(request, candidates)
        if request.session:
            self._homes[request.session] = candidates.workers[choice.row], now_ms
        return choice


AFFINITY_MS: Final = 60_000.0
"""As vllm-router's ``--kv-aware-session-affinity-ttl-secs 60``."""

PEERS: Final[Mapping[str, Callable[[], Sticky]]] = {
    "sticky": lambda: Sticky(KvAware()),
    "affinity": lambda: Sticky(KvAware(), AFFINITY_MS),
}
"""Policies of other routers that know sessions."""
