"""How a router follows a journal: of a consolidator inside this process, or of one elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import zmq

from poolgrid.kernel.journal.ports import PoolListener
from poolgrid.kernel.wire.ingest import LoadingWorker
from poolgrid.server.consolidator.feed_follower import FeedFollower
from poolgrid.server.process.clock import Clock
from poolgrid.server.process.tasks import unless

if TYPE_CHECKING:
    from poolgrid.server.consolidator.service import ConsolidatorService

SILENCE_MS = 2500.0
"""Silence of a consolidator that is worth a word: it publishes at least every 500 ms."""


class JournalFeed(Protocol):
    """A journal that a router follows: of a consolidator in this process or elsewhere."""

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

    def loading(self) -> list[LoadingWorker]:
        """Return the workers that still load, as they report it; it is for people, and may be a second old."""
        ...

    async def stop(self) -> None: ...


class EmbeddedFeed:
    """A consolidator in this process: its records arrive by a plain call."""

    def __init__(self, consolidator: ConsolidatorService) -> None:
        self._consolidator = consolidator
        self._unsubscribe: Callable[[], None] | None = None
        self._listener: PoolListener | None = None
        self._stopped = False

    async def start(self, listener: PoolListener) -> None:
        """Recover the journal, open the consolidator's sockets, deliver the state."""
        await self._consolidator.start()
        self._listener = listener
        self._unsubscribe = self._consolidator.subscribe(listener)

    def resync(self) -> None:
        """Subscribe again, once the consolidator's turn is over: it may be in the middle of one."""
        if self._unsubscribe is not None:
            self._unsubscribe()
            self._unsubscribe = None
            asyncio.get_running_loop().call_soon(self._subscribe)

    def _subscribe(self) -> None:
        if not self._stopped and self._unsubscribe is None and self._listener is not None:
            self._unsubscribe = self._consolidator.subscribe(self._listener)

    def trouble(self, now_ms: float) -> str:
        """Return what keeps the consolidator from writing as it should, if anything."""
        return self._consolidator.trouble

    def loading(self) -> list[LoadingWorker]:
        return self._consolidator.loading()

    def behind(self) -> int:
        """Return 0: records arrive in the turn in which they are written."""
        return 0

    async def stop(self) -> None:
        self._stopped = True
        if self._unsubscribe is not None:
            self._unsubscribe()
        await self._consolidator.stop()


class RemoteFeed:
    """A consolidator in another process, shared with other routers; where it is may change."""

    def __init__(
        self,
        feed_endpoint: str,
        query_endpoint: str,
        clock: Clock,
        make_context: Callable[[], zmq.Context[Any]] = zmq.Context,
    ) -> None:
        """Empty endpoints are not known yet: ``move`` sets them."""
        self._endpoints = (feed_endpoint, query_endpoint)
        self._listener: PoolListener | None = None
        self._moving = asyncio.Lock()
        self._moved = asyncio.Event()
        self._known = asyncio.Event()
        if feed_endpoint and query_endpoint:
            self._known.set()
        self._clock = clock
        self._make_context = make_context
        self._follower: FeedFollower | None = None

    async def start(self, listener: PoolListener) -> None:
        """Follow; returns when the first snapshot was delivered, however long the consolidator takes to come up."""
        self._listener = listener
        await self._known.wait()
        async with self._moving:
            await self._follow(listener)
        while True:
            follower = self._follower
            assert follower is not None, "it was made just now"
            self._moved.clear()
            await unless(self._moved, follower.wait_synced(), "first snapshot of the consolidator")
            if follower is self._follower:
                return

    async def move(self, feed_endpoint: str, query_endpoint: str) -> None:
        """Follow a consolidator that is elsewhere now; its first snapshot replaces what is known."""
        async with self._moving:
            if self._endpoints == (feed_endpoint, query_endpoint):
                return
            self._endpoints = (feed_endpoint, query_endpoint)
            self._known.set()
            if self._follower is not None and self._listener is not None:
                await self._follower.stop()
                await self._follow(self._listener)
                self._moved.set()

    async def _follow(self, listener: PoolListener) -> None:
        self._follower = FeedFollower(*self._endpoints, listener, self._clock, make_context=self._make_context)
        await self._follower.start()

    def resync(self) -> None:
        if self._follower is not None:
            self._follower.resync()

    def answers(self) -> bool:
        """Return whether a message of the consolidator came a moment ago."""
        heard_ms = None if self._follower is None else self._follower.heard_ms
        return heard_ms is not None and self._clock.monotonic_ms() - heard_ms <= SILENCE_MS

    def trouble(self, now_ms: float) -> str:
        """Return how long the consolidator has been silent, when that is longer than it should be."""
        heard_ms = self._follower.heard_ms if self._follower is not None else None
        if heard_ms is None or now_ms - heard_ms <= SILENCE_MS:
            return ""
        return (
            f"the consolidator has been silent for {(now_ms - heard_ms) / 1000:.0f} s: it is gone, cut off, or cannot "
            "write its journal"
        )

    def loading(self) -> list[LoadingWorker]:
        return self._follower.loading() if self._follower is not None else []

    def behind(self) -> int:
        return self._follower.behind() if self._follower is not None else 0

    async def stop(self) -> None:
        if self._follower is not None:
            await self._follower.stop()
