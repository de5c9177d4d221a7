"""What routers answer operators, over HTTP as JSON objects: ``/v1/workers``, ``/v1/pools``, ``/v1/decisions`` and more.

The routers make these values, and global routers and commands read them, so that a key has one name. Every
field is there in every answer, ``null`` where nothing is known: a key that is missing is an error and never a zero.
Readers pass over keys that they do not know.

Counts of each of the last seconds, for views of a recent past that must be right without every single request.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import add
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType


class AnswerRow(msgspec.Struct, frozen=True, kw_only=True):
    """An answer, or a part of one."""

    def to_json(self) -> dict[str, Any]:
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain


# -- both routers ------------------------------------------------------------------------------------------------------


class QueueRow(AnswerRow, frozen=True, kw_only=True):
    """Requests in a router's queue, and the number that it refused."""

    requests: int
    requests_max: int
    prompt_tokens: int
    prompt_tokens_max: int
    retry_after_s: float | None
    refused: dict[str, int]


class InstanceRow(AnswerRow, frozen=True, kw_only=True):
    """One worker of an endpoint: ``ready``, ``draining`` or ``unreachable``."""

    worker_id: str
    dp_rank: int
    state: str


class EndpointRow(AnswerRow, frozen=True, kw_only=True):
    """All workers that serve one model in one role under one name, in ``GET /health``."""

    endpoint: str
    model: str
    role: str
    workers: int
    ready: int
    decodes_only: bool = False
    """Whether its workers take no whole request, and none at all without a prefill worker."""
    instances: list[InstanceRow]


# -- a pool's router ---------------------------------------------------------------------------------------------------


class SourceRow(AnswerRow, frozen=True, kw_only=True):
    """One source of a worker's events, and how far its stream can be trusted."""

    state: str
    reason: str


class StreamRow(AnswerRow, frozen=True, kw_only=True):
    """How far a worker's event stream can be trusted, and the numbers of the cross-check."""

    state: str
    reason: str
    trusted: bool
    untrusted_because: str | None
    sources: dict[str, SourceRow]
    checked_requests: int
    predicted_tokens: int
    realised_tokens: int
    disagreement: float
    fault: str = ""
    """In what the engine's events do not fit the worker, so that they are of no use; empty = they fit."""


class WorkerRow(AnswerRow, frozen=True, kw_only=True):
    """One worker: its state, its load, what it holds, how late its events are."""

    worker_id: str
    dp_rank: int
    model: str
    role: str
    state: str
    unreachable_because: str | None
    epoch: int
    engine: str
    block_size: int
    running_requests: int
    waiting_requests: int
    prefill_tokens: int
    active_blocks: int
    active_requests: int
    cached_blocks: int
    indexed_blocks: int
    total_blocks: int
    requests_total: int
    event_lag_ms: float | None
    last_event_ms_ago: float | None
    http_endpoint: str
    stream: StreamRow
    verdict: str = ""
    """Cause that the checks of `poolgrid doctor` name."""


class LoadingRow(AnswerRow, frozen=True, kw_only=True):
    """One worker that still loads, and is not in the pool before."""

    worker_id: str
    model: str
    role: str
    phase: str
    done_bytes: int
    total_bytes: int
    left_bytes: int
    """Of this phase; 0 where it is not reported."""


class WorkerList(AnswerRow, frozen=True, kw_only=True):
    """Answer of ``GET /v1/workers``."""

    object: str = "list"
    offset: int
    queue: QueueRow
    data: list[WorkerRow]
    loading: list[LoadingRow] = []
    uncached_tokens: dict[str, int] = {}
    """Prompt tokens computed since the router started, by cause."""


class VerdictRow(AnswerRow, frozen=True, kw_only=True):
    """The verdict on one worker: what was promised and reported, and why they differ."""

    worker: str
    cause: str
    is_fault: bool
    meaning: str
    evidence: list[str]
    fix: str
    first_request: str
    requests: int
    promised_tokens: int
    reported_tokens: int


class ModelFinding(AnswerRow, frozen=True, kw_only=True):
    """What a router found of one model whose requests it forwards."""

    model: str
    cause: str
    is_fault: bool
    meaning: str
    evidence: list[str]
    """What was seen, a sentence each."""
    fix: str


class DoctorAnswer(AnswerRow, frozen=True, kw_only=True):
    """Answer of a router's ``GET /v1/doctor``."""

    object: str = "list"
    data: list[VerdictRow]
    uncached_tokens: dict[str, int]
    models: list[ModelFinding] = []
    """Why prompts are placed by text, and why no token ids are sent to engines."""


class DrainAnswer(AnswerRow, frozen=True, kw_only=True):
    """Answer of ``POST /v1/workers/{worker_id}/drain``: which processes were asked, and how long it may take if that
    is known."""

    worker_id: str
    timeout_ms: int | None


class DecisionRow(AnswerRow, frozen=True, kw_only=True):
    """One line of facts about a decision."""

    request_id: str
    time_ms: int
    stage: str
    policy: str
    reason: str
    worker: str
    isl: int
    isl_blocks: int
    overlap_blocks: int
    cost: float | None
    candidates: int
    realised_cached_tokens: int | None
    session: str = ""


class SessionRow(AnswerRow, frozen=True, kw_only=True):
    """One session of a pool."""

    session: str
    tenant: str
    """Hash of the tenant's name, 16 hexadecimal digits; empty without API keys."""
    parent: str
    state: str
    """``running``, ``waiting`` (in its engine) or ``idle``."""
    turns: int
    footprint_blocks: int
    """Over all workers."""
    workers: dict[str, int]
    """Blocks by worker, that of the latest turn first."""
    isl: int
    cached_tokens: int
    last_request_id: str
    last_ms_ago: int
    expected_return_ms: int | None
    """Until its next turn, 0 where it runs or is overdue; ``null`` = unknown."""
    gaps_ms: dict[str, int]
    """Smoothed time to the next turn, by how the turn before ended; only kinds that occurred."""


class WaitingTurnRow(AnswerRow, frozen=True, kw_only=True):
    """A turn that waits at the router: its session would evict others that are in use."""

    session: str
    tenant: str
    request_id: str
    isl: int
    waited_ms: int


class AdmissionRow(AnswerRow, frozen=True, kw_only=True):
    """Whether turns wait for room, and what the last minutes were like, replayed with such waits and without."""

    state: str
    """``works``, or ``rests``: no turn waits, because that shortened no times."""
    reason: str
    gain: float | None = None
    """By how much turns have their first tokens sooner, as a share."""
    turns: int = 0
    ttft_ms: float | None = None
    without_ttft_ms: float | None = None
    computed_tokens: int | None = None
    without_computed_tokens: int | None = None
    waiting_turns: int | None = None
    """How many waited in the replay."""
    reviewed_ms_ago: int | None = None


class SessionList(AnswerRow, frozen=True, kw_only=True):
    """Answer of ``GET /v1/sessions``, the latest first."""

    object: str = "list"
    offset: int
    total: int
    """Sessions that are known."""
    data: list[SessionRow]
    waiting: list[WaitingTurnRow] = []
    """Turns at this router that wait for room for their session, the one that asked first at the front."""
    admission: AdmissionRow | None = None
    """``null`` without ``session_admission``."""


class DecisionList(AnswerRow, frozen=True, kw_only=True):
    """Answer of a router's ``GET /v1/decisions``, newest first."""

    object: str = "list"
    data: list[DecisionRow]


class CandidateRow(AnswerRow, frozen=True, kw_only=True):
    """A worker that could have been chosen, with every term of its cost."""

    worker: str
    chosen: bool
    device_overlap_blocks: int
    host_overlap_blocks: int
    disk_overlap_blocks: int
    active_prefill_tokens: int
    active_blocks: int
    requests: int
    cost: float | None
    terms: dict[str, float]


class RecordedBy(AnswerRow, frozen=True, kw_only=True):
    """Where on disk a decision was found, and the rules in force when it was made."""

    router: str
    file: str
    entry: int
    settings_version: str
    settings: dict[str, Any]


class MediaRow(AnswerRow, frozen=True, kw_only=True):
    """How far a request with media was compared with what workers hold."""

    items: int
    compared_blocks: int
    """Leading blocks of the prompt whose names are known: they end at a medium whose tokens cannot be counted."""


class LegRow(AnswerRow, frozen=True, kw_only=True):
    """What serving a request in one leg, or in two, was expected to cost on the best worker."""

    cost_ms: float
    weight: float
    """Of the last term in the cost; the others count as they are."""
    terms: dict[str, float]
    """``queue_ms``, ``prompt_ms``, and ``pause_ms`` of others (one leg) or ``transfer_ms`` (two)."""


class LegsRow(AnswerRow, frozen=True, kw_only=True):
    """Why a request has one leg or two."""

    reason: str
    """``local_prefill``, ``overflow``, ``no_prefill_worker`` (one leg) or ``disaggregated`` (two)."""
    one: LegRow | None
    """``None`` = no worker took it then."""
    two: LegRow | None


class DecisionExplanation(DecisionRow, frozen=True, kw_only=True):
    """Everything about one decision."""

    offset: int
    behind_records: int
    attempt: int
    block_size: int
    margin: float | None
    runner_up: str | None
    expected_ttft_ms: float | None
    """What the policy expected, of one that predicts times."""
    realised_ttft_ms: float | None
    failure: str | UnsetType = UNSET
    """Why the worker did not serve it; only of an attempt that moved to another."""
    rows: list[CandidateRow]
    filtered: dict[str, str]
    untrusted: dict[str, str]
    recorded: RecordedBy | UnsetType = UNSET
    """Only when it was read from a decision journal."""
    media: MediaRow | UnsetType = UNSET
    """Only of a request with media."""
    legs: LegsRow | UnsetType = UNSET
    """Only where one leg and two were possible."""


class RequestExplanation(AnswerRow, frozen=True, kw_only=True):
    """Answer of a router's ``GET /v1/decisions/{request_id}``: a decision for each attempt."""

    request_id: str
    attempts: list[DecisionExplanation]


class DryRun(AnswerRow, frozen=True, kw_only=True):
    """Answer of ``POST /v1/route``: a decision for each sequence."""

    dry_run: bool = True
    routes: list[DecisionExplanation]


class RoleStatusRow(AnswerRow, frozen=True, kw_only=True):
    """The workers of one role, as a pool's status tells a global router."""

    role: str
    ready: int
    draining: int
    unreachable: int
    requests: int
    capacity: int


class ModelStatusRow(AnswerRow, frozen=True, kw_only=True):
    """One model of a pool, as its status tells a global router."""

    model: str
    block_size: int
    hash_spec: str
    max_sequence_length: int
    roles: list[RoleStatusRow]
    loras: list[str]


class PoolStatusRow(AnswerRow, frozen=True, kw_only=True):
    """What a pool serves and how busy it is."""

    ready: bool
    models: list[ModelStatusRow]
    waiting_requests: int
    saturation: float
    retry_after_s: float | None


class JournalRow(AnswerRow, frozen=True, kw_only=True):
    """How far a router has followed its pool's journal."""

    offset: int
    trouble: str
    """What keeps records from being written; empty when nothing does."""


class RecordingRow(AnswerRow, frozen=True, kw_only=True):
    """Whether a router's decisions reach its disk."""

    recorded: bool
    trouble: str
    unrecorded: int


class PoolAnswer(AnswerRow, frozen=True, kw_only=True):
    """Answer of ``GET /v1/pool``: where the select plane listens, and how the pool is."""

    select_endpoint: str
    status: PoolStatusRow
    journal: JournalRow
    decisions: RecordingRow


# -- a global router ---------------------------------------------------------------------------------------------------


class RoleRow(AnswerRow, frozen=True, kw_only=True):
    """The workers of one role in a pool."""

    ready: int
    draining: int
    unreachable: int
    requests: int
    capacity: int


class PoolModelRow(AnswerRow, frozen=True, kw_only=True):
    """One model of a pool, its workers by role."""

    model: str
    block_size: int
    hash_spec: str
    max_sequence_length: int
    loras: list[str]
    roles: dict[str, RoleRow]


class BreakerRow(AnswerRow, frozen=True, kw_only=True):
    """A pool's circuit breaker, with its last steps."""

    state: str
    retry_after_ms: float
    steps: list[dict[str, Any]]


class PoolRouterRow(AnswerRow, frozen=True, kw_only=True):
    """One of several routers of a pool, as the global router sees it."""

    url: str
    state: str
    """``active``, ``standby`` or ``away``."""
    reason: str = ""


class PoolRow(AnswerRow, frozen=True, kw_only=True):
    """One pool: its state, its last status, its breaker."""

    name: str
    stage: str
    url: str
    state: str
    reason: str
    select_endpoint: str
    in_flight: int
    breaker: BreakerRow
    saturation: float | None
    waiting_requests: int | None
    models: list[PoolModelRow]
    speed_rank: int
    routers: list[PoolRouterRow] = []
    """Those of a pool that is found by name, the oldest first."""

    def roles(self) -> list[RoleRow]:
        return [role for model in self.models for role in model.roles.values()]


class PoolList(AnswerRow, frozen=True, kw_only=True):
    """Answer of ``GET /v1/pools``."""

    object: str = "list"
    revision: int
    queue: QueueRow
    data: list[PoolRow]


class PlacedRow(AnswerRow, frozen=True, kw_only=True):
    """One line of facts about a request and where it went."""

    request_id: str
    time_ms: int
    model: str
    isl: int
    revision: int
    pools: list[str]
    how: str | None
    workers: list[str]
    dispatches: int
    outcome: str
    output_tokens: int
    queued_ms: float
    ttft_ms: float | None
    itl_ms: float | None


class PlacedList(AnswerRow, frozen=True, kw_only=True):
    """Answer of a global router's ``GET /v1/decisions``, newest first."""

    object: str = "list"
    data: list[PlacedRow]


class RefusalRow(AnswerRow, frozen=True, kw_only=True):
    """A pool that gave no worker."""

    pool: str
    state: str
    message: str


class PlacementRow(AnswerRow, frozen=True, kw_only=True):
    """One dispatch: what was wanted, what was passed over, where it went."""

    stage: str
    work: str
    cause: str
    how: str
    pool: str
    worker: str
    pool_reason: str
    overlap_blocks: int
    block_size: int
    dispatch_id: str
    select_ms: float
    selection: dict[str, Any]
    spill: dict[str, Any] | None
    fallback: dict[str, Any]
    refusals: list[RefusalRow]


class ExpectedOutputRow(AnswerRow, frozen=True, kw_only=True):
    """How many tokens an output was expected to have, and the source of the number."""

    tokens: int
    source: str


class PlacedExplanation(PlacedRow, frozen=True, kw_only=True):
    """Answer of a global router's ``GET /v1/decisions/{request_id}``: a placement for each dispatch."""

    hints: dict[str, float | None]
    expected_output: ExpectedOutputRow
    placements: list[PlacementRow]
    notes: list[str]


class ReloadAnswer(AnswerRow, frozen=True, kw_only=True):
    """Answer of ``POST /v1/config/reload`` and ``/v1/config/rollback``: what became of the document."""

    outcome: str
    revision: int
    source: str
    changes: list[str]
    problems: list[str]


class ReloadRow(ReloadAnswer, frozen=True, kw_only=True):
    """An earlier attempt to change the document."""

    time_ms: int


class MeasuredRow(AnswerRow, frozen=True, kw_only=True):
    """A 95th percentile and its target."""

    pool: str
    metric: str
    p95_ms: float
    target_ms: float
    samples: int


class LoopStepRow(AnswerRow, frozen=True, kw_only=True):
    """A change of the share that spills, or the note that nothing can."""

    time_ms: float
    stage: str
    cell: list[int]
    pool: str
    spill_pool: str | None
    share_before: float
    share_after: float
    verdict: str
    measured: list[MeasuredRow]
    reason: str


class ConfigAnswer(AnswerRow, frozen=True, kw_only=True):
    """Answer of ``GET /v1/config``: the document in force, the last attempts to change it, the last loop steps."""

    revision: int
    source: str
    document: dict[str, Any]
    reloads: list[ReloadRow]
    loop_steps: list[LoopStepRow]


# -- names -------------------------------------------------------------------------------------------------------------


class NamedRow(AnswerRow, frozen=True, kw_only=True):
    """One process under its name."""

    namespace: str
    component: str
    instance: str
    endpoints: dict[str, str]
    started_ms: int
    """Unix time at which this life of it registered; 0 = unknown."""
    lease_ms: int


class FleetList(AnswerRow, frozen=True, kw_only=True):
    """Answer of ``GET /v1/fleet``."""

    object: str = "list"
    names: str
    """Where registrations are kept: the setting ``names``."""
    where: str
    refused: dict[str, str]
    """Registrations that cannot be used, and why; at most 256."""
    data: list[NamedRow]


SECONDS_KEPT = 300
"""As many as the fleet page shows: five minutes."""

Counts = tuple[int, ...]
"""Of one second, in the order of the columns of its table."""


class SecondCounts:
    """A ring of counts: adding takes the same time always, and the size is bounded whatever the clock does."""

    def __init__(self) -> None:
        self._by_second: dict[int, Sequence[int]] = {}
        """In the order in which seconds came first, which is that of time unless the clock was set."""

    def add(self, time_ms: int, more: Sequence[int]) -> None:
        """Count a row into the second of a wall-clock time; all rows of a ring have the same columns."""
        ring, second = self._by_second, time_ms // 1000
        counts = ring.get(second)
        if counts is None:
            if len(ring) >= SECONDS_KEPT:
                del ring[next(iter(ring))]
            ring[second] = more
        else:
            ring[second] = tuple(map(add, counts, more))

    def rows(self) -> dict[str, Counts]:
        """Return the counts by second, as rows of a table; seconds without any are left out."""
        return {str(second): tuple(counts) for second, counts in self._by_second.items()}
