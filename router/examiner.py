"""Collects the evidence of ``poolgrid.server.diagnosis`` while a projection is folded: promised against reported reuse.

It only observes: no decision depends on it, so it is in no checkpoint, and a replay attaches one of its own. It gets
of a start in the order of the worker's events, when the index stands where the engine stood.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from poolgrid.kernel.decision.decision import Decision
from poolgrid.kernel.projection.fleet import Worker
from poolgrid.kernel.projection.projection import Projection, Promise
from poolgrid.kernel.routing.selector import PROMPT_STAGES
from poolgrid.kernel.wire.events import LoadReported, RequestStarted
from poolgrid.kernel.wire.identifiers import StreamState, WorkerKey
from poolgrid.server.diagnosis.rules import (
    WINDOW,
    Observation,
    ReuseVerdict,
    UncachedSplit,
    WorkerEvidence,
    diagnose,
    split_uncached,
)

HEAD_BLOCKS: Final = 32
"""Leading blocks of a prompt that are looked up later: enough to see whether its blocks were announced."""

ANNOUNCED_AFTER_MS: Final = 500
"""Events of a prompt are with the router by then; they take milliseconds (benchmarks, event plane)."""

LEAST_HEADS: Final = 8
"""Prompts in a burst after which the oldest is looked up although it is young."""

HISTORIES_MAX: Final = 4096
"""Workers whose requests are kept, gone ones included; beyond it those that are gone are forgotten."""

JUDGED_EVERY: Final = 4
"""Requests after which a verdict is made again for lists and metrics; making one takes about 0.1 ms."""

DecisionOf = Callable[[str], Decision | None]
"""Returns the decision of a dispatch, while it is kept."""

OnReuse = Callable[[Decision, int], None]
"""Takes how many tokens of a decision's prompt its worker reused, as reported."""


class _History:
    """What is kept of one worker."""

    __slots__ = (
        "agreed",
        "cleared",
        "epoch",
        "epochs",
        "final",
        "foreign",
        "heads",
        "judged",
        "load",
        "observations",
        "own",
        "steps_fell",
        "verdict",
    )

    def __init__(self, epoch: int) -> None:
        self.observations: deque[Observation] = deque(maxlen=WINDOW)
        self.heads: deque[tuple[int, Sequence[int]]] = deque(maxlen=WINDOW)
        """When each prompt was chosen for, and its first blocks."""
        self.epoch = epoch
        self.epochs = 1
        self.load: LoadReported | None = None
        self.steps_fell = False
        self.agreed = self.own = self.foreign = 0
        self.cleared: int | None = None
        """Own requests when it last took back all that it had reported."""
        self.final: WorkerEvidence | None = None
        """What was known of a worker when it left."""
        self.judged: object = None
        """The state of the evidence that ``verdict`` is about."""
        self.verdict: ReuseVerdict | None = None


class Examiner:
    """The evidence on all workers of one projection."""

    def __init__(self, projection: Projection, decision_of: DecisionOf, on_reuse: OnReuse | None = None) -> None:
        self._projection = projection
        self._decision_of = decision_of
        self._on_reuse = on_reuse
        self._histories: dict[WorkerKey, _History] = {}
        projection.examiner = self

    # -- what happens ----------------------------------------------------------------------------------------------

    def started(self, key: WorkerKey, event: RequestStarted, promised: Promise | None) -> None:
        """A worker began a request, perhaps of another router."""
        decision = self._decision_of(event.request_id)
        if decision is not None and not event.cached_later and self._on_reuse is not None:
            self._on_reuse(decision, event.cached_tokens)
        worker = self._projection.fleet.workers.get(key)
        if worker is None:
            return
        history = self._history(worker)
        if decision is None:
            history.foreign += 1
            return
        history.own += 1
        if decision.request.stage in PROMPT_STAGES:
            if decision.reported_isl is None:
                decision.reported_isl = event.isl
            if promised is not None:
                self._compare(worker, history, decision, event.request_id, promised, event.cached_tokens)

    def finished(self, key: WorkerKey, request_id: str, promised: Promise | None, reported_tokens: int) -> None:
        """A worker ended a request and reported only then how much of its prompt it reused."""
        decision = self._decision_of(request_id)
        if decision is None:
            return
        if self._on_reuse is not None:
            self._on_reuse(decision, reported_tokens)
        worker = self._projection.fleet.workers.get(key)
        if worker is not None and promised is not None and decision.request.stage in PROMPT_STAGES:
            self._compare(worker, self._history(worker), decision, request_id, promised, reported_tokens)

    def _compare(
        self,
        worker: Worker,
        history: _History,
        decision: Decision,
        dispatch_id: str,
        promised: Promise,
        reported_tokens: int,
    ) -> None:
        request, now_ms = decision.request, decision.time_ms
        path, promised_tokens = promised
        isl, block_size = request.isl, request.block_size
        if promised_tokens > isl:
            promised_tokens = isl
        promised_blocks = min(len(path), promised_tokens // block_size) if promised_tokens else 0
        observation = Observation(
            dispatch_id,
            now_ms,
            isl,
            decision.reported_isl,
            promised_tokens,
            reported_tokens,
            decision.seen_tokens,
            "media" if request.media else request.domain,
            path[promised_blocks - 1] if promised_blocks else 0,
        )
        if promised_tokens != reported_tokens and abs(promised_tokens - reported_tokens) > block_size:
            observation.announced = self._announced(worker.key, history, now_ms)
        elif promised_tokens and reported_tokens:
            history.agreed += 1
        history.observations.append(observation)
        history.heads.append((now_ms, path if len(path) <= HEAD_BLOCKS else path[:HEAD_BLOCKS]))

    def cleared(self, worker: WorkerKey) -> None:
        """A worker reported that nothing it said before holds any more."""
        history = self._histories.get(worker)
        if history is not None:
            history.cleared = history.own

    def left(self, worker: WorkerKey) -> None:
        """A worker is about to leave; what the index holds of it is still known."""
        history = self._histories.get(worker)
        if history is not None and worker in self._projection.fleet.workers:
            history.final = self.evidence(worker)

    def gateway_reported(
        self, decision: Decision, path: Sequence[int], reported_tokens: int, reported_isl: int | None
    ) -> None:
        """Take the usage of an engine that answers past this router: reused tokens and prompt length."""
        decision.reported_isl = reported_isl
        worker = self._projection.fleet.workers.get(decision.worker)
        if worker is None or worker.requests_total:
            return  # workers that report requests are compared at their starts, or at their ends
        history, request = self._history(worker), decision.request
        history.own += 1
        if request.stage in PROMPT_STAGES:
            promised = (path, decision.overlap_blocks * request.block_size)
            self._compare(worker, history, decision, request.request_id, promised, reported_tokens)

    def _announced(self, worker: WorkerKey, history: _History, now_ms: int) -> float | None:
        """Return how much of the last prompt that is old enough the index holds of the worker."""
        if self._has_windows(worker):
            return None  # a window that moved on leaves an earlier prompt nowhere to resume
        for time_ms, head in reversed(history.heads):
            if head and now_ms - time_ms >= ANNOUNCED_AFTER_MS:
                return self._projection.index.overlap(head, worker).blocks / len(head)
        if len(history.heads) < LEAST_HEADS or not history.heads[0][1]:
            return None
        head = history.heads[0][1]  # in a burst the oldest will do
        return self._projection.index.overlap(head, worker).blocks / len(head)

    def _history(self, worker: Worker) -> _History:
        key = worker.key
        history = self._histories.get(key)
        if history is None:
            if len(self._histories) >= HISTORIES_MAX:
                for gone in self._histories.keys() - self._projection.fleet.workers.keys():
                    del self._histories[gone]
            history = self._histories[key] = _History(worker.epoch)
        if worker.load is not history.load or worker.epoch != history.epoch:
            _note(history, worker)
        return history

    def _has_windows(self, worker: WorkerKey) -> bool:
        index = self._projection.index
        report = index.groups.report_of(1 << index.slot(worker)) if index.groups.reported else None
        return report is not None and bool(report.groups)

    # -- views -----------------------------------------------------------------------------------------------------

    def evidence(self, key: WorkerKey) -> WorkerEvidence:
        projection = self._projection
        worker = projection.fleet.workers[key]
        state, reason = projection.trust.stream(key)
        history = self._histories.get(key) or _History(worker.epoch)
        held = projection.index.held_blocks(key)
        is_unheard = any(each.state is StreamState.ABSENT for each in worker.streams.values())
        return WorkerEvidence(
            str(key),
            worker.card.block_size,
            list(history.observations),
            state.name.lower(),
            reason,
            state is not StreamState.SYNCING and (held > 0 or not is_unheard),
            held,
            history.epochs,
            history.steps_fell,
            history.agreed,
            history.own,
            history.foreign,
            self._has_windows(key),
            history.cleared is not None and history.own - history.cleared < WINDOW,
            worker.events_fault,
        )

    def verdict(self, key: WorkerKey) -> ReuseVerdict:
        """Return the verdict on a worker of the fleet, judged again after ``JUDGED_EVERY`` requests."""
        history = self._histories.get(key)
        if history is None:
            return diagnose(self.evidence(key))
        state = (
            history.own // JUDGED_EVERY,
            history.foreign // JUDGED_EVERY,
            history.epochs,
            self._projection.trust.stream(key)[0],
            self._projection.fleet.workers[key].events_fault,
        )
        if history.verdict is None or history.judged != state:
            history.judged, history.verdict = state, diagnose(self.evidence(key))
        return history.verdict

    def verdicts(self) -> list[ReuseVerdict]:
        """Return the verdict on each worker that is, or was, in the fleet, judged now."""
        workers = self._projection.fleet.workers
        evidence = {key: each.final for key, each in self._histories.items() if each.final and key not in workers}
        evidence |= {key: self.evidence(key) for key in workers}
        return [diagnose(each) for _, each in sorted(evidence.items()) if each is not None]


def _note(history: _History, worker: Worker) -> None:
    """Note another life of a worker, or other figures of its engine."""
    if worker.epoch != history.epoch:
        history.epoch = worker.epoch
        history.epochs += 1
        history.load = None
    load = worker.load
    if load is not None and history.load is not None and load.steps < history.load.steps:
        history.steps_fell = True
    history.load = load


def uncached_of(decision: Decision, reported_tokens: int) -> UncachedSplit:
    """Return why the rest of a decision's prompt was computed."""
    request, columns = decision.request, decision.candidates
    promised_blocks = best_blocks = decision.overlap_blocks
    if decision.seen_tokens > max(reported_tokens, promised_blocks * request.block_size):
        tiers = zip(columns.device_overlap, columns.host_overlap, columns.disk_overlap, strict=True)
        best_blocks = int(max(map(sum, tiers)))
    size = request.block_size
    return split_uncached(
        request.isl, decision.seen_tokens, best_blocks * size, promised_blocks * size, reported_tokens
    )
