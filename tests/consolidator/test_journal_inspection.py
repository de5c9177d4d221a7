"""A journal as an operator meets it: verified, read as of any moment, and written by a poolgrid from the future."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest

from poolgrid.kernel.consolidation.pool_state import PoolState
from poolgrid.kernel.journal.framing import ENTRY_HEADER, FILE_HEADER, JournalCorrupt
from poolgrid.kernel.journal.stored_records import stored_records, understand_all
from poolgrid.kernel.wire import codec
from poolgrid.kernel.wire.errors import DecodeError
from poolgrid.kernel.wire.events import AnyEvent, Event
from poolgrid.server.consolidator.journal.files import FileJournal, JournalSettings
from poolgrid.server.consolidator.journal.inspection import (
    NotKept,
    check_journal,
    event_row,
    next_offset,
    offset_at,
    reaches_back_to,
    state_at,
    survey,
)
from tests.consolidator.journal_builder import FakeDisk, encoded, fold, record, write
from tests.wire.test_wire_frames import GOLDEN

BLOCKS_MAX = 1_000_000


def a_journal() -> FakeDisk:
    """Four segments and two snapshots."""
    disk = FakeDisk()
    journal = write(disk, 12, segment_bytes=400)
    for offset in (12, 18):
        journal.append(encoded(journal.next_offset, offset - journal.next_offset), offset)
        journal.write_snapshot(fold(offset).freeze())
    journal.append(encoded(18, 4), 22)
    return disk


WHOLE = a_journal()


def test_a_sound_journal_is_sound_and_its_snapshots_are_what_its_records_fold_to() -> None:
    found = check_journal(WHOLE, BLOCKS_MAX)

    assert (found.records, found.snapshots, found.compared_snapshots) == (22, 2, 2)
    assert found.torn is None
    assert not found.unknown


def test_a_snapshot_that_is_not_what_the_records_fold_to_is_found() -> None:
    disk = a_journal()
    wrong = fold(18)
    wrong.workers[record(1).worker].draining = True
    FileJournal(disk).write_snapshot(wrong.freeze())

    with pytest.raises(JournalCorrupt, match="not what the records before it fold to"):
        check_journal(disk, BLOCKS_MAX)


def test_a_journal_whose_beginning_no_snapshot_holds_is_not_sound() -> None:
    disk = FakeDisk()
    write(disk, 20, segment_bytes=300)
    disk.remove(disk.names()[0])

    with pytest.raises(JournalCorrupt, match="no snapshot holds the state"):
        check_journal(disk, BLOCKS_MAX)


def test_the_state_at_any_offset_is_the_fold_of_what_is_before() -> None:
    for offset in range(23):
        assert state_at(WHOLE, offset, BLOCKS_MAX).facts() == fold(offset).facts()
    with pytest.raises(NotKept, match="the journal ends before record 22"):
        state_at(WHOLE, 23, BLOCKS_MAX)


def test_after_retention_the_journal_reaches_back_to_its_oldest_snapshot() -> None:
    disk = a_journal()
    journal = FileJournal(disk, JournalSettings(segment_bytes=400, retention_bytes=0, retention_ms=0))

    assert journal.retain(now_ms=10**12) > 0

    begin = reaches_back_to(disk)
    assert begin == 12
    assert state_at(disk, 22, BLOCKS_MAX).facts() == fold(22).facts()
    assert check_journal(disk, BLOCKS_MAX).records < 22
    with pytest.raises(NotKept, match="reaches back to 12"):
        state_at(disk, 3, BLOCKS_MAX)


def test_a_time_means_the_first_record_after_it() -> None:
    # Record n of the builder is recorded at 2000 + n.
    for offset in range(22):
        assert offset_at(WHOLE, 2000 + offset) == offset + 1
    assert offset_at(WHOLE, 0) == 0
    assert offset_at(WHOLE, 10**9) == next_offset(WHOLE) == 22


def test_the_survey_lists_a_damaged_segment_with_what_is_wrong() -> None:
    disk = a_journal()
    name = disk.names()[0]
    disk.files[name][FILE_HEADER.size + ENTRY_HEADER.size + 3] ^= 1

    found = survey(disk)

    assert "payload does not match" in found.segments[0].damage
    assert [segment.damage for segment in found.segments[1:]] == [""] * (len(found.segments) - 1)
    assert [snapshot.offset for snapshot in found.snapshots] == [12, 18]


# -- from the future ---------------------------------------------------------------------------------------------------


def from_the_future(offset: int) -> list[bytes]:
    """Three records: an unknown kind, one with an unknown event among known ones, one with fields after the known."""
    raw = [msgspec.msgpack.decode(codec.journal_record.encode(record(offset + at))) for at in range(3)]
    raw[1][7] = [["BlocksPinned", b"\0" * 8, {"why": "prompt cache"}], *raw[1][7]]
    raw[2][7][0] = [*raw[2][7][0], "a new field", 3]
    raw[2].append({"zone": "b"})
    unknown = ["LeaseGranted", offset, {"holder": "w", "until_ms": 5}]
    return [msgspec.msgpack.encode(each) for each in (unknown, raw[1], raw[2])]


def test_records_of_a_later_version_are_skipped_counted_and_the_rest_is_folded() -> None:
    disk = FakeDisk()
    journal = write(disk, 5)
    journal.append(from_the_future(5), 0)
    journal.append(encoded(8, 4), 0)

    found = check_journal(disk, BLOCKS_MAX)
    again = FileJournal(disk)
    pool = again.recover(BLOCKS_MAX)

    assert (found.records, found.unknown, found.extra_fields) == (
        12,
        {"LeaseGranted": 1, "BlocksPinned": 1},
        3,
    )
    expected = PoolState()
    for offset in range(12):
        known = record(offset) if offset != 5 else msgspec.structs.replace(record(5), events=[], source="consolidator")
        expected.apply(known)
    assert pool.facts() == state_at(disk, 12, BLOCKS_MAX).facts()
    assert pool.offset == 12
    assert pool.workers[record(1).worker].presence.holds(12)  # from the record with the unknown event
    assert any("1 of the unknown kind LeaseGranted" in line for line in again.report)
    assert check_journal(disk, BLOCKS_MAX).records == 12


def test_what_is_neither_known_nor_from_the_future_is_damage() -> None:
    for rubbish in (b"\x01", b"\x90", msgspec.msgpack.encode({"a": 1}), msgspec.msgpack.encode(["X", 9]), b""):
        with pytest.raises(DecodeError):
            understand_all(rubbish, 5)
        disk = FakeDisk()
        journal = write(disk, 5)
        journal.append([rubbish], 0)
        with pytest.raises(JournalCorrupt, match="record 5"):
            list(stored_records(disk))


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
def test_a_line_of_an_event_has_all_its_fields_and_states_by_name(kind: type) -> None:
    row = event_row(EVENTS[kind])

    assert set(row) == {"type", *EVENTS[kind].__struct_fields__}
    assert not isinstance(row.get("state"), int)
    assert not isinstance(row.get("tier"), int)
