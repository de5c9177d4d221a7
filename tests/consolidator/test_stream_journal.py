"""The journal in a stream: several writers, answers that are lost, ends that are lost, pieces."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poolgrid.kernel.journal.framing import JournalCorrupt, JournalFenced
from poolgrid.kernel.wire import codec
from poolgrid.kernel.wire.events import JournalRecord
from poolgrid.plugins.nats.journal import StreamJournal, StreamJournalSettings
from poolgrid.plugins.nats.message import StoredMessage, StreamUnavailable
from tests.clock import HandClock
from tests.consolidator.fake_stream import FakeStream
from tests.consolidator.journal_builder import encoded, facts_of, fold, record
from tests.consolidator.journal_kinds import BLOCKS_MAX
from tests.consolidator.journal_laws import fill, offsets, snapshot
from tests.router.fleet_builder import stored


def large(offset: int, blocks: int) -> bytes:
    """A record of so many blocks."""
    events = [stored(list(range(1, blocks + 1)))]
    return codec.journal_record.encode(JournalRecord(offset, "w", 0, 1, offset - 1, 1000, 2000, list(events), "worker"))


def test_a_writer_that_was_overtaken_is_fenced_with_an_error_that_says_so() -> None:
    stream = FakeStream()
    old = fill(StreamJournal(stream, "old", HandClock()), 5)
    new = StreamJournal(stream, "new", HandClock())

    with pytest.raises(JournalFenced, match=r"message 4 is of another writer, 'new\.1'"):
        old.append(encoded(5, 1), 0)
    with pytest.raises(JournalFenced):
        old.append(encoded(5, 1), 0)  # and stays so
    with pytest.raises(JournalFenced):
        old.drop_lost()
    with pytest.raises(JournalFenced):
        snapshot(old, 5)

    fill(new, 8)
    assert offsets(new, 0) == list(range(8))


def test_a_writer_that_is_idle_finds_out_too() -> None:
    stream = FakeStream()
    old = fill(StreamJournal(stream, "old", HandClock()), 5)
    assert old.drop_lost() == []
    StreamJournal(stream, "new", HandClock())

    with pytest.raises(JournalFenced, match="another writer"):
        old.drop_lost()


def test_what_an_overtaken_writer_sent_and_comes_late_is_not_stored() -> None:
    stream = FakeStream()
    old = fill(StreamJournal(stream, "old", HandClock()), 5)
    stream.answers_lost_after = 0
    with pytest.raises(StreamUnavailable):
        old.append([large(5, 30_000), large(6, 30_000)], 0)

    new = StreamJournal(stream, "new", HandClock())

    assert stream.deliver_late() == [False]
    assert facts_of(new.recover(BLOCKS_MAX)) == facts_of(fold(5))


def test_what_was_stored_before_its_answer_was_lost_counts_once() -> None:
    stream = FakeStream()
    journal = fill(StreamJournal(stream, "w", HandClock()), 5)
    stream.answers_lost_after = 1
    with pytest.raises(StreamUnavailable):
        journal.append(encoded(5, 2), 0)
    assert journal.next_offset == 5

    journal.append(encoded(5, 6), 0)

    assert journal.next_offset == 11
    assert offsets(journal, 0) == list(range(11))


def test_what_comes_late_of_the_writer_itself_counts_once() -> None:
    stream = FakeStream()
    journal = fill(StreamJournal(stream, "w", HandClock()), 5)
    stream.answers_lost_after = 0
    with pytest.raises(StreamUnavailable):
        journal.append(encoded(5, 2), 0)
    [late] = stream.late
    stream.late = []
    real = stream.append

    def overtaken(messages: list[object], last_sequence: int) -> None:
        stream.append = real  # type: ignore[method-assign]
        stream.store(*late)
        real(messages, last_sequence)  # type: ignore[arg-type]

    stream.append = overtaken  # type: ignore[method-assign, assignment]
    with pytest.raises(StreamUnavailable, match="wrong last sequence"):
        journal.append(encoded(5, 4), 0)
    journal.append(encoded(5, 4), 0)

    assert offsets(journal, 0) == list(range(9))


def test_a_stream_that_lost_its_end_has_no_writer_any_more() -> None:
    stream = FakeStream()
    journal = fill(StreamJournal(stream, "w", HandClock()), 9)
    stream.lose_end(3)

    with pytest.raises(JournalFenced, match="it ends at message 3, 4 was acknowledged: its end is lost"):
        journal.drop_lost()

    again = StreamJournal(stream, "again", HandClock())
    assert again.next_offset == 6
    assert facts_of(again.recover(BLOCKS_MAX)) == facts_of(fold(6))


def test_a_snapshot_of_a_history_that_was_lost_is_not_believed() -> None:
    stream = FakeStream()
    journal = fill(StreamJournal(stream, "w", HandClock()), 6)
    snapshot(journal, 6)
    fill(journal, 9)
    snapshot(journal, 9)
    stream.lose_end(3)

    again = StreamJournal(stream, "again", HandClock())
    pool = again.recover(BLOCKS_MAX)

    assert facts_of(pool) == facts_of(fold(6))
    assert [anchor.offset for anchor in stream.snapshots()] == [6]
    assert again.report == ["00000000000000000009.snapshot is of a history that the stream lost; it was removed"]


def test_a_stream_that_was_emptied_begins_anew() -> None:
    stream = FakeStream()
    journal = fill(StreamJournal(stream, "w", HandClock()), 9)
    snapshot(journal, 9)
    stream.remove_before(stream.last + 1)

    again = StreamJournal(stream, "again", HandClock())

    assert facts_of(again.recover(BLOCKS_MAX)) == facts_of(fold(0))
    assert not stream.objects
    fill(again, 4)
    assert offsets(again, 0) == [0, 1, 2, 3]


def test_records_larger_than_a_message_go_in_pieces() -> None:
    stream = FakeStream(body_bytes_max=80_000)
    journal = fill(StreamJournal(stream, "w", HandClock()), 2)

    journal.append([large(2, 30_000), *encoded(3, 2)], 0)

    assert [message.piece for message in stream.messages.values()] == [0, 0, 0, 1, 2, 3]
    assert journal.read(2, 2, 1 << 30) == [large(2, 30_000), *encoded(3, 1)]
    again = StreamJournal(stream, "again", HandClock())
    assert (again.next_offset, again.recover(BLOCKS_MAX).offset) == (5, 5)


@pytest.mark.parametrize("pieces", [1, 2, 3])
def test_a_record_whose_last_piece_was_never_stored_never_was(pieces: int) -> None:
    stream = FakeStream(body_bytes_max=80_000)
    journal = fill(StreamJournal(stream, "w", HandClock()), 2)
    stream.answers_lost_after = pieces
    with pytest.raises(StreamUnavailable):
        journal.append([large(2, 30_000)], 0)

    other = StreamJournal(stream, "other", HandClock())
    assert other.next_offset == other.recover(BLOCKS_MAX).offset == 2
    other.append(encoded(2, 3), 0)

    assert offsets(other, 0) == list(range(5))
    assert StreamJournal(stream, "third", HandClock()).recover(BLOCKS_MAX).offset == 5


def test_the_writer_itself_sends_a_record_again_whose_last_piece_was_not_stored() -> None:
    stream = FakeStream(body_bytes_max=80_000)
    journal = fill(StreamJournal(stream, "w", HandClock()), 2)
    stream.answers_lost_after = 2
    with pytest.raises(StreamUnavailable):
        journal.append([large(2, 30_000)], 0)

    journal.append([large(2, 30_000)], 0)

    assert journal.read(0, 9, 1 << 30) == [*encoded(0, 2), large(2, 30_000)]
    assert StreamJournal(stream, "again", HandClock()).recover(BLOCKS_MAX).offset == 3


def test_nothing_is_removed_behind_a_snapshot_that_servers_without_power_may_lose() -> None:
    stream = FakeStream()
    clock = HandClock()
    settings = StreamJournalSettings(1, 10**9, durable_after_ms=1000)
    journal = fill(StreamJournal(stream, "w", clock, settings), 30, at_once=1)
    snapshot(journal, 10)
    snapshot(journal, 20)
    clock.now_ms = 999
    assert journal.retain(0) == 0

    clock.now_ms = 1500
    for offset in (22, 24, 26, 28):
        snapshot(journal, offset)
    assert [anchor.offset for anchor in stream.snapshots()] == [20, 22, 28]  # durable, about to be, newest
    assert journal.retain(0) > 0

    # What is not durable is lost: the messages of both new snapshots among it.
    stream.lose_end(22)
    again = StreamJournal(stream, "again", clock, settings)
    assert facts_of(again.recover(BLOCKS_MAX)) == facts_of(fold(again.next_offset))
    assert again.next_offset == 21


@pytest.mark.parametrize("beside", [0, 1])
@pytest.mark.parametrize("damaged", [False, True])
def test_nothing_relies_on_a_snapshot_that_servers_lost_before_it_was_durable(
    damaged: bool, beside: int, caplog: pytest.LogCaptureFixture
) -> None:
    stream = FakeStream()
    clock = HandClock()
    journal = fill(StreamJournal(stream, "w", clock, StreamJournalSettings(1, 10**9, durable_after_ms=1000)), 30)
    snapshot(journal, 10)
    if beside:
        snapshot(journal, 20)
    # The power fails, the writer lives on and hears nothing of it.
    for anchor in list(stream.objects):
        if damaged:
            stream.objects[anchor] = stream.objects[anchor][:-5]
        else:
            del stream.objects[anchor]
    clock.now_ms = 1500

    assert journal.retain(0) == 0
    assert stream.snapshots() == []
    assert "lost before it was durable" in caplog.text
    again = StreamJournal(stream, "again", clock, StreamJournalSettings(1, 10**9, durable_after_ms=1000))
    assert facts_of(again.recover(BLOCKS_MAX)) == facts_of(fold(again.next_offset))


def test_a_snapshot_that_was_lost_takes_no_older_one_along() -> None:
    stream = FakeStream()
    clock = HandClock()
    journal = fill(StreamJournal(stream, "w", clock, StreamJournalSettings(1, 10**9, durable_after_ms=1000)), 30)
    snapshot(journal, 10)
    clock.now_ms = 1500
    snapshot(journal, 20)
    stream.objects = {anchor: content for anchor, content in stream.objects.items() if anchor.offset == 10}
    clock.now_ms = 3000
    snapshot(journal, 26)

    assert [anchor.offset for anchor in stream.snapshots()] == [10, 26]


def test_snapshots_of_an_earlier_writer_count_as_new() -> None:
    stream = FakeStream()
    clock = HandClock()
    settings = StreamJournalSettings(1, 10**9, durable_after_ms=1000)
    journal = fill(StreamJournal(stream, "w", clock, settings), 30, at_once=1)
    snapshot(journal, 10)
    snapshot(journal, 20)
    clock.now_ms = 10_000  # of another machine: it says nothing of how old they are

    again = StreamJournal(stream, "again", clock, settings)
    again.recover(BLOCKS_MAX)

    assert again.retain(0) == 0
    clock.now_ms = 11_000
    assert again.retain(0) > 0


def test_a_writer_that_slept_keeps_no_snapshot_of_a_history_that_was_lost() -> None:
    stream = FakeStream()
    slept = fill(StreamJournal(stream, "slept", HandClock()), 9)
    stream.lose_end(2)
    other = StreamJournal(stream, "other", HandClock())
    other.append([large(offset, 3) for offset in range(3, 9)], 0)

    with pytest.raises(JournalFenced, match="another writer"):
        snapshot(slept, 9)

    assert stream.snapshots() == []


def test_a_writer_that_slept_stores_nothing_behind_as_many_messages_of_another_as_were_lost() -> None:
    stream = FakeStream()
    slept = fill(StreamJournal(stream, "slept", HandClock()), 9)
    assert stream.last == 4
    stream.lose_end(2)
    other = StreamJournal(stream, "other", HandClock())
    other.append([large(3, 3)], 0)
    assert stream.last == 4  # where the one that slept believes to be

    with pytest.raises(JournalFenced, match="another writer"):
        slept.append(encoded(9, 1), 0)
    assert StreamJournal(stream, "third", HandClock()).recover(BLOCKS_MAX).offset == 4


def test_damage_anywhere_in_a_message_is_found_and_named() -> None:
    whole = FakeStream()
    fill(StreamJournal(whole, "w", HandClock()), 9)
    body = whole.messages[3].body
    for position in range(0, len(body), 5):
        stream = FakeStream()
        stream.messages, stream.last = dict(whole.messages), whole.last
        flipped = bytearray(body)
        flipped[position] ^= 1
        old = whole.messages[3]
        stream.messages[3] = StoredMessage(3, old.message_id, 0, False, bytes(flipped))
        journal = StreamJournal(stream, "again", HandClock())

        with pytest.raises(JournalCorrupt, match="stream fake, message 3") as caught:
            journal.recover(BLOCKS_MAX)
        assert caught.value.offset == 3


def test_a_server_that_takes_small_messages_only_is_refused() -> None:
    with pytest.raises(StreamUnavailable, match="set max_payload there"):
        StreamJournal(FakeStream(body_bytes_max=1000), "w", HandClock())


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_failures_and_any_number_of_writers_store_every_record_once_and_in_order(data: st.DataObject) -> None:
    stream = FakeStream()
    lives = 0
    journal = StreamJournal(stream, "life-0", HandClock())
    done = 0
    """Offset behind what some writer was told is stored."""
    for _ in range(data.draw(st.integers(1, 25))):
        what = data.draw(
            st.sampled_from(["append", "append", "lose answers", "new writer", "late", "snapshot", "retain"])
        )
        stream.answers_lost_after = None
        if what == "new writer":
            lives += 1
            journal = StreamJournal(
                stream, f"life-{lives}", HandClock(), StreamJournalSettings(2000, 10**9, durable_after_ms=0)
            )
            pool = journal.recover(BLOCKS_MAX)
            assert done <= pool.offset
            assert facts_of(pool) == facts_of(fold(pool.offset))
            done = pool.offset
        elif what == "late":
            stream.deliver_late()
        elif what == "snapshot":
            snapshot(journal, done)
        elif what == "retain":
            journal.retain(0)
        else:
            if what == "lose answers":
                stream.answers_lost_after = data.draw(st.integers(0, 3))
            try:
                journal.append(encoded(done, data.draw(st.integers(1, 4))), 0)
            except StreamUnavailable:
                continue
            assert journal.next_offset > done
            done = journal.next_offset

    stream.answers_lost_after = None
    last = StreamJournal(stream, "last", HandClock())
    pool = last.recover(BLOCKS_MAX)
    assert done <= pool.offset
    assert facts_of(pool) == facts_of(fold(pool.offset))
    assert offsets(last, last.oldest_offset) == list(range(last.oldest_offset, pool.offset))
    assert all(
        payload == codec.journal_record.encode(record(offset))
        for offset, payload in enumerate(last.read(last.oldest_offset, 10_000, 1 << 30), last.oldest_offset)
    )


class Crowded:
    """A journal of large records in a small stream, whose snapshots are durable after a while."""

    BYTES_MAX = 40_000

    def __init__(self) -> None:
        self.stream = FakeStream()
        self.clock = HandClock()
        self.journal = self.open("w")
        self.offset = 0

    def open(self, writer: str) -> StreamJournal:
        sizes = StreamJournalSettings(self.BYTES_MAX // 4, 10**9, self.BYTES_MAX, durable_after_ms=1000)
        journal = StreamJournal(self.stream, writer, self.clock, sizes)
        journal.recover(BLOCKS_MAX)
        return journal

    def fill(self) -> None:
        """Append until nothing more is taken."""
        with pytest.raises(StreamUnavailable, match="may hold 40000"):
            self._append_for_ever()
        self.offset = self.journal.next_offset
        assert self.stream.facts().bytes <= self.BYTES_MAX

    def _append_for_ever(self) -> None:
        while True:
            self.journal.append(encoded(self.offset, 20), 0)
            self.offset = self.journal.next_offset

    def make_room(self) -> int:
        return self.journal.make_room(BLOCKS_MAX, 0)


def test_a_stream_that_is_full_is_made_smaller_by_a_snapshot_of_what_is_stored() -> None:
    scene = Crowded()
    scene.fill()
    assert scene.journal.crowded
    assert scene.journal.snapshot_due

    assert scene.make_room() == 0  # the snapshot is not durable yet
    assert [anchor.offset for anchor in scene.stream.snapshots()] == [scene.journal.next_offset]
    assert not scene.journal.snapshot_due
    scene.clock.now_ms = 1000

    assert scene.make_room() > 0
    scene.journal.append(encoded(scene.offset, 20), 0)
    last = scene.open("last")
    assert facts_of(last.recover(BLOCKS_MAX)) == facts_of(fold(last.next_offset))


def test_a_full_stream_goes_on_however_often_it_fills_up_and_whoever_writes_it() -> None:
    scene = Crowded()
    for life in range(6):
        scene.fill()
        if life % 2:
            scene.journal = scene.open(f"life-{life}")
        while not scene.make_room():
            scene.clock.now_ms += 500
            assert scene.clock.now_ms < 10_000, "it is stalled for good"
        scene.journal.append(encoded(scene.offset, 1), 0)
        scene.offset = scene.journal.next_offset
        pool = scene.open(f"look-{life}").recover(BLOCKS_MAX)
        scene.journal = scene.open(f"then-{life}")

        assert facts_of(pool) == facts_of(fold(scene.offset))


def test_a_damaged_snapshot_is_not_left_alone_with_a_full_stream() -> None:
    scene = Crowded()
    scene.journal.append(encoded(0, 1), 0)
    scene.offset = 1
    snapshot(scene.journal, 1)
    scene.fill()
    scene.make_room()
    first, newest = scene.stream.snapshots()
    scene.stream.objects[newest] = b"x" * 100
    scene.clock.now_ms = 1000
    assert scene.make_room() == 1, "the writer's first message, which is behind the first snapshot"

    with pytest.raises(JournalCorrupt):
        scene.make_room()

    assert scene.stream.snapshots() == [first]
    assert scene.make_room() == 0
    scene.clock.now_ms = 2000
    assert scene.make_room() > 0


def test_what_fits_is_stored_and_the_rest_comes_again() -> None:
    scene = Crowded()
    records = [*encoded(0, 2), *(large(offset, 40_000) for offset in range(2, 9))]

    with pytest.raises(StreamUnavailable, match="appending 9 records"):
        scene.journal.append(records, 0)

    assert 0 < scene.stream.facts().bytes <= scene.BYTES_MAX
    assert scene.journal.next_offset == 0, "nothing is answered for"
    last = scene.stream.last
    with pytest.raises(StreamUnavailable):
        scene.journal.append(records, 0)
    assert scene.stream.last == last, "it is not stored again"
    assert scene.open("next").next_offset == 2
