"""What reports have told of one rank's cache, so that it can be told again. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from poolgrid.wire.events import AnyEvent, BlocksRemoved, BlocksStored, CacheCleared
from poolgrid.wire.hashing import unpack_hashes
from poolgrid.wire.identifiers import Tier
from poolgrid.workers.core.cache_facts import chains, stored_chain


class ReportedBlocks:
    """The blocks of one rank by tier, each with its parent."""

    def __init__(self) -> None:
        self._held: dict[Tier, dict[int, int | None]] = {tier: {} for tier in Tier}

    def __bool__(self) -> bool:
        return any(self._held.values())

    def count_on(self, tier: Tier) -> int:
        return len(self._held[tier])

    def apply(self, events: Iterable[AnyEvent]) -> None:
        """Follow what is told."""
        for event in events:
            if type(event) is BlocksStored:
                held = self._held[event.tier]
                hashes = unpack_hashes(event.sequence_hashes)
                held.update(zip(hashes, (event.parent, *hashes[:-1]), strict=True))
            elif type(event) is BlocksRemoved:
                held = self._held[event.tier]
                for sequence_hash in unpack_hashes(event.sequence_hashes):
                    held.pop(sequence_hash, None)
            elif type(event) is CacheCleared:
                for held in self._held.values():
                    held.clear()

    def restate(self) -> list[BlocksStored]:
        """Return all of it, parents before children, tier by tier."""
        events: list[BlocksStored] = []
        for tier, held in self._held.items():
            for parent, hashes in chains(held.items()):
                events += stored_chain(parent, hashes, tier)
        return events
