"""Who is told of everything that a router's decisions depend on, in the order in which it happened.

What a decision depends on is: the records and snapshots applied, what the router did to its ledger on its own account
(booked, crowded, renewed, released, let expire, each with the clock it read), and the arguments of ``select``. With
those, and the policy's settings, the same code gives the same decisions again, bit for bit. Nothing else may
change the state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from wire.events import JournalRecord
from wire.identifiers import Role, WorkerKey

if TYPE_CHECKING:
    from router.core.decision import Decision


class Witness(Protocol):
    """Called in the middle of the router's turn: must be quick, keep the order, and change nothing."""

    def loaded(self, next_offset: int, now_ms: float) -> None:
        """Hear that the state of the pool before record ``next_offset`` replaces all that was known of it."""
        ...

    def applied(self, record: JournalRecord, now_ms: float) -> None:
        """Hear that a record is being applied."""
        ...

    def decided(
        self,
        decision: Decision,
        path: Sequence[int],
        now_ms: float,
        unavailable: Mapping[WorkerKey, str],
        roles: tuple[Role, ...],
    ) -> None:
        """Hear of a choice and of the arguments that led to it."""
        ...

    def booked(self, decision: Decision, dispatch_id: str, now_ms: float, lease_ms: float) -> None:
        """Hear that a choice was entered into the ledger."""
        ...

    def crowded(self, worker: WorkerKey, dispatch_id: str, booked_tokens: int, now_ms: float) -> None:
        """Hear that a worker refused a dispatch because it has promised more than this router knew."""
        ...

    def renewed(self, worker: WorkerKey, dispatch_id: str, now_ms: float) -> None:
        """Hear that a reservation's lease began anew."""
        ...

    def released(self, worker: WorkerKey, dispatch_id: str) -> None:
        """Hear that the router took an entry off its ledger."""
        ...

    def expired(self, now_ms: float, renewed: Sequence[str]) -> None:
        """Hear that reservations due by ``now_ms`` expired, those of the dispatches ``renewed`` excepted."""
        ...
