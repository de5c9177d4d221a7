"""What lies in a journal's directory, whether it is sound, and the state of the pool at any moment that it reaches.

A state is a snapshot before the moment, and the records up to it.

Journal records as JSON objects, for people and programs.

Hashes are 16 hexadecimal digits, because readers of JSON lose bits of a u64.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import msgspec

from poolgrid.kernel.consolidation.pool_state import PoolState
from poolgrid.kernel.journal import framing
from poolgrid.kernel.journal.framing import FILE_HEADER, JournalCorrupt, scan
from poolgrid.kernel.journal.ports import ReadableDisk
from poolgrid.kernel.journal.stored_records import (
    RECORDS,
    SegmentKind,
    StoredRecord,
    TornTail,
    created_ms_of,
    offset_of,
    segment_names,
    stored_records,
)
from poolgrid.kernel.wire.events import AnyEvent, JournalRecord
from poolgrid.kernel.wire.hashing import unpack_hashes

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
    return sorted(offset_of(name, framing.SUFFIX) for name in disk.names() if name.endswith(framing.SUFFIX))


def load_snapshot(disk: ReadableDisk, offset: int, blocks_per_worker_max: int) -> PoolState:
    """Return the state that a snapshot holds, or raise ``JournalCorrupt``."""
    name = framing.name_of(offset)
    return framing.load(name, disk.read(name, 0, disk.size(name)), blocks_per_worker_max)


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

    ``on_progress`` gets the offset reached, now and then. A damaged snapshot gives way to the one before it.
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


@dataclass(frozen=True, slots=True)
class SegmentFacts:
    """One segment."""

    file: str
    first_offset: int
    next_offset: int
    """Offset after the last sound record."""
    bytes: int
    created_ms: int
    damage: str = ""
    """What is wrong with its end; empty when nothing is."""


@dataclass(frozen=True, slots=True)
class SnapshotFacts:
    """One snapshot."""

    file: str
    offset: int
    bytes: int
    created_ms: int


@dataclass(slots=True)
class Survey:
    """The files of a journal."""

    segments: list[SegmentFacts] = field(default_factory=list)
    snapshots: list[SnapshotFacts] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        return sum(segment.bytes for segment in self.segments) + sum(snapshot.bytes for snapshot in self.snapshots)


@dataclass(slots=True)
class Verified:
    """What ``verify`` saw of a sound journal."""

    records: int = 0
    bytes: int = 0
    snapshots: int = 0
    compared_snapshots: int = 0
    """Snapshots that were compared with the fold of the records before them."""
    unknown: dict[str, int] = field(default_factory=dict)
    """Kinds that this version does not know, and how many of each."""
    extra_fields: int = 0
    torn: TornTail | None = None


def survey(disk: ReadableDisk, kind: SegmentKind = RECORDS) -> Survey:
    """Return the files of a journal; a damaged one is listed with what is wrong, not raised."""
    found = Survey()
    for name in segment_names(disk):
        data = disk.read(name, 0, disk.size(name))
        first = offset_of(name)
        try:
            created_ms = created_ms_of(name, data, kind)
        except JournalCorrupt as error:
            found.segments.append(SegmentFacts(name, first, first, len(data), 0, error.detail))
            continue
        positions, _end, damage = scan(data, FILE_HEADER.size, first)
        detail = "" if damage is None else f"{damage.fault.value} at byte {damage.position}: {damage.detail}"
        found.segments.append(SegmentFacts(name, first, first + len(positions), len(data), created_ms, detail))
    for offset in snapshot_offsets(disk):
        name = framing.name_of(offset)
        header = disk.read(name, 0, FILE_HEADER.size)
        created_ms = FILE_HEADER.unpack(header)[4] if len(header) == FILE_HEADER.size else 0
        found.snapshots.append(SnapshotFacts(name, offset, disk.size(name), created_ms))
    return found


def check_journal(
    disk: ReadableDisk, blocks_per_worker_max: int, on_progress: Callable[[int], None] = lambda _: None
) -> Verified:
    """Check every byte of a journal and compare every snapshot with the fold of the records before it.

    Raises ``JournalCorrupt`` at the first fault. ``on_progress`` gets the bytes of payloads checked, now and then. A
    torn tail is not raised: the writer of the journal may be in the middle of it.
    """
    found = Verified()
    names = segment_names(disk)
    oldest = offset_of(names[0]) if names else 0
    snapshots: dict[int, PoolState] = {}
    for offset in snapshot_offsets(disk):
        snapshots[offset] = load_snapshot(disk, offset, blocks_per_worker_max)
        found.snapshots += 1
        found.bytes += disk.size(framing.name_of(offset))
    reachable = [offset for offset in snapshots if offset >= oldest]
    if oldest > 0 and not reachable:
        raise JournalCorrupt(
            names[0],
            0,
            oldest,
            "no snapshot holds the state before the oldest record",
            "restore the missing files, or start with an empty directory: workers restate their caches",
        )
    # Folding begins at the first state that can be had.
    pool = PoolState(blocks_per_worker_max) if oldest == 0 else snapshots[min(reachable)]
    torn: list[TornTail] = []
    for stored in stored_records(disk, 0, torn, count_fields=True):
        found.records += 1
        found.bytes += stored.size
        found.extra_fields += stored.understood.extra_fields
        for kind in stored.understood.unknown:
            found.unknown[kind] = found.unknown.get(kind, 0) + 1
        offset = stored.record.offset
        if offset == pool.offset:
            _compare(pool, snapshots, found)
            pool.apply(stored.record)
        if found.records % PROGRESS_EVERY_RECORDS == 0:
            on_progress(found.bytes)
    _compare(pool, snapshots, found)
    found.torn = torn[0] if torn else None
    return found


def _compare(pool: PoolState, snapshots: dict[int, PoolState], found: Verified) -> None:
    """Compare the fold with the snapshot at its offset, if there is one and it is not where the fold began."""
    snapshot = snapshots.get(pool.offset)
    if snapshot is None or snapshot is pool:
        return
    found.compared_snapshots += 1
    if snapshot.facts() != pool.facts():
        raise JournalCorrupt(
            framing.name_of(pool.offset),
            0,
            pool.offset,
            "its checksums hold, and it is not what the records before it fold to",
            "remove the file: the snapshot before it and the segments hold the truth",
        )


def event_row(event: AnyEvent) -> dict[str, Any]:
    """Return an event with its kind, hashes as hexadecimal digits."""
    row: dict[str, Any] = {"type": type(event).__name__}
    for name in event.__struct_fields__:
        value = getattr(event, name)
        if name == "sequence_hashes":
            row[name] = [f"{sequence_hash:016x}" for sequence_hash in unpack_hashes(value)]
        elif name == "parent":
            row[name] = None if value is None else f"{value:016x}"
        elif isinstance(value, IntEnum):
            row[name] = value.name.lower()
        elif isinstance(value, msgspec.Struct):
            row[name] = _named(value)
        elif isinstance(value, tuple):
            row[name] = [_named(each) for each in value]
        else:
            row[name] = value
    return row


def _named(struct: msgspec.Struct) -> dict[str, Any]:
    return {
        name: _named(value)
        if isinstance(value := getattr(struct, name), msgspec.Struct)
        else msgspec.to_builtins(value)
        for name in struct.__struct_fields__
    }


def record_row(stored: StoredRecord, events: Iterable[AnyEvent] | None = None) -> dict[str, Any]:
    """Return a record as one JSON object, with all its events or those given."""
    record = stored.record
    row: dict[str, Any] = {
        "offset": record.offset,
        "worker": str(record.worker),
        "worker_id": record.worker_id,
        "dp_rank": record.dp_rank,
        "epoch": record.epoch,
        "seq": record.seq,
        "time_ms": record.time_ms,
        "recorded_ms": record.recorded_ms,
        "source": record.source,
        "events": [event_row(event) for event in (record.events if events is None else events)],
    }
    if stored.understood.unknown:
        row["unknown"] = list(stored.understood.unknown)
    if stored.understood.extra_fields:
        row["extra_fields"] = stored.understood.extra_fields
    return row


def chosen_events(record: JournalRecord, types: Collection[str]) -> list[AnyEvent]:
    """Return the events of the kinds asked for; all when none are named."""
    return [event for event in record.events if not types or type(event).__name__ in types]
