"""Speed factor of each worker: real over predicted step times, learned from its first tokens.

Rules
    1. A choice leaves what was predicted for it at pace 1: until its first token, the queue included, and for its own
       prompt alone. Its first token shows how long it really took. A worker's pace is the ratio of the two sums, in
       which old observations count less (``KEPT``) and so do all when time passes (``MEMORY_MS``).
    2. A pace is relative to the load under which it was learned: engines that are full delay first tokens for reasons
       that no step time has. An engine with nothing to do has a pace of its own, from choices that found it so.
    3. A worker begins with ``PRIOR_MS`` worth of the pool's pace, which its observations replace, and what time takes
       from these is filled up with it again. So a worker without recent requests returns to the pool's pace,
       and a slow worker is tried again. The pool's own begins with 1, the value of the cards.
    4. A worker that does not answer gives no observation, and must count as slow all the same. It is never taken to be
       faster than its oldest request without a first token allows, once that is late beyond doubt.
    5. One observation changes a pace by a factor of ``INFLUENCE_MAX`` at most: a first token can be late for reasons
       that are not its engine's, and a worker taken for slow gets few requests to show otherwise. One that is reported
       behind a replay of cache events teaches nothing, because its time is that of its reading.
    6. A request that ends without a first token teaches nothing, unless it had waited longer than was predicted.
    7. It is a fold like the projection it belongs to: choices, events and their times decide, nothing else. All
       operations are those of IEEE, so the same inputs give the same bits on every machine.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Final

import msgspec
import numpy as np

from poolgrid.kernel.decision.decision import Decision
from poolgrid.kernel.decision.policy import IndexArray
from poolgrid.kernel.projection.fleet import Worker
from poolgrid.kernel.projection.observers import IsOpen, Observer
from poolgrid.kernel.routing.engine_times import EngineColumns, Engines, FewEngines
from poolgrid.kernel.wire.card import WorkerCard
from poolgrid.kernel.wire.identifiers import WorkerId, WorkerKey

GROUPS_MAX: Final = 64
"""Groups of workers whose card times are kept."""

_POOL: Final = WorkerKey(WorkerId(""), 0)
"""Whose pace is that of the pool; no worker has an empty name."""

AWAITED_MAX = 16_384
"""Chosen requests whose first token is awaited; one more is not learned from."""

KEPT = 0.917
"""What an observation counts after the next one; after eight it counts half, so a busy worker is known in seconds."""

INFLUENCE_MAX = 1.5
"""A worker that is ten times slower than predicted is known to be after six first tokens. The first of them tells it
apart (``CERTAIN``)."""

MEMORY_MS = 120_000.0
"""Time after which what was observed counts half: long enough that a worker with little traffic stays known."""

ARRIVALS_MEMORY_MS = 30_000.0
"""Over what time the rate of requests is an average."""

PRIOR_MS = 500.0
"""How much the pool's pace counts, in predicted milliseconds: a handful of requests outweighs it."""

NOISE, CERTAIN = 1.2, 1.5
"""Below the first a worker counts as equal to the pool, above the second its own pace counts in full. Single times
are off by a tenth, and treating equal workers as different sends prompts away from where they are cached."""

ROUNDED = 1.0 + 1e-9
"""What a quotient may be off by."""

GRACE_MS = 250.0
"""How much later than predicted a first token may come before it counts as late: a full step that had begun."""


class Awaited(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A choice whose first token is awaited."""

    chosen_ms: float
    unit_ms: float
    """Predicted time to its first token at pace 1, from the choice on."""
    own_ms: float
    """The part of it that computes its own prompt."""
    pace: float
    """With which the choice reckoned."""
    is_idle: bool = False
    """Whether the engine had nothing else to do."""


class Arrivals(msgspec.Struct, array_like=True):
    """Requests that were chosen for of late; those of long ago count less."""

    count: float = 0.0
    own_ms: float = 0.0
    """Sum of what their prompts take, at pace 1."""
    last_ms: float = 0.0

    def add(self, own_ms: float, now_ms: float) -> None:
        kept = _remembered(now_ms - self.last_ms, ARRIVALS_MEMORY_MS)
        self.count = self.count * kept + 1.0
        self.own_ms = self.own_ms * kept + own_ms
        self.last_ms = now_ms

    def load(self, now_ms: float) -> float:
        return self.count / (ARRIVALS_MEMORY_MS + max(0.0, now_ms - self.last_ms))


class Observations(msgspec.Struct):
    """Observed and predicted times until first tokens."""

    observed_ms: float = 0.0
    unit_ms: float = 0.0
    """What was predicted, at pace 1, for what was observed."""
    seen_ms: float = 0.0
    """When the last observation was made."""

    def add(self, observed_ms: float, unit_ms: float, prior: float, now_ms: float) -> None:
        """Take an observation, after what time has made of those before, as far as one may change the ratio."""
        kept = _remembered(now_ms - self.seen_ms)
        filled_ms = PRIOR_MS * (1.0 - kept)
        known_ms, known_unit_ms = self.observed_ms * kept + filled_ms * prior, self.unit_ms * kept + filled_ms
        self.unit_ms = known_unit_ms * KEPT + unit_ms
        as_before_ms = known_ms * self.unit_ms / known_unit_ms
        seen_ms = known_ms * KEPT + observed_ms
        self.observed_ms = min(max(seen_ms, as_before_ms / INFLUENCE_MAX), as_before_ms * INFLUENCE_MAX)
        self.seen_ms = now_ms

    def ratio(self, prior: float, now_ms: float) -> float:
        """Return the ratio of the sums; what time has taken from them is filled up with ``prior``."""
        # What is kept is MEMORY_MS / (MEMORY_MS + age), what is filled up the rest of PRIOR_MS.
        filled = PRIOR_MS * max(0.0, now_ms - self.seen_ms)
        return (self.observed_ms * MEMORY_MS + filled * prior) / (self.unit_ms * MEMORY_MS + filled)


class WorkerPace(Observations):
    """What is known of one worker."""

    served_ms: float = 0.0
    """Since when the engine is at the oldest of ``awaited``: the last first token."""
    awaited: dict[str, Awaited] = {}
    """By dispatch, in order of choice."""
    recent: Arrivals = msgspec.field(default_factory=Arrivals)
    """Requests that it was chosen for."""
    idle: Observations = msgspec.field(default_factory=Observations)
    """Of choices for which the engine had nothing else to do."""


class SpeedEntry(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What was learned of the speed of one worker, or of the pool as a whole."""

    worker_id: str
    """Empty for the pool."""
    dp_rank: int
    observed_ms: float
    unit_ms: float
    seen_ms: float
    served_ms: float
    awaited: list[tuple[str, Awaited]]
    recent: Arrivals = msgspec.field(default_factory=Arrivals)
    idle: tuple[float, float, float] = (PRIOR_MS, PRIOR_MS, 0.0)
    """The fields of ``Observations``."""


class SpeedsState(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What a router had learned of its workers' speeds, and of how requests come, for a checkpoint."""

    arrivals: Arrivals
    workers: list[SpeedEntry]
    """The pool's as the first."""


def _remembered(age_ms: float, memory_ms: float = MEMORY_MS) -> float:
    """Return how much of what was seen counts after a time; a quotient, because powers differ between machines."""
    return memory_ms / (memory_ms + max(0.0, age_ms))


def _told_apart(pace: float, prior: float) -> float:
    """Return a worker's pace, or the pool's as far as the two cannot be distinguished."""
    times = pace / prior if pace > prior else prior / pace
    if times >= CERTAIN:
        return pace
    if times <= NOISE:
        return prior
    times = 1.0 + (CERTAIN - 1.0) * (times - NOISE) / (CERTAIN - NOISE)
    return prior * times if pace > prior else prior / times


class LearnedSpeeds(Observer):
    """The paces of all workers of a pool."""

    name = "paces"

    def __init__(self) -> None:
        self._workers: dict[WorkerKey, WorkerPace] = {}
        self._pool = WorkerPace(PRIOR_MS, PRIOR_MS, idle=Observations(PRIOR_MS, PRIOR_MS))
        self._arrivals = Arrivals()
        self._awaited = 0
        self._latest_ms = 0.0
        """Times of the moments that it observed."""
        self._columns: dict[int, tuple[Sequence[Worker], EngineColumns]] = {}
        """Card times of groups of workers, by the identity of the group."""

    # -- choices and facts -----------------------------------------------------------------------------------------

    def on_chosen(
        self, decision: Decision, card: WorkerCard, dispatch_id: str, path: Sequence[int], now_ms: float
    ) -> None:
        forecast = decision.choice.forecast
        if forecast is not None:
            pace = forecast.pace
            self.expect(decision.worker, dispatch_id, forecast.expected_ms / pace, forecast.own_ms, pace, now_ms)

    def expect(
        self, worker: WorkerKey, dispatch_id: str, unit_ms: float, own_ms: float, pace: float, now_ms: float
    ) -> None:
        """Await the first token of a choice that reckoned with a pace; both predictions are at pace 1."""
        self._latest_ms = now_ms
        known = self._workers.get(worker)
        if known is None:
            idle = Observations(PRIOR_MS * self._pool.idle.ratio(1.0, now_ms), PRIOR_MS, now_ms)
            pace_ms = PRIOR_MS * self.pool_pace(now_ms)
            known = self._workers[worker] = WorkerPace(pace_ms, PRIOR_MS, now_ms, now_ms, idle=idle)
        self._arrivals.add(own_ms, now_ms)
        known.recent.add(own_ms, now_ms)
        if self._awaited >= AWAITED_MAX and dispatch_id not in known.awaited:
            return
        self._awaited += dispatch_id not in known.awaited
        known.awaited[dispatch_id] = Awaited(now_ms, unit_ms, own_ms, pace, unit_ms <= own_ms * ROUNDED)

    def on_first_token(self, worker: WorkerKey, dispatch_id: str, now_ms: float) -> None:
        """Learn from a first token; one that was not chosen here teaches nothing but that the engine is at the next."""
        self._latest_ms = now_ms
        known = self._workers.get(worker)
        if known is None:
            return
        known.served_ms = now_ms
        awaited = known.awaited.pop(dispatch_id, None)
        if awaited is not None:
            self._awaited -= 1
            self._learn(known, awaited, now_ms)
            if self.report_ttft is not None:
                self.report_ttft(dispatch_id, awaited.unit_ms * awaited.pace, now_ms - awaited.chosen_ms)

    def on_untimed_token(self, worker: WorkerKey, request_id: str) -> None:
        """Await a first token no longer that was read at a time that says nothing of when it came."""
        known = self._workers.get(worker)
        if known is not None and known.awaited.pop(request_id, None) is not None:
            self._awaited -= 1

    def on_released(self, worker: WorkerKey, request_id: str, blocks: int | None) -> None:
        """Await a request no longer that had no first token."""
        known = self._workers.get(worker)
        if known is None or request_id not in known.awaited:
            return
        now_ms, awaited = self._latest_ms, known.awaited.pop(request_id)
        self._awaited -= 1
        waited_ms = now_ms - awaited.chosen_ms
        if waited_ms > GRACE_MS and waited_ms > awaited.unit_ms * self._ratio(known, now_ms) + GRACE_MS:
            self._learn(known, awaited, now_ms)

    def on_finished(self, worker: WorkerKey, request_id: str, blocks: int | None, now_ms: float) -> None:
        self.on_released(worker, request_id, blocks)

    def on_expired(self, is_open: IsOpen) -> None:
        """Await no request that the ledger does not have any more: no message about it will come."""
        for worker, known in self._workers.items():
            for dispatch_id in [each for each in known.awaited if not is_open(worker, each)]:
                del known.awaited[dispatch_id]
                self._awaited -= 1

    def on_left(self, worker: WorkerKey) -> None:
        known = self._workers.pop(worker, None)
        if known is not None:
            self._awaited -= len(known.awaited)

    def on_snapshot(self, workers: Collection[WorkerKey], is_open: IsOpen) -> None:
        """Continue after a snapshot, which has no first tokens: await none, keep the workers that are present."""
        for worker in [each for each in self._workers if each not in workers]:
            self.on_left(worker)
        self.on_expired(lambda worker, dispatch_id: False)

    def _learn(self, known: WorkerPace, awaited: Awaited, now_ms: float) -> None:
        observed_ms = max(0.0, now_ms - awaited.chosen_ms)
        unit_ms, pool = awaited.unit_ms, self._pool
        if awaited.is_idle:
            known.idle.add(observed_ms, unit_ms, pool.idle.ratio(1.0, now_ms), now_ms)
            pool.idle.add(observed_ms, unit_ms, 1.0, now_ms)
        known.add(observed_ms, unit_ms, self.pool_pace(now_ms), now_ms)
        pool.add(observed_ms, unit_ms, 1.0, now_ms)

    # -- estimates -------------------------------------------------------------------------------------------------

    def pool_pace(self, now_ms: float) -> float:
        return self._pool.ratio(1.0, now_ms)

    def arrivals(self, now_ms: float) -> tuple[float, float]:
        """Return how many requests come per millisecond, and what a prompt takes of them at pace 1, on average."""
        known = self._arrivals
        return known.load(now_ms), known.own_ms / known.count if known.count else 0.0

    def _ratio(self, known: WorkerPace, now_ms: float) -> float:
        return known.ratio(self.pool_pace(now_ms), now_ms)

    def believed(
        self, workers: Sequence[WorkerKey], now_ms: float
    ) -> tuple[tuple[float, float, float, float, float], ...]:
        """Return each worker's pace, the milliseconds at pace 1 of its queue that are done, how many it awaits, the
        requests that it was sent per millisecond, times its pace, and its pace while it has nothing to do.

        The engine has been at its oldest request since that was chosen, or since the last first token.
        """
        prior, idle_prior = self.pool_pace(now_ms), self._pool.idle.ratio(1.0, now_ms)
        believed = []
        for known in map(self._workers.get, workers):
            if known is None:
                believed.append((prior, 0.0, 0.0, 0.0, idle_prior))
                continue
            pace = _told_apart(known.ratio(prior, now_ms), prior)
            done_ms, waiting, awaited = 0.0, 0.0, known.awaited
            if awaited:
                waiting = float(len(awaited))
                oldest = next(iter(awaited.values()))
                age_ms = now_ms - oldest.chosen_ms
                if age_ms > CERTAIN * pace * (oldest.unit_ms + GRACE_MS):
                    pace = age_ms / (oldest.unit_ms + GRACE_MS)
                since_ms = max(oldest.chosen_ms, known.served_ms)
                done_ms = min(max(0.0, now_ms - since_ms) / pace, oldest.own_ms)
            idle_pace = pace if awaited else _told_apart(known.idle.ratio(idle_prior, now_ms), idle_prior)
            believed.append((pace, done_ms, waiting, known.recent.load(now_ms) * pace, idle_pace))
        return tuple(believed)

    def _columns_of(self, workers: Sequence[Worker]) -> EngineColumns:
        known = self._columns.get(id(workers))
        if known is None or known[0] is not workers:
            if len(self._columns) >= GROUPS_MAX:
                self._columns.clear()
            known = self._columns[id(workers)] = (workers, EngineColumns.of(workers))
        return known[1]

    def describe(self, workers: Sequence[Worker], rows: IndexArray, now_ms: float) -> Engines:
        columns = self._columns_of(workers)
        believed = np.array(self.believed([columns.keys[row] for row in rows], now_ms), np.float64).reshape(-1, 5)
        paces, done_ms, waiting, loads, idle_paces = believed.T
        choices_per_ms, typical_ms = self.arrivals(now_ms)
        return Engines(
            columns.curves,
            columns.curve[rows],
            columns.step_tokens[rows],
            columns.total_blocks[rows],
            paces,
            done_ms,
            waiting,
            choices_per_ms,
            typical_ms,
            loads,
            idle_paces,
        )

    def describe_few(self, workers: Sequence[Worker], rows: Sequence[int] | None, now_ms: float) -> FewEngines:
        columns = self._columns_of(workers)
        keys, kinds = columns.keys, columns.kinds
        if rows is not None:
            keys, kinds = tuple(keys[row] for row in rows), tuple(kinds[row] for row in rows)
        return FewEngines(kinds, self.believed(keys, now_ms), *self.arrivals(now_ms))

    # -- for a state that is resumed elsewhere ---------------------------------------------------------------------

    def checkpoint(self) -> SpeedsState:
        """Return what is known of requests, of the pool (``served_ms`` is the latest moment), and of workers."""
        pool = msgspec.structs.replace(self._pool, served_ms=self._latest_ms)
        return SpeedsState(
            msgspec.structs.replace(self._arrivals),
            [
                SpeedEntry(
                    worker.worker_id,
                    worker.dp_rank,
                    pace.observed_ms,
                    pace.unit_ms,
                    pace.seen_ms,
                    pace.served_ms,
                    list(pace.awaited.items()),
                    msgspec.structs.replace(pace.recent),
                    msgspec.structs.astuple(pace.idle),
                )
                for worker, pace in [(_POOL, pool), *self._workers.items()]
            ],
        )

    def restore(self, state: Any) -> None:
        known = msgspec.convert(state, SpeedsState)
        if not known.workers:
            return
        paces = {
            WorkerKey(WorkerId(each.worker_id), each.dp_rank): WorkerPace(
                each.observed_ms,
                each.unit_ms,
                each.seen_ms,
                each.served_ms,
                dict(each.awaited),
                each.recent,
                Observations(*each.idle),
            )
            for each in known.workers
        }
        self._arrivals = msgspec.structs.replace(known.arrivals)
        self._pool = paces.pop(_POOL)
        self._latest_ms = self._pool.served_ms
        self._workers = paces
        self._awaited = sum(len(each.awaited) for each in paces.values())
