"""Latencies, tokens and errors by second: the totals of the API's instruments, sampled once a second."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack

from poolgrid.process.clock import Clock
from poolgrid.process.tasks import Restart, supervised
from poolgrid.wire.second_counts import Counts, SecondCounts

INTERVAL_MS = 1000


class ServedSeconds:
    """Differences of totals for each of the last seconds."""

    def __init__(self, read: Callable[[], Sequence[int]], clock: Clock) -> None:
        """``read`` returns totals that only grow."""
        self.since_ms = clock.wall_ms()
        """Nothing is known of the time before."""
        self._read = read
        self._clock = clock
        self._before = read()
        self._seconds = SecondCounts()

    def rows(self) -> dict[str, Counts]:
        """Return the differences by second; seconds without any are left out."""
        return self._seconds.rows()

    def sample(self) -> None:
        """Count what came since the last sample into the second that lies between the two."""
        now = self._read()
        # Tokens that a request gave back make a total smaller.
        more = [max(0, after - before) for after, before in zip(now, self._before, strict=True)]
        self._before = now
        if any(more):
            self._seconds.put(self._clock.wall_ms() - INTERVAL_MS // 2, more)

    async def run(self) -> None:
        while True:
            await asyncio.sleep((INTERVAL_MS - self._clock.wall_ms() % INTERVAL_MS) / 1000)
            self.sample()


def open_served_seconds(opened: AsyncExitStack, read: Callable[[], Sequence[int]], clock: Clock) -> ServedSeconds:
    """Sample ``read`` once a second until the process ends."""
    served = ServedSeconds(read, clock)
    task = supervised(served.run, "seconds of the fleet page", Restart(limit=None))
    opened.callback(task.cancel)
    return served
