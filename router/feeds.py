"""The two ways to follow a journal: a consolidator inside this process, or one elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import zmq

from router.consolidator.feed_follower import FeedFollower
from router.consolidator.service import ConsolidatorService
from router.ports import JournalReader
from runtime.clock import Clock
from wire.events import JournalRecord
from wire.feed import BlockChain, WorkerState

SILENCE_MS = 2500.0
"""Silence of a consolidator that is worth a word: it speaks every ``feed_keep_alive_ms``, 500 unless set otherwise."""


class _Listener:
    """Hands what a consolidator says to a reader."""

    def __init__(self, reader: JournalReader) -> None:
        self._reader = reader

    def on_snapshot(self, offset: int, workers: list[WorkerState], chains: Iterable[tuple[int, BlockChain]]) -> None:
        """Pass a snapshot on."""
        self._reader.on_snapshot(offset, workers, chains)

    def on_records(self, records: Sequence[JournalRecord]) -> None:
        """Pass records on."""
        self._reader.on_records(records)


class EmbeddedFeed:
    """A consolidator in this process: its records arrive by a plain call."""

    def __init__(self, consolidator: ConsolidatorService) -> None:
        self._consolidator = consolidator
        self._unsubscribe: Callable[[], None] | None = None

    async def start(self, reader: JournalReader) -> None:
        """Recover the journal, open the consolidator's sockets, deliver the state."""
        await self._consolidator.start()
        self._unsubscribe = self._consolidator.subscribe(_Listener(reader))

    def trouble(self, now_ms: float) -> str:
        """Return what keeps the consolidator from writing, if anything."""
        consolidator = self._consolidator
        if not consolidator.stalled:
            return ""
        return (
            f"the journal cannot be written since {(now_ms - consolidator.stalled_since_ms) / 1000:.0f} s "
            f"({consolidator.stall_reason}); what workers say waits with them"
        )

    def behind(self) -> int:
        """Return 0: records arrive in the turn in which they are written."""
        return 0

    async def stop(self) -> None:
        """Stop following and end the consolidator."""
        if self._unsubscribe is not None:
            self._unsubscribe()
        await self._consolidator.stop()


class RemoteFeed:
    """A consolidator in another process, shared with other routers."""

    def __init__(
        self,
        feed_endpoint: str,
        query_endpoint: str,
        clock: Clock,
        make_context: Callable[[], zmq.Context[Any]] = zmq.Context,
    ) -> None:
        self._endpoints = (feed_endpoint, query_endpoint)
        self._clock = clock
        self._make_context = make_context
        self._follower: FeedFollower | None = None

    async def start(self, reader: JournalReader) -> None:
        """Follow; returns when the first snapshot was delivered, however long the consolidator takes to come up."""
        self._follower = FeedFollower(*self._endpoints, _Listener(reader), self._clock, make_context=self._make_context)
        await self._follower.start()
        await self._follower.wait_synced()

    def trouble(self, now_ms: float) -> str:
        """Return how long the consolidator has been silent, when that is longer than it should be."""
        heard_ms = self._follower.heard_ms if self._follower is not None else None
        if heard_ms is None or now_ms - heard_ms <= SILENCE_MS:
            return ""
        return (
            f"the consolidator has been silent for {(now_ms - heard_ms) / 1000:.0f} s: it is gone, cut off, or cannot "
            "write its journal"
        )

    def behind(self) -> int:
        """Return how many records are still to come of those that the consolidator has named."""
        return self._follower.behind if self._follower is not None else 0

    async def stop(self) -> None:
        """Stop following."""
        if self._follower is not None:
            await self._follower.stop()
