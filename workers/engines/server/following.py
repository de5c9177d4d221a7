"""The cache events of all ranks of an engine server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import zmq

from poolgrid.process.clock import Clock
from poolgrid.wire.events import AnyEvent, BlocksStored
from poolgrid.wire.identifiers import Tier
from poolgrid.workers.engines.server.core.server_facts import EventSource
from poolgrid.workers.engines.server.engine import CacheEvents
from poolgrid.workers.engines.server.rank_events import RankEvents


class FollowedEvents(CacheEvents):
    """Follows one publisher for each rank, in their order."""

    def __init__(
        self, sources: Sequence[EventSource], block_size: int, context: zmq.Context[Any], clock: Clock
    ) -> None:
        self._sources = sources
        self._block_size = block_size
        self._context = context
        self._clock = clock
        self._ranks: list[RankEvents] = []

    def cached_blocks(self, dp_rank: int) -> int:
        return self._ranks[dp_rank].told.count_on(Tier.DEVICE) if self._ranks else 0

    def restate(self, dp_rank: int) -> list[BlocksStored]:
        """Return what was told of a rank's cache."""
        return self._ranks[dp_rank].told.restate() if self._ranks else []

    def is_current(self) -> bool:
        return all(each.is_current for each in self._ranks)

    def describe(self) -> dict[str, object]:
        return {"events": [each.describe() for each in self._ranks]}

    def open(self, tell: Callable[[int, list[AnyEvent]], None]) -> None:
        """Begin to follow; raises ``ValueError`` for an endpoint that is none."""
        for dp_rank, source in enumerate(self._sources):
            rank = RankEvents(dp_rank, source, self._block_size, self._context, self._clock, tell)
            self._ranks.append(rank)
            rank.open()

    def close(self) -> None:
        """Stop following; what was told stays known."""
        for each in self._ranks:
            each.close()
