"""The segments of a decision journal in a stream: appended to by one router, read as files of a directory.

Rules
    1. What is appended at once is a *unit*, in one message or in pieces that follow each other: a header that says
       where the bytes belong, and the bytes. A unit whose last piece is missing never was.
    2. A unit belongs to the segment that begins at the message its header names, at a position in it. Whatever the
       segment held from that position on is cut. So a segment is cut back by a unit without bytes.
    3. What was sent and not answered may be stored. Before anything else is sent the stream is asked, and the segment
       is cut back to what its writer knows of: what comes next says that it was lost.
    4. Whoever begins last writes. A router that finds messages of another one behind its own writes nothing any more.
    5. The servers remove what is too much or too old, oldest first. A segment whose beginning is gone is none.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from poolgrid.consolidator.journal.framing import file_header, frame
from poolgrid.consolidator.journal.stored_records import SUFFIX
from poolgrid.consolidator.stream.history import MessageHistory, ReadableMessages, corrupt
from poolgrid.consolidator.stream.message import (
    BrokenChain,
    Chain,
    Damaged,
    Outgoing,
    StoredMessage,
    pieces,
)
from poolgrid.consolidator.stream.ports import OutOfTurn, StreamFacts, StreamUnavailable
from poolgrid.consolidator.stream.read_only_disk import ReadOnlyDisk
from poolgrid.router.decision_journal.entries import DECISIONS

UNIT = struct.Struct("<4sQQQQ")
MAGIC = b"PGDU"

FOREIGN_ATTEMPTS = 10
"""How often a unit is sent again at once because a foreign message was stored before it."""

SEGMENTS_KEPT = 2
"""Segments whose content is kept by a reader, who asks for their size and reads them then."""


class DecisionStream(Protocol):
    """A stream as the writer of decisions uses it, on a thread; each call may raise ``StreamUnavailable``."""

    @property
    def name(self) -> str:
        """Return the name of the stream, for people."""
        ...

    @property
    def body_bytes_max(self) -> int:
        """Return how much of a body one message may hold."""
        ...

    def open(self) -> None:
        """Make the stream, or bring the one that is there up to the settings."""
        ...

    def facts(self) -> StreamFacts:
        """Return the stream as whoever orders it knows it."""
        ...

    def append(
        self, messages: Sequence[Outgoing], last_sequence: int, begins: bool = False, own_sequence: int | None = None
    ) -> None:
        """Store messages as ``stream.ports.RecordStream`` does."""
        ...

    def read(self, from_sequence: int, limit: int) -> list[StoredMessage]:
        """Return messages from a sequence on; none only when none is there (yet)."""
        ...

    def close(self) -> None:
        """Let go of the stream."""
        ...


@dataclass(frozen=True, slots=True)
class Unit:
    """Where bytes belong."""

    segment: int
    """Number of the segment's first entry."""
    begin: int
    """Sequence of the first message of the segment's first unit."""
    position: int
    next_number: int
    """Of the entry behind those of the unit."""

    def encode(self, data: bytes) -> bytes:
        return UNIT.pack(MAGIC, self.segment, self.begin, self.position, self.next_number) + data


def begins_unit(data: bytes) -> bool:
    """Return whether the first piece of a unit begins so."""
    return len(data) >= UNIT.size and data[: len(MAGIC)] == MAGIC


def unit_of(sequence: int, body: bytes) -> Unit:
    """Return the header at the front of a unit; raises ``Damaged``. ``sequence`` is of its first piece."""
    if not begins_unit(body):
        raise Damaged(f"message {sequence}: it begins with {body[:4]!r}, decisions begin with {MAGIC!r}")
    unit = Unit(*UNIT.unpack_from(body)[1:])
    if not 0 < unit.begin <= sequence:
        raise Damaged(f"message {sequence}: it says that its segment begins at message {unit.begin}")
    return unit


class StreamSegments:
    """Does for a stream what ``DecisionSegments`` does for a directory; every method may raise ``OSError``.

    Nothing is asked before the first ``mend``: a router starts also while the servers are away.
    """

    def __init__(self, stream: DecisionStream, life: str) -> None:
        """``life`` names this life of the router and no other, in letters, digits, _ and -."""
        self.report: list[str] = []
        self._stream = stream
        self._life = life
        self._number = 0
        """Of the last message: a name is never used again."""
        self._opened = False
        self._begins = True
        """Whether the stream holds no message of this life."""
        self._end = (0, "")
        self._last = 0
        """Sequence of the last message behind it that is known, all of them foreign; else its own."""
        self._next = 0
        self._unanswered = False
        self._fenced = ""
        self._segment: Unit | None = None
        self._size = 0
        self._begun_with = 0
        self._begun = 0
        self._stored_bytes = 0

    def is_full(self, segment_bytes: int) -> bool:
        return self._segment is not None and self._size >= max(segment_bytes, 2 * self._begun_with)

    def mend(self) -> None:
        """Find out where the stream ends, and cut what a failed write left behind; first of all and after failures."""
        if self._fenced:
            raise StreamUnavailable(self._fenced)
        if not self._opened:
            self._open()
        elif self._unanswered:
            self._settle()

    def _open(self) -> None:
        self._stream.open()
        facts = self._stream.facts()
        self._end = (facts.last_sequence, "")
        self._last = facts.last_sequence
        history = MessageHistory(self._stream)
        last = history.last_own(facts) if facts.messages else None
        if last is not None:
            first = history.first_piece(last.sequence, facts.first_sequence)
            self._end = (last.sequence, last.message_id)
            if first is not None:
                try:
                    self._next = unit_of(first.sequence, first.body).next_number
                except Damaged as error:
                    raise StreamUnavailable(f"stream {self._stream.name} is no stream of decisions: {error}") from None
        self._stored_bytes = facts.bytes
        self._segment = None
        self._unanswered = False
        self._opened = True

    def _settle(self) -> None:
        facts = self._stream.facts()
        if facts.last_sequence < self._end[0]:
            self._opened = False  # its end is lost: what is there now is somebody's before
            self._begins = True
            self._life += "x"  # names that were used may be known to the servers
            self._open()
            return
        self._begins = self._begins or facts.first_sequence > self._end[0]
        self._take_stored(facts)
        self._unanswered = False
        if self._segment is not None:
            self._store(lambda: self._at(self._size, self._next), b"")

    def _take_stored(self, facts: StreamFacts) -> None:
        """Look at what is stored behind the last known message; raises ``StreamUnavailable`` for another router's."""
        for message in MessageHistory(self._stream).messages(
            max(self._last + 1, facts.first_sequence), facts.last_sequence
        ):
            self._last = message.sequence
            if message.is_foreign:
                continue
            if message.message_id.rpartition(".")[0] != self._life:
                self._fenced = (
                    f"another router of this id records its decisions in stream {self._stream.name} since message "
                    f"{message.sequence}; give each router a router_id of its own, and start this one again"
                )
                raise StreamUnavailable(self._fenced)
            self._end = (message.sequence, message.message_id)
            self._begins = False

    def begin(self, payloads: Sequence[bytes], now_ms: int) -> None:
        """Begin a segment with these entries."""
        data = file_header(DECISIONS.magic, self._next, now_ms) + self._framed(payloads)
        self._segment = self._store(lambda: Unit(self._next, self._last + 1, 0, self._next + len(payloads)), data)
        self._size = self._begun_with = len(data)
        self._next += len(payloads)
        self._begun += 1

    def append(self, payloads: Sequence[bytes]) -> None:
        """Append entries to the newest segment, all of them or none."""
        data = self._framed(payloads)
        self._store(lambda: self._at(self._size, self._next + len(payloads)), data)
        self._size += len(data)
        self._next += len(payloads)

    def _framed(self, payloads: Sequence[bytes]) -> bytes:
        return b"".join(frame(payload, number) for number, payload in enumerate(payloads, self._next))

    def _at(self, position: int, next_number: int) -> Unit:
        assert self._segment is not None, "a segment is begun before it is appended to"
        return Unit(self._segment.segment, self._segment.begin, position, next_number)

    def _store(self, place: Callable[[], Unit], data: bytes) -> Unit:
        """Store a unit behind what is there, and return it; again at once where foreign messages came before it."""
        for _ in range(FOREIGN_ATTEMPTS):
            last, own = self._last, self._end
            unit = place()
            try:
                self._store_unit(unit, data)
                return unit
            except OutOfTurn as error:
                facts = self._stream.facts()
                if facts.last_sequence > last:
                    self._take_stored(facts)
                    if self._end == own:
                        continue
                raise StreamUnavailable(f"writing decisions to stream {self._stream.name}: {error}") from None
        raise StreamUnavailable(f"writing decisions to stream {self._stream.name}: others store messages there")

    def _store_unit(self, unit: Unit, data: bytes) -> None:
        messages: list[Outgoing] = []
        after = self._end[1]
        for piece, more, body in pieces(unit.encode(data), self._stream.body_bytes_max):
            self._number += 1
            messages.append(Outgoing(f"{self._life}.{self._number}", after, piece, more, body))
            after = messages[-1].message_id
        self._unanswered = True
        if self._begins or self._last == self._end[0]:
            self._stream.append(messages, self._last, self._begins)
        else:
            self._stream.append(messages, self._last, own_sequence=self._end[0])
        self._unanswered = self._begins = False
        self._end = (self._last + len(messages), after)
        self._last = self._end[0]
        self._stored_bytes += sum(len(message.body) for message in messages)

    def sync(self) -> None:
        """Do nothing: what was appended is as durable as the stream's servers make it."""

    def retain(self, now_ms: int) -> int:
        """Look how large the stream is; the servers remove what is too much or too old."""
        self._stored_bytes = self._stream.facts().bytes
        return 0

    def sizes(self) -> tuple[int, int]:
        """Return the number of segments that were begun, and the bytes of the stream when it was looked at last."""
        return self._begun, self._stored_bytes

    def close(self) -> None:
        self._stream.close()


@dataclass(frozen=True, slots=True)
class _Window:
    begin: int
    last: int


class DecisionsInStream(ReadOnlyDisk):
    """Implements ``poolgrid.consolidator.ports.Disk`` for reading: the stream as it was when this was made."""

    def __init__(self, stream: ReadableMessages) -> None:
        super().__init__("these decisions were opened for reading", SEGMENTS_KEPT)
        self._stream = stream
        self._history = MessageHistory(stream)
        self._facts = stream.facts()
        self._windows: dict[str, _Window] = {}
        for unit, window in self._cut():
            # Of two of one name the earlier one never was: the attempt to begin it failed.
            self._windows.setdefault(f"{unit.segment:020d}{SUFFIX}", window)

    @property
    def stored_bytes(self) -> int:
        return self._facts.bytes

    def _cut(self) -> Iterator[tuple[Unit, _Window]]:
        """Yield segments, newest first."""
        last, oldest = self._facts.last_sequence, self._facts.first_sequence
        while last >= oldest:
            first = self._history.first_piece(last, oldest)
            if first is None:
                return
            try:
                unit = unit_of(first.sequence, first.body)
            except Damaged as error:
                raise corrupt(self._stream.name, first.sequence, 0, str(error)) from None
            if unit.begin < oldest:
                return
            yield unit, _Window(unit.begin, last)
            last = unit.begin - 1

    def names(self) -> list[str]:
        return sorted(self._windows)

    def _read(self, name: str) -> bytes:
        window = self._windows.get(name)
        if window is None:
            raise FileNotFoundError(errno.ENOENT, "is not in the stream", name)
        content = bytearray()
        chain = Chain()
        for message in self._history.messages(window.begin, window.last):
            try:
                body = chain.take(message)
                if body is None:
                    continue
                unit = unit_of(message.sequence, body)
                if unit.begin != window.begin:
                    continue  # of a segment that was never begun
                if unit.position > len(content):
                    raise Damaged(f"message {message.sequence}: bytes {len(content)} to {unit.position} are missing")
            except (Damaged, BrokenChain) as error:
                raise corrupt(self._stream.name, message.sequence, 0, str(error)) from None
            content[unit.position :] = body[UNIT.size :]
        return bytes(content)
