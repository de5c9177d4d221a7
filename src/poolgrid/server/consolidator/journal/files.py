"""The journal on disk: records in segments, and snapshots next to them.

Rules for this file:

1. A segment is named after the offset of its first record (``<20 digits>.segment``) and only ever grows at its end.
2. Only the last segment may be torn; what is torn was never acknowledged under ``fsync=always``, and is cut when the
   journal is opened, with a line in ``report``. Anything else that does not check stops with ``JournalCorrupt``.
3. After a failed append the segment is cut back to what was there before, so that trying again is safe.
4. Opening reads the newest sound snapshot and the records after it; older segments are looked at when they are read,
   and by ``verify``.
5. Retention removes whole segments, oldest first, and none that the older of the two kept snapshots needs.
"""

from __future__ import annotations

import bisect
import threading
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from poolgrid.kernel.consolidation.pool_state import FrozenPool, PoolState
from poolgrid.kernel.journal import framing
from poolgrid.kernel.journal.framing import (
    FILE_HEADER,
    SEGMENT_MAGIC,
    EntryFault,
    JournalCorrupt,
    file_header,
    frame,
    payload_at,
    scan,
)
from poolgrid.kernel.journal.ports import Disk, Journal
from poolgrid.kernel.journal.stored_records import (
    SUFFIX,
    corrupt,
    created_ms_of,
    is_all_zeros,
    offset_of,
    understand,
)
from poolgrid.kernel.wire.errors import DecodeError
from poolgrid.kernel.wire.events import JournalRecord

SNAPSHOTS_KEPT = 2
"""The newest, and one more in case the newest is damaged."""

CROWDED = 2
"""How many times of what retention keeps may be there until a snapshot is written for it."""


@dataclass(frozen=True, slots=True)
class JournalSettings:
    """Sizes and ages; see ``ConsolidatorSettings`` for their reasons."""

    segment_bytes: int = 64 * 1024 * 1024
    retention_bytes: int = 1024 * 1024 * 1024
    retention_ms: int = 24 * 3600 * 1000


@dataclass(slots=True)
class _Segment:
    name: str
    first: int
    created_ms: int
    size: int
    records: int = -1
    """Number of records, -1 before the segment was looked at."""
    positions: array[int] = field(default_factory=lambda: array("Q"))
    """Where each record begins: 8 bytes a record, for a pool of small records has millions within its retention."""


class FileJournal(Journal):
    """A journal in one directory, written by one process."""

    def __init__(self, disk: Disk, settings: JournalSettings | None = None) -> None:
        self._disk = disk
        self._settings = settings or JournalSettings()
        self._segments: list[_Segment] = []
        self._snapshots: list[int] = []
        self._next = 0
        self._dirty: list[str] = []
        self._needs_repair = False
        self._lock = threading.Lock()
        self._kept = threading.Lock()
        """Held while segments are read or released, which another thread may do."""
        self._report: list[str] = []
        self.unknown: dict[str, int] = {}
        """Kinds of records and events that a later version wrote and ``recover`` passed over, and how many of each."""
        self._open()

    # Opening

    def _open(self) -> None:
        for name in self._disk.names():
            if name.endswith(SUFFIX):
                self._segments.append(_Segment(name, offset_of(name), 0, self._disk.size(name)))
            elif name.endswith(framing.SUFFIX):
                self._snapshots.append(offset_of(name, framing.SUFFIX))
        for position, segment in enumerate(self._segments):
            last = position == len(self._segments) - 1
            if last and segment.size < FILE_HEADER.size:
                # The segment was being created: no record was ever in it.
                self._report.append(f"{segment.name}: cut an unfinished header of {segment.size} bytes")
                self._disk.remove(segment.name)
                self._segments.pop()
                break
            if last and is_all_zeros(self._disk, segment.name):
                # Power failed before anything of it was durable: the file has its length and none of its data.
                self._report.append(f"{segment.name}: cut {segment.size} bytes, all of them zero")
                self._disk.remove(segment.name)
                self._segments.pop()
                break
            segment.created_ms = created_ms_of(segment.name, self._disk.read(segment.name, 0, FILE_HEADER.size))
        if self._segments:
            tail = self._segments[-1]
            self._cut_torn_tail(tail)
            # A process that was killed may have left it in the system's memory only, and what it holds counts from now.
            self._disk.sync(tail.name)
            self._next = tail.first + tail.records
        elif self._snapshots:
            self._next = self._snapshots[-1]

    def _cut_torn_tail(self, segment: _Segment) -> None:
        data = self._disk.read(segment.name, 0, segment.size)
        positions, end, damage = scan(data, FILE_HEADER.size, segment.first)
        if damage is not None:
            if damage.fault is EntryFault.CORRUPT:
                raise corrupt(segment.name, damage.position, damage.number, damage.detail)
            self._disk.truncate(segment.name, end)
            self._report.append(
                f"{segment.name}: cut a torn tail of {segment.size - end} bytes at byte {end}, "
                f"record {damage.number} ({damage.detail})"
            )
            segment.size = end
        segment.positions = array("Q", positions)
        segment.records = len(positions)

    def recover(self, blocks_per_worker_max: int) -> PoolState:
        """Return the state after the last record: the newest sound snapshot, and the records after it."""
        pool = self._newest_state(blocks_per_worker_max)
        while pool.offset < self._next:
            for payload in self.read(pool.offset, 10_000, 64 * 1024 * 1024):
                pool.apply(self._decode(payload, pool.offset))
        for kind, count in self.unknown.items():
            self._report.append(f"{count} of the unknown kind {kind} were passed over: a later version wrote them")
        return pool

    def _newest_state(self, blocks_per_worker_max: int) -> PoolState:
        damaged: JournalCorrupt | None = None
        for offset in reversed(self._snapshots):
            name = framing.name_of(offset)
            try:
                pool = framing.load(name, self._disk.read(name, 0, self._disk.size(name)), blocks_per_worker_max)
            except JournalCorrupt as error:
                damaged = error
                self._report.append(f"{error}; going back to the snapshot before it")
                continue
            if offset > self._next:
                self._go_on_from(offset)
            if pool.offset >= self.oldest_offset:
                return pool
        if self.oldest_offset == 0:
            return PoolState(blocks_per_worker_max)
        if damaged is not None:
            raise damaged
        first = self._segments[0]
        raise JournalCorrupt(
            first.name,
            0,
            first.first,
            "no snapshot holds the state before the oldest record",
            "restore the missing files, or start with an empty directory: workers restate their caches",
        )

    def _go_on_from(self, offset: int) -> None:
        """Drop segments that end before a snapshot: their last records were not durable when the power failed."""
        self._report.append(
            f"{framing.name_of(offset)} reaches beyond the last record kept, {self._next - 1}; "
            f"the journal continues at record {offset}"
        )
        for segment in self._segments:
            self._disk.remove(segment.name)
        self._segments.clear()
        self._next = offset

    def _decode(self, payload: bytes, offset: int) -> JournalRecord:
        try:
            understood = understand(payload, offset)
        except DecodeError as error:
            segment = self._segment_of(offset)
            raise corrupt(
                segment.name, 0, offset, f"the checksum holds and the record does not decode ({error})"
            ) from None
        for kind in understood.unknown:
            self.unknown[kind] = self.unknown.get(kind, 0) + 1
        return understood.record

    @property
    def report(self) -> list[str]:
        """Return what opening and ``recover`` found and did, for the log."""
        return self._report

    # Appending

    @property
    def next_offset(self) -> int:
        return self._next

    @property
    def oldest_offset(self) -> int:
        return self._segments[0].first if self._segments else self._next

    def append(self, payloads: Sequence[bytes], now_ms: int) -> None:
        """Append encoded records in one write, all of them or none; ``OSError`` leaves the journal as it was."""
        if not payloads:
            return
        tail = self._tail(now_ms)
        if self._needs_repair:
            self._disk.truncate(tail.name, tail.size)
            self._needs_repair = False
        framed: list[bytes] = []
        positions: list[int] = []
        at = tail.size
        for number, payload in enumerate(payloads, self._next):
            entry = frame(payload, number)
            positions.append(at)
            at += len(entry)
            framed.append(entry)
        try:
            self._disk.append(tail.name, b"".join(framed))
        except OSError:
            self._needs_repair = True
            raise
        tail.size = at
        tail.positions.extend(positions)
        tail.records += len(payloads)
        self._next += len(payloads)
        with self._lock:
            if tail.name not in self._dirty:
                self._dirty.append(tail.name)

    def _tail(self, now_ms: int) -> _Segment:
        if self._segments:
            tail = self._segments[-1]
            if tail.size < self._settings.segment_bytes and tail.first + tail.records == self._next:
                return tail
            self._close_segment(tail)
        name = f"{self._next:020d}{SUFFIX}"
        # A failed attempt may have left a part of a header behind.
        if name in self._disk.names():
            self._disk.truncate(name, 0)
        header = file_header(SEGMENT_MAGIC, self._next, now_ms)
        self._disk.append(name, header)
        segment = _Segment(name, self._next, now_ms, len(header), 0)
        self._segments.append(segment)
        return segment

    def _close_segment(self, segment: _Segment) -> None:
        """Make a segment durable before the next begins: only the last one may be torn when the power fails."""
        # Also when nothing of it is ours: a process that was killed may have left it in the system's memory only.
        self._disk.sync(segment.name)
        with self._lock:
            if segment.name in self._dirty:
                self._dirty.remove(segment.name)

    def sync(self) -> None:
        """Make everything appended so far durable; may be called from another thread."""
        with self._lock:
            dirty, self._dirty = self._dirty, []
        for position, name in enumerate(dirty):
            try:
                self._disk.sync(name)
            except FileNotFoundError:
                continue  # retention was faster
            except OSError:
                with self._lock:
                    self._dirty = [*dirty[position:], *(n for n in self._dirty if n not in dirty[position:])]
                raise

    # Reading

    def _segment_of(self, offset: int) -> _Segment:
        at = bisect.bisect_right([segment.first for segment in self._segments], offset) - 1
        return self._segments[at]

    def read(self, from_offset: int, limit: int, bytes_max: int) -> list[bytes]:
        """Return encoded records from ``from_offset`` on; raises ``JournalCorrupt`` for a damaged closed segment."""
        if from_offset < self.oldest_offset:
            raise ValueError(f"reading the journal: offset {from_offset}, the oldest kept is {self.oldest_offset}")
        with self._kept:
            return self._read(from_offset, limit, bytes_max)

    def _read(self, from_offset: int, limit: int, bytes_max: int) -> list[bytes]:
        found: list[bytes] = []
        room = bytes_max
        while from_offset < self._next and len(found) < limit:
            segment = self._segment_of(from_offset)
            self._look_at(segment)
            index = from_offset - segment.first
            if index >= segment.records:
                following = self._segment_after(segment)
                raise corrupt(
                    segment.name, segment.size, from_offset, f"records {from_offset} to {following - 1} are missing"
                )
            positions = segment.positions
            start = positions[index]
            stop, end = index, start
            while stop < segment.records and len(found) + stop - index < limit:
                following = positions[stop + 1] if stop + 1 < segment.records else segment.size
                if following - start > room and (found or stop > index):
                    break
                stop, end = stop + 1, following
            if stop == index:
                break
            data = self._disk.read(segment.name, start, end - start)
            found.extend(payload_at(data, position - start) for position in positions[index:stop])
            room -= end - start
            from_offset = segment.first + stop
        return found

    def _segment_after(self, segment: _Segment) -> int:
        at = self._segments.index(segment) + 1
        return self._segments[at].first if at < len(self._segments) else self._next

    def _look_at(self, segment: _Segment) -> None:
        """Check a closed segment before anything of it is used."""
        if segment.records >= 0:
            return
        data = self._disk.read(segment.name, 0, segment.size)
        positions, _end, damage = scan(data, FILE_HEADER.size, segment.first)
        if damage is not None:
            raise corrupt(segment.name, damage.position, damage.number, damage.detail)
        segment.positions = array("Q", positions)
        segment.records = len(positions)

    # Snapshots and retention

    def snapshot_parts(self, frozen: FrozenPool) -> Iterator[bytes]:
        return framing.parts(frozen, self._segments[-1].created_ms if self._segments else 0)

    def keep_snapshot(self, offset: int, parts: Iterable[bytes]) -> None:
        """Keep a snapshot and remove those before the newest two; may be called from another thread."""
        # Never ahead of the records: what it was made of must be at least as durable.
        self.sync()
        self._disk.write_atomically(framing.name_of(offset), parts)
        with self._lock:
            if offset not in self._snapshots:
                bisect.insort(self._snapshots, offset)
            old, self._snapshots = self._snapshots[:-SNAPSHOTS_KEPT], self._snapshots[-SNAPSHOTS_KEPT:]
        for offset in old:
            self._remove(framing.name_of(offset))

    @property
    def crowded(self) -> bool:
        return self.sizes()[1] > CROWDED * self._settings.retention_bytes

    @property
    def snapshot_due(self) -> bool:
        """Return whether as much as retention keeps came after the newest snapshot."""
        newest = self._snapshots[-1] if self._snapshots else 0
        later = sum(segment.size for segment in list(self._segments) if segment.first >= newest)
        return self.crowded and later > self._settings.retention_bytes

    def retain(self, now_ms: int) -> int:
        """Remove closed segments that are too many or too old and that no kept snapshot needs."""
        with self._kept:
            return self._retain(now_ms)

    def _retain(self, now_ms: int) -> int:
        if not self._snapshots:
            return 0
        needed = self._snapshots[0]
        removed = 0
        total = sum(segment.size for segment in self._segments)
        while len(self._segments) > 1:
            oldest, following = self._segments[0], self._segments[1]
            too_old = following.created_ms < now_ms - self._settings.retention_ms
            if following.first > needed or not (total > self._settings.retention_bytes or too_old):
                break
            self._remove(oldest.name)
            total -= oldest.size
            del self._segments[0]
            removed += 1
        return removed

    def _remove(self, name: str) -> None:
        try:
            self._disk.remove(name)
        except FileNotFoundError:
            pass  # another process did

    def drop_lost(self) -> list[str]:
        """Drop segments that are gone, or shorter than what was written to them; return their names.

        The next append begins a new segment when the last one is among them. Records of a segment that was lost cannot
        be read any more; a snapshot must stand in for them.
        """
        lost = {each.name for each in list(self._segments) if self._is_lost(each)}
        if not lost:
            return []
        with self._kept:
            # Retention may have been the one who removed some.
            names = [each.name for each in self._segments if each.name in lost]
            self._segments = [each for each in self._segments if each.name not in lost]
        self._needs_repair = False
        return names

    def _is_lost(self, segment: _Segment) -> bool:
        try:
            return self._disk.size(segment.name) < segment.size
        except FileNotFoundError:
            return True

    def sizes(self) -> tuple[int, int]:
        """Return the number of segments and their bytes."""
        return len(self._segments), sum(segment.size for segment in list(self._segments))

    def close(self) -> None:
        """Make everything durable and release the directory."""
        try:
            self.sync()
        finally:
            self._disk.close()
