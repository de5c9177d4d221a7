"""What an export says of an event is all that the event says."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest

from poolgrid.consolidator.journal.record_rows import event_row, event_rows
from poolgrid.consolidator.journal.stored_records import StoredRecord, Understood
from poolgrid.wire.events import AnyEvent, Event, JournalRecord
from poolgrid.wire.hashing import unpack_hashes
from tests.wire.test_wire_frames import GOLDEN

RECORD_COLUMNS = {
    "offset", "event", "worker_id", "dp_rank", "epoch", "seq", "time_ms", "recorded_ms", "source", "type"
}  # fmt: skip


def events_in(value: Any) -> list[Any]:
    if isinstance(value, Event):
        return [value]
    if isinstance(value, msgspec.Struct):
        return [event for name in value.__struct_fields__ for event in events_in(getattr(value, name))]
    if isinstance(value, list | tuple):
        return [event for item in value for event in events_in(item)]
    return []


EVENTS = {type(event): event for event in events_in(list(GOLDEN.values()))}


def test_there_is_an_example_of_every_kind() -> None:
    assert set(EVENTS) == set(get_args(AnyEvent))


@pytest.mark.parametrize("kind", get_args(AnyEvent), ids=lambda kind: kind.__name__)
def test_every_field_of_an_event_has_a_column_of_its_own(kind: type) -> None:
    event = EVENTS[kind]
    record = JournalRecord(7, "w", 0, 1, 2, 3, 4, [event], "the record's source")
    (row,) = event_rows([StoredRecord("file", 0, 0, Understood(record))])

    said = {name: value for name, value in row.items() if name not in RECORD_COLUMNS and value is not None}

    assert len(said) == sum(getattr(event, name) is not None for name in event.__struct_fields__)
    assert row["source"] == "the record's source"
    assert row["type"] == kind.__name__
    for name in event.__struct_fields__:
        value = getattr(event, name)
        if name == "sequence_hashes":
            assert row[name] == list(unpack_hashes(value))
        elif isinstance(value, int | str) and name in said:
            assert row[name] in (value, getattr(value, "name", "").lower())


@pytest.mark.parametrize("kind", get_args(AnyEvent), ids=lambda kind: kind.__name__)
def test_every_event_has_the_same_columns(kind: type) -> None:
    rows = [
        next(event_rows([StoredRecord("file", 0, 0, Understood(JournalRecord(7, "w", 0, 1, 2, 3, 4, [event])))]))
        for event in (EVENTS[kind], next(iter(EVENTS.values())))
    ]

    assert list(rows[0]) == list(rows[1])


@pytest.mark.parametrize("kind", get_args(AnyEvent), ids=lambda kind: kind.__name__)
def test_a_line_of_an_event_has_all_its_fields_and_states_by_name(kind: type) -> None:
    row = event_row(EVENTS[kind])

    assert set(row) == {"type", *EVENTS[kind].__struct_fields__}
    assert not isinstance(row.get("state"), int)
    assert not isinstance(row.get("tier"), int)
