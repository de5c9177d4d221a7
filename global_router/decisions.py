"""Why a request went where it went: one record over all its stages, pools, workers, moves and the end.

A record grows while its request lives. ``explanation`` is everything; ``summary`` one line of facts.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import msgspec

from poolgrid.kernel.pool_grids.axis import TARGETS
from poolgrid.kernel.pool_grids.closed_loop import Spill
from poolgrid.kernel.pool_grids.grid import FallbackChoice, Selection
from poolgrid.kernel.pool_grids.request_hints import ExpectedOutput, RequestHints
from poolgrid.kernel.wire.answers import (
    ExpectedOutputRow,
    PlacedExplanation,
    PlacedRow,
    PlacementRow,
    RefusalRow,
    SecondCounts,
)
from poolgrid.kernel.wire.identifiers import kept_under, name_of

NOTES_MAX = 50
"""Of one request; one that waits is tried again and again, with the same result each time."""

IN_FLIGHT = "in flight"
"""Outcome of a request that has not ended."""


@dataclass(slots=True)
class Refusal:
    """A pool that was asked for a worker and gave none, or whose worker could not be reached."""

    pool: str
    state: str
    message: str
    blames_pool: bool = False
    """Whether it counts for the pool's circuit breaker: a busy pool, or a prompt too long for it, is no failure."""


@dataclass(slots=True)
class PoolPlacement:
    """One dispatch: what was wanted, what was passed over, where it went."""

    stage: str
    """The document's stage whose pools were looked at."""
    work: str
    """What the worker is asked to do: ``whole``, ``prefill`` or ``decode``."""
    cause: str
    """``first``, ``decode leg``, or why the request had to move."""
    how: str
    """How the pool was found: ``grid``, ``override``, ``spill``, ``retry``, ``fallback`` or ``same-pool``."""
    selection: Selection
    spill: Spill | None
    choice: FallbackChoice
    refusals: tuple[Refusal, ...]
    dispatch_id: str
    pool: str
    worker: str
    pool_reason: str
    overlap_blocks: int
    block_size: int
    select_ms: float

    def explanation(self) -> PlacementRow:
        return PlacementRow(
            stage=self.stage,
            work=self.work,
            cause=self.cause,
            how=self.how,
            pool=self.pool,
            worker=self.worker,
            pool_reason=self.pool_reason,
            overlap_blocks=self.overlap_blocks,
            block_size=self.block_size,
            dispatch_id=self.dispatch_id,
            select_ms=round(self.select_ms, 3),
            selection=self.selection.explanation(),
            spill=None if self.spill is None else {"pool": self.spill.pool, "share": self.spill.share},
            fallback=self.choice.explanation(),
            refusals=[
                RefusalRow(pool=refusal.pool, state=refusal.state, message=refusal.message) for refusal in self.refusals
            ],
        )


@dataclass(slots=True)
class RequestDecision:
    """The record of one request."""

    request_id: str
    time_ms: int
    """Unix time of the arrival."""
    model: str
    isl: int
    revision: int
    """Revision of the document that it was served under."""
    hints: RequestHints
    expected: ExpectedOutput
    placements: list[PoolPlacement] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    outcome: str = IN_FLIGHT
    """``in flight``, a finish reason, or ``refused: code``."""
    output_tokens: int = 0
    queued_ms: float = 0.0
    """How long it waited for a pool with room before its first dispatch."""
    ttft_ms: float | None = None
    itl_ms: float | None = None

    def note(self, text: str) -> None:
        """Add a note, unless it is there; beyond ``NOTES_MAX`` no more are taken."""
        if text not in self.notes and len(self.notes) < NOTES_MAX:
            self.notes.append(text)

    def summary(self) -> PlacedRow:
        return PlacedRow(
            request_id=self.request_id,
            time_ms=self.time_ms,
            model=self.model,
            isl=self.isl,
            revision=self.revision,
            pools=list(dict.fromkeys(placement.pool for placement in self.placements)),
            how=self.placements[-1].how if self.placements else None,
            workers=list(dict.fromkeys(placement.worker for placement in self.placements)),
            dispatches=len(self.placements),
            outcome=self.outcome,
            output_tokens=self.output_tokens,
            queued_ms=round(self.queued_ms, 3),
            ttft_ms=None if self.ttft_ms is None else round(self.ttft_ms, 3),
            itl_ms=None if self.itl_ms is None else round(self.itl_ms, 3),
        )

    def explanation(self) -> PlacedExplanation:
        hints = self.hints
        return PlacedExplanation(
            **msgspec.structs.asdict(self.summary()),
            hints={
                **{
                    kind.default_key: hints.targets[kind.name].value_ms if kind.name in hints.targets else None
                    for kind in TARGETS
                },
                "priority": hints.priority,
                "osl": hints.osl,
            },
            expected_output=ExpectedOutputRow(tokens=self.expected.tokens, source=self.expected.source),
            placements=[placement.explanation() for placement in self.placements],
            notes=list(self.notes),
        )


class RequestDecisions:
    """The last records, by request id."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._records: OrderedDict[str, RequestDecision] = OrderedDict()
        self._latest: dict[str, str] = {}
        """The latest request that clients called by a name."""
        self.added = 0
        """Records so far, forgotten ones included."""
        self.seconds = SecondCounts()
        """Requests in each of the last seconds, forgotten records included."""

    def add(self, record: RequestDecision) -> None:
        """Keep a record, forgetting the oldest beyond the capacity; a second one of the same id replaces the first."""
        self.added += 1
        self.seconds.add(record.time_ms, (1, record.isl, 0, 0))
        self._records.pop(record.request_id, None)
        self._records[record.request_id] = record
        self._latest[name_of(record.request_id)] = record.request_id
        while len(self._records) > self._capacity:
            forgotten, _ = self._records.popitem(last=False)
            if self._latest.get(name_of(forgotten)) == forgotten:
                del self._latest[name_of(forgotten)]

    def get(self, request_id: str) -> RequestDecision | None:
        """Return a request's record, if it is kept.

        It may be asked for by any name that people have of it (``poolgrid.kernel.wire.identifiers.kept_under``): by one
        that several clients chose it is the latest, of a request with several sequences the first.
        """
        found = kept_under(request_id, self._id_under)
        return self._records[found[0]] if found else None

    def _id_under(self, name: str) -> str | None:
        return name if name in self._records else self._latest.get(name)

    @property
    def oldest_ms(self) -> int | None:
        """When the request of the oldest record came; ``None`` = none is kept."""
        return next((each.time_ms for each in self._records.values()), None)

    def newest(self, limit: int) -> list[RequestDecision]:
        """Return the last records, newest first."""
        newest: list[RequestDecision] = []
        for record in reversed(self._records.values()):
            if len(newest) >= limit:
                break
            newest.append(record)
        return newest

    def __len__(self) -> int:
        return len(self._records)
