"""What the router needs from the outside: a journal to follow, and somewhere to keep its decisions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from wire.events import JournalRecord
from wire.feed import BlockChain, WorkerState


class JournalReader(Protocol):
    """Who follows a journal: called in order, from the task that owns the router's state."""

    def on_snapshot(
        self, next_offset: int, workers: Sequence[WorkerState], chains: Iterable[tuple[int, BlockChain]]
    ) -> None:
        """Replace all state; the next record is the one at ``next_offset``. ``chains`` may be read later, once."""
        ...

    def on_records(self, records: Sequence[JournalRecord]) -> None:
        """Apply records that follow on what was applied before, without holes."""
        ...


class DecisionRecord(Protocol):
    """Keeps what came of decisions; what led to them it hears as a ``Witness``."""

    def realised(self, request_id: str, attempt: int, cached_tokens: int) -> None:
        """Note what the chosen worker really reused."""
        ...

    def ended(self, request_id: str, output_tokens: int) -> None:
        """Note that a request is over."""
        ...


class JournalFeed(Protocol):
    """A consolidator, in this process or elsewhere."""

    async def start(self, reader: JournalReader) -> None:
        """Deliver a snapshot, then every record after it; returns once the snapshot was delivered (not: loaded)."""
        ...

    def trouble(self, now_ms: float) -> str:
        """Return why the state may not be current, in words; empty when all is well."""
        ...

    def behind(self) -> int:
        """Return how many records the journal is known to hold beyond those delivered; 0 when that is none."""
        ...

    async def stop(self) -> None:
        """Stop delivering."""
        ...
