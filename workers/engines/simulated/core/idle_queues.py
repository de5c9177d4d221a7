"""Blocks that nobody holds, by priority: which of them goes next, and whose priority lapses.

As TensorRT-LLM's: one queue for each priority, the lowest is emptied first, from its front. A priority that has a
duration lapses so long after the block became idle, and the block is the newest of those with the usual one then.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from poolgrid.wire.requests import RETENTION_DEFAULT


class IdleQueues:
    """The idle blocks of one tier that have another priority than the usual one, beside those that have it."""

    __slots__ = ("_added", "_lapses", "_priority", "_queues", "_usual")

    def __init__(self, usual: OrderedDict[int, None]) -> None:
        """``usual`` are the blocks with the usual priority, the oldest first; it stays the caller's, too."""
        self._usual = usual
        self._queues: dict[int, OrderedDict[int, int]] = {}
        """By priority; of each block its number in the order of being added."""
        self._priority: dict[int, int] = {}
        self._lapses: list[tuple[float, int, int]] = []
        """A heap: when a priority lapses, the block's number, and its hash. Entries that no longer hold are skipped."""
        self._added = 0

    def __len__(self) -> int:
        """Return how many there are, those with the usual priority not counted."""
        return len(self._priority)

    def __iter__(self) -> Iterator[int]:
        return iter(self._priority)

    def __contains__(self, sequence_hash: int) -> bool:
        """Tell whether a block is among them, those with the usual priority not counted."""
        return sequence_hash in self._priority

    def add(self, sequence_hash: int, priority: int, lapses_ms: float | None = None) -> None:
        """Add a block with another priority than the usual one, until a time or for ever."""
        self._added += 1
        queue = self._queues.get(priority)
        if queue is None:
            queue = self._queues[priority] = OrderedDict()
        queue[sequence_hash] = self._added
        self._priority[sequence_hash] = priority
        if lapses_ms is None:
            return
        heappush(self._lapses, (lapses_ms, self._added, sequence_hash))
        if len(self._lapses) > 4 * len(self._priority) + 64:
            self._lapses = [lapse for lapse in self._lapses if self._holds(lapse)]
            heapify(self._lapses)

    def discard(self, sequence_hash: int) -> None:
        """Take a block out, whichever priority it has."""
        priority = self._priority.pop(sequence_hash, None)
        if priority is None:
            self._usual.pop(sequence_hash, None)
            return
        queue = self._queues[priority]
        del queue[sequence_hash]
        if not queue:
            del self._queues[priority]

    def lapse(self, now_ms: float) -> list[int]:
        """Give the usual priority to blocks whose time is over, and return them."""
        lapses = self._lapses
        lapsed: list[int] = []
        while lapses and lapses[0][0] <= now_ms:
            lapse = heappop(lapses)
            if self._holds(lapse):
                self.discard(lapse[2])
                self._usual[lapse[2]] = None
                lapsed.append(lapse[2])
        return lapsed

    def pop(self) -> tuple[int, int]:
        """Take out the block that goes next, and return it with its priority; ``KeyError`` where there is none."""
        lowest = min(self._queues, default=RETENTION_DEFAULT)
        if lowest >= RETENTION_DEFAULT and self._usual:
            return self._usual.popitem(last=False)[0], RETENTION_DEFAULT
        sequence_hash = next(iter(self._queues[lowest]))
        self.discard(sequence_hash)
        return sequence_hash, lowest

    def _holds(self, lapse: tuple[float, int, int]) -> bool:
        _, number, sequence_hash = lapse
        priority = self._priority.get(sequence_hash)
        return priority is not None and self._queues[priority][sequence_hash] == number
