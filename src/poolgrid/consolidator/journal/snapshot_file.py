"""Snapshots on disk: the fold of all records before an offset, in a file that is written whole or not at all.

file header    magic PGRIDSNP; ``first offset`` = the offset of the next record to apply
entry 0        the workers, msgpack: [WorkerEntry, ...]
entry 1..n-2   blocks, msgpack: [[position of the worker, source, [parent, hashes, tier, group]], ...]
entry n-1      the end, msgpack: number of block entries, or [number of block entries, SessionsSnapshot] where sessions
               are known (a file without it is not complete)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from poolgrid.consolidator.core.pool_state import FrozenPool, PoolState, WorkerEntry
from poolgrid.consolidator.journal.framing import (
    FILE_HEADER,
    SNAPSHOT_MAGIC,
    VERSION,
    JournalCorrupt,
    file_header,
    frame,
    header_check,
    payload_at,
    scan,
)
from poolgrid.wire.feed import BlockChain
from poolgrid.wire.sessions import NO_SESSIONS, SessionsSnapshot

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
