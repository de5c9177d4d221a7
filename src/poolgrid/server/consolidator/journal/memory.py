"""A journal that ends with its process, for tests and for pools without a data directory."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice

from poolgrid.kernel.consolidation.pool_state import PoolState
from poolgrid.kernel.journal.ports import Journal


class MemoryJournal(Journal):
    """The newest records, up to a number of bytes; the oldest give way.

    A router that needs older ones takes a snapshot, as with a journal on disk.
    """

    in_memory = True

    def __init__(self, bytes_max: int = 64 * 1024 * 1024) -> None:
        self._records: deque[bytes] = deque()
        self._bytes_max = bytes_max
        self._bytes = 0
        self._next = 0

    @property
    def next_offset(self) -> int:
        return self._next

    @property
    def oldest_offset(self) -> int:
        return self._next - len(self._records)

    def append(self, payloads: Sequence[bytes], now_ms: int) -> None:
        """Append encoded records; the oldest go when the bytes do not suffice."""
        records = self._records
        for payload in payloads:
            records.append(payload)
            self._bytes += len(payload)
        self._next += len(payloads)
        while self._bytes > self._bytes_max and len(records) > 1:
            self._bytes -= len(records.popleft())

    def read(self, from_offset: int, limit: int, bytes_max: int) -> list[bytes]:
        first = from_offset - self.oldest_offset
        if first < 0:
            raise ValueError(f"reading the journal: offset {from_offset}, the oldest kept is {self.oldest_offset}")
        found: list[bytes] = []
        room = bytes_max
        for payload in islice(self._records, first, first + limit):
            room -= len(payload)
            if room < 0 and found:
                break
            found.append(payload)
        return found

    def recover(self, blocks_per_worker_max: int) -> PoolState:
        """Return an empty pool: nothing outlives the process."""
        return PoolState(blocks_per_worker_max)

    def keep_snapshot(self, offset: int, parts: Iterable[bytes]) -> None:
        """Do nothing: there is no restart to be quick at."""

    def retain(self, now_ms: int) -> int:
        """Remove nothing: ``append`` keeps the bound."""
        return 0

    def sizes(self) -> tuple[int, int]:
        return 1, self._bytes

    def close(self) -> None:
        self._records.clear()
        self._bytes = 0
