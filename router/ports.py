"""What the router needs from the outside: a journal to follow, and somewhere to keep its decisions."""

from __future__ import annotations

from typing import Protocol

from poolgrid.consolidator.ports import PoolListener
from poolgrid.wire.loading import LoadingWorker


class DecisionRecord(Protocol):
    """Keeps what came of decisions; what led to them it is told as the log of the router's state."""

    def realised(self, request_id: str, attempt: int, cached_tokens: int) -> None:
        """Note what the chosen worker really reused."""
        ...

    def first_token(self, request_id: str, attempt: int, ttft_ms: float) -> None:
        """Note how long the first token of a choice really took, of a policy that expected something."""
        ...

    def ended(self, request_id: str, output_tokens: int) -> None:
        """Note that a request is over."""
        ...


class JournalFeed(Protocol):
    """A consolidator, in this process or elsewhere."""

    async def start(self, listener: PoolListener) -> None:
        """Deliver a snapshot, then every record after it; returns once the snapshot was delivered (not: loaded)."""
        ...

    def trouble(self, now_ms: float) -> str:
        """Return why the state may not be current, in words; empty when all is well."""
        ...

    def resync(self) -> None:
        """Deliver a snapshot soon, and what follows it: what was delivered could not be applied.

        What comes before that snapshot is of no use to the listener. It never comes from inside the call.
        """
        ...

    def behind(self) -> int:
        """Return how many records the journal is known to hold beyond those delivered; 0 when that is none."""
        ...

    async def stop(self) -> None:
        """Stop delivering."""
        ...


class PoolFeed(JournalFeed, Protocol):
    """A feed that knows too what is in no journal."""

    def loading(self) -> list[LoadingWorker]:
        """Return the workers that still load, by their own words; it is for people, and may be a second old."""
        ...
