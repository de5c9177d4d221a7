"""The turns of the last minutes, and a replay of them with admission by working set and without it.

Rules
    1. The log has the turns of all routers of a pool that are over, with the times at which this router learned of
       them. Its bound is ``TURNS_MAX``: the oldest go.
    2. A replay is a small model of the pool. A worker computes prompts one after the other, small ones first, at the
       pace that routers have learned, while what runs fits into its cache. It evicts what was used longest ago.
    3. A turn comes as long after the turn that it follows as it came then: of its session, its parent or its subagents.
       It goes where it costs least, and its answer takes as long as then. So the replay has the feedback that slow
       answers have: later turns come later.
    4. With admission, turns wait by the rules of ``poolgrid.kernel.routing.working_set`` and
       ``poolgrid.server.router.lane_placer``, in the order in which they came.
    5. Caches are empty at first: turns of the first ``WARM_SHARE`` of the time are not counted.
    6. Of a model with more than ``WORKERS_PLAYED`` workers, one of N workers plays one of N sessions, with their
       subagents. At most the latest ``TURNS_PLAYED`` turns are played.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum, auto
from heapq import heapify, heappop, heappush
from typing import ClassVar, Final, NamedTuple

import msgspec

from poolgrid.kernel.decision.decision import Decision
from poolgrid.kernel.projection.fleet import Worker
from poolgrid.kernel.projection.observers import Observer
from poolgrid.kernel.routing.engine_times import refill_ms
from poolgrid.kernel.routing.kv_policy import AGAIN_WORTH, LEFT_WORTH
from poolgrid.kernel.routing.session_places import WITH_PLACE, turn_of
from poolgrid.kernel.routing.working_set import AGE_MS, SMALL_SHARE, OfferedTurn, SessionKey, WorkingSet
from poolgrid.kernel.wire.card import WorkerCard
from poolgrid.kernel.wire.events import TurnBegan
from poolgrid.kernel.wire.hashing import stable_u64
from poolgrid.kernel.wire.identifiers import Role, WorkerKey
from poolgrid.server.router.lane_placer import is_long

TURNS_MAX: Final = 16_384
"""Turns in the log, 300 bytes each."""
TURNS_PLAYED: Final = 8192
"""Both replays take up to a second of computation, in slices."""
WORKERS_PLAYED: Final = 16
"""Each turn is compared with all of them."""
WARM_SHARE: Final = 0.3
OFFERED_MAX: Final = 16
"""Turns behind the first that are offered a place each time; fewer than at a router, because most are not admitted."""
LOOK_MS: Final = 250.0
"""Turns that wait are offered again no sooner, unless a place has become free."""
LONG_BLOCKS, LONG_MIN, PACE_QUANTILE = 32, 20, 0.25
"""Of so many prompts of so many blocks to compute, a quarter hardly waited for others."""
PACE_TURNS: Final = 2048
"""Latest turns from which paces are taken."""
BASE_QUANTILE: Final = 0.1
"""Of the times to the first token: what the quickest turns took is the least that any takes."""


class PastTurn(msgspec.Struct, eq=False, gc=False):
    """A turn as it was."""

    session: SessionKey
    parent: SessionKey | None
    model: str
    priority: int
    blocks: int
    """Of its prompt."""
    common: int
    """Of them, those that the worker held before the session's first turn there."""
    prefix: int
    """Sequence hash of the last of them; 0 where its parent has them, or there are none."""
    held: int
    """Of its prompt, where it was sent."""
    family: int
    """A number that a session has in common with its subagents."""
    asked_ms: float
    sent_ms: float
    first_ms: float = 0.0
    """When its first token came."""
    ended_ms: float = 0.0
    end_blocks: int = 0
    """Of its prompt and its answer."""


class TurnLog(Observer):
    """Keeps the latest turns that are over."""

    name: ClassVar[str] = "turn_log"

    def __init__(self, places: WorkingSet) -> None:
        """``places`` has learned of a turn before the log does."""
        self.places = places
        self._open: OrderedDict[tuple[WorkerKey, str], PastTurn] = OrderedDict()
        self._past: deque[PastTurn] = deque(maxlen=TURNS_MAX)

    def clear(self) -> None:
        self._open.clear()
        self._past.clear()

    def since(self, asked_ms: float) -> list[PastTurn]:
        """Return the turns that came at this time or later, in the order in which they ended."""
        return [turn for turn in self._past if turn.asked_ms >= asked_ms]

    def begin(
        self,
        worker: WorkerKey,
        dispatch_id: str,
        turn: OfferedTurn,
        held: int,
        model: str,
        now_ms: float,
        waited_ms: float,
    ) -> None:
        """``held`` are the leading blocks of its prompt that the worker has."""
        if (worker, dispatch_id) in self._open:
            return
        session, parent = turn.session, turn.parent
        common, prefix = self.places.origin(session)
        tenant, name = parent or session
        family, asked_ms = stable_u64(f"{tenant} {name}"), now_ms - waited_ms
        self._open[worker, dispatch_id] = PastTurn(
            session, parent, model, turn.priority, turn.blocks, common, prefix, held, family, asked_ms, now_ms
        )
        if len(self._open) > TURNS_MAX:
            self._open.popitem(last=False)

    # -- what happens ----------------------------------------------------------------------------------------------

    def on_chosen(
        self, decision: Decision, card: WorkerCard, dispatch_id: str, path: Sequence[int], now_ms: float
    ) -> None:
        request = decision.request
        if request.session and request.stage in WITH_PLACE:
            held = min(decision.overlap_blocks, len(path))
            self.begin(decision.worker, dispatch_id, turn_of(request), held, card.model, now_ms, decision.queued_ms)

    def on_turn_began(self, worker: Worker, event: TurnBegan, now_ms: float) -> None:
        turn, place = event.turn, event.turn.place
        if place is not None:
            parent = (turn.tenant, turn.parent) if turn.parent else None
            blocks = -(-event.isl // worker.card.block_size)
            offered = OfferedTurn((turn.tenant, turn.session), blocks, place.priority, parent)
            self.begin(worker.key, event.request_id, offered, place.common, worker.card.model, now_ms, place.waited_ms)

    def on_first_token(self, worker: WorkerKey, request_id: str, now_ms: float) -> None:
        turn = self._open.get((worker, request_id))
        if turn is not None and not turn.first_ms:
            turn.first_ms = now_ms

    def on_finished(self, worker: WorkerKey, request_id: str, blocks: int | None, now_ms: float) -> None:
        turn = self._open.pop((worker, request_id), None)
        if turn is not None and turn.first_ms:
            turn.ended_ms, turn.end_blocks = now_ms, max(turn.blocks, blocks or 0)
            self._past.append(turn)


class EngineSize(NamedTuple):
    """What a replay knows of a worker."""

    model: str
    capacity: int
    block_ms: float
    """What computing a block takes."""
    block_size: int


def engine_sizes(places: WorkingSet, cards: Mapping[WorkerKey, WorkerCard]) -> dict[WorkerKey, EngineSize]:
    """Return the workers that compute prompts, at the paces that were learned of them."""
    found: dict[WorkerKey, EngineSize] = {}
    for worker in sorted(cards):
        card = cards[worker]
        capacity = card.limits.total_kv_blocks
        if card.role not in (Role.DECODE, Role.ENCODE) and capacity:
            found[worker] = EngineSize(
                card.model, capacity, (places.refill_ms(worker) or refill_ms(card)) / capacity, card.block_size
            )
    return found


class CacheModel:
    """One worker of a replay."""

    def __init__(self, key: WorkerKey, size: EngineSize) -> None:
        self.key = key
        self.size = size
        self.behind_ms = 0.0
        """What prompts that were sent to it and are not computed take."""
        self.is_computing = False
        self.small: deque[int] = deque()
        self.large: deque[int] = deque()
        """Turns that were sent to it, by number."""
        self._used = self._pinned = 0
        self._idle: OrderedDict[SessionKey | int, int] = OrderedDict()
        """Blocks of sessions and of what they share, by last use."""
        self._running: dict[SessionKey, list[int]] = {}
        """Blocks and turns that run."""

    def held(self, turn: PastTurn) -> int:
        """Return the leading blocks of a prompt that it holds."""
        common = turn.common
        if turn.prefix:
            common = min(common, self._idle.get(turn.prefix, 0))
        elif turn.parent is None or not self._of(turn.parent):
            common = 0
        return common if common < turn.common else min(turn.blocks, common + self._of(turn.session))

    def fits(self, turn: PastTurn) -> bool:
        """Return whether a turn has room together with those that run."""
        more = turn.end_blocks - turn.common - self._running.get(turn.session, (0, 0))[0]
        return not self._running or self._pinned + more <= self.size.capacity

    def begin(self, turn: PastTurn) -> None:
        session, own = turn.session, max(0, turn.end_blocks - turn.common)
        run = self._running.get(session)
        if run is None:
            run = self._running[session] = [self._idle.pop(session, 0), 0]
            self._pinned += run[0]
        more = max(0, own - run[0])
        run[0] += more
        run[1] += 1
        self._pinned += more
        self._used += more
        if turn.prefix:
            self._used += turn.common - self._idle.get(turn.prefix, 0)
            self._idle[turn.prefix] = turn.common
        self._touch(turn)
        self._evict()

    def end(self, turn: PastTurn) -> None:
        run = self._running[turn.session]
        run[1] -= 1
        if not run[1]:
            del self._running[turn.session]
            self._pinned -= run[0]
            self._idle[turn.session] = run[0]
            self._touch(turn)

    def _of(self, session: SessionKey) -> int:
        run = self._running.get(session)
        return self._idle.get(session, 0) if run is None else run[0]

    def _touch(self, turn: PastTurn) -> None:
        """Keep what a turn begins with at least as long as what follows."""
        for shared in (turn.parent, turn.prefix):
            if shared is not None and shared in self._idle:
                self._idle.move_to_end(shared)

    def _evict(self) -> None:
        over = self._used - self.size.capacity
        while over > 0 and self._idle:
            oldest, blocks = next(iter(self._idle.items()))
            lost = min(blocks, over)
            if lost == blocks:
                del self._idle[oldest]
            else:
                self._idle[oldest] = blocks - lost
            self._used -= lost
            over -= lost


class ReplayTotals(msgspec.Struct):
    """What came of a replay."""

    turns: int = 0
    """That were counted."""
    ttft_ms: float = 0.0
    """With what they waited: the mean over sessions of the mean over a session's turns, of sessions with several."""
    computed_tokens: int = 0
    waited: int = 0
    """Turns that waited for a place."""


class Moment(IntEnum):
    """What happens in a replay; of one time, in this order."""

    ARRIVES = auto()
    ENDS = auto()
    LOOK = auto()
    COMPUTED = auto()


class TurnReplay:
    """Plays turns once."""

    def __init__(
        self, turns: Sequence[PastTurn], sizes: Mapping[WorkerKey, EngineSize], places: WorkingSet | None
    ) -> None:
        """``turns`` are over, in the order of their ends. ``places`` is an empty working set, or ``None`` to play them
        without admission."""
        self._workers, self._shares = _sample(_at_pace(sizes, turns[-PACE_TURNS:]))
        self._given = turns
        self._turns: list[PastTurn] = []
        self._offered: list[OfferedTurn] = []
        self._places = places
        if places is not None:
            for each in self._workers.values():
                for worker in each:
                    capacity = worker.size.capacity
                    places.know(worker.key, capacity, round(capacity * worker.size.block_ms))
        self._moments: list[tuple[float, Moment, int]] = []
        self._followers: dict[int, list[tuple[int, float]]] = {}
        """By turn, those that come a pause after it."""
        self._arrived_ms = [0.0] * len(turns)
        self._own_ms = [0.0] * len(turns)
        self._where: dict[int, CacheModel] = {}
        self._known: set[SessionKey] = set()
        """Sessions that had a turn."""
        self._waiting: list[int] = []
        self._tried = (-1, 0.0)
        """Changes of the working set when those that wait were offered places, and when to offer again without any."""
        self._ttfts_ms: dict[SessionKey, list[float]] = {}
        self._look_ms = 0.0
        """When they are offered again at the latest."""
        self._counted_ms = 0.0
        self.totals = ReplayTotals()

    def play(self) -> Iterator[None]:
        """Play all turns; each step is short."""
        turns, totals = self._turns, self.totals
        yield from self._sample_turns()
        if not turns:
            return
        self._counted_ms = turns[0].asked_ms + WARM_SHARE * (turns[-1].asked_ms - turns[0].asked_ms)
        yield from self._link()
        while self._moments:
            now_ms, moment, number = heappop(self._moments)
            if moment is Moment.ARRIVES:
                self._arrive(number, now_ms)
            elif moment is Moment.COMPUTED:
                self._computed(number, now_ms)
            elif moment is Moment.ENDS:
                self._end(number, now_ms)
            if self._waiting:
                self._place(now_ms)
            yield
        counted = [each.first_ms - each.sent_ms for each in turns[-PACE_TURNS:] if each.asked_ms >= self._counted_ms]
        base_ms = sorted(counted)[int(BASE_QUANTILE * len(counted))]
        means_ms = [sum(each) / len(each) for each in self._ttfts_ms.values() if len(each) > 1]
        totals.ttft_ms = base_ms + sum(means_ms) / max(1, len(means_ms))

    def _sample_turns(self) -> Iterator[None]:
        """Find the turns that are played."""
        for turn in reversed(self._given):
            share = self._shares.get(turn.model, 0)
            if share and not turn.family % share:
                self._turns.append(turn)
                if len(self._turns) == TURNS_PLAYED:
                    break
            yield
        self._turns.sort(key=lambda each: each.asked_ms)

    def _link(self) -> Iterator[None]:
        """Find which turn each one follows, and by how long a pause."""
        ends: list[tuple[float, int]] = []
        latest: dict[SessionKey, int] = {}
        for number, turn in enumerate(self._turns):
            self._offered.append(OfferedTurn(turn.session, turn.blocks, turn.priority, turn.parent))
            while ends and ends[0][0] <= turn.asked_ms:
                _, over = heappop(ends)
                ended = self._turns[over]
                latest[ended.session] = over
                if ended.parent is not None:
                    latest[ended.parent] = over
            heappush(ends, (turn.ended_ms, number))
            before = latest.get(turn.session)
            if before is None and turn.parent is not None:
                before = latest.get(turn.parent)
            if before is None:
                self._moments.append((turn.asked_ms, Moment.ARRIVES, number))
            else:
                pause_ms = turn.asked_ms - self._turns[before].ended_ms
                self._followers.setdefault(before, []).append((number, pause_ms))
            yield
        heapify(self._moments)

    # -- moments ---------------------------------------------------------------------------------------------------

    def _arrive(self, number: int, now_ms: float) -> None:
        self._arrived_ms[number] = now_ms
        is_behind = bool(self._waiting) and is_long(self._arrived_ms[self._waiting[0]], now_ms)
        if not self._offer(number, now_ms, 0.0, is_behind):
            self._waiting.append(number)
            self.totals.waited += 1
            self._tried = (-1, 0.0)

    def _computed(self, number: int, now_ms: float) -> None:
        turn, worker = self._turns[number], self._where[number]
        worker.is_computing = False
        worker.behind_ms -= self._own_ms[number]
        heappush(self._moments, (now_ms + turn.ended_ms - turn.first_ms, Moment.ENDS, number))
        self._compute(worker, now_ms)

    def _end(self, number: int, now_ms: float) -> None:
        turn, worker = self._turns[number], self._where.pop(number)
        worker.end(turn)
        if self._places is not None:
            self._places.end(turn.session, turn.end_blocks, now_ms)
        for follower, pause_ms in self._followers.pop(number, ()):
            heappush(self._moments, (now_ms + pause_ms, Moment.ARRIVES, follower))
        self._compute(worker, now_ms)

    # -- workers ---------------------------------------------------------------------------------------------------

    def _send(self, number: int, crowded: Sequence[WorkerKey], now_ms: float) -> None:
        """Send a turn to the worker where it costs least."""
        turn = self._turns[number]
        workers = self._workers[turn.model]
        workers = [each for each in workers if each.key not in crowded] or workers
        held = [each.held(turn) for each in workers]
        most, worth = max(held), LEFT_WORTH if turn.session in self._known else AGAIN_WORTH
        self._known.add(turn.session)
        worker, has = min(
            zip(workers, held, strict=True),
            key=lambda each: (
                each[0].behind_ms + (turn.blocks - each[1] + worth * (most - each[1])) * each[0].size.block_ms
            ),
        )
        own_ms = self._own_ms[number] = max(1, turn.blocks - has) * worker.size.block_ms
        worker.behind_ms += own_ms
        self._where[number] = worker
        is_small = turn.blocks <= SMALL_SHARE * worker.size.capacity
        (worker.small if is_small else worker.large).append(number)
        if self._places is not None:
            waited_ms = now_ms - self._arrived_ms[number]
            self._places.begin(self._offered[number], worker.key, turn.common, turn.prefix, now_ms, waited_ms)
        self._compute(worker, now_ms)

    def _compute(self, worker: CacheModel, now_ms: float) -> None:
        """Begin with the next prompt of a worker, if it can."""
        queue = worker.small or worker.large
        if worker.is_computing or not queue or not worker.fits(self._turns[queue[0]]):
            return
        number = queue.popleft()
        turn = self._turns[number]
        computed = max(1, turn.blocks - worker.held(turn))
        worker.begin(turn)
        worker.is_computing = True
        first_ms = now_ms + computed * worker.size.block_ms
        if turn.asked_ms >= self._counted_ms:
            self.totals.turns += 1
            self._ttfts_ms.setdefault(turn.session, []).append(first_ms - self._arrived_ms[number])
            self.totals.computed_tokens += computed * worker.size.block_size
        heappush(self._moments, (first_ms, Moment.COMPUTED, number))

    # -- places ----------------------------------------------------------------------------------------------------

    def _offer(self, number: int, now_ms: float, waited_ms: float, is_behind: bool = False) -> bool:
        """Send a turn that may go now; return whether it went."""
        turn, places = self._turns[number], self._places
        if places is None or (not is_behind and places.is_free(turn.blocks)):
            self._send(number, (), now_ms)
            return True
        workers = self._workers[turn.model]
        held = max(each.held(turn) for each in workers)
        prefix = turn.prefix if held >= turn.common else 0
        keys = [each.key for each in workers]
        found = places.offer(self._offered[number], keys, held, prefix, now_ms, waited_ms, is_behind)
        if found.admitted:
            self._send(number, found.crowded, now_ms)
        return found.admitted

    def _place(self, now_ms: float) -> None:
        """Offer places to those that wait, if any may be free."""
        places, waiting = self._places, self._waiting
        assert places is not None, "only with it any wait"
        if self._tried[0] == places.changes and now_ms < self._tried[1]:
            return
        while waiting:
            is_head_long = is_long(self._arrived_ms[waiting[0]], now_ms)
            candidates = waiting[: 1 if is_head_long else OFFERED_MAX]
            went = next((each for each in candidates if self._offer(each, now_ms, self._waited_ms(each, now_ms))), None)
            if went is None:
                due_ms = min(places.next_ms(), self._arrived_ms[waiting[0]] + AGE_MS)
                due_ms = max(due_ms, now_ms + LOOK_MS)
                self._tried = places.changes, due_ms
                if not now_ms < self._look_ms <= due_ms:
                    self._look_ms = due_ms
                    heappush(self._moments, (due_ms, Moment.LOOK, -1))
                return
            waiting.remove(went)

    def _waited_ms(self, number: int, now_ms: float) -> float:
        return max(1.0, now_ms - self._arrived_ms[number])


def _at_pace(sizes: Mapping[WorkerKey, EngineSize], turns: Sequence[PastTurn]) -> dict[WorkerKey, EngineSize]:
    """Return the workers at the pace at which long prompts were computed, answers of others between them."""
    taken_ms: dict[str, list[float]] = {}
    for turn in turns:
        computed = turn.blocks - turn.held
        if computed >= LONG_BLOCKS:
            taken_ms.setdefault(turn.model, []).append((turn.first_ms - turn.sent_ms) / computed)
    least_ms = {
        model: sorted(found)[int(PACE_QUANTILE * len(found))]
        for model, found in taken_ms.items()
        if len(found) >= LONG_MIN
    }
    return {
        key: size._replace(block_ms=max(size.block_ms, least_ms.get(size.model, 0.0))) for key, size in sizes.items()
    }


def _sample(sizes: Mapping[WorkerKey, EngineSize]) -> tuple[dict[str, list[CacheModel]], dict[str, int]]:
    """Return the workers of each model that are played, and for how many of its workers each stands."""
    by_model: dict[str, list[WorkerKey]] = {}
    for key in sorted(sizes):
        by_model.setdefault(sizes[key].model, []).append(key)
    shares = {model: -(-len(keys) // WORKERS_PLAYED) for model, keys in by_model.items()}
    workers = {
        model: [CacheModel(key, sizes[key]) for key in keys[:: shares[model]]] for model, keys in by_model.items()
    }
    return workers, shares
