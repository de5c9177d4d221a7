"""Workers that refused a request because they have no room, and when they may be asked again.

A worker in front of a full engine passes the engine's ``Retry-After`` on. Until that time is over it gets nothing, and
requests that only it could serve wait in the queue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Mapping
from typing import Final, Generic, TypeVar

from poolgrid.process.clock import Clock

K = TypeVar("K", bound=Hashable)
"""How a router names a worker."""

FULL: Final = "it refused a request for lack of room"
"""Filter reason of such a worker."""

RETRY_AFTER_DEFAULT_MS: Final = 250
"""Pause before a worker is asked again that reported no time: room may come with the next request that ends there."""

RETRY_AFTER_MAX_MS: Final = 60_000
"""Longest time that is believed."""


class FullWorkers(Generic[K]):
    """Those of one router."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._until_ms: dict[K, float] = {}
        self._next_ms = float("inf")
        self._reasons: Mapping[K, str] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._on_room: Callable[[], None] = lambda: None

    def observe(self, on_room: Callable[[], None]) -> None:
        """Call ``on_room`` from now on whenever a worker may be asked again."""
        self._on_room = on_room

    def note(self, worker: K, retry_after_ms: int | None) -> None:
        """Leave a worker alone for the time that it reported."""
        pause_ms = RETRY_AFTER_DEFAULT_MS if retry_after_ms is None else min(retry_after_ms, RETRY_AFTER_MAX_MS)
        until_ms = self._clock.monotonic_ms() + max(1, pause_ms)
        self._until_ms[worker] = max(until_ms, self._until_ms.get(worker, 0.0))
        self._changed()

    def at(self, now_ms: float) -> Mapping[K, str]:
        """Return the workers that are full at this time; the mapping is never changed afterwards."""
        if now_ms >= self._next_ms:
            self._until_ms = {worker: until_ms for worker, until_ms in self._until_ms.items() if until_ms > now_ms}
            self._changed()
        return self._reasons

    def retry_after_s(self, now_ms: float) -> float:
        """Return when the first of them may be asked again; 0 while none is full."""
        return max(0.0, self._next_ms - now_ms) / 1000 if self.at(now_ms) else 0.0

    def close(self) -> None:
        """Stop watching the time."""
        if self._timer is not None:
            self._timer.cancel()

    def _changed(self) -> None:
        self._reasons = dict.fromkeys(self._until_ms, FULL)
        self._next_ms = min(self._until_ms.values(), default=float("inf"))
        self.close()
        if self._until_ms:
            delay_s = max(0.001, (self._next_ms - self._clock.monotonic_ms()) / 1000)
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._on_time)

    def _on_time(self) -> None:
        full = self.at(self._clock.monotonic_ms())
        if full and self._timer is not None and self._timer.when() <= asyncio.get_running_loop().time():
            self._changed()  # the loop's clock is ahead of ours
        self._on_room()
