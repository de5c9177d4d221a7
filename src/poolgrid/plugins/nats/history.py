"""What can be read from a stream by its holder: where an offset is, the newest state, the records after it.

``StreamHistory`` reads on threads, from a ``RecordStream`` or anything that reads like one.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from poolgrid.kernel.consolidation.pool_state import PoolState
from poolgrid.kernel.journal import framing
from poolgrid.kernel.journal.framing import SEGMENT_MAGIC, JournalCorrupt, file_header, frame
from poolgrid.kernel.journal.stored_records import SUFFIX, Understood, understand
from poolgrid.kernel.wire.errors import DecodeError
from poolgrid.plugins.nats.message import (
    PIECES_MAX,
    Anchor,
    Body,
    BodyAssembler,
    Damaged,
    Readable,
    StoredMessage,
    StreamFacts,
    StreamUnavailable,
    created_ms_of,
    first_offset_of,
    open_body,
)

READ_MESSAGES = 256
"""Messages asked for at a time."""

LAGGING_ATTEMPTS = 50
"""How often a message that must be there is asked for again, a replica that answers being behind the others."""


def corrupt(name: str, sequence: int, offset: int, detail: str) -> JournalCorrupt:
    """Return the error for damage in a stream."""
    return JournalCorrupt(
        f"stream {name}, message {sequence}",
        0,
        offset,
        detail,
        f"records before {offset} are sound; restore the stream from a copy, or remove it to start over (workers "
        "restate their caches)",
    )


class StreamHistory:
    """Reads a journal's stream."""

    def __init__(self, stream: Readable) -> None:
        self._stream = stream
        self.report: list[str] = []
        """What reading found, for the log."""
        self.unknown: dict[str, int] = {}
        """Kinds of records and events that a later version wrote and were passed over, and how many of each."""

    def message(self, sequence: int) -> StoredMessage:
        for _ in range(LAGGING_ATTEMPTS):
            found = self._stream.read(sequence, 1)
            if found:
                if found[0].sequence != sequence:
                    raise corrupt(self._stream.name, sequence, 0, f"the next message there is {found[0].sequence}")
                return found[0]
        raise StreamUnavailable(f"reading stream {self._stream.name}: message {sequence} does not come")

    def messages(self, from_sequence: int, to_sequence: int) -> Iterator[StoredMessage]:
        empty = 0
        while from_sequence <= to_sequence:
            found = self._stream.read(from_sequence, min(READ_MESSAGES, to_sequence - from_sequence + 1))
            if not found:
                empty += 1
                if empty > LAGGING_ATTEMPTS:
                    raise StreamUnavailable(
                        f"reading stream {self._stream.name}: messages {from_sequence} to {to_sequence} do not come"
                    )
                continue
            empty = 0
            for message in found:
                if message.sequence != from_sequence:
                    raise corrupt(
                        self._stream.name,
                        from_sequence,
                        0,
                        f"messages {from_sequence} to {message.sequence - 1} are missing",
                    )
                if from_sequence > to_sequence:
                    return
                yield message
                from_sequence += 1

    def first_piece(self, sequence: int, oldest: int) -> StoredMessage | None:
        """Return the first piece of the body that a message is part of, of the last one before a foreign message.

        ``None`` when that is older than the oldest.
        """
        pieces = 0
        for at in range(sequence, oldest - 1, -1):
            message = self.message(at)
            if message.is_foreign:
                continue
            if message.piece == 0:
                return message
            pieces += 1
            if pieces > PIECES_MAX:
                break
        return None

    def last_own(self, facts: StreamFacts) -> StoredMessage | None:
        for at in range(facts.last_sequence, facts.first_sequence - 1, -1):
            message = self.message(at)
            if not message.is_foreign:
                return message
        return None

    def first_own(self, facts: StreamFacts) -> StoredMessage | None:
        messages = self.messages(facts.first_sequence, facts.last_sequence)
        return next((message for message in messages if not message.is_foreign), None)

    def locate(self, offset: int, facts: StreamFacts) -> StoredMessage | None:
        """Return the first piece of the body that holds a record, or would hold it next; ``None`` when it is gone."""
        return self._last_where(facts, lambda message: first_offset_of(message) <= offset)

    def newest_before(self, time_ms: int, facts: StreamFacts) -> StoredMessage | None:
        return self._last_where(facts, lambda message: created_ms_of(message) < time_ms)

    def _last_where(self, facts: StreamFacts, holds: Callable[[StoredMessage], bool]) -> StoredMessage | None:
        """Search by halves: ``holds`` is true up to some message and false behind it."""
        low, high = facts.first_sequence, facts.last_sequence
        found: StoredMessage | None = None
        while low <= high:
            middle = (low + high) // 2
            try:
                message = self.first_piece(middle, facts.first_sequence)
                good = message is None or holds(message)
            except Damaged as error:
                raise corrupt(self._stream.name, middle, 0, str(error)) from None
            if good:
                found = message or found
                low = middle + 1
            else:
                assert message is not None
                high = message.sequence - 1
        return found

    def bodies(self, from_sequence: int, to_sequence: int) -> Iterator[tuple[StoredMessage, Body]]:
        """Yield whole bodies, each with the message that ends it; raises ``JournalCorrupt`` at damage."""
        offset = 0
        assembler = BodyAssembler()
        for message in self.messages(from_sequence, to_sequence):
            try:
                data = assembler.take(message)
                if data is None:
                    continue
                body = open_body(message.sequence, data)
            except Damaged as error:
                raise corrupt(self._stream.name, message.sequence, offset, str(error)) from None
            offset = body.next_offset
            yield message, body

    def usable_snapshots(self, facts: StreamFacts) -> list[Anchor]:
        """Return the snapshots that belong to this stream, oldest first: their last message is at its place."""
        usable = []
        for anchor in self._stream.snapshots():
            if anchor.sequence < facts.first_sequence or anchor.sequence > facts.last_sequence:
                continue
            if self.message(anchor.sequence).message_id == anchor.message_id:
                usable.append(anchor)
        return usable

    def snapshot(self, anchor: Anchor, blocks_per_worker_max: int) -> PoolState:
        """Return the state that a snapshot holds; raises ``JournalCorrupt``."""
        return framing.load(framing.name_of(anchor.offset), self._stream.get_snapshot(anchor), blocks_per_worker_max)

    def recover(self, blocks_per_worker_max: int, facts: StreamFacts) -> PoolState:
        """Return the state after the last record: the newest sound snapshot, and the records after it."""
        pool, sequence = self._beginning(blocks_per_worker_max, facts)
        for message, body in self.bodies(sequence, facts.last_sequence):
            if body.first_offset > pool.offset:
                raise corrupt(
                    self._stream.name,
                    message.sequence,
                    pool.offset,
                    f"records {pool.offset} to {body.first_offset - 1} are missing",
                )
            for offset, payload in enumerate(body.payloads, body.first_offset):
                if offset == pool.offset:
                    pool.apply(self.understood(message.sequence, payload, offset).record)
        for kind, count in self.unknown.items():
            self.report.append(f"{count} of the unknown kind {kind} were passed over: a later version wrote them")
        return pool

    def _beginning(self, blocks_per_worker_max: int, facts: StreamFacts) -> tuple[PoolState, int]:
        """Return the newest state that is whole, and where to read on from."""
        damaged: JournalCorrupt | None = None
        for anchor in reversed(self.usable_snapshots(facts)):
            try:
                pool = self.snapshot(anchor, blocks_per_worker_max)
            except JournalCorrupt as error:
                damaged = error
                self.report.append(f"{error}; going back to the snapshot before it")
                continue
            return pool, anchor.sequence
        oldest = self.first_own(facts) if facts.messages else None
        if oldest is None:
            return PoolState(blocks_per_worker_max), facts.last_sequence + 1
        if oldest.piece or first_offset_of(oldest) > 0:
            if damaged is not None:
                raise damaged
            raise corrupt(
                self._stream.name,
                oldest.sequence,
                0 if oldest.piece else first_offset_of(oldest),
                "no snapshot holds the state before the oldest record",
            )
        return PoolState(blocks_per_worker_max), oldest.sequence

    def understood(self, sequence: int, payload: bytes, offset: int) -> Understood:
        """Return the record that a payload holds; what a later version wrote is passed over and counted."""
        try:
            found = understand(payload, offset)
        except DecodeError as error:
            raise corrupt(
                self._stream.name, sequence, offset, f"the checksum holds and the record does not decode ({error})"
            ) from None
        for kind in found.unknown:
            self.unknown[kind] = self.unknown.get(kind, 0) + 1
        return found


SEGMENT_MESSAGES = 2048
"""Messages that make a segment: half a gigabyte where each is as large as it gets, some megabytes where it is not."""

SEGMENTS_KEPT = 4
"""Segments whose content is kept, for a reader that asks for their size first."""


@dataclass(frozen=True, slots=True)
class _Window:
    first_sequence: int
    last_sequence: int
    first_offset: int
    created_ms: int


class StreamDirectory:
    """Implements ``poolgrid.kernel.journal.ports.ReadableDisk``: the stream as it was when this was made."""

    def __init__(self, stream: Readable) -> None:
        self._kept: dict[str, bytes] = {}
        self._stream = stream
        self._history = StreamHistory(stream)
        self._facts = stream.facts()
        self._windows = {f"{each.first_offset:020d}{SUFFIX}": each for each in self._cut(self._facts)}
        self._snapshots: dict[str, Anchor] = {
            framing.name_of(anchor.offset): anchor for anchor in self._history.usable_snapshots(self._facts)
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

    def size(self, name: str) -> int:
        return len(self._content(name))

    def read(self, name: str, at: int, length: int) -> bytes:
        return self._content(name)[at : at + length]

    def _content(self, name: str) -> bytes:
        content = self._kept.get(name)
        if content is None:
            content = self._kept[name] = self._read(name)
            if len(self._kept) > SEGMENTS_KEPT:
                del self._kept[next(iter(self._kept))]
        return content

    def _read(self, name: str) -> bytes:
        anchor = self._snapshots.get(name)
        if anchor is not None:
            return self._stream.get_snapshot(anchor)
        window = self._windows.get(name)
        if window is None:
            raise FileNotFoundError(errno.ENOENT, "is not in the stream", name)
        entries = [file_header(SEGMENT_MAGIC, window.first_offset, window.created_ms)]
        for _, body in self._history.bodies(window.first_sequence, window.last_sequence):
            entries += [frame(payload, offset) for offset, payload in enumerate(body.payloads, body.first_offset)]
        return b"".join(entries)
