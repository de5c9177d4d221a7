"""The reader of a stream as a dialogue: it meets loss, other writers, ends that are lost, and streams that forgot."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poolgrid.consolidator.core.feed_reader import Deliver, FeedState
from poolgrid.nats.journal import StreamJournal
from poolgrid.nats.message import StoredMessage, empty_body
from poolgrid.nats.reader import LoadSnapshot, ReadFrom, StreamEffect, StreamReader
from poolgrid.wire.events import JournalRecord
from tests.consolidator.fake_stream import FakeStream, StillClock
from tests.consolidator.journal_builder import record
from tests.consolidator.journal_laws import fill, snapshot
from tests.examples import examples


class Dialogue:
    """A reader and the stream that it asks; ``records`` is what it delivered behind its last snapshot."""

    def __init__(self, stream: FakeStream | None = None) -> None:
        self.stream = stream or FakeStream()
        self.reader = StreamReader()
        self.now_ms = 0.0
        self.base = 0
        self.records: list[JournalRecord] = []
        self.questions: list[LoadSnapshot | ReadFrom] = []
        self.heard_up_to = self.stream.last

    def start(self) -> Dialogue:
        self.note(self.reader.start(self.now_ms))
        return self.settle()

    def note(self, effects: list[StreamEffect]) -> None:
        for effect in effects:
            if isinstance(effect, Deliver):
                self.records += effect.records
            else:
                self.questions.append(effect)
        expected = range(self.base, self.base + len(self.records))
        assert [each.offset for each in self.records] == list(expected)

    def answer(self) -> None:
        """Answer the oldest question as the stream is now."""
        question = self.questions.pop(0)
        stream, now_ms = self.stream, self.now_ms
        if isinstance(question, LoadSnapshot):
            anchors = [
                anchor
                for anchor in stream.snapshots()
                if anchor.sequence in stream.messages
                and stream.messages[anchor.sequence].message_id == anchor.message_id
            ]
            anchor = anchors[-1] if anchors else None
            effects = self.reader.loaded(question.request, anchor, stream.first, now_ms)
            if effects:
                self.base, self.records = (0 if anchor is None else anchor.offset), []
            self.note(effects)
        else:
            messages = stream.read(question.sequence, 256)
            facts = None if any(each.sequence >= question.wanted for each in messages) else stream.facts()
            self.note(self.reader.answer(question.request, messages, facts, now_ms))

    def settle(self) -> Dialogue:
        while self.questions:
            self.answer()
        return self

    def hear(self, *lost: int) -> None:
        """Tell of what was stored since the last time, but for some sequences."""
        for sequence in range(self.heard_up_to + 1, self.stream.last + 1):
            if sequence not in lost:
                self.note(self.reader.receive(self.stream.messages[sequence], self.now_ms))
        self.heard_up_to = self.stream.last

    def pass_time(self, ms: float) -> None:
        self.now_ms += ms
        self.note(self.reader.tick(self.now_ms))


def followed(count: int) -> tuple[Dialogue, StreamJournal]:
    dialogue = Dialogue()
    journal = fill(StreamJournal(dialogue.stream, "w", StillClock()), count)
    return dialogue.start(), journal


def test_an_end_that_was_lost_means_a_snapshot() -> None:
    dialogue, _ = followed(9)
    dialogue.stream.lose_end(2)
    dialogue.pass_time(1000)
    dialogue.settle()
    assert dialogue.reader.state is FeedState.SYNCING
    assert "ends at message 2" in dialogue.reader.fault

    dialogue.pass_time(250)
    dialogue.settle()

    assert (dialogue.reader.snapshots, dialogue.reader.next_offset) == (2, 3)


def test_an_end_that_was_lost_and_has_grown_again_is_noticed_by_its_names() -> None:
    dialogue, _ = followed(9)
    dialogue.stream.lose_end(2)
    fill(StreamJournal(dialogue.stream, "other", StillClock()), 30, at_once=1)

    dialogue.hear()
    dialogue.settle()
    dialogue.pass_time(250)
    dialogue.settle()

    assert dialogue.reader.breaks == 1
    assert (dialogue.reader.snapshots, dialogue.reader.next_offset) == (2, 30)


def test_an_end_that_was_lost_and_is_as_long_again_is_noticed_while_nothing_happens() -> None:
    dialogue, _ = followed(9)
    last = dialogue.stream.last
    dialogue.stream.lose_end(2)
    other = StreamJournal(dialogue.stream, "other", StillClock())
    while dialogue.stream.last < last:
        fill(other, other.next_offset + 1)

    for _ in range(2):
        dialogue.pass_time(1000)
        dialogue.settle()

    assert dialogue.reader.next_offset == other.next_offset < 9


@pytest.mark.parametrize("ahead", [-3, 0, 1, 2, 10**17])
@pytest.mark.parametrize("follows", [False, True], ids=["after nothing", "after the last message"])
def test_a_forged_message_that_was_told_costs_a_snapshot_at_most(ahead: int, follows: bool) -> None:
    dialogue, journal = followed(9)
    last = dialogue.stream.messages[dialogue.stream.last]
    after = last.message_id if follows else "forged.1"
    body = empty_body(9, 0)
    forged = StoredMessage(dialogue.stream.last + 1 + ahead, "forged.2", after, 0, False, body)

    for _ in range(3):
        dialogue.note(dialogue.reader.receive(forged, 0))
        dialogue.settle()
        fill(journal, journal.next_offset + 2)
        dialogue.hear()
        for _ in range(3):
            dialogue.pass_time(5000)
            dialogue.settle()

    assert dialogue.reader.next_offset == journal.next_offset == 15
    assert dialogue.records == [record(offset) for offset in range(dialogue.base, 15)]
    assert (dialogue.reader.state, dialogue.reader.behind) == (FeedState.LIVE, 0)


def test_an_end_that_was_lost_with_the_message_of_a_snapshot_is_noticed_though_nothing_more_comes() -> None:
    dialogue = Dialogue()
    journal = fill(StreamJournal(dialogue.stream, "w", StillClock()), 3, at_once=1)
    snapshot(journal, 3)
    dialogue.note(dialogue.reader.start(0))
    dialogue.answer()
    assert dialogue.reader.next_offset == 3, "the snapshot is loaded, and no message read"
    anchored_to = dialogue.reader.next_sequence
    dialogue.stream.lose_end(1)
    other = StreamJournal(dialogue.stream, "other", StillClock())
    other.recover(1000)
    fill(other, 1)
    assert dialogue.stream.last == anchored_to - 1

    for _ in range(2):
        dialogue.pass_time(6000)
        dialogue.settle()

    assert (dialogue.reader.state, dialogue.reader.next_offset) == (FeedState.LIVE, 1)


def test_a_stream_that_does_not_reach_back_means_a_snapshot() -> None:
    dialogue, journal = followed(3)
    fill(journal, 30)
    snapshot(journal, 28)
    dialogue.stream.remove_before(dialogue.stream.last)

    dialogue.pass_time(1000)
    dialogue.settle()

    assert (dialogue.base, dialogue.reader.next_offset) == (28, 30)


def test_a_replica_that_is_behind_is_asked_again() -> None:
    dialogue, journal = followed(3)
    fill(journal, 6)
    dialogue.pass_time(1000)
    question = dialogue.questions.pop()
    assert isinstance(question, ReadFrom)

    dialogue.note(dialogue.reader.answer(question.request, [], dialogue.stream.facts(), dialogue.now_ms))
    assert (dialogue.reader.state, dialogue.reader.behind) == (FeedState.REPLAYING, 1)
    dialogue.pass_time(50)
    dialogue.settle()

    assert (dialogue.reader.next_offset, dialogue.reader.state) == (6, FeedState.LIVE)


def test_a_question_without_an_answer_is_asked_again_and_its_late_answer_is_ignored() -> None:
    dialogue, journal = followed(3)
    fill(journal, 6)
    dialogue.pass_time(1000)
    late = dialogue.questions.pop()
    assert isinstance(late, ReadFrom)

    dialogue.pass_time(5000)
    dialogue.settle()
    assert dialogue.reader.answer(late.request, dialogue.stream.read(1, 9), None, dialogue.now_ms) == []

    assert dialogue.reader.next_offset == 6


@settings(max_examples=examples(26))
@given(st.data())
def test_whatever_is_lost_the_records_come_in_order_and_in_the_end_all_of_them(data: st.DataObject) -> None:
    dialogue = Dialogue()
    lives = 0
    journal = StreamJournal(dialogue.stream, "life-0", StillClock())
    dialogue.note(dialogue.reader.start(0))
    for _ in range(data.draw(st.integers(1, 30))):
        what = data.draw(
            st.sampled_from(
                ["write", "write", "hear", "hear some", "answer", "time", "writer", "snapshot", "lose end", "retain"]
            )
        )
        if what == "write":
            fill(journal, journal.next_offset + data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3)))
        elif what == "hear":
            dialogue.hear()
        elif what == "hear some":
            dialogue.hear(*data.draw(st.lists(st.integers(1, 60), max_size=5)))
        elif what == "answer" and dialogue.questions:
            dialogue.answer()
        elif what == "time":
            dialogue.pass_time(data.draw(st.sampled_from([10, 300, 1000, 6000])))
        elif what == "snapshot":
            snapshot(journal, journal.next_offset)
        elif what == "retain":
            journal.retain(0)
        elif what in ("writer", "lose end"):
            if what == "lose end" and dialogue.stream.messages:
                kept = data.draw(st.integers(dialogue.stream.first, dialogue.stream.last))
                dialogue.stream.lose_end(kept)
                dialogue.heard_up_to = min(dialogue.heard_up_to, kept)
            lives += 1
            journal = StreamJournal(dialogue.stream, f"life-{lives}", StillClock())
            journal.recover(1000)

    fill(journal, journal.next_offset + 1)
    for _ in range(6):
        dialogue.pass_time(6000)
        dialogue.settle()

    assert dialogue.reader.state is FeedState.LIVE
    assert dialogue.reader.next_offset == journal.next_offset
    assert all(each == record(each.offset) for each in dialogue.records)
