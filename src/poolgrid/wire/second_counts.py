"""Counts of each of the last seconds, for views of a recent past that must be right without every single request."""

from __future__ import annotations

from collections.abc import Iterable

SECONDS_KEPT = 300
"""As many as the fleet page shows: five minutes."""

Counts = tuple[int, int, int, int]
"""Requests, their prompt tokens, those of them that were found in caches, moves to another worker."""


class SecondCounts:
    """A ring of counts: adding takes the same time always, and the size is bounded whatever the clock does."""

    def __init__(self) -> None:
        self._by_second: dict[int, list[int]] = {}
        """In the order in which seconds came first, which is that of time unless the clock was set."""

    def add(self, time_ms: int, requests: int, prompt_tokens: int, found_tokens: int, moves: int = 0) -> None:
        """Count into the second of a wall-clock time."""
        second = time_ms // 1000
        counts = self._by_second.get(second)
        if counts is None:
            if len(self._by_second) >= SECONDS_KEPT:
                del self._by_second[next(iter(self._by_second))]
            counts = self._by_second[second] = [0, 0, 0, 0]
        counts[0] += requests
        counts[1] += prompt_tokens
        counts[2] += found_tokens
        counts[3] += moves

    def rows(self) -> dict[str, Counts]:
        """Return the counts by second, as rows of a table; seconds without any are left out."""
        return {str(second): (a, b, c, d) for second, (a, b, c, d) in self._by_second.items()}


def added(tables: Iterable[dict[str, Counts]]) -> dict[str, Counts]:
    """Return the counts of several processes as one table."""
    total: dict[str, Counts] = {}
    for table in tables:
        for second, counts in table.items():
            a, b, c, d = total.get(second, (0, 0, 0, 0))
            total[second] = (a + counts[0], b + counts[1], c + counts[2], d + counts[3])
    return total
