"""Cache events of one rank of an engine server: followed over ZMQ, told as the worker's own.

Rules:

1. The publisher is followed as a consolidator follows one (``poolgrid.kv_events.follower``): numbered frames,
   holes replayed, lives told apart. Its epochs and numbers end here; what comes out is part of the worker's stream.
2. A new life of the publisher, and a loss that no replay mends, is told as ``CacheCleared``: what was claimed before
   may not be there. So is a connection that is gone for the lease.
3. ``told`` holds exactly what was told, so that whoever lost the stream can be told again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from poolgrid.kv_events.follower import Leave, NewLife, PubEffect, PubFollower, SourceState
from poolgrid.kv_events.publisher_sockets import PublisherSockets
from poolgrid.kv_events.translation import RootSeed
from poolgrid.process.clock import Clock
from poolgrid.wire.events import AnyEvent, CacheCleared, EventBatch
from poolgrid.wire.identifiers import StreamState, Tier, WorkerId, WorkerKey
from poolgrid.workers.core.cache_facts import ReportedBlocks
from poolgrid.workers.engines.server.core.server_facts import EventSource

log = logging.getLogger(__name__)

REPLAY_TIMEOUT_MS = 5_000
"""How long a replay may be silent before it is asked for again. Publishers look for questions between two steps, and a
step with a long prompt takes seconds."""

LEASE_MS = 30_000
"""How long the connection may be gone before what was claimed is taken back: a server that restarts is told apart by
what it replays, so this is for one that has gone for good."""

BLOCKS_MAX = 4_194_304
"""Most blocks that are followed of a rank, some 500 MB: more than any cache on one device has."""


class RankEvents:
    """Follows the publisher of one rank, and keeps what it said."""

    def __init__(
        self,
        dp_rank: int,
        source: EventSource,
        block_size: int,
        context: zmq.Context[Any],
        clock: Clock,
        tell: Callable[[int, list[AnyEvent]], None],
        root_seed: RootSeed | None = None,
    ) -> None:
        """``dp_rank`` is the worker's number of the rank; the publisher may have another for it."""
        self._dp_rank = dp_rank
        self._source = source
        self._tell = tell
        self.told = ReportedBlocks()
        key = WorkerKey(WorkerId("engine server"), source.dp_rank)
        has_replay = bool(source.replay_endpoint)
        self._follower = PubFollower(
            key, block_size, BLOCKS_MAX, has_replay, REPLAY_TIMEOUT_MS, LEASE_MS, root_seed=root_seed
        )
        self._sockets = PublisherSockets(
            f"of rank {source.dp_rank}", source, context, clock, LEASE_MS, self._follower, self._on_effects
        )
        self._said = ""
        self._block_size = block_size
        self._unfit = ""
        """Why the blocks that the server stores are not taken; empty = they are."""

    @property
    def is_current(self) -> bool:
        """Whether nothing that was published is still to be read."""
        return self._follower.state is SourceState.LIVE

    @property
    def health(self) -> tuple[StreamState, str]:
        """Return how far the claims can be trusted, and why; with what is probably wrong where it was never reached."""
        state, reason = self._follower.health
        if self._follower.state is SourceState.ABSENT and self._source.doubt:
            return state, f"{reason}; {self._source.doubt}"
        return state, reason

    @property
    def counts(self) -> dict[str, int]:
        return self._follower.counts

    def describe(self) -> dict[str, object]:
        """Return the state for people and probes, as JSON values."""
        state, reason = self.health
        return {
            "dp_rank": self._dp_rank,
            "endpoint": self._source.endpoint,
            "replay_endpoint": self._source.replay_endpoint,
            "state": state.name.lower(),
            "reason": reason or self._unfit,
            "blocks": sum(self.told.count_on(tier) for tier in Tier),
            **self.counts,
        }

    def open(self) -> None:
        """Begin to follow; raises ``ValueError`` where the endpoint is none."""
        try:
            self._sockets.open()
        except zmq.ZMQError as error:
            self._sockets.close()
            raise ValueError(f"following cache events at {self._source.endpoint!r} failed: {error}") from None

    def close(self) -> None:
        self._sockets.close()

    def _on_effects(self, effects: Sequence[PubEffect]) -> None:
        self._note_block_size()
        events: list[AnyEvent] = []
        for effect in effects:
            if isinstance(effect, EventBatch):
                events += effect.events
            elif isinstance(effect, NewLife | Leave):
                log.info("cache events of rank %d begin anew: %s", self._source.dp_rank, effect.reason)
                events = [CacheCleared()] if events or self.told else []
        state, reason = self.health
        if state is StreamState.STALE and reason != self._said:
            log.warning("cache events of rank %d cannot be trusted: %s", self._source.dp_rank, reason)
        self._said = reason
        if events:
            self.told.apply(events)
            self._tell(self._dp_rank, events)

    def _note_block_size(self) -> None:
        """Log once that blocks of the server have another size than those of this worker."""
        size = self._follower.other_block_size
        if size and not self._unfit:
            self._unfit = (
                f"rank {self._source.dp_rank} stores blocks of {size} tokens, this worker's have {self._block_size}: "
                f"none of them is known to routers. Give kv_block_size {size}"
            )
            log.error("cache events do not fit: %s", self._unfit)
