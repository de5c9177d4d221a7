"""A journal's stream as a directory of segments and snapshots, for those who only look.

A segment is what so many messages hold, byte for byte what a consolidator would have written in a directory. So
whatever reads a directory reads a stream. Nothing is changed, and a consolidator may write meanwhile.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass

from poolgrid.consolidator.journal import snapshot_file
from poolgrid.consolidator.journal.framing import SEGMENT_MAGIC, file_header, frame
from poolgrid.consolidator.journal.stored_records import SUFFIX
from poolgrid.consolidator.stream.history import Readable, StreamHistory
from poolgrid.consolidator.stream.message import Chain, created_ms_of, first_offset_of
from poolgrid.consolidator.stream.ports import Anchor, StreamFacts
from poolgrid.consolidator.stream.read_only_disk import ReadOnlyDisk

SEGMENT_MESSAGES = 2048
"""Messages that make a segment: half a gigabyte where each is as large as it gets, some megabytes where it is not."""

SEGMENTS_KEPT = 4
"""Segments whose content is kept, for who asks for their size and reads them then."""


@dataclass(frozen=True, slots=True)
class _Window:
    first_sequence: int
    last_sequence: int
    first_offset: int
    created_ms: int


class StreamDirectory(ReadOnlyDisk):
    """Implements ``poolgrid.consolidator.ports.Disk`` for reading: the stream as it was when this was made."""

    def __init__(self, stream: Readable) -> None:
        super().__init__("this journal was opened for reading", SEGMENTS_KEPT)
        self._stream = stream
        self._history = StreamHistory(stream)
        self._facts = stream.facts()
        self._windows = {f"{each.first_offset:020d}{SUFFIX}": each for each in self._cut(self._facts)}
        self._snapshots: dict[str, Anchor] = {
            snapshot_file.name_of(anchor.offset): anchor for anchor in self._history.usable_snapshots(self._facts)
        }

    @property
    def stored_bytes(self) -> int:
        return self._facts.bytes

    def _cut(self, facts: StreamFacts) -> list[_Window]:
        """Return where segments begin, each with the first piece of a body; those without records are left out."""
        starts = []
        sequence = facts.first_sequence
        while sequence <= facts.last_sequence:
            for message in self._history.messages(sequence, facts.last_sequence):
                if message.piece == 0 and not message.is_foreign:
                    starts.append(message)
                    break
            sequence += SEGMENT_MESSAGES
        windows: list[_Window] = []
        for at, message in enumerate(starts):
            last = starts[at + 1].sequence - 1 if at + 1 < len(starts) else facts.last_sequence
            if windows and windows[-1].first_sequence == message.sequence:
                windows.pop()
            offset = first_offset_of(message)
            if windows and windows[-1].first_offset == offset:
                windows.pop()
            windows.append(_Window(message.sequence, last, offset, created_ms_of(message)))
        return windows

    def names(self) -> list[str]:
        return sorted([*self._windows, *self._snapshots])

    def _read(self, name: str) -> bytes:
        anchor = self._snapshots.get(name)
        if anchor is not None:
            return self._stream.get_snapshot(anchor)
        window = self._windows.get(name)
        if window is None:
            raise FileNotFoundError(errno.ENOENT, "is not in the stream", name)
        entries = [file_header(SEGMENT_MAGIC, window.first_offset, window.created_ms)]
        for _, body in self._history.bodies(Chain(), window.first_sequence, window.last_sequence):
            entries += [frame(payload, offset) for offset, payload in enumerate(body.payloads, body.first_offset)]
        return b"".join(entries)
