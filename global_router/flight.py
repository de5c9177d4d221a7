"""A request at the global router, from its arrival to its end: what it asked for, where it may go, what it holds."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import msgspec

from poolgrid.global_router.configuration import Active
from poolgrid.global_router.core.choice.circuit_breaker import Ticket
from poolgrid.global_router.core.choice.destination import Attribution, Destination
from poolgrid.global_router.core.choice.request_hints import ExpectedOutput, RequestHints
from poolgrid.global_router.core.document.axis import StageName
from poolgrid.global_router.decisions import RequestDecision
from poolgrid.global_router.pools import PoolConnection
from poolgrid.serving.request_tracker import RoutedRequest
from poolgrid.wire.identifiers import Stage
from poolgrid.wire.selection import Reservation, WorkerRank


@dataclass(slots=True)
class ReservedLeg:
    """One dispatch and what it holds at its pool."""

    pool: PoolConnection
    reservation: Reservation
    ticket: Ticket | None
    """``None`` once the pool's breaker knows the result."""
    lease_ms: float
    renewed_ms: float


class Flight(RoutedRequest, eq=False):
    """One request; served under the revision of the document that was in force when it got its first worker."""

    config: Active
    hints: RequestHints
    expected: ExpectedOutput
    record: RequestDecision
    arrived_ms: float
    destinations: dict[StageName, Destination] = msgspec.field(default_factory=dict)
    """By stage, once it is known."""
    legs: dict[str, ReservedLeg] = msgspec.field(default_factory=dict)
    """By dispatch id: the current one, and those kept for the leg after them."""
    excluded: dict[str, list[WorkerRank]] = msgspec.field(default_factory=dict)
    """By pool, the workers that failed this request."""
    unable: dict[str, list[WorkerRank]] = msgspec.field(default_factory=dict)
    """By pool, the workers that cannot do what it asks for: they are not asked again."""
    paths: dict[tuple[str, int], bytes] = msgspec.field(default_factory=dict)
    """The prompt's packed sequence hashes, by hash spec and block size."""
    lane: str = ""
    """The lane of the queue that it waits in."""
    attempts: int = 0
    """How often it was tried to place it where it is to go next."""
    stage: StageName = "aggregated"
    work: Stage = Stage.WHOLE
    after_encode: tuple[StageName, Stage] = ("aggregated", Stage.WHOLE)
    """What follows a running encode leg."""
    moving: asyncio.Task[None] | None = None
    attribution: Attribution = msgspec.field(default_factory=Attribution)
    """The cells whose loops this request's latencies count for."""
    first_ms: float | None = None
    last_ms: float = 0.0

    @property
    def admitted_by(self) -> StageName:
        """Return the stage whose pools decide whether there is room: those that generate the output."""
        return "aggregated" if self.config.document.mode == "aggregated" else "decode"
