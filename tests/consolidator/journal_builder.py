"""Journals for tests: the stream of one worker, on a disk in memory or a real one."""

from __future__ import annotations

from collections.abc import Iterable

from poolgrid.kernel.consolidation.pool_state import PoolState
from poolgrid.kernel.wire import codec
from poolgrid.kernel.wire.events import AnyEvent, JournalRecord, WorkerJoined
from poolgrid.server.consolidator.journal.files import FileJournal, JournalSettings
from poolgrid.server.consolidator.journal.posix_disk import PosixDisk
from tests.router.fleet_builder import make_card, stored


class FakeDisk:
    """A directory in memory; ``room`` bytes can still be written."""

    def __init__(self, files: dict[str, bytes] | None = None) -> None:
        self.files: dict[str, bytearray] = {name: bytearray(data) for name, data in (files or {}).items()}
        self.room: int | None = None
        self.synced: list[str] = []

    def names(self) -> list[str]:
        return sorted(self.files)

    def size(self, name: str) -> int:
        return len(self.files[name])

    def read(self, name: str, at: int, length: int) -> bytes:
        return bytes(self.files[name][at : at + length])

    def append(self, name: str, data: bytes) -> None:
        fits = len(data) if self.room is None else min(self.room, len(data))
        self.files.setdefault(name, bytearray()).extend(data[:fits])
        if self.room is not None:
            self.room -= fits
        if fits < len(data):
            raise OSError(28, "No space left on device", name)

    def truncate(self, name: str, size: int) -> None:
        del self.files[name][size:]

    def sync(self, name: str) -> None:
        self.synced.append(name)

    def write_atomically(self, name: str, parts: Iterable[bytes]) -> int:
        self.files[name] = bytearray(b"".join(parts))
        return len(self.files[name])

    def remove(self, name: str) -> None:
        del self.files[name]

    def close(self) -> None:
        pass

    def copy(self) -> FakeDisk:
        return FakeDisk({name: bytes(data) for name, data in self.files.items()})


def record(offset: int) -> JournalRecord:
    """The stream of one worker: it joins, then stores one chain after the other."""
    events: list[AnyEvent] = [WorkerJoined(make_card())] if offset == 0 else [stored([2 * offset, 2 * offset + 1])]
    source = "consolidator" if offset == 0 else "worker"
    return JournalRecord(offset, "w", 0, 1, max(0, offset - 1), 1000, 2000 + offset, events, source)


def encoded(first: int, count: int) -> list[bytes]:
    return [codec.journal_record.encode(record(offset)) for offset in range(first, first + count)]


def write(disk: FakeDisk | PosixDisk, count: int, segment_bytes: int = 1 << 20, at_once: int = 3) -> FileJournal:
    journal = FileJournal(disk, JournalSettings(segment_bytes=segment_bytes))
    while journal.next_offset < count:
        first = journal.next_offset
        journal.append(encoded(first, min(at_once, count - first)), now_ms=1000 * first)
    return journal


def fold(count: int) -> PoolState:
    pool = PoolState()
    for offset in range(count):
        pool.apply(record(offset))
    return pool


def facts_of(pool: PoolState) -> object:
    """All that a pool's state says, to be compared."""
    frozen = pool.freeze()
    return frozen.offset, [(worker.entry, worker.held) for worker in frozen.workers]
