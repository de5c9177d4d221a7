"""The journal on a disk that can be looked into, cut, flipped and filled."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poolgrid.kernel.journal.framing import (
    ENTRY_HEADER,
    FILE_HEADER,
    SECTOR_BYTES,
    ZEROS_MIN,
    EntryFault,
    JournalCorrupt,
    frame,
    scan,
)
from poolgrid.kernel.journal.stored_records import stored_records
from poolgrid.kernel.wire import codec
from poolgrid.kernel.wire.events import JournalRecord
from poolgrid.server.consolidator.journal.files import FileJournal, JournalSettings
from poolgrid.server.consolidator.journal.inspection import check_journal
from poolgrid.server.consolidator.journal.memory import MemoryJournal
from poolgrid.server.consolidator.journal.posix_disk import DirectoryInUse, PosixDisk
from tests.consolidator.journal_builder import FakeDisk, encoded, facts_of, fold, record, write
from tests.consolidator.journal_kinds import InDirectory, InFakeStream, JournalKind
from tests.consolidator.journal_laws import JournalLaws

BLOCKS_MAX = 1_000_000


def test_what_was_appended_is_read_back_in_any_slices() -> None:
    journal = write(FakeDisk(), 50, segment_bytes=600)

    assert journal.sizes()[0] > 5
    for first in range(50):
        for limit in (1, 7, 100):
            assert journal.read(first, limit, 1 << 20) == encoded(first, min(limit, 50 - first))
    assert journal.read(50, 10, 1 << 20) == []
    assert len(journal.read(0, 100, 400)) < 10
    assert len(journal.read(0, 100, 1)) == 1  # one too large for the bound still goes


def test_a_journal_opened_again_goes_on_without_a_hole() -> None:
    disk = FakeDisk()
    write(disk, 20, segment_bytes=600).close()

    journal = write(disk, 40, segment_bytes=600)

    assert [codec.journal_record.decode(payload).offset for payload in journal.read(0, 100, 1 << 20)] == list(range(40))
    assert facts_of(journal.recover(BLOCKS_MAX)) == facts_of(fold(40))


def test_a_tail_torn_at_any_byte_of_the_last_record_is_cut_and_reported() -> None:
    whole = FakeDisk()
    write(whole, 10)
    (name,) = whole.names()
    size = whole.size(name)
    last = ENTRY_HEADER.size + len(encoded(9, 1)[0])
    for cut in range(1, last):
        disk = whole.copy()
        disk.truncate(name, size - cut)

        journal = FileJournal(disk)

        assert journal.next_offset == 9
        assert "torn tail" in journal.report[0]
        assert "record 9" in journal.report[0]
        assert disk.size(name) == size - last
        journal.append(encoded(9, 1), 0)
        assert bytes(disk.files[name]) == bytes(whole.files[name])


def test_a_tail_of_zeros_is_torn_too() -> None:
    disk = FakeDisk()
    write(disk, 10)
    (name,) = disk.names()
    disk.files[name].extend(bytes(100))

    journal = FileJournal(disk)

    assert journal.next_offset == 10
    assert journal.report


@pytest.mark.parametrize("lost", range(1, ZEROS_MIN + 2))
def test_a_last_sector_of_zeros_is_torn_however_little_of_the_record_was_in_it(lost: int) -> None:
    payload = bytes(range(1, 256)) * 4
    head = 2 * SECTOR_BYTES - FILE_HEADER.size - ENTRY_HEADER.size + lost
    whole = bytes(FILE_HEADER.size) + frame(payload[:head], 7)
    assert len(whole) == 2 * SECTOR_BYTES + lost

    _, end, damage = scan(whole[: 2 * SECTOR_BYTES] + bytes(lost), FILE_HEADER.size, 7)
    assert (end, damage and damage.fault) == (FILE_HEADER.size, EntryFault.TORN)

    flipped = bytearray(whole)
    flipped[600] ^= 1
    _, _, damage = scan(bytes(flipped), FILE_HEADER.size, 7)
    assert damage is not None
    assert damage.fault is EntryFault.CORRUPT


def test_an_unfinished_segment_header_is_cut() -> None:
    disk = FakeDisk()
    write(disk, 10)
    disk.append(f"{10:020d}.segment", b"PGRID")

    journal = FileJournal(disk)

    assert journal.next_offset == 10
    assert len(disk.names()) == 1


def collect(records: Iterable[JournalRecord], found: list[JournalRecord]) -> None:
    """Collect into ``found`` one by one, so that what came before an error is kept."""
    for sound in records:
        found.append(sound)  # noqa: PERF402


def test_a_segment_of_which_nothing_was_durable_is_cut_and_reported() -> None:
    disk = FakeDisk()
    journal = write(disk, 30, segment_bytes=500)
    last = disk.names()[-1]
    size = len(disk.files[last])
    disk.files[last][:] = bytes(size)

    reopened = FileJournal(disk)

    assert reopened.next_offset == int(last.removesuffix(".segment")) < journal.next_offset
    assert last not in disk.files
    assert reopened.report == [f"{last}: cut {size} bytes, all of them zero"]


def test_the_records_before_a_segment_of_zeros_are_read_without_complaint() -> None:
    disk = FakeDisk()
    write(disk, 30, segment_bytes=500)
    last = disk.names()[-1]
    disk.files[last][:] = bytes(len(disk.files[last]))

    assert [each.record.offset for each in stored_records(disk)] == list(range(int(last.removesuffix(".segment"))))


def test_a_segment_is_durable_before_the_next_begins() -> None:
    disk = FakeDisk()
    write(disk, 30, segment_bytes=500)

    assert set(disk.names()[:-1]) <= set(disk.synced)


def test_what_a_killed_process_left_is_durable_before_it_counts() -> None:
    disk = FakeDisk()
    write(disk, 3)
    disk.synced.clear()

    FileJournal(disk)

    assert disk.synced == disk.names()


def test_a_flipped_byte_anywhere_is_detected_and_located_and_all_before_it_is_usable() -> None:
    whole = FakeDisk()
    write(whole, 12, segment_bytes=250)
    names = whole.names()
    assert len(names) > 2
    for name in names:
        first = int(name.split(".")[0])
        for position in range(whole.size(name)):
            disk = whole.copy()
            disk.files[name][position] ^= 0x41

            found: list[JournalRecord] = []
            with pytest.raises(JournalCorrupt) as caught:
                collect((each.record for each in stored_records(disk)), found)

            assert caught.value.file == name
            assert caught.value.offset == len(found) >= first
            assert caught.value.position <= position
            assert "restore" in caught.value.remedy
            assert found == [record(offset) for offset in range(len(found))]


def test_corruption_in_the_segment_being_written_stops_the_opening() -> None:
    disk = FakeDisk()
    write(disk, 10)
    (name,) = disk.names()
    disk.files[name][FILE_HEADER.size + 40] ^= 1

    with pytest.raises(JournalCorrupt, match=r"record 0: .*; records before 0 are sound"):
        FileJournal(disk)
    assert disk.size(name) > 500  # nothing was cut


def test_corruption_in_a_closed_segment_stops_whoever_reads_it() -> None:
    disk = FakeDisk()
    write(disk, 20, segment_bytes=500)
    disk.files[disk.names()[1]][200] ^= 1

    with pytest.raises(JournalCorrupt):
        FileJournal(disk).recover(BLOCKS_MAX)


def test_a_missing_segment_is_noticed() -> None:
    disk = FakeDisk()
    write(disk, 20, segment_bytes=500)
    disk.remove(disk.names()[1])

    with pytest.raises(JournalCorrupt, match="are missing"):
        FileJournal(disk).recover(BLOCKS_MAX)
    with pytest.raises(JournalCorrupt, match="are missing"):
        list(stored_records(disk))


def test_a_snapshot_and_the_records_after_it_are_the_whole_state() -> None:
    disk = FakeDisk()
    journal = write(disk, 30, segment_bytes=500)
    journal.write_snapshot(fold(30).freeze())
    write(disk, 45, segment_bytes=500)

    journal = FileJournal(disk)

    assert facts_of(journal.recover(BLOCKS_MAX)) == facts_of(fold(45))
    assert check_journal(disk, BLOCKS_MAX).records == 45


def test_a_byte_flipped_anywhere_in_a_snapshot_is_found_and_the_one_before_it_serves() -> None:
    whole = FakeDisk()
    journal = write(whole, 30)
    journal.write_snapshot(fold(30).freeze())
    journal.append(encoded(30, 5), 0)
    journal.write_snapshot(fold(35).freeze())
    name = f"{35:020d}.snapshot"
    size = whole.size(name)
    for position in (*range(24), *range(24, size, 7), size - 1):
        disk = whole.copy()
        disk.files[name][position] ^= 1

        with pytest.raises(JournalCorrupt) as caught:
            check_journal(disk, BLOCKS_MAX)
        assert caught.value.file == name
        assert caught.value.position <= position
        journal = FileJournal(disk)
        assert facts_of(journal.recover(BLOCKS_MAX)) == facts_of(fold(35))
        assert "going back to the snapshot before it" in journal.report[0]


def test_retention_removes_only_segments_that_no_kept_snapshot_needs() -> None:
    disk = FakeDisk()
    settings_ = JournalSettings(segment_bytes=500, retention_bytes=1, retention_ms=10**9)
    journal = FileJournal(disk, settings_)
    for offset in range(60):
        journal.append(encoded(offset, 1), now_ms=offset)
    assert journal.retain(now_ms=60) == 0  # no snapshot, nothing may go

    journal.write_snapshot(fold(60).freeze())
    journal.append(encoded(60, 1), 60)
    assert journal.retain(now_ms=60) > 3
    assert journal.sizes()[0] <= 2
    with pytest.raises(ValueError, match="the oldest kept is"):
        journal.read(0, 1, 1000)

    again = FileJournal(disk, settings_)
    assert facts_of(again.recover(BLOCKS_MAX)) == facts_of(fold(61))


def test_retention_by_age() -> None:
    disk = FakeDisk()
    journal = FileJournal(disk, JournalSettings(segment_bytes=300, retention_ms=1000))
    for offset in range(30):
        journal.append(encoded(offset, 1), now_ms=offset * 100)
    journal.write_snapshot(fold(30).freeze())

    journal.retain(now_ms=3000)

    oldest = codec.journal_record.decode(journal.read(journal.oldest_offset, 1, 1000)[0]).offset
    assert 0 < oldest <= 20


def test_two_snapshots_are_kept() -> None:
    disk = FakeDisk()
    journal = write(disk, 40)
    for offset in (10, 20, 30, 40):
        journal.write_snapshot(fold(offset).freeze())

    assert [name for name in disk.names() if name.endswith("snapshot")] == [
        f"{30:020d}.snapshot",
        f"{40:020d}.snapshot",
    ]


def test_a_full_disk_fails_the_append_and_a_later_one_succeeds() -> None:
    whole = FakeDisk()
    write(whole, 10, at_once=1)
    for room in range(0, 200, 7):
        disk = FakeDisk()
        journal = write(disk, 5, at_once=1)
        disk.room = room
        with pytest.raises(OSError, match="No space left"):
            journal.append(encoded(5, 5), 5000)
        assert journal.next_offset == 5
        assert len(journal.read(0, 100, 1 << 20)) == 5
        disk.room = None

        journal.append(encoded(5, 5), 5000)

        assert disk.files == whole.files
        assert facts_of(FileJournal(disk).recover(BLOCKS_MAX)) == facts_of(fold(10))


def test_a_disk_that_fills_up_at_a_new_segment_leaves_nothing_behind() -> None:
    for room in (0, 10, 32, 50):
        disk = FakeDisk()
        journal = write(disk, 6, segment_bytes=300, at_once=6)
        disk.room = room
        with pytest.raises(OSError, match="No space left"):
            journal.append(encoded(6, 2), 0)
        disk.room = None
        journal.append(encoded(6, 2), 0)

        assert check_journal(disk, BLOCKS_MAX).records == 8


def test_a_snapshot_beyond_the_last_record_wins() -> None:
    disk = FakeDisk()
    journal = write(disk, 30)
    journal.write_snapshot(fold(30).freeze())
    (name,) = [name for name in disk.names() if name.endswith("segment")]
    disk.truncate(name, FILE_HEADER.size)

    journal = FileJournal(disk)
    pool = journal.recover(BLOCKS_MAX)
    journal.append(encoded(30, 3), 0)

    assert facts_of(pool) == facts_of(fold(30))
    assert (journal.oldest_offset, journal.next_offset) == (30, 33)
    assert check_journal(disk, BLOCKS_MAX).records == 3


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(200, 2000), st.data())
def test_any_appends_any_cut_and_the_fold_of_what_is_left(
    sizes: list[int], segment_bytes: int, data: st.DataObject
) -> None:
    disk = FakeDisk()
    journal = FileJournal(disk, JournalSettings(segment_bytes=segment_bytes))
    for size in sizes:
        journal.append(encoded(journal.next_offset, size), 0)
        if data.draw(st.booleans()):
            journal.write_snapshot(fold(journal.next_offset).freeze())
    last = [name for name in disk.names() if name.endswith("segment")][-1]
    disk.truncate(last, data.draw(st.integers(0, disk.size(last))))

    again = FileJournal(disk)
    pool = again.recover(BLOCKS_MAX)

    assert facts_of(pool) == facts_of(fold(pool.offset))
    assert again.next_offset == pool.offset <= sum(sizes)


def test_a_directory_has_one_writer(tmp_path: Path) -> None:
    disk = PosixDisk(tmp_path / "journal")

    with pytest.raises(DirectoryInUse, match="another process holds"):
        PosixDisk(tmp_path / "journal")
    disk.close()
    PosixDisk(tmp_path / "journal").close()


def test_the_real_disk_behaves_as_the_one_in_memory(tmp_path: Path) -> None:
    fake, real = FakeDisk(), PosixDisk(tmp_path)
    for disk in (fake, real):
        journal = write(disk, 30, segment_bytes=500)
        journal.write_snapshot(fold(30).freeze())
        journal.append(encoded(30, 2), 0)
        journal.sync()

    assert [name for name in real.names() if name != "journal.lock"] == fake.names()
    for name in fake.names():
        assert real.read(name, 0, 1 << 20) == bytes(fake.files[name])
    real.close()
    (tmp_path / "x.snapshot.tmp").write_bytes(b"half")
    assert "x.snapshot.tmp" not in PosixDisk(tmp_path).names()


def test_the_memory_journal_keeps_the_newest_within_its_bound() -> None:
    journal = MemoryJournal(bytes_max=1000)
    for offset in range(100):
        journal.append(encoded(offset, 1), 0)

    assert journal.next_offset == 100
    assert 80 < journal.oldest_offset < 100
    assert journal.read(journal.oldest_offset, 1000, 1 << 20)[-1] == encoded(99, 1)[0]
    assert journal.sizes()[1] <= 1000
    with pytest.raises(ValueError, match="the oldest kept"):
        journal.read(0, 1, 1)


class TestJournalLaws(JournalLaws):
    """On what is kept in memory."""

    @pytest.fixture(params=[InDirectory, InFakeStream], ids=["directory", "stream"])
    def kind(self, request: pytest.FixtureRequest) -> JournalKind:
        make: Callable[[], JournalKind] = request.param
        return make()


RECORDS = 100_000


class BlindDisk(FakeDisk):
    """Takes everything and keeps nothing, so that only the journal's own memory is seen."""

    def append(self, name: str, data: bytes) -> None:
        pass


def test_a_record_on_disk_costs_few_bytes_of_memory() -> None:
    journal = FileJournal(BlindDisk())
    journal.append([b"first"], 0)
    tracemalloc.start()
    try:
        for _ in range(RECORDS // 100):
            journal.append([b"payload"] * 100, 0)
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept / RECORDS < 12
