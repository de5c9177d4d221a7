"""Journal records as rows for people and programs: JSON lines, one per record, or Parquet, one row per event.

Hashes are 16 hexadecimal digits in JSON, because JSON's readers lose bits of a u64; in Parquet they are u64.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from enum import IntEnum
from pathlib import Path
from typing import Any

import msgspec

from poolgrid.consolidator.journal.stored_records import StoredRecord
from poolgrid.wire.events import AnyEvent, JournalRecord
from poolgrid.wire.hashing import unpack_hashes

PARQUET_ROWS_PER_GROUP = 50_000
"""Rows written at a time: some tens of MiB, whatever the journal's size."""


class ParquetUnavailable(ImportError):
    """pyarrow is not installed."""


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
        else:
            row[name] = value
    return row


def _named(struct: msgspec.Struct) -> dict[str, Any]:
    """Return a struct, an array on disk, with the names of its fields."""
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


_COLUMNS = {
    "request_id": "text",
    "isl": "u32",
    "cached_tokens": "u32",
    "active_blocks": "u32",
    "reason": "text",
    "tier": "text",
    "parent": "u64",
    "sequence_hashes": "u64s",
    "running_requests": "u32",
    "waiting_requests": "u32",
    "prefill_tokens": "u32",
    "cached_blocks": "u32",
    "total_blocks": "u32",
    "steps": "u64",
    "of_source": "text",
    "state": "text",
    "card": "text",
    "cached_later": "bool",
}
"""Columns for the fields of events, with their types; those of the first versions first. A card is JSON."""

_COLUMN_OF = {"source": "of_source"}
"""Fields whose name a column of the record has: which source an event is about, and which one its record is of."""


def _cell(value: Any) -> Any:
    if isinstance(value, IntEnum):
        return value.name.lower()
    if isinstance(value, bytes):
        return list(unpack_hashes(value))
    if isinstance(value, msgspec.Struct):
        return msgspec.json.encode(_named(value)).decode()
    return value


def event_rows(stored: Iterable[StoredRecord]) -> Iterator[dict[str, Any]]:
    """Yield one flat row per event; fields that an event does not have are ``None``."""
    for each in stored:
        record = each.record
        for number, event in enumerate(record.events):
            row: dict[str, Any] = {
                "offset": record.offset,
                "event": number,
                "worker_id": record.worker_id,
                "dp_rank": record.dp_rank,
                "epoch": record.epoch,
                "seq": record.seq,
                "time_ms": record.time_ms,
                "recorded_ms": record.recorded_ms,
                "source": record.source,
                "type": type(event).__name__,
                **dict.fromkeys(_COLUMNS),
            }
            for name in event.__struct_fields__:
                row[_COLUMN_OF.get(name, name)] = _cell(getattr(event, name))
            yield row


def write_parquet(stored: Iterable[StoredRecord], out: Path) -> int:
    """Write one row per event; return how many. Raises ``ParquetUnavailable`` without pyarrow, ``OSError``."""
    try:
        import pyarrow  # type: ignore[import-not-found,import-untyped,unused-ignore]
        import pyarrow.parquet  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError:
        raise ParquetUnavailable(
            "writing Parquet: pyarrow is not installed; pip install pyarrow (or the extra `parquet`), or use "
            "--format jsonl; nothing was written"
        ) from None
    u64, u32, text = pyarrow.uint64(), pyarrow.uint32(), pyarrow.string()
    types = {"u64": u64, "u32": u32, "text": text, "u64s": pyarrow.list_(u64), "bool": pyarrow.bool_()}
    schema = pyarrow.schema(
        [
            ("offset", u64),
            ("event", u32),
            ("worker_id", text),
            ("dp_rank", u32),
            ("epoch", u64),
            ("seq", u64),
            ("time_ms", u64),
            ("recorded_ms", u64),
            ("source", text),
            ("type", text),
            *((name, types[kind]) for name, kind in _COLUMNS.items()),
        ]
    )
    count = 0
    pending: list[dict[str, Any]] = []
    with pyarrow.parquet.ParquetWriter(out, schema, compression="zstd") as writer:
        for row in event_rows(stored):
            pending.append(row)
            count += 1
            if len(pending) >= PARQUET_ROWS_PER_GROUP:
                writer.write_table(pyarrow.Table.from_pylist(pending, schema))
                pending = []
        writer.write_table(pyarrow.Table.from_pylist(pending, schema))
    return count
