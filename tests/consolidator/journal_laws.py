"""What every journal that outlives its process keeps to, whatever it is kept on."""

from __future__ import annotations

from typing import TypeVar

import pytest

from poolgrid.kernel.journal.ports import Journal
from poolgrid.kernel.wire import codec
from tests.consolidator.journal_builder import encoded, facts_of, fold
from tests.consolidator.journal_kinds import BLOCKS_MAX, JournalKind

J = TypeVar("J", bound=Journal)


def fill(journal: J, count: int, at_once: int = 3) -> J:
    """Append the records below ``count`` that are not there yet; each is a second later than the one before."""
    while journal.next_offset < count:
        first = journal.next_offset
        journal.append(encoded(first, min(at_once, count - first)), now_ms=1000 * first)
    return journal


def snapshot(journal: Journal, offset: int) -> None:
    journal.keep_snapshot(offset, list(journal.snapshot_parts(fold(offset).freeze())))


def offsets(journal: Journal, first: int) -> list[int]:
    return [codec.journal_record.decode(payload).offset for payload in journal.read(first, 10_000, 1 << 30)]


class JournalLaws:
    """A class of tests; who inherits it gives the fixture ``kind``."""

    def test_what_was_appended_is_read_back_in_any_slices(self, kind: JournalKind) -> None:
        journal = fill(kind.open(), 30)

        for first in (0, 1, 7, 29):
            for limit in (1, 7, 100):
                assert journal.read(first, limit, 1 << 20) == encoded(first, min(limit, 30 - first))
        assert journal.read(30, 10, 1 << 20) == []
        assert len(journal.read(0, 100, 400)) < 10
        assert len(journal.read(0, 100, 1)) == 1  # one too large for the bound still goes

    def test_a_journal_opened_again_goes_on_without_a_hole(self, kind: JournalKind) -> None:
        fill(kind.open(), 10).close()

        journal = fill(kind.open(), 20, at_once=1)

        assert offsets(journal, 0) == list(range(20))
        assert facts_of(journal.recover(BLOCKS_MAX)) == facts_of(fold(20))

    def test_an_empty_journal_is_an_empty_pool(self, kind: JournalKind) -> None:
        journal = kind.open()

        assert (journal.oldest_offset, journal.next_offset) == (0, 0)
        assert facts_of(journal.recover(BLOCKS_MAX)) == facts_of(fold(0))

    def test_a_snapshot_and_the_records_after_it_are_the_whole_state(self, kind: JournalKind) -> None:
        journal = fill(kind.open(), 20)
        snapshot(journal, 14)  # between records that were stored together
        fill(journal, 31)
        journal.close()

        assert facts_of(kind.open().recover(BLOCKS_MAX)) == facts_of(fold(31))

    def test_a_damaged_snapshot_gives_way_to_the_one_before_it(self, kind: JournalKind) -> None:
        journal = fill(kind.open(), 20)
        snapshot(journal, 12)
        snapshot(journal, 20)
        journal.close()
        kind.spoil_newest_snapshot()

        journal = kind.open()

        assert facts_of(journal.recover(BLOCKS_MAX)) == facts_of(fold(20))
        assert "going back to the snapshot before it" in journal.report[0]

    def test_retention_removes_only_what_no_kept_snapshot_needs(self, kind: JournalKind) -> None:
        journal = fill(kind.open(retention_bytes=1), 30, at_once=1)
        assert journal.retain(10**6) == 0  # no snapshot, nothing may go
        for offset in (10, 20, 30):
            snapshot(journal, offset)

        assert journal.retain(10**6) > 1

        assert 0 < journal.oldest_offset <= 20
        assert offsets(journal, journal.oldest_offset) == list(range(journal.oldest_offset, 30))
        with pytest.raises(ValueError, match="the oldest kept is"):
            journal.read(0, 1, 1000)
        fill(journal, 33)
        journal.close()
        journal = kind.open()
        assert facts_of(journal.recover(BLOCKS_MAX)) == facts_of(fold(33))
        assert journal.oldest_offset <= 20

    def test_a_journal_that_is_much_too_large_wants_a_snapshot_until_there_is_one(self, kind: JournalKind) -> None:
        journal = kind.open(retention_bytes=2000)
        assert not journal.crowded
        fill(journal, 60)
        journal = kind.open(retention_bytes=2000)  # also of another life
        journal.recover(BLOCKS_MAX)
        assert journal.crowded
        assert journal.snapshot_due

        snapshot(journal, 59)
        assert not journal.snapshot_due
        snapshot(journal, 60)
        journal.retain(10**6)

        assert journal.oldest_offset > 0
        assert not kind.open(retention_bytes=2000).crowded

    def test_retention_by_age(self, kind: JournalKind) -> None:
        journal = fill(kind.open(retention_ms=10_000), 30, at_once=1)
        snapshot(journal, 30)

        journal.retain(30_000)

        assert 0 < journal.oldest_offset <= 20

    def test_what_could_not_be_appended_is_appended_once_with_more_behind_it(self, kind: JournalKind) -> None:
        journal = fill(kind.open(), 5)
        kind.refuse(True)
        for _ in range(2):
            with pytest.raises(OSError):  # noqa: PT011 - whatever it is kept on says it in its own words
                journal.append(encoded(5, 2), 0)
        kind.refuse(False)
        assert journal.next_offset == 5

        journal.append(encoded(5, 4), 0)

        assert offsets(journal, 0) == list(range(9))
        assert facts_of(kind.open().recover(BLOCKS_MAX)) == facts_of(fold(9))
