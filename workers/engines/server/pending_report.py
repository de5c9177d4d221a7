"""What became visible of an engine server since the last report to the worker."""

from __future__ import annotations

from dataclasses import dataclass, field

from poolgrid.wire.events import AnyEvent
from poolgrid.wire.requests import TokenDelta


@dataclass(slots=True)
class PendingReport:
    """Filled within one turn of the event loop, handed over in the next."""

    deltas: list[TokenDelta] = field(default_factory=list)
    events: dict[int, list[AnyEvent]] = field(default_factory=dict)
    """By rank; a rank that is there is part of the report."""
    released: list[str] = field(default_factory=list)
    expired: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0

    def of_rank(self, dp_rank: int) -> list[AnyEvent]:
        return self.events.setdefault(dp_rank, [])

    def __bool__(self) -> bool:
        return bool(self.deltas or self.events or self.released)
