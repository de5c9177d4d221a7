"""What a journal keeps in memory of what it has on disk."""

from __future__ import annotations

import tracemalloc

from poolgrid.consolidator.journal.files import FileJournal
from tests.consolidator.journal_builder import FakeDisk

RECORDS = 100_000


class BlindDisk(FakeDisk):
    """Takes everything and keeps nothing, so that only the journal's own memory is seen."""

    def append(self, name: str, data: bytes) -> None:
        pass


def test_a_record_on_disk_costs_few_bytes_of_memory() -> None:
    journal = FileJournal(BlindDisk())
    journal.append([b"first"], 0)
    tracemalloc.start()
    try:
        for _ in range(RECORDS // 100):
            journal.append([b"payload"] * 100, 0)
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept / RECORDS < 12
