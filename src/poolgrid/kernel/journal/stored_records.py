"""The records of a journal as any reader finds them: in order, located, and tolerant of what a later version wrote.

A record is understood *whole*, *in part* (some of its events are of kinds that this version does not know, or carry
fields after those it knows), or *not at all* (an array that begins with the name of an unknown kind of record, then its
offset). What is not understood is skipped and named, never an error: the checksum has shown that the bytes are what was
written. Bytes that are none of this are damage.

Nothing here changes a file or takes the lock, so a journal can be read while a consolidator writes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args

import msgspec

from poolgrid.kernel.journal.framing import (
    FILE_HEADER,
    SEGMENT_MAGIC,
    VERSION,
    EntryFault,
    JournalCorrupt,
    header_check,
    payload_at,
    scan,
)
from poolgrid.kernel.journal.ports import ReadableDisk
from poolgrid.kernel.wire import codec
from poolgrid.kernel.wire.errors import DecodeError
from poolgrid.kernel.wire.events import AnyEvent, JournalRecord
from poolgrid.kernel.wire.feed import CONSOLIDATOR_SOURCE

SUFFIX = ".segment"

_RECORD_FIELDS = len(JournalRecord.__struct_fields__)
_EVENTS_AT = JournalRecord.__struct_fields__.index("events")
_EVENT_FIELDS: dict[str, int] = {kind.__name__: len(kind.__struct_fields__) + 1 for kind in get_args(AnyEvent)}
"""Elements of each known event on disk, its name included."""


@dataclass(frozen=True, slots=True)
class SegmentKind:
    """What a directory's segments hold."""

    magic: bytes
    contiguous: bool
    """Whether a hole between two segments is damage."""
    remedy: str
    """What to do about damage; ``{offset}`` is the first entry that cannot be trusted."""


RECORDS = SegmentKind(
    SEGMENT_MAGIC,
    True,
    "records before {offset} are sound; restore the file from a copy, or move it and everything later out of the "
    "directory to continue from there (workers restate what is then missing)",
)


@dataclass(frozen=True, slots=True)
class StoredPayload:
    """One entry and where it lies."""

    file: str
    position: int
    number: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class Understood:
    """What this version makes of one payload."""

    record: JournalRecord
    unknown: tuple[str, ...] = ()
    """Names of the kinds of events, or of the one kind of record, that were skipped."""
    extra_fields: int = 0
    """Trailing fields that were skipped."""


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """One record and where it lies."""

    file: str
    position: int
    size: int
    """Bytes of the payload."""
    understood: Understood

    @property
    def record(self) -> JournalRecord:
        return self.understood.record


@dataclass(frozen=True, slots=True)
class TornTail:
    """The end of the last segment, which an unfinished write left behind."""

    file: str
    position: int
    offset: int
    detail: str


def understand(payload: bytes, offset: int) -> Understood:
    """Return the record that a payload holds at ``offset``; raises ``DecodeError`` when it holds none."""
    try:
        record = codec.journal_record.decode(payload)
    except DecodeError as error:
        return _in_part(payload, offset, error)
    if record.offset != offset:
        raise DecodeError("a journal record", f"its offset field is {record.offset}")
    return Understood(record)


def understand_all(payload: bytes, offset: int) -> Understood:
    """Return the same as ``understand``, and count trailing fields; twice the work."""
    found = understand(payload, offset)
    if found.unknown:
        return found
    raw = msgspec.msgpack.decode(payload)
    extra = max(0, len(raw) - _RECORD_FIELDS)
    extra += sum(max(0, len(event) - _EVENT_FIELDS[event[0]]) for event in raw[_EVENTS_AT])
    return Understood(found.record, extra_fields=extra) if extra else found


def _in_part(payload: bytes, offset: int, error: DecodeError) -> Understood:
    """Return what can be understood of a payload that a later version wrote; raise ``error`` for anything else."""
    try:
        raw: Any = msgspec.msgpack.decode(payload)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise error from None
    if not isinstance(raw, list) or len(raw) < 2:
        raise error
    if isinstance(raw[0], str):
        if raw[1] != offset:
            raise DecodeError("a journal record", f"a {raw[0]} has the offset field {raw[1]}")
        return Understood(JournalRecord(offset, "", 0, 0, 0, 0, 0, [], CONSOLIDATOR_SOURCE), (raw[0],))
    if len(raw) <= _EVENTS_AT or not isinstance(raw[_EVENTS_AT], list):
        raise error
    known, unknown = [], []
    for event in raw[_EVENTS_AT]:
        if not isinstance(event, list) or not event or not isinstance(event[0], str):
            raise error
        if event[0] in _EVENT_FIELDS:
            known.append(event)
        else:
            unknown.append(event[0])
    if not unknown:
        raise error
    # Through bytes again, so that the codec's own checks hold for the part that is known.
    raw[_EVENTS_AT] = known
    record = codec.journal_record.decode(msgspec.msgpack.encode(raw))
    if record.offset != offset:
        raise DecodeError("a journal record", f"its offset field is {record.offset}")
    return Understood(record, tuple(unknown))


def segment_names(disk: ReadableDisk) -> list[str]:
    """Return the names of the segments, oldest first."""
    return [name for name in disk.names() if name.endswith(SUFFIX)]


def offset_of(name: str, suffix: str = SUFFIX) -> int:
    """Return the offset in a file's name."""
    text = name.removesuffix(suffix)
    if not text.isdigit():
        raise JournalCorrupt(name, 0, 0, "its name is not an offset", "remove the file: the journal did not write it")
    return int(text)


def is_all_zeros(disk: ReadableDisk, name: str) -> bool:
    """Return whether a file has a length and no data: power failed before anything of it was durable."""
    return not any(disk.read(name, 0, FILE_HEADER.size)) and not any(disk.read(name, 0, disk.size(name)))


def created_ms_of(name: str, data: bytes, kind: SegmentKind = RECORDS) -> int:
    """Check a segment's header and return when it was created, Unix milliseconds."""
    first = offset_of(name)
    if len(data) < FILE_HEADER.size:
        raise corrupt(name, 0, first, f"{len(data)} bytes, a header has {FILE_HEADER.size}", kind)
    found, version, check, offset, created_ms = FILE_HEADER.unpack_from(data)
    if found != kind.magic or check != header_check(found, version, offset, created_ms) or offset != first:
        raise corrupt(name, 0, first, f"the header has {found!r}, first record {offset}", kind)
    if version != VERSION:
        raise JournalCorrupt(
            name,
            8,
            first,
            f"format version {version}, this poolgrid reads version {VERSION}",
            "use the poolgrid that wrote it, or another data_dir",
        )
    return int(created_ms)


def corrupt(name: str, position: int, offset: int, detail: str, kind: SegmentKind = RECORDS) -> JournalCorrupt:
    """Return the error for damage in a segment."""
    return JournalCorrupt(name, position, offset, detail, kind.remedy.format(offset=offset))


def stored_payloads(
    disk: ReadableDisk,
    kind: SegmentKind,
    from_offset: int = 0,
    torn: list[TornTail] | None = None,
    to_offset: int | None = None,
) -> Iterator[StoredPayload]:
    """Yield the payloads from ``from_offset`` on, in order; raise ``JournalCorrupt`` at damage, after all before it.

    A torn tail ends them quietly and is put into ``torn``. Nothing at or behind ``to_offset`` is read, so damage
    there has no effect.
    """
    names = segment_names(disk)
    expected: int | None = None
    for at, name in enumerate(names):
        last = at == len(names) - 1
        first = offset_of(name)
        if expected is not None and (first < expected or (first > expected and kind.contiguous)):
            raise corrupt(name, 0, expected, f"records {expected} to {first - 1} are missing", kind)
        if not last and offset_of(names[at + 1]) <= from_offset:
            expected = offset_of(names[at + 1])
            continue
        if to_offset is not None and first >= to_offset:
            return
        size = disk.size(name)
        data = disk.read(name, 0, size)
        if last and size < FILE_HEADER.size:
            if torn is not None:
                torn.append(TornTail(name, 0, first, f"{size} of {FILE_HEADER.size} bytes of a header"))
            return
        if last and is_all_zeros(disk, name):
            if torn is not None:
                torn.append(TornTail(name, 0, first, f"{size} bytes, all of them zero"))
            return
        created_ms_of(name, data, kind)
        positions, end, damage = scan(data, FILE_HEADER.size, first)
        for number, position in enumerate(positions, first):
            if number < from_offset:
                continue
            if to_offset is not None and number >= to_offset:
                return
            yield StoredPayload(name, position, number, payload_at(data, position))
        if damage is not None:
            if to_offset is not None and damage.number >= to_offset:
                return
            if not last or damage.fault is not EntryFault.TORN:
                raise corrupt(name, damage.position, damage.number, damage.detail, kind)
            if torn is not None:
                torn.append(TornTail(name, end, damage.number, damage.detail))
        expected = first + len(positions)


def stored_records(
    disk: ReadableDisk,
    from_offset: int = 0,
    torn: list[TornTail] | None = None,
    count_fields: bool = False,
    to_offset: int | None = None,
) -> Iterator[StoredRecord]:
    """Yield the records that ``stored_payloads`` finds. With ``count_fields`` trailing fields are counted."""
    read = understand_all if count_fields else understand
    for stored in stored_payloads(disk, RECORDS, from_offset, torn, to_offset):
        try:
            understood = read(stored.payload, stored.number)
        except DecodeError as error:
            detail = f"the record does not decode ({error})"
            raise corrupt(stored.file, stored.position, stored.number, detail) from None
        yield StoredRecord(stored.file, stored.position, len(stored.payload), understood)
