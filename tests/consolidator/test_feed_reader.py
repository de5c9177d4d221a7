"""The feed's reader as a dialogue: it meets loss, restarts and a journal that forgot."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from router.consolidator.core.feed_frames import FeedFrame, decode_feed, encode_alive, encode_record
from router.consolidator.core.feed_reader import Deliver, FeedEffect, FeedReader, FeedState, Snapshot
from tests.consolidator.journal_builder import encoded
from wire.feed import Records, Replay, SnapshotPart, TakeSnapshot, TooOld


def live(offset: int, life: bytes = b"x") -> FeedFrame:
    return decode_feed(encode_record(offset, encoded(offset, 1)[0], life))


def alive(next_offset: int, life: bytes = b"x") -> FeedFrame:
    return decode_feed(encode_alive(next_offset, life))


def snapshot(request: int, offset: int) -> SnapshotPart:
    return SnapshotPart(request, offset, 0, True, [], [])


def offsets(effects: list[FeedEffect]) -> list[int]:
    return [record.offset for effect in effects if isinstance(effect, Deliver) for record in effect.records]


def synced(offset: int = 0) -> FeedReader:
    reader = FeedReader()
    reader.start(0)
    reader.answer(snapshot(1, offset), b"x", 0)
    return reader


def test_records_that_arrive_before_the_snapshot_follow_it_without_those_it_contains() -> None:
    reader = FeedReader()
    assert reader.start(0) == [TakeSnapshot(1)]
    for offset in (3, 4, 5):
        assert reader.receive(live(offset), 0) == []

    effects = reader.answer(snapshot(1, 4), b"x", 0)

    assert effects[0] == Snapshot(4, [], [])
    assert offsets(effects) == [4, 5]
    assert reader.state is FeedState.LIVE


def test_a_hole_is_replayed_and_what_came_meanwhile_follows() -> None:
    reader = synced()
    reader.receive(live(0), 0)

    assert reader.receive(live(3), 0) == [Replay(2, 1, 4096)]
    assert reader.receive(live(4), 0) == []
    effects = reader.answer(Records(2, encoded(1, 2), 4), b"x", 0)
    assert offsets(effects) == [1, 2]
    assert reader.due_ms() is not None  # the journal said it has one more
    effects = reader.answer(Records(3, encoded(3, 1), 4), b"x", 0)
    assert offsets(effects) == [3, 4]
    assert reader.state is FeedState.LIVE


def test_a_loss_at_the_end_is_noticed_by_the_keepalive() -> None:
    reader = synced(5)

    assert reader.receive(alive(5), 0) == []
    assert reader.receive(alive(6), 0) == [Replay(2, 5, 4096)]


def test_too_old_means_a_snapshot() -> None:
    reader = synced()
    reader.receive(live(9), 0)

    assert reader.answer(TooOld(2, 7), b"x", 0) == [TakeSnapshot(3)]


def test_another_life_of_the_consolidator_means_a_snapshot_and_old_answers_are_ignored() -> None:
    reader = synced(5)

    assert reader.receive(live(3, b"y"), 0) == [TakeSnapshot(2)]
    assert reader.answer(snapshot(1, 99), b"y", 0) == []
    effects = reader.answer(snapshot(2, 2), b"y", 0)
    assert effects[0] == Snapshot(2, [], [])
    assert reader.next_offset == 2


def test_silence_is_asked_again() -> None:
    reader = FeedReader(answer_timeout_ms=100)
    reader.start(0)

    assert reader.tick(99) == []
    assert reader.tick(100) == [TakeSnapshot(2)]
    assert reader.due_ms() == 200


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_whatever_is_lost_doubled_or_late_every_record_is_delivered_once_in_order(data: st.DataObject) -> None:
    total = data.draw(st.integers(1, 25))
    oldest = data.draw(st.integers(0, total // 2))
    reader = FeedReader(answer_timeout_ms=10)
    delivered: list[int] = []
    asked: list[Replay | TakeSnapshot] = []
    now_ms = 0.0

    def take(effects: list[FeedEffect]) -> None:
        for effect in effects:
            if isinstance(effect, Snapshot):
                delivered[:] = range(effect.offset)
            elif isinstance(effect, Deliver):
                delivered.extend(record.offset for record in effect.records)
            else:
                asked.append(effect)

    def reply(published: int) -> None:
        question = asked.pop()
        if isinstance(question, TakeSnapshot):
            take(reader.answer(snapshot(question.request, published), b"x", now_ms))
        elif question.from_offset < oldest:
            take(reader.answer(TooOld(question.request, oldest), b"x", now_ms))
        else:
            count = min(3, published - question.from_offset)
            take(
                reader.answer(Records(question.request, encoded(question.from_offset, count), published), b"x", now_ms)
            )

    take(reader.start(now_ms))
    for offset in range(total):
        fate = data.draw(st.sampled_from(["arrives", "arrives", "lost", "twice"]))
        for _ in range({"arrives": 1, "lost": 0, "twice": 2}[fate]):
            take(reader.receive(live(offset), now_ms))
        answered: bool = data.draw(st.booleans())
        if asked and answered:
            reply(offset + 1)
        assert delivered == list(range(len(delivered)))
    take(reader.receive(alive(total), now_ms))
    for _ in range(100):
        now_ms += 10
        take(reader.tick(now_ms))
        while asked:
            reply(total)

    assert delivered == list(range(total))
    assert reader.state is FeedState.LIVE
