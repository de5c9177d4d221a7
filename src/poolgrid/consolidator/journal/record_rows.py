"""Journal records as JSON objects, for people and programs.

Hashes are 16 hexadecimal digits, because readers of JSON lose bits of a u64.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from enum import IntEnum
from typing import Any

import msgspec

from poolgrid.consolidator.journal.stored_records import StoredRecord
from poolgrid.wire.events import AnyEvent, JournalRecord
from poolgrid.wire.hashing import unpack_hashes


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
