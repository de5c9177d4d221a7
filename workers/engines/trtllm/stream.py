"""The events that an engine publishes by itself: followed over ZMQ, one stream for each rank, on the worker's loop.

The stream names neither salts nor adapters. So the first block of a prompt is told to routers only when no request with
either began with the same tokens (``core.root_seeds``); what hangs off an untold block is untold too.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import zmq

from poolgrid.kv_events.cache_events import StoredBlock
from poolgrid.process.clock import Clock
from poolgrid.wire.events import AnyEvent, BlocksStored
from poolgrid.wire.identifiers import Tier
from poolgrid.workers.core.event_translation import RootSeed
from poolgrid.workers.engines.server.core.server_facts import EventSource
from poolgrid.workers.engines.server.rank_events import RankEvents
from poolgrid.workers.engines.trtllm.arguments.event_stream import EventStreamEndpoints

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0
"""How long the first connection to every rank may take; the engine binds before it is ready."""

CHECK_S = 0.01
"""Between two looks whether all ranks are connected."""

NO_NAME = 0
"""Of a block whose engine hash says nothing of tenants."""


class EngineStream:
    """Follows the publishers of all ranks."""

    def __init__(
        self,
        stream: EventStreamEndpoints,
        ranks: int,
        block_size: int,
        context: zmq.Context[Any],
        clock: Clock,
        root_seed: RootSeed,
        tell: Callable[[int, list[AnyEvent]], None],
    ) -> None:
        """``tell`` is called with the events of a rank, in order."""

        def seed_of(tokens: bytes) -> int | None:
            return root_seed(StoredBlock(block_hash=NO_NAME, tokens=tokens))

        self._ranks = [
            RankEvents(
                rank, EventSource(rank, *stream.of_rank(rank), stream.topic), block_size, context, clock, tell, seed_of
            )
            for rank in range(ranks)
        ]

    def restate(self, rank: int) -> list[BlocksStored]:
        """Return what was told of a rank's cache."""
        return self._ranks[rank].told.restate()

    def blocks_on(self, rank: int, tier: Tier) -> int:
        return self._ranks[rank].told.count_on(tier)

    def describe(self) -> list[dict[str, object]]:
        return [each.describe() for each in self._ranks]

    async def open(self) -> None:
        """Begin to follow; return when every rank is connected, or after a time-out. Raises ``ValueError``."""
        for each in self._ranks:
            each.open()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                while not all(each.is_current for each in self._ranks):  # noqa: ASYNC110 - a socket's monitor tells it
                    await asyncio.sleep(CHECK_S)
        except TimeoutError:
            missing = [each.describe()["endpoint"] for each in self._ranks if not each.is_current]
            log.warning("the engine does not publish its events at %s yet; they are followed once it does", missing)

    def close(self) -> None:
        """Stop following; what was told stays known."""
        for each in self._ranks:
            each.close()
