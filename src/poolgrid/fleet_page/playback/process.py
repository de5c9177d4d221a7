"""``python -m poolgrid.fleet_page.playback.process``: reads a journal, folds it, answers, and ends.

One question comes on standard input and one answer goes to standard output, both as a frame of MessagePack. Without a
directory the records follow the question, a frame each. It reads only, takes no lock, and runs with what other work
leaves of the processor; the memory and the time that it may take are bounded.
"""

from __future__ import annotations

import os
import resource
import signal
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import msgspec

from poolgrid.consolidator.core.pool_state import PoolState
from poolgrid.consolidator.journal.framing import JournalCorrupt
from poolgrid.consolidator.journal.inspection import NotKept, offset_at, reaches_back_to, state_at
from poolgrid.consolidator.journal.posix_disk import ReadOnlyDirectory
from poolgrid.consolidator.journal.stored_records import stored_records
from poolgrid.fleet_page.playback.reel import Leg, fill, make_reel
from poolgrid.wire import codec
from poolgrid.wire.events import JournalRecord
from poolgrid.wire.hashing import unpack_hashes
from poolgrid.wire.limits import FRAME_BYTES_MAX

NICENESS = 15

MEMORY_BYTES_MAX = 4 * 1024**3
"""Address space: twenty million blocks. A larger pool cannot be played back, and the answer reports it."""

FOLD_CPU_S_MAX = 15.0
FOLD_S_MAX = 45.0
"""Longest folding up to the last frame, by the processor's clock and by the wall's, since others come first. Then the
reel ends where it is."""


class Question(msgspec.Struct):
    """What is wanted: a reel, or the times of legs."""

    directory: str
    """Of the journal; empty = its records follow."""
    first_offset: int
    """Of the first record that follows."""
    blocks_per_worker_max: int
    from_ms: int = 0
    to_ms: int = 0
    frames: int = 0
    paths: list[tuple[str, bytes, int]] = []
    """Conversations: name, packed sequence hashes, tokens of a block."""
    legs: list[Leg] = []
    """With these the times of the legs are wanted, from ``from_offset`` on."""
    from_offset: int = 0


class Answer(msgspec.Struct):
    """What came of it."""

    body: bytes = b""
    """A reel as JSON, or legs as MessagePack."""
    refused: str = ""
    """Why there is none, in words."""


def write_frame(target: IO[bytes], body: bytes) -> None:
    """Write one frame."""
    target.write(struct.pack("<I", len(body)))
    target.write(body)


def read_frame(source: IO[bytes]) -> bytes | None:
    """Return the next frame, ``None`` at the end of the input."""
    head = source.read(4)
    if len(head) < 4:
        return None
    (size,) = struct.unpack("<I", head)
    body = source.read(min(size, FRAME_BYTES_MAX))
    return body if len(body) == size else None


def answer(question: Question, following: Iterator[bytes]) -> Answer:
    """Return the answer to a question; ``following`` are the records behind it."""
    try:
        return _legs(question, following) if question.legs else _reel(question, following)
    except (NotKept, JournalCorrupt) as error:
        return Answer(refused=str(error))
    except OSError as error:
        return Answer(refused=f"reading the journal failed ({error}); it may have been shortened meanwhile, try again")
    except MemoryError:
        return Answer(refused=f"the pool takes more than {MEMORY_BYTES_MAX // 1024**3} GiB to fold, the limit")


def _records(question: Question, following: Iterator[bytes], from_offset: int) -> Iterator[JournalRecord]:
    if question.directory:
        for stored in stored_records(ReadOnlyDirectory(Path(question.directory)), from_offset):
            yield stored.record
    else:
        for payload in following:
            yield codec.journal_record.decode(payload)


def _legs(question: Question, following: Iterator[bytes]) -> Answer:
    fill(question.legs, _records(question, following, question.from_offset))
    return Answer(msgspec.msgpack.encode(question.legs))


def _reel(question: Question, following: Iterator[bytes]) -> Answer:
    from_ms = question.from_ms
    if question.directory:
        disk = ReadOnlyDirectory(Path(question.directory))
        offset = max(offset_at(disk, from_ms), reaches_back_to(disk))
        pool = state_at(disk, offset, question.blocks_per_worker_max)
    elif question.first_offset:
        return Answer(
            refused=f"the journal is kept in memory and begins at record {question.first_offset} by now: what the pool "
            "held before is not known. With --data-dir it is kept on disk, with snapshots"
        )
    else:
        pool = PoolState(question.blocks_per_worker_max)
    records = _records(question, following, pool.offset)
    first = next(records, None)
    while first is not None and first.recorded_ms <= from_ms and not question.directory:
        pool.apply(first)
        first = next(records, None)

    def rest() -> Iterator[JournalRecord]:
        if first is not None:
            yield first
            yield from records

    until_s, until_cpu_s = time.monotonic() + FOLD_S_MAX, time.process_time() + FOLD_CPU_S_MAX
    paths = [(name, unpack_hashes(path), block_size) for name, path, block_size in question.paths]
    reel = make_reel(
        pool,
        rest(),
        from_ms,
        question.to_ms,
        question.frames,
        paths,
        lambda: time.monotonic() > until_s or time.process_time() > until_cpu_s,
    )
    return Answer(msgspec.json.encode(reel))


def main() -> None:
    """Answer one question."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent process, which ends it
    os.nice(NICENESS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES_MAX, MEMORY_BYTES_MAX))
    source, target = sys.stdin.buffer, sys.stdout.buffer
    asked = read_frame(source)
    if asked is None:
        return
    found = answer(msgspec.msgpack.decode(asked, type=Question), iter(lambda: read_frame(source), None))
    target.write(msgspec.msgpack.encode(found))
    target.flush()


if __name__ == "__main__":
    main()
