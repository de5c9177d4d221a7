"""Counts of each of the last seconds, for views of a recent past that must be right without every single request."""

from __future__ import annotations

from collections.abc import Sequence
from operator import add

SECONDS_KEPT = 300
"""As many as the fleet page shows: five minutes."""

Counts = tuple[int, ...]
"""Of one second, in the order of the columns of its table."""


class SecondCounts:
    """A ring of counts: adding takes the same time always, and the size is bounded whatever the clock does."""

    def __init__(self) -> None:
        self._by_second: dict[int, Sequence[int]] = {}
        """In the order in which seconds came first, which is that of time unless the clock was set."""

    def add(self, time_ms: int, more: Sequence[int]) -> None:
        """Count a row into the second of a wall-clock time; all rows of a ring have the same columns."""
        ring, second = self._by_second, time_ms // 1000
        counts = ring.get(second)
        if counts is None:
            if len(ring) >= SECONDS_KEPT:
                del ring[next(iter(ring))]
            ring[second] = more
        else:
            ring[second] = tuple(map(add, counts, more))

    def rows(self) -> dict[str, Counts]:
        """Return the counts by second, as rows of a table; seconds without any are left out."""
        return {str(second): tuple(counts) for second, counts in self._by_second.items()}
