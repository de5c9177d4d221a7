"""Sequences by when something happens to them."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush

from poolgrid.workers.engines.simulated.core.sequence import Sequence


class Calendar:
    """A heap by time or by step. An entry holds as long as ``holds`` says so; others are skipped."""

    def __init__(self, holds: Callable[[float, Sequence], bool]) -> None:
        self._holds = holds
        self._entries: list[tuple[float, int, Sequence]] = []
        self._pushed = 0
        """Keeps the heap from ever comparing two sequences."""

    def push(self, when: float, sequence: Sequence, alive: int) -> None:
        """Enter a sequence; ``alive`` is how many entries can hold at most, to which the heap is kept in proportion."""
        self._pushed += 1
        heappush(self._entries, (when, self._pushed, sequence))
        if len(self._entries) > 4 * alive + 64:
            self._entries = [entry for entry in self._entries if self._holds(entry[0], entry[2])]
            heapify(self._entries)

    def first(self) -> float | None:
        """Return when the next thing happens."""
        entries = self._entries
        while entries:
            if self._holds(entries[0][0], entries[0][2]):
                return entries[0][0]
            heappop(entries)
        return None

    def pop(self, until: float) -> Sequence | None:
        """Return the sequence to which the next thing happens up to then."""
        entries = self._entries
        while entries and entries[0][0] <= until:
            when, _, sequence = heappop(entries)
            if self._holds(when, sequence):
                return sequence
        return None
