"""The state of a pool at any moment that its journal still reaches: a snapshot before it, and the records up to it."""

from __future__ import annotations

from collections.abc import Callable

from poolgrid.consolidator.core.pool_state import PoolState
from poolgrid.consolidator.journal import snapshot_file
from poolgrid.consolidator.journal.errors import JournalCorrupt
from poolgrid.consolidator.journal.stored_records import offset_of, segment_names, stored_records
from poolgrid.consolidator.ports import ReadableDisk

PROGRESS_EVERY_RECORDS = 1000


class NotKept(ValueError):
    """The journal no longer reaches back to the moment asked for, or has not come to it yet."""


def next_offset(disk: ReadableDisk) -> int:
    """Return the offset after the last record (after the newest snapshot, when that reaches further)."""
    names = segment_names(disk)
    snapshots = snapshot_offsets(disk)
    after = snapshots[-1] if snapshots else 0
    if names:
        last = offset_of(names[-1])
        after = max(after, last)
        for stored in stored_records(disk, last):
            after = max(after, stored.record.offset + 1)
    return after


def snapshot_offsets(disk: ReadableDisk) -> list[int]:
    """Return the offsets of the snapshots, oldest first."""
    return sorted(offset_of(name, snapshot_file.SUFFIX) for name in disk.names() if name.endswith(snapshot_file.SUFFIX))


def load_snapshot(disk: ReadableDisk, offset: int, blocks_per_worker_max: int) -> PoolState:
    """Return the state that a snapshot holds, or raise ``JournalCorrupt``."""
    name = snapshot_file.name_of(offset)
    return snapshot_file.load(name, disk.read(name, 0, disk.size(name)), blocks_per_worker_max)


def reaches_back_to(disk: ReadableDisk) -> int:
    """Return the first offset whose state can be had."""
    names = segment_names(disk)
    oldest = offset_of(names[0]) if names else 0
    if names and oldest == 0:
        return 0
    found = [offset for offset in snapshot_offsets(disk) if offset >= oldest]
    return found[0] if found else next_offset(disk)


def state_at(
    disk: ReadableDisk,
    offset: int,
    blocks_per_worker_max: int,
    on_progress: Callable[[int], None] = lambda _: None,
) -> PoolState:
    """Return the state before record ``offset``; raises ``NotKept`` or ``JournalCorrupt``.

    ``on_progress`` is told the offset reached, now and then. A damaged snapshot gives way to the one before it.
    """
    names = segment_names(disk)
    oldest = offset_of(names[0]) if names else None
    pool: PoolState | None = None
    damaged: JournalCorrupt | None = None
    for at in reversed(snapshot_offsets(disk)):
        if at > offset or (at < offset and oldest is not None and at < oldest):
            continue
        try:
            pool = load_snapshot(disk, at, blocks_per_worker_max)
            break
        except JournalCorrupt as error:
            damaged = error
    if pool is None:
        if oldest != 0 and not (offset == 0 and oldest is None):
            if damaged is not None:
                raise damaged
            raise NotKept(
                f"reading the state before record {offset}: the journal reaches back to {reaches_back_to(disk)}; "
                "ask for a later one"
            )
        pool = PoolState(blocks_per_worker_max)
    if pool.offset < offset:
        for stored in stored_records(disk, pool.offset, to_offset=offset):
            pool.apply(stored.record)
            if pool.offset % PROGRESS_EVERY_RECORDS == 0:
                on_progress(pool.offset)
    if pool.offset < offset:
        raise NotKept(f"reading the state before record {offset}: the journal ends before record {pool.offset}")
    return pool


def offset_at(disk: ReadableDisk, time_ms: int) -> int:
    """Return the offset of the first record that was recorded after a wall-clock time, or the end of the journal."""
    names = segment_names(disk)
    start = 0
    for name in names:
        first = next(iter(stored_records(disk, offset_of(name))), None)
        if first is None or first.record.recorded_ms > time_ms:
            break
        start = offset_of(name)
    for stored in stored_records(disk, start):
        # What is unknown has no time of its own.
        if stored.record.recorded_ms > time_ms:
            return stored.record.offset
    return next_offset(disk)
