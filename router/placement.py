"""A request at its router, the worker that was chosen for its next leg, or why there is none."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from poolgrid.kernel.decision.decision import Decision
from poolgrid.kernel.decision.stage_plan import LegSpec
from poolgrid.kernel.projection.lineage import Known
from poolgrid.kernel.requests.legs import Dispatch
from poolgrid.kernel.requests.trace_record import SpanRecord, Value
from poolgrid.kernel.routing.selector import NoWorker, PolicyFailed
from poolgrid.kernel.routing.working_set import SessionKey
from poolgrid.kernel.wire.identifiers import STAGE_WORD, Stage, WorkerKey
from poolgrid.server.serving.fair_queue import QueuedRequest
from poolgrid.server.serving.request_tracker import RoutedRequest


class WaitCause(StrEnum):
    """Why a request waits, as metrics name it."""

    WORKERS_FULL = "workers_full"
    UNREACHABLE = "unreachable"
    BEHIND_OTHERS = "behind_others"
    HELD = "held"
    WORKING_SET = "working_set"
    WORKER_LOST = "worker_lost"
    NEXT_LEG = "next_leg"


class LocalRequest(RoutedRequest, eq=False):
    """A request of a pool's router."""

    path: array[int]
    """Sequence hashes of the prompt's whole blocks."""
    block_size: int = 0
    """Tokens of a block of ``path``; 0 as long as no worker of the model was there."""
    tried: dict[WorkerKey, str] = msgspec.field(default_factory=dict)
    """Workers that failed this request, and how: they come last."""
    latest: Dispatch | None = None
    """Its last dispatch; ``None`` before the first."""
    unable: dict[WorkerKey, str] = msgspec.field(default_factory=dict)
    """Workers that cannot do what it asks for, and why: they are not asked again."""
    queued: QueuedRequest[LocalRequest] | None = None
    """Its place in the queue, while it waits."""
    crowded: Mapping[WorkerKey, str] = msgspec.field(default_factory=dict)
    """Workers that it must leave alone while others can serve it: it would evict sessions there."""
    displaced: tuple[SessionKey, ...] = ()
    """Sessions that have lost their places to it."""
    has_place: bool = False
    """Whether it has waited for room in the pool's working set, and has it: it does not wait for engines too, where
    turns of other sessions would pass it."""
    follows: Known | None = None
    """The turn before its own when it began to wait."""
    behind: Mapping[WorkerKey, int] = msgspec.field(default_factory=dict)
    """Those that wait and will be computed behind it on each worker, while it is placed by a plan."""
    resumed_for: WaitCause = WaitCause.WORKER_LOST
    """Why it waits, while its client is being served already."""
    placed: asyncio.Future[None] | None = None
    """Resolved when a waiting request is on a worker; ``None`` for one whose client reads its stream already."""

    @property
    def is_over(self) -> bool:
        """Return whether a request that waits needs no worker any more."""
        return self.machine.ended or (self.placed is not None and self.placed.done())


class Placement(msgspec.Struct):
    """A worker, chosen for a leg of a request."""

    decision: Decision
    leg: LegSpec
    now_ms: float

    def reason(self) -> str:
        """Return the short reason code, with the stage where there are several."""
        reason = self.decision.reason
        stage = self.leg.stage
        return reason if stage is Stage.WHOLE else f"{STAGE_WORD[stage]}-{reason}"


@dataclass(frozen=True, slots=True)
class PlacementFailure:
    """Why no worker was chosen."""

    none: NoWorker | PolicyFailed
    busy: bool = False
    """Whether some worker could serve the request once it has room or can be reached again: it may wait."""
    full: bool = False
    """Whether some worker that could serve it has refused others for lack of room."""
    waits_for_engine: bool = False
    """Whether the engine where it would go has enough to compute."""

    @property
    def is_policy_failure(self) -> bool:
        """Return whether the policy raised; only this request is lost."""
        return isinstance(self.none, PolicyFailed)

    @property
    def wait_cause(self) -> WaitCause:
        full = self.full or (isinstance(self.none, NoWorker) and self.none.busy)
        return WaitCause.WORKERS_FULL if full else WaitCause.UNREACHABLE

    def __str__(self) -> str:
        return str(self.none)


OTHERS_MAX = 8
"""Further candidates that are sent, the cheapest; ``/v1/decisions`` has them all. Each costs some 15 µs to send."""


def tell_decision(span: SpanRecord, decision: Decision) -> None:
    """Put a decision on a span: the chosen worker's terms as attributes, those of others in an event each."""
    told = decision.explanation()
    span.attributes |= {
        "poolgrid.worker": told.worker,
        "poolgrid.stage": told.stage,
        "poolgrid.policy": told.policy,
        "poolgrid.decision.reason": told.reason,
        "poolgrid.decision.attempt": told.attempt,
        "poolgrid.candidates": told.candidates,
        "poolgrid.filtered": len(told.filtered),
        "poolgrid.isl": told.isl,
        "poolgrid.overlap_blocks": told.overlap_blocks,
        "poolgrid.block_size": told.block_size,
        "poolgrid.journal_offset": told.offset,
        "poolgrid.behind_records": told.behind_records,
    }
    if told.session:
        span.attributes["poolgrid.session"] = told.session
    if told.cost is not None:
        span.attributes["poolgrid.cost"] = told.cost
    others = []
    for row in told.rows:
        if row.chosen:
            span.attributes |= {f"poolgrid.cost.{name}": value for name, value in row.terms.items()}
        else:
            others.append(row)
    others.sort(key=lambda row: 0.0 if row.cost is None else row.cost)
    for row in others[:OTHERS_MAX]:
        blocks = row.device_overlap_blocks + row.host_overlap_blocks + row.disk_overlap_blocks
        event: dict[str, Value] = {
            "poolgrid.worker": row.worker,
            "poolgrid.overlap_blocks": blocks,
            "poolgrid.requests": row.requests,
        }
        if row.cost is not None:
            event["poolgrid.cost"] = row.cost
            event["poolgrid.cost.terms"] = " ".join(f"{name}={value:g}" for name, value in row.terms.items())
        span.event("other candidate", span.began_ms, event)
