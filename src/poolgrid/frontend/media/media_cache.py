"""One tenant's media by URL, fetched and checked, for a short time; one fetch for all its requests that ask at once.

Rules
    1. At most ``bytes_max`` bytes are kept; the least recently used go first. What is larger is not kept.
    2. An entry is valid for ``ttl_ms`` after its fetch ended; then it is fetched again.
    3. While a URL is being fetched, each request for it waits for that fetch. It continues while any request waits,
       and is cancelled when the last one has left. Its refusal is everyone's, and is not kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from poolgrid.frontend.media.references import MediaRefused
from poolgrid.process.caches import BudgetedLru
from poolgrid.process.clock import Clock
from poolgrid.process.tasks import cancel_all, owned
from poolgrid.wire.multimodal import MediaItem


class MediaBudget:
    """The bytes of media that this process holds for requests in flight: all leases together.

    An addition that would exceed it is refused (429): nothing waits, because what would make room is the end of other
    answers.
    """

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.held = 0

    def lease(self, request_bytes_max: int) -> MediaLease:
        """Return an empty lease of at most ``request_bytes_max`` bytes."""
        return MediaLease(self, request_bytes_max)


class MediaLease:
    """What one request holds; closing it twice is harmless."""

    def __init__(self, budget: MediaBudget, bytes_max: int) -> None:
        self._budget = budget
        self._bytes_max = bytes_max
        self._held = 0
        self._closed = False

    def add(self, size: int) -> None:
        """Take ``size`` bytes more, or raise ``MediaRefused`` and take none."""
        if self._held + size > self._bytes_max:
            raise MediaRefused(
                "media_too_large",
                f"the media of the request have more than {self._bytes_max} bytes together, the limit",
            )
        if self._budget.held + size > self._budget.bytes_max:
            raise MediaRefused(
                "media_busy",
                f"media of other requests hold {self._budget.held} bytes of {self._budget.bytes_max} "
                "(media-memory-bytes); try again",
            )
        if not self._closed:
            self._held += size
            self._budget.held += size

    def close(self) -> None:
        """Give everything back."""
        self._budget.held -= self._held
        self._held = 0
        self._closed = True


@dataclass(slots=True)
class _Flight:
    task: asyncio.Task[MediaItem | MediaRefused]
    waiting: int = 0


Key = tuple[str, ...]
"""The salt of the request, what the medium was checked as, and its URL."""


class MediaCache:
    """Keeps media by key."""

    def __init__(
        self, bytes_max: int, ttl_ms: float, clock: Clock, on_lookup: Callable[[str], None] = lambda outcome: None
    ) -> None:
        """``on_lookup`` is called for each ``get``: hit, miss, or shared (the URL was being fetched already)."""
        self._on_lookup = on_lookup
        self._ttl_ms = ttl_ms
        self._clock = clock
        self._kept: BudgetedLru[Key, tuple[float, MediaItem]] = BudgetedLru(
            bytes_max, lambda key, entry: len(entry[1].data)
        )
        self._flights: dict[Key, _Flight] = {}

    @property
    def held(self) -> int:
        """Return the bytes kept."""
        return self._kept.used

    async def get(
        self, key: Key, fetch: Callable[[], Coroutine[Any, Any, MediaItem | MediaRefused]]
    ) -> MediaItem | MediaRefused:
        """Return what is kept, or what ``fetch`` returns."""
        kept = self._kept.get(key)
        if kept is not None:
            if kept[0] > self._clock.monotonic_ms():
                self._on_lookup("hit")
                return kept[1]
            self._kept.drop(key)
        flight = self._flights.get(key)
        if flight is None:
            self._on_lookup("miss")
            flight = _Flight(owned(fetch(), "fetch of a medium"))
            self._flights[key] = flight
            flight.task.add_done_callback(lambda task: self._landed(key, task))
        else:
            self._on_lookup("shared")
        flight.waiting += 1
        try:
            # Shielded: that one of several waiting clients leaves must not end the fetch for the others.
            return await asyncio.shield(flight.task)
        finally:
            flight.waiting -= 1
            if not flight.waiting and not flight.task.done():
                self._flights.pop(key, None)
                flight.task.cancel()

    async def close(self) -> None:
        """Cancel every fetch and forget everything."""
        await cancel_all([flight.task for flight in self._flights.values()])
        self._kept.clear()

    def _landed(self, key: Key, task: asyncio.Task[MediaItem | MediaRefused]) -> None:
        flight = self._flights.get(key)
        if flight is not None and flight.task is task:
            del self._flights[key]
        # ``exception`` also marks it as seen, for the case that everyone left in the same turn.
        if task.cancelled() or task.exception() is not None:
            return
        medium = task.result()
        if isinstance(medium, MediaItem) and self._ttl_ms > 0:
            self._kept.keep(key, (self._clock.monotonic_ms() + self._ttl_ms, medium))
