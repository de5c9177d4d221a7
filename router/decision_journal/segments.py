"""The segments of a decision journal: appended to by one process, each readable on its own.

Rules
    1. A life of the router begins a segment; a segment that grew beyond ``segment_bytes``, and to twice what it began
       with, is followed by another one: checkpoints never take more than half of a journal.
    2. After a failed write the segment is cut back to what was there before, and closed: what was to be written is
       lost, and the next segment says so.
    3. What a killed process left torn is cut when the journal is opened. A damaged segment is left as it is: it is for
       ``verify`` to name, and no reason not to serve.
    4. Retention removes whole segments, oldest first, never the newest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from poolgrid.consolidator.journal.errors import JournalCorrupt
from poolgrid.consolidator.journal.framing import FILE_HEADER, EntryFault, file_header, frame, scan
from poolgrid.consolidator.journal.stored_records import SUFFIX, created_ms_of, offset_of, segment_names
from poolgrid.consolidator.ports import Disk
from poolgrid.router.decision_journal.entries import DECISIONS


@dataclass(slots=True)
class _Segment:
    name: str
    first: int
    created_ms: int
    size: int
    begun_with: int = 0
    """Bytes with which it began in this life of the router."""


class DecisionSegments:
    """A directory of segments; every method may raise ``OSError``."""

    def __init__(self, disk: Disk, retention_bytes: int, retention_ms: int) -> None:
        self._disk = disk
        self._retention_bytes = retention_bytes
        self._retention_ms = retention_ms
        self._segments: list[_Segment] = []
        self._next = 0
        self._mend = False
        self.report: list[str] = []
        """What opening found and did, for the log."""
        for name in segment_names(disk):
            self._open(name)

    def _open(self, name: str) -> None:
        data = self._disk.read(name, 0, self._disk.size(name))
        if len(data) < FILE_HEADER.size:
            self.report.append(f"{name}: removed an unfinished header of {len(data)} bytes")
            self._disk.remove(name)
            return
        first = offset_of(name)
        try:
            created_ms = created_ms_of(name, data, DECISIONS)
        except JournalCorrupt as error:
            self.report.append(str(error))
            self._segments.append(_Segment(name, first, 0, len(data)))
            self._next = first + 1
            return
        positions, end, damage = scan(data, FILE_HEADER.size, first)
        if damage is not None and damage.fault is EntryFault.TORN:
            self._disk.truncate(name, end)
            self.report.append(f"{name}: cut a torn tail of {len(data) - end} bytes at byte {end} ({damage.detail})")
            data = data[:end]
        elif damage is not None:
            self.report.append(f"{name}: damaged from byte {damage.position} on ({damage.detail})")
        self._segments.append(_Segment(name, first, created_ms, len(data)))
        # One number is left out behind damage, so that the next segment's name differs from all there are.
        self._next = first + len(positions) + (damage is not None and damage.fault is EntryFault.CORRUPT)
        if not positions:
            self._next = max(self._next, first + 1)

    def is_full(self, segment_bytes: int) -> bool:
        """Return whether another segment should follow the newest one."""
        if not self._segments:
            return False
        tail = self._segments[-1]
        return tail.size >= max(segment_bytes, 2 * tail.begun_with)

    def begin(self, payloads: Sequence[bytes], now_ms: int) -> None:
        """Begin a segment with these entries."""
        name = f"{self._next:020d}{SUFFIX}"
        if name in self._disk.names():
            self._disk.truncate(name, 0)  # a failed attempt left a part behind
        entries = [frame(payload, number) for number, payload in enumerate(payloads, self._next)]
        data = b"".join((file_header(DECISIONS.magic, self._next, now_ms), *entries))
        self._disk.append(name, data)
        self._segments.append(_Segment(name, self._next, now_ms, len(data), len(data)))
        self._next += len(payloads)
        self._mend = False

    def append(self, payloads: Sequence[bytes]) -> None:
        """Append entries to the newest segment, all of them or none."""
        tail = self._segments[-1]
        data = b"".join(frame(payload, number) for number, payload in enumerate(payloads, self._next))
        try:
            self._disk.append(tail.name, data)
        except OSError:
            self._mend = True
            raise
        tail.size += len(data)
        self._next += len(payloads)

    def mend(self) -> None:
        """Cut what a failed write left behind; nothing may be written before that."""
        if self._mend:
            self._disk.truncate(self._segments[-1].name, self._segments[-1].size)
            self._mend = False

    def sync(self) -> None:
        """Make the newest segment durable."""
        if self._segments:
            self._disk.sync(self._segments[-1].name)

    def retain(self, now_ms: int) -> int:
        """Remove segments that are too many or too old; return how many."""
        removed = 0
        total = sum(segment.size for segment in self._segments)
        while len(self._segments) > 1:
            oldest, following = self._segments[0], self._segments[1]
            too_old = following.created_ms < now_ms - self._retention_ms
            if not (total > self._retention_bytes or too_old):
                break
            self._disk.remove(oldest.name)
            total -= oldest.size
            del self._segments[0]
            removed += 1
        return removed

    def sizes(self) -> tuple[int, int]:
        """Return the number of segments and their bytes."""
        return len(self._segments), sum(segment.size for segment in self._segments)

    def close(self) -> None:
        """Make everything durable and let go of the directory."""
        try:
            self.sync()
        finally:
            self._disk.close()
