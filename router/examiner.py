"""Collects the evidence of ``poolgrid.server.diagnosis`` while a projection is folded: promised against reported reuse.

It only observes: no decision depends on it, so it is in no checkpoint, and a replay attaches one of its own. It gets
of a start in the order of the worker's events, when the index stands where the engine stood.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Final

import msgspec

from poolgrid.kernel.decision.decision import Decision
from poolgrid.kernel.projection.fleet import Worker
from poolgrid.kernel.projection.projection import Projection, Promise
from poolgrid.kernel.routing.selector import PROMPT_STAGES
from poolgrid.kernel.wire.events import LoadReported, RequestStarted
from poolgrid.kernel.wire.identifiers import StreamState, WorkerKey
from poolgrid.server.diagnosis.evidence import (
    NEVER,
    WINDOW,
    Announcement,
    Observation,
    UncachedSplit,
    WorkerEvidence,
    split_uncached,
)
from poolgrid.server.diagnosis.rules import ReuseVerdict, diagnose

NOWHERE_AFTER_MS: Final = 6_000
"""When a prompt that was computed, and of which no event came, counts as never announced: its events may be late."""

SAMPLE_MS: Final = 50
"""Least time between two prompts of a worker whose events are awaited."""

MISSING_MAX: Final = 32
"""Prompts of a worker of which nothing came yet. With so many no other is awaited before they are judged: what comes
sooner would count for more."""

LOOKS: Final = 2
"""Missing prompts of a worker that are looked for at each of its requests, a few microseconds each."""

MARKS: Final = (*range(1, 8), *(step << octave for octave in range(1, 15) for step in (4, 5, 6, 7)))
"""Depths in blocks at which prompts are remembered: each up to 8, then four for each doubling, so that the longest
prompt has some sixty."""

AT_MARKS: Final = tuple(itemgetter(*(depth - 1 for depth in MARKS[:count])) for count in range(2, len(MARKS) + 1))
"""By the number of marks within a path, from two on: what returns its blocks there, in one call."""

SENT_MAX: Final = 8192
"""Remembered depths of a worker's prompts, some 500 KB; beyond it those that were new first are forgotten."""

RENEWED_FOR: Final = 32
"""Requests that agree after a worker registered again, or took back all that it had reported, until that explains
nothing."""

HISTORIES_MAX: Final = 4096
"""Workers whose requests are kept, gone ones included; beyond it those that are gone are forgotten."""

JUDGED_EVERY: Final = 4
"""Requests after which a verdict is made again for lists and metrics; making one takes about 0.1 ms."""

DecisionOf = Callable[[str], Decision | None]
"""Returns the decision of a dispatch, while it is kept."""

OnReuse = Callable[[Decision, int], None]
"""Takes how many tokens of a decision's prompt its worker reused, as reported."""


class _Awaited(msgspec.Struct, gc=False):
    """A prompt with a block that the pool neither held nor had been sent, whose events are awaited."""

    worker: WorkerKey
    path: Sequence[int]
    """Up to that block."""
    domain: str
    number: int
    done_ms: int = 0
    """When it was known to be computed; 0 = it is not."""
    stored_blocks: int = 0
    """Blocks that the worker's events had stored then."""
    missing_ms: int = 0
    """How long after that nothing had come at the last look; 0 = there was none."""
    is_resent: bool = False
    """Whether another request brought the block since, so that it may be in the events of that one."""


_Begun = tuple[int, int, list[int], _Awaited | None]
"""A request's number, and the one below which all had ended when it began; those of the requests that had brought its
worker each block at ``MARKS`` before; its prompt, if its events are awaited."""

AWAITED_MAX: Final = 4096
"""Prompts of all workers whose events are awaited; beyond it the oldest is not judged."""

BEGUN_MAX: Final = 4096
"""Requests of a worker whose end is awaited; beyond it the oldest is compared without what was known at its start."""


class _History:
    """What is kept of one worker."""

    __slots__ = (
        "agreed",
        "announcements",
        "begun",
        "borrowed",
        "cleared",
        "epoch",
        "final",
        "foreign",
        "judged",
        "load",
        "missing",
        "observations",
        "own",
        "renewed",
        "running",
        "sampled_ms",
        "sent",
        "silent_ms",
        "steps_fell",
        "unreported",
        "verdict",
    )

    def __init__(self, epoch: int) -> None:
        self.observations: deque[Observation] = deque(maxlen=WINDOW)
        self.missing: deque[_Awaited] = deque()
        """Prompts of which nothing had come when they were computed."""
        self.silent_ms: int | None = None
        """When it first reused its cache although no event had stored a block in this epoch."""
        self.sampled_ms = 0
        """When a prompt was awaited last."""
        self.announcements: deque[Announcement] = deque(maxlen=WINDOW)
        self.borrowed: deque[str] = deque(maxlen=WINDOW)
        """Workers whose prompts came in the events of this one, oldest first."""
        self.begun: dict[str, _Begun] = {}
        """Requests whose report is awaited."""
        self.running: dict[str, int] = {}
        """Numbers of requests that have not ended, in their order."""
        self.sent: dict[int, int] = {}
        """Number of the last request with a block, for blocks at ``MARKS``."""
        self.epoch = epoch
        self.renewed: int | None = None
        """Requests that had agreed when it registered again."""
        self.load: LoadReported | None = None
        self.steps_fell = False
        self.agreed = self.own = self.foreign = self.unreported = 0
        self.cleared: int | None = None
        """Requests that had agreed when it last took back all that it had reported."""
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
        self._awaited: dict[int, _Awaited] = {}
        """By the block that is awaited."""
        self._now_ms = 0
        """Of the latest decision that was looked at."""
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
            path = self._projection.trust.awaited_path(key, event.request_id) if promised is None else promised[0]
            if path:
                begun = self._begin(worker, history, decision, path)
                history.running[event.request_id] = history.own
                if promised is None:
                    history.begun[event.request_id] = begun
                else:
                    self._compare(worker, history, decision, event.request_id, promised, event.cached_tokens, begun)
                for each in (history.begun, history.running):
                    if len(each) > BEGUN_MAX:
                        del each[next(iter(each))]

    def finished(self, key: WorkerKey, request_id: str, promised: Promise | None, reported_tokens: int) -> None:
        """A worker ended a request and reported only then how much of its prompt it reused."""
        decision = self._decision_of(request_id)
        if decision is None:
            return
        if self._on_reuse is not None:
            self._on_reuse(decision, reported_tokens)
        worker = self._projection.fleet.workers.get(key)
        if worker is not None and promised is not None and decision.request.stage in PROMPT_STAGES:
            history = self._history(worker)
            history.running.pop(request_id, None)
            begun = history.begun.pop(request_id, None) or self._begin(worker, history, decision, promised[0])
            self._compare(worker, history, decision, request_id, promised, reported_tokens, begun)

    def ended_silently(self, key: WorkerKey, request_id: str) -> None:
        """A worker ended a request and did not report at its end how much of its prompt it reused."""
        history = self._histories.get(key)
        if history is not None:
            history.running.pop(request_id, None)
            history.unreported += history.begun.pop(request_id, None) is not None

    def _compare(
        self,
        worker: Worker,
        history: _History,
        decision: Decision,
        dispatch_id: str,
        promised: Promise,
        reported_tokens: int,
        begun: _Begun,
    ) -> None:
        request, now_ms = decision.request, decision.time_ms
        path, promised_tokens = promised
        isl, block_size = request.isl, request.block_size
        if promised_tokens > isl:
            promised_tokens = isl
        promised_blocks = min(len(path), promised_tokens // block_size) if promised_tokens else 0
        number, settled, brought, awaited = begun
        sent = brought.index(NEVER) if NEVER in brought else len(brought)
        at = bisect_right(MARKS, reported_tokens // block_size)
        domain = "media" if request.media else request.domain
        observation = Observation(
            dispatch_id,
            now_ms,
            isl,
            decision.reported_isl,
            promised_tokens,
            reported_tokens,
            decision.seen_tokens,
            domain,
            path[promised_blocks - 1] if promised_blocks else 0,
            decision.overlap_tokens,
            number,
            settled,
            MARKS[sent - 1] * block_size if sent else 0,
            brought[min(at, sent) - 1] if at and sent else NEVER,
            brought[at] if at < sent else NEVER,
            worker.load is not None and worker.load.foreign_requests > 0,
        )
        if promised_tokens and reported_tokens and abs(promised_tokens - reported_tokens) <= block_size:
            history.agreed += 1
        if worker.stored_blocks:
            history.silent_ms = None
        elif reported_tokens and history.silent_ms is None:
            history.silent_ms = self._now_ms
        history.observations.append(observation)
        for _ in range(min(LOOKS, len(history.missing))):
            self._look(worker, history, history.missing.popleft())
        if awaited is not None:
            awaited.done_ms, awaited.stored_blocks = self._now_ms, worker.stored_blocks
            self._look(worker, history, awaited)

    def _begin(self, worker: Worker, history: _History, decision: Decision, path: Sequence[int]) -> _Begun:
        """Take note of a prompt on its way to a worker; return what was known of its blocks before."""
        self._now_ms = max(self._now_ms, decision.time_ms)
        sent, number, length, awaited = history.sent, history.own, len(path), self._awaited
        settled = next(iter(history.running.values()), number)
        marks = bisect_right(MARKS, length)
        blocks = AT_MARKS[marks - 2](path) if marks > 1 else path[:marks]
        brought = [sent.get(block, NEVER) for block in blocks]
        sent.update(dict.fromkeys(blocks, number))
        if not awaited.keys().isdisjoint(blocks):
            for block in awaited.keys() & set(blocks):
                self._bring_again(awaited[block])
        while len(sent) > SENT_MAX:
            del sent[next(iter(sent))]
        return number, settled, brought, self._await(worker, history, decision, path, number)

    def _await(
        self, worker: Worker, history: _History, decision: Decision, path: Sequence[int], number: int
    ) -> _Awaited | None:
        request = decision.request
        is_sampled = self._now_ms - history.sampled_ms >= SAMPLE_MS and len(history.missing) < MISSING_MAX
        if not is_sampled or (self._has_windows(worker.key) and not worker.stored_blocks):
            return None  # of windows alone nothing is found by a prefix
        known = decision.seen_tokens // request.block_size
        at = bisect_right(MARKS, known)
        if at == len(MARKS) or MARKS[at] > len(path):
            return None
        # What a worker holds and no prompt had are the ends of answers.
        at = max(at, bisect_right(MARKS, _best_blocks(decision)))
        if at == len(MARKS) or MARKS[at] > len(path):
            return None
        history.sampled_ms = self._now_ms
        domain = "media" if request.media else request.domain
        prompt = _Awaited(worker.key, path[: MARKS[at]], domain, number)
        self._awaited[prompt.path[-1]] = prompt
        if len(self._awaited) > AWAITED_MAX:
            del self._awaited[next(iter(self._awaited))]
        return prompt

    def _bring_again(self, prompt: _Awaited) -> None:
        """Another request has the awaited block: look once more before it is computed again."""
        worker = self._projection.fleet.workers.get(prompt.worker)
        own, others = self._holders(prompt)
        if worker is not None and (own or others):
            self._settle(worker, self._history(worker), prompt, own, others)
        prompt.is_resent = True

    def _look(self, worker: Worker, history: _History, prompt: _Awaited) -> None:
        """Take note of whose events have a prompt, or that none has after so long."""
        if prompt.path[-1] not in self._awaited:
            return  # it is settled
        own, others = self._holders(prompt)
        age_ms = self._now_ms - prompt.done_ms
        if own or others or age_ms >= NOWHERE_AFTER_MS:
            self._settle(worker, history, prompt, own, others)
            return
        prompt.missing_ms = max(1, age_ms)
        history.missing.append(prompt)

    def _settle(self, worker: Worker, history: _History, prompt: _Awaited, own: bool, others: list[WorkerKey]) -> None:
        del self._awaited[prompt.path[-1]]
        if prompt.is_resent and (own or others):
            return  # whose they are is not known
        for key in others:
            other = self._projection.fleet.workers.get(key)
            if other is not None:
                self._history(other).borrowed.append(str(worker.key))
        names = tuple(map(str, others))
        history.announcements.append(
            Announcement(own, names, prompt.missing_ms, prompt.domain, prompt.number, prompt.stored_blocks)
        )

    def _holders(self, prompt: _Awaited) -> tuple[bool, list[WorkerKey]]:
        """Return whether a worker's events have a prompt of it, and whose have it without having been sent it."""
        index, block = self._projection.index, prompt.path[-1]
        own, others = False, []
        for depth, mask in index.holders(prompt.path)[:1]:
            left = mask if depth == len(prompt.path) else 0
            while left:
                lowest = left & -left
                left ^= lowest
                key = index.worker(lowest.bit_length() - 1)
                if key == prompt.worker:
                    own = True
                elif (other := self._histories.get(key)) is None or block not in other.sent:
                    others.append(key)
        return own, others

    def cleared(self, worker: WorkerKey) -> None:
        """A worker reported that nothing it said before holds any more."""
        history = self._histories.get(worker)
        if history is not None:
            history.cleared = history.agreed

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
            begun = self._begin(worker, history, decision, path)
            self._compare(worker, history, decision, request.request_id, promised, reported_tokens, begun)

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
            history.renewed is not None and history.agreed - history.renewed < RENEWED_FOR,
            history.steps_fell,
            history.agreed,
            history.own,
            history.foreign,
            self._has_windows(key),
            history.cleared is not None and history.agreed - history.cleared < RENEWED_FOR,
            worker.events_fault,
            list(history.announcements),
            len(history.missing),
            dict(Counter(history.borrowed)),
            worker.stored_blocks,
            0 if history.silent_ms is None else self._now_ms - history.silent_ms,
            history.unreported,
        )

    def verdict(self, key: WorkerKey) -> ReuseVerdict:
        """Return the verdict on a worker of the fleet, judged again after ``JUDGED_EVERY`` requests."""
        history = self._histories.get(key)
        if history is None:
            return diagnose(self.evidence(key))
        state = (
            history.own // JUDGED_EVERY,
            history.foreign // JUDGED_EVERY,
            history.epoch,
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
        history.renewed = history.agreed
        history.load = None
    load = worker.load
    if load is not None and history.load is not None and load.steps < history.load.steps:
        history.steps_fell = True
    history.load = load


def _best_blocks(decision: Decision) -> int:
    """Return the most blocks that any candidate held, on all of its tiers."""
    columns = decision.candidates
    return int(max(map(sum, zip(columns.device_overlap, columns.host_overlap, columns.disk_overlap, strict=True))))


def uncached_of(decision: Decision, reported_tokens: int) -> UncachedSplit:
    """Return why the rest of a decision's prompt was computed."""
    request = decision.request
    promised_blocks = best_blocks = decision.overlap_blocks
    if decision.seen_tokens > max(reported_tokens, promised_blocks * request.block_size):
        best_blocks = _best_blocks(decision)
    size = request.block_size
    return split_uncached(
        request.isl, decision.seen_tokens, best_blocks * size, promised_blocks * size, reported_tokens
    )
