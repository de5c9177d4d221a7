"""The traffic that a pool's routers recorded: when requests came, how long they were, what they shared, how it went.

A request is its first decision, and came when it began to wait for that; output lengths are what the router counted or,
for requests whose tokens went past it, by the worker's blocks. Nothing of a prompt is known but the sequence
hashes of its whole blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from zlib import decompress

from poolgrid.kernel.decision.decision import Decision, DecisionLog
from poolgrid.kernel.journal.ports import ReadableDisk
from poolgrid.kernel.journal.stored_records import stored_records
from poolgrid.kernel.routing.router_state import RouterState
from poolgrid.kernel.routing.selector import PROMPT_STAGES
from poolgrid.kernel.wire.card import WorkerCard
from poolgrid.kernel.wire.events import PrefillCompleted, RequestFinished, RequestProgressed, WorkerJoined, WorkerLeft
from poolgrid.kernel.wire.identifiers import Role, Stage, WorkerKey
from poolgrid.server.consolidator.journal.inspection import reaches_back_to, state_at
from poolgrid.server.router.decision_journal.entries import (
    DecisionMade,
    OverlapRealised,
    RequestEnded,
    RouterSettingsNoted,
    path_of,
)
from poolgrid.server.router.decision_journal.reader import stored_entries
from poolgrid.server.router.examiner import Examiner, uncached_of
from poolgrid.server.serving.prompt_paths import ReuseSketch

PROGRESS_EVERY_ENTRIES = 500


@dataclass(slots=True)
class RecordedTraffic:
    """One request and what came of it."""

    request_id: str
    time_ms: int
    """Wall clock of the router when it came: at its first decision, less what it had waited for that."""
    model: str
    isl: int
    block_size: int
    path: tuple[int, ...]
    worker: WorkerKey
    session: str = ""
    """Tenant and name of the session that it is a turn of; empty = of none."""
    parent: str = ""
    osl: int | None = None
    cached_tokens: int | None = None
    first_token_ms: int | None = None
    """Wall clock of the worker at the first token."""
    finished_ms: int | None = None


@dataclass(slots=True)
class PoolShape:
    """The workers that served the traffic."""

    workers: int = 0
    """Most that were members at a time."""
    card: WorkerCard | None = None
    """Of most of them."""
    roles: Counter[Role] = field(default_factory=Counter)


@dataclass(slots=True)
class Recording:
    """All that was recorded of a pool's traffic with one model."""

    requests: list[RecordedTraffic]
    """In order of arrival."""
    shape: PoolShape
    settings: RouterSettingsNoted | None
    """The rules of the last router life."""
    other_models: int = 0
    """Requests for models with less traffic, left out."""
    unknown_lengths: int = 0
    """Requests whose output length is not known, taken as one token."""


def read_recording(
    pool: ReadableDisk,
    decisions: Iterable[ReadableDisk],
    blocks_per_worker_max: int,
    on_progress: Callable[[int], None] = lambda _: None,
) -> Recording:
    """Return the recorded traffic of the model with most requests; raises ``JournalCorrupt``, ``NotKept``.

    ``on_progress`` gets the bytes read, now and then.
    """
    found: dict[str, RecordedTraffic] = {}
    settings: RouterSettingsNoted | None = None
    done = count = 0
    for disk in decisions:
        for stored in stored_entries(disk):
            done += stored.size
            count += 1
            if count % PROGRESS_EVERY_ENTRIES == 0:
                on_progress(done)
            entry = stored.entry
            if isinstance(entry, RouterSettingsNoted):
                settings = entry
            elif isinstance(entry, DecisionMade):
                request = entry.request
                if request.stage is not Stage.ENCODE and request.request_id not in found:
                    found[request.request_id] = RecordedTraffic(
                        request.request_id,
                        entry.time_ms - round(entry.queued_ms),
                        request.model,
                        request.isl,
                        request.block_size,
                        path_of(entry),
                        stored.workers[_chosen(entry)],
                        f"{request.tenant:x} {request.session}" if request.session else "",
                        f"{request.tenant:x} {request.parent}" if request.parent else "",
                    )
            elif isinstance(entry, RequestEnded) and entry.request_id in found:
                found[entry.request_id].osl = entry.output_tokens
            elif isinstance(entry, OverlapRealised) and entry.attempt == 0 and entry.request_id in found:
                found[entry.request_id].cached_tokens = entry.cached_tokens
    shape = _follow_pool(pool, found, blocks_per_worker_max, done, on_progress)
    models = Counter(each.model for each in found.values())
    model = max(models, key=lambda name: models[name], default="")
    requests = sorted(
        (
            each
            for each in found.values()
            if each.model == model and each.isl >= 1 and len(each.path) == each.isl // each.block_size
        ),
        key=lambda each: each.time_ms,
    )
    recording = Recording(requests, shape, settings, len(found) - models.get(model, 0))
    for each in requests:
        if not each.osl:
            recording.unknown_lengths += 1
            each.osl = 1
    return recording


def _chosen(made: DecisionMade) -> int:
    return int.from_bytes(decompress(made.columns)[4 * made.row : 4 * made.row + 4], "little")


def _follow_pool(
    pool: ReadableDisk,
    found: dict[str, RecordedTraffic],
    blocks_per_worker_max: int,
    done: int,
    on_progress: Callable[[int], None],
) -> PoolShape:
    """Read from the pool's stream who the workers were, and when requests had their first and last token."""
    begin = reaches_back_to(pool)
    state = state_at(pool, begin, blocks_per_worker_max)
    members = {key: worker.card for key, worker in state.workers.items()}
    shape = PoolShape()
    blocks: dict[str, int] = {}

    def look() -> None:
        if len(members) > shape.workers:
            shape.workers = len(members)
            shape.roles = Counter(card.role for card in members.values())
            shape.card = max(members.values(), key=lambda card: sum(each == card for each in members.values()))

    look()
    for number, stored in enumerate(stored_records(pool, begin)):
        done += stored.size
        if number % PROGRESS_EVERY_ENTRIES == 0:
            on_progress(done)
        record = stored.record
        for event in record.events:
            if isinstance(event, WorkerJoined):
                members[record.worker] = event.card
                look()
            elif isinstance(event, WorkerLeft):
                members.pop(record.worker, None)
            elif isinstance(event, PrefillCompleted):
                request = found.get(event.request_id)
                if request is not None and request.first_token_ms is None:
                    request.first_token_ms = record.time_ms
            elif isinstance(event, RequestProgressed):
                if event.request_id in found:
                    blocks[event.request_id] = event.active_blocks
            elif isinstance(event, RequestFinished):
                request = found.get(event.request_id)
                if request is not None:
                    request.finished_ms = record.time_ms
                    if request.osl is None and event.request_id in blocks:
                        request.osl = max(1, blocks[event.request_id] * request.block_size - request.isl)
    return shape


DECISIONS_KEPT = 10_000
"""As a router keeps them: a request that reports later is of no account."""


class RecordedExamination:
    """The evidence of one router's recorded decisions; a ``ReplayWatcher``."""

    def __init__(self) -> None:
        self._log = DecisionLog(DECISIONS_KEPT)
        self._sketch = ReuseSketch()
        self._paths: dict[str, Sequence[int]] = {}
        self.examiner: Examiner | None = None
        self.uncached_tokens: dict[str, int] = dict.fromkeys(("cold", "routing", "eviction", "mismatch"), 0)

    def begin(self, state: RouterState) -> None:
        self.examiner = Examiner(state.projection, self._log.of_dispatch)

    def decided(self, decision: Decision, path: Sequence[int]) -> None:
        if decision.attempt == 0 and decision.request.stage in PROMPT_STAGES:
            decision.seen_tokens = self._sketch.note(path) * decision.request.block_size
        self._log.add(decision)
        self._paths[decision.request.request_id] = path
        if len(self._paths) > DECISIONS_KEPT:
            del self._paths[next(iter(self._paths))]

    def realised(self, entry: OverlapRealised) -> None:
        for decision in self._log.of_request(entry.request_id):
            if decision.attempt != entry.attempt:
                continue
            if entry.isl is not None and self.examiner is not None:
                path = self._paths.get(entry.request_id, ())
                self.examiner.gateway_reported(decision, path, entry.cached_tokens, entry.isl)
            if entry.attempt == 0 and decision.request.stage in PROMPT_STAGES and decision.request.isl:
                split = uncached_of(decision, entry.cached_tokens)
                for name in self.uncached_tokens:
                    self.uncached_tokens[name] += getattr(split, name)
