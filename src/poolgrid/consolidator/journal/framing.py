"""How bytes are framed in the journal's files: pure, shared by segments and snapshots.

    file header, 32 bytes    magic (8)  version u32  check u32  first offset u64  created, Unix ms u64
    entry                    length u32  header check u32  checksum u64  payload (length bytes)

All numbers are little-endian. A file header's ``check`` is the low half of XXH3-64 of its other 28 bytes. An entry's
``header check`` is the low half of XXH3-64 of the length's four bytes, seeded with the entry's number (a record's
offset); ``checksum`` is XXH3-64 of the payload with the same seed. So an entry is tied to its place: a flipped length
is found without trusting it, and an entry that belongs elsewhere is not taken.

An entry that the end of the file cuts off is *torn*: the last write did not finish. So is one whose bytes are zero from
some point to the end of the file: the file grew, the data did not arrive. That takes at least ``ZEROS_MIN`` of them, or
all from the beginning of a sector: disks write sectors as a whole. Anything else that does not check is *corrupt*.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import Enum

from xxhash import xxh3_64_intdigest

VERSION = 1
SEGMENT_MAGIC = b"PGRIDJRN"
SNAPSHOT_MAGIC = b"PGRIDSNP"
FILE_HEADER = struct.Struct("<8sIIQQ")
ENTRY_HEADER = struct.Struct("<IIQ")
ZEROS_MIN = 16
SECTOR_BYTES = 512
_checked = struct.Struct("<8sIQQ")
_length = struct.Struct("<I")
_U32 = 0xFFFF_FFFF


class EntryFault(Enum):
    """Why an entry cannot be read."""

    TORN = "torn"
    CORRUPT = "corrupt"


@dataclass(frozen=True, slots=True)
class Damage:
    """The first entry of some bytes that cannot be read."""

    fault: EntryFault
    position: int
    number: int
    detail: str


def file_header(magic: bytes, first_offset: int, created_ms: int) -> bytes:
    """Return the header of a segment or snapshot."""
    check = header_check(magic, VERSION, first_offset, created_ms)
    return FILE_HEADER.pack(magic, VERSION, check, first_offset, created_ms)


def header_check(magic: bytes, version: int, first_offset: int, created_ms: int) -> int:
    """Return the check that a file header must carry."""
    return xxh3_64_intdigest(_checked.pack(magic, version, first_offset, created_ms), 0) & _U32


def frame(payload: bytes, number: int) -> bytes:
    """Return the entry of a payload."""
    length = len(payload)
    check = xxh3_64_intdigest(_length.pack(length), number) & _U32
    return ENTRY_HEADER.pack(length, check, xxh3_64_intdigest(payload, number)) + payload


def scan(data: bytes, at: int, number: int) -> tuple[list[int], int, Damage | None]:
    """Walk over the entries of a file's content from position ``at``; the first has ``number``.

    Returns the positions of sound entries, the position behind the last of them, and what stopped the walk.
    """
    positions: list[int] = []
    size = len(data)
    view = memoryview(data)
    header = ENTRY_HEADER.size
    unpack = ENTRY_HEADER.unpack_from
    digest = xxh3_64_intdigest
    while at < size:
        if at + header > size:
            return positions, at, Damage(EntryFault.TORN, at, number, f"{size - at} bytes of an entry's header")
        length, check, checksum = unpack(data, at)
        if digest(view[at : at + 4], number) & _U32 != check:
            fault = EntryFault.TORN if _zeros_to_the_end(data, at) else EntryFault.CORRUPT
            return positions, at, Damage(fault, at, number, "the length does not match its check")
        end = at + header + length
        if end > size:
            missing = f"{size - at - header} of {length} bytes of a payload"
            return positions, at, Damage(EntryFault.TORN, at, number, missing)
        if digest(view[at + header : end], number) != checksum:
            fault = EntryFault.TORN if _zeros_to_the_end(data, at) else EntryFault.CORRUPT
            return positions, at, Damage(fault, at, number, "the payload does not match its checksum")
        positions.append(at)
        number += 1
        at = end
    return positions, at, None


def payload_at(data: bytes, position: int) -> bytes:
    """Return the payload of an entry that ``scan`` found sound."""
    length = _length.unpack_from(data, position)[0]
    start = position + ENTRY_HEADER.size
    return data[start : start + length]


def _zeros_to_the_end(data: bytes, at: int) -> bool:
    size = len(data)
    zeros_from = max(at, len(data.rstrip(b"\0")))
    sector = -(-zeros_from // SECTOR_BYTES) * SECTOR_BYTES
    return zeros_from == at or size - zeros_from >= ZEROS_MIN or sector < size


class JournalCorrupt(Exception):
    """A file of the journal does not hold what it should; nothing was changed.

    ``offset`` is the first record that cannot be trusted; every record before it is sound.
    """

    def __init__(self, file: str, position: int, offset: int, detail: str, remedy: str) -> None:
        self.file = file
        self.position = position
        self.offset = offset
        self.detail = detail
        self.remedy = remedy
        super().__init__(f"journal file {file}, byte {position}, record {offset}: {detail}; {remedy}")


class JournalFenced(Exception):
    """Another process writes this journal now, or it lost its end: this writer's state is no fold of it any more.

    Nothing that this writer still holds may be stored, acknowledged or published. A new writer, which reads the journal
    from the start, may continue.
    """
