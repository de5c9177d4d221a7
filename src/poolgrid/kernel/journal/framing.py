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

Snapshots on disk: the fold of all records before an offset, in a file that is written whole or not at all.

file header    magic PGRIDSNP; ``first offset`` = the offset of the next record to apply
entry 0        the workers, msgpack: [WorkerEntry, ...]
entry 1..n-2   blocks, msgpack: [[position of the worker, source, [parent, hashes, tier, group]], ...]
entry n-1      the end, msgpack: number of block entries, or [number of block entries, SessionsSnapshot] where sessions
               are known (a file without it is not complete)
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

import msgspec
from xxhash import xxh3_64_intdigest

from poolgrid.kernel.consolidation.pool_state import FrozenPool, PoolState, WorkerEntry
from poolgrid.kernel.wire.feed import BlockChain
from poolgrid.kernel.wire.sessions import NO_SESSIONS, SessionsSnapshot

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


ENTRY_BYTES = 16 * 1024
"""Bytes of hashes after which a further entry begins: one that is made on an event loop must not take long."""

SUFFIX = ".snapshot"

_Block = tuple[int, str, BlockChain]
_encoder = msgspec.msgpack.Encoder()
_workers = msgspec.msgpack.Decoder(list[WorkerEntry])
_blocks = msgspec.msgpack.Decoder(list[_Block])
_end = msgspec.msgpack.Decoder(int | tuple[int, SessionsSnapshot])


def name_of(offset: int) -> str:
    """Return the file name of the snapshot before record ``offset``."""
    return f"{offset:020d}{SUFFIX}"


def parts(frozen: FrozenPool, created_ms: int) -> Iterator[bytes]:
    """Yield the content of a snapshot file; what is done between two parts does not depend on how much is held."""
    yield file_header(SNAPSHOT_MAGIC, frozen.offset, created_ms)
    yield frame(_encoder.encode([worker.entry for worker in frozen.workers]), 0)
    number = 1
    pending: list[_Block] = []
    size = 0
    for block in frozen.source_chains():
        pending.append(block)
        size += len(block[2].sequence_hashes) + 32
        if size >= ENTRY_BYTES:
            yield frame(_encoder.encode(pending), number)
            number += 1
            pending = []
            size = 0
    if pending:
        yield frame(_encoder.encode(pending), number)
        number += 1
    end = number - 1 if frozen.sessions == NO_SESSIONS else (number - 1, frozen.sessions)
    yield frame(_encoder.encode(end), number)


def check(name: str, data: bytes) -> list[int]:
    """Return where the entries of a snapshot file are, all of them with sums that hold, or raise ``JournalCorrupt``."""
    expected = int(name.removesuffix(SUFFIX))

    def corrupt(position: int, detail: str) -> JournalCorrupt:
        return _corrupt(name, position, detail)

    if len(data) < FILE_HEADER.size:
        raise corrupt(0, f"{len(data)} bytes, a header has {FILE_HEADER.size}")
    magic, version, check, offset, created_ms = FILE_HEADER.unpack_from(data)
    sound = check == header_check(magic, version, offset, created_ms)
    if magic != SNAPSHOT_MAGIC or version != VERSION or not sound or offset != expected:
        raise corrupt(0, f"the header has {magic!r} version {version} offset {offset}")
    positions, _end, damage = scan(data, FILE_HEADER.size, 0)
    if damage is not None:
        raise corrupt(damage.position, damage.detail)
    try:
        if len(positions) < 2 or _end_of(data, positions)[0] != len(positions) - 2:
            raise corrupt(len(data), "the end is missing")
    except (msgspec.MsgspecError, IndexError) as error:
        raise _of_another_version(name, error) from None
    return positions


def load(name: str, data: bytes, blocks_per_worker_max: int) -> PoolState:
    """Return the state that a snapshot file holds, or raise ``JournalCorrupt``."""
    positions = check(name, data)
    try:
        entries = _workers.decode(payload_at(data, positions[0]))

        blocks = (block for position in positions[1:-1] for block in _blocks.decode(payload_at(data, position)))
        return PoolState.load(
            int(name.removesuffix(SUFFIX)), entries, blocks, blocks_per_worker_max, _end_of(data, positions)[1]
        )
    except (msgspec.MsgspecError, IndexError) as error:
        raise _of_another_version(name, error) from None


def _end_of(data: bytes, positions: Sequence[int]) -> tuple[int, SessionsSnapshot]:
    end = _end.decode(payload_at(data, positions[-1]))
    return (end, NO_SESSIONS) if isinstance(end, int) else end


def _corrupt(name: str, position: int, detail: str) -> JournalCorrupt:
    remedy = "remove the file: the snapshot before it and the segments hold the same"
    return JournalCorrupt(name, position, int(name.removesuffix(SUFFIX)), detail, remedy)


def _of_another_version(name: str, error: Exception) -> JournalCorrupt:
    return _corrupt(name, 0, f"checksums hold and the content does not decode ({error}): another version wrote it")
