"""The messages of a journal's stream: what one holds, how they hang together. Pure.

Rules
    1. A *body* is what a segment of a directory is (``journal.framing``): a header with the offset of the first record,
       and an entry for each record, tied to its offset by a checksum. A body without entries marks the start of a
       writer.
    2. A body that is larger than one message is cut into *pieces*, in messages that follow each other. A body whose
       last piece is missing was never acknowledged; the next message with a first piece begins another one.
    3. Every message has a name (``Nats-Msg-Id``: the writer's life, and a number that it never uses again). A server
       that lost the end of a stream and was given another one in its place has other names at the same sequences.
    4. What is at a sequence and is not ours is *foreign*: a message without a name, on another subject than its
       writer's, or whose first piece does not begin a body; and nothing at all where a message was removed. It is
       skipped: the offsets of bodies show whether a message of ours is missing there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from poolgrid.kernel.journal.framing import (
    ENTRY_HEADER,
    FILE_HEADER,
    SEGMENT_MAGIC,
    VERSION,
    file_header,
    frame,
    header_check,
    payload_at,
    scan,
)

MESSAGE_ID = "Nats-Msg-Id"
PIECE = "Poolgrid-Piece"
MORE = "Poolgrid-More"

BODY_BYTES = 256 * 1024
"""Records that are put into one message: far below the 1 MiB that servers take by default, and few enough
that a reader decodes one in some milliseconds. A larger record goes alone, in pieces."""

MESSAGE_BYTES = 512
"""Size that servers count for a message in addition to its body, at most: subject, headers, and file overhead."""

PIECES_MAX = 1024
"""Pieces of one body: the largest record that the contract allows, on a server that takes 64 KiB."""


class Damaged(ValueError):
    """A message does not hold what it should."""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message that is still to be stored."""

    message_id: str
    piece: int
    more: bool
    body: bytes

    def headers(self) -> dict[str, str]:
        headers = {MESSAGE_ID: self.message_id}
        if self.piece:
            headers[PIECE] = str(self.piece)
        if self.more:
            headers[MORE] = "1"
        return headers


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """A message of the stream."""

    sequence: int
    message_id: str
    piece: int
    more: bool
    body: bytes

    @property
    def is_foreign(self) -> bool:
        return not self.message_id


def foreign_message(sequence: int) -> StoredMessage:
    """Return what stands for a message that is none of ours."""
    return StoredMessage(sequence, "", 0, False, b"")


@dataclass(frozen=True, slots=True)
class Body:
    """What a whole body holds."""

    first_offset: int
    created_ms: int
    payloads: Sequence[bytes]

    @property
    def next_offset(self) -> int:
        return self.first_offset + len(self.payloads)


def stored_message(sequence: int, headers: Mapping[str, str], body: bytes) -> StoredMessage:
    """Return the message that was stored at a sequence; raises ``Damaged`` when it is none of ours."""
    message_id = headers.get(MESSAGE_ID)
    piece, more = headers.get(PIECE, "0"), headers.get(MORE, "0")
    if not message_id or not piece.isdecimal() or len(piece) > 4 or int(piece) >= PIECES_MAX:
        raise Damaged(f"its headers are {', '.join(sorted(headers)[:16])[:200] or 'none'}")
    return StoredMessage(sequence, message_id, int(piece), more == "1", body)


def begins_body(data: bytes) -> bool:
    """Return whether the first piece of a body of any version begins so."""
    if len(data) < FILE_HEADER.size:
        return False
    magic, version, check, first, created_ms = FILE_HEADER.unpack_from(data)
    return bool(magic == SEGMENT_MAGIC and check == header_check(magic, version, first, created_ms))


def empty_body(offset: int, created_ms: int) -> bytes:
    """Return the body with which a writer begins, before the record at an offset."""
    return file_header(SEGMENT_MAGIC, offset, created_ms)


def bodies(
    payloads: Sequence[bytes], first_offset: int, created_ms: int, body_bytes: int = BODY_BYTES
) -> Iterator[bytes]:
    """Yield bodies that hold records which follow each other."""
    begin = 0
    while begin < len(payloads):
        end, size = begin, 0
        entries: list[bytes] = []
        while end < len(payloads) and (not entries or size + len(payloads[end]) + ENTRY_HEADER.size <= body_bytes):
            entries.append(frame(payloads[end], first_offset + end))
            size += len(entries[-1])
            end += 1
        yield file_header(SEGMENT_MAGIC, first_offset + begin, created_ms) + b"".join(entries)
        begin = end


def pieces(body: bytes, size: int) -> Iterator[tuple[int, bool, bytes]]:
    """Yield what of a body goes into each message: its number, whether more follow, the bytes."""
    for number, at in enumerate(range(0, len(body), size)):
        yield number, at + size < len(body), body[at : at + size]


def first_offset_of(message: StoredMessage) -> int:
    """Return the offset at which the body of a first piece begins; raises ``Damaged``."""
    return _header(message.sequence, message.body)[0]


def created_ms_of(message: StoredMessage) -> int:
    """Return when the body of a first piece was written, Unix milliseconds; raises ``Damaged``."""
    return _header(message.sequence, message.body)[1]


def open_body(sequence: int, data: bytes) -> Body:
    """Return what a whole body holds, every byte checked; raises ``Damaged``. ``sequence`` is of its last piece."""
    first, created_ms = _header(sequence, data)
    positions, _end, damage = scan(data, FILE_HEADER.size, first)
    if damage is not None:
        raise Damaged(f"message {sequence}, byte {damage.position}, record {damage.number}: {damage.detail}")
    return Body(first, created_ms, [payload_at(data, position) for position in positions])


def _header(sequence: int, data: bytes) -> tuple[int, int]:
    if len(data) < FILE_HEADER.size:
        raise Damaged(f"message {sequence}: {len(data)} bytes, a header has {FILE_HEADER.size}")
    magic, version, check, first, created_ms = FILE_HEADER.unpack_from(data)
    if magic != SEGMENT_MAGIC or check != header_check(magic, version, first, created_ms):
        raise Damaged(f"message {sequence}: the header has {magic!r}, first record {first}")
    if version != VERSION:
        raise Damaged(f"message {sequence}: format version {version}, this poolgrid reads version {VERSION}")
    return int(first), int(created_ms)


class BodyAssembler:
    """Puts the pieces of bodies together."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._began = False
        """Whether a first piece was seen."""

    def take(self, message: StoredMessage) -> bytes | None:
        """Take the next message; return the body that it completes. Raises ``Damaged``."""
        if message.is_foreign:
            return None
        if message.piece == 0:
            self._pieces = []
            self._began = True
        elif not self._began:
            return None  # its body began before the first message that was read
        elif message.piece != len(self._pieces):
            raise Damaged(f"message {message.sequence} is piece {message.piece}, expected is {len(self._pieces)}")
        self._pieces.append(message.body)
        return None if message.more else b"".join(self._pieces)


class StreamUnavailable(OSError):
    """The stream did not answer, or refused for now: whether what was sent is stored is not known."""


class OutOfTurn(Exception):
    """The stream does not end where the writer thinks: what was sent is not stored, or was stored before."""


@dataclass(frozen=True, slots=True)
class StreamFacts:
    """A stream at one moment."""

    first_sequence: int
    """Of the oldest message kept; ``last_sequence + 1`` when there is none."""
    last_sequence: int
    """Of the newest message that there ever was; 0 before the first."""
    messages: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Anchor:
    """Where in the stream a snapshot belongs: it holds all records before ``offset``."""

    offset: int
    sequence: int
    """Of the first piece of the body that holds the last of them."""
    message_id: str
    """Of that message: another name there means that the snapshot is of a history that was lost."""


class Readable(Protocol):
    """As much of a journal's stream as reading it takes, on threads."""

    @property
    def name(self) -> str: ...

    def facts(self) -> StreamFacts: ...

    def read(self, from_sequence: int, limit: int) -> list[StoredMessage]:
        """Return messages from a sequence on, as many as fit an answer; none only when none is there (yet).

        They have no hole between them: where one was removed there is a foreign one.
        """
        ...

    def snapshots(self) -> list[Anchor]:
        """Return the snapshots that are kept, oldest first."""
        ...

    def get_snapshot(self, anchor: Anchor) -> bytes: ...


class RecordStream(Readable, Protocol):
    """A stream as its writer uses it, on threads: every call waits, and may raise ``StreamUnavailable``."""

    @property
    def body_bytes_max(self) -> int: ...

    def open(self) -> None:
        """Make what is not there yet, and clear away what a writer that was killed left unfinished."""
        ...

    def append(
        self, messages: Sequence[Outgoing], last_sequence: int, begins: bool = False, own_sequence: int | None = None
    ) -> None:
        """Store messages right behind ``last_sequence``, each once the one before it is stored.

        The one before the first must be of the same writer, too; with ``begins`` that writer has none yet. With foreign
        messages behind the writer's last one, ``own_sequence`` is where that one is. Raises
        ``OutOfTurn`` when the stream does not end there, or with another writer's message. Some of the messages may be
        stored then, and when ``StreamUnavailable`` is raised: a number of them from the first on.
        """
        ...

    def remove_before(self, sequence: int) -> None: ...

    def put_snapshot(self, anchor: Anchor, content: bytes) -> None: ...

    def remove_snapshot(self, anchor: Anchor) -> None: ...

    def close(self) -> None: ...
