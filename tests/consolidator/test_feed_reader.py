"""The feed's reader as a dialogue: it meets loss, restarts and a journal that forgot."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from poolgrid.kernel.consolidation.feed_reader import Deliver, FeedEffect, FeedReader, FeedState, Snapshot
from poolgrid.kernel.wire.feed import (
    MESSAGE_BYTES_MAX,
    FeedFrame,
    Records,
    Replay,
    SnapshotPart,
    TakeSnapshot,
    TooOld,
    decode_feed,
    encode_alive,
    encode_records,
)
from poolgrid.kernel.wire.limits import FEED_RECORDS_PER_MESSAGE_MAX
from poolgrid.kernel.wire.sessions import NO_SESSIONS
from tests.consolidator.journal_builder import encoded
from tests.examples import examples


def live(offset: int, life: bytes = b"x") -> FeedFrame:
    return together(offset, 1, life)


def together(offset: int, count: int, life: bytes = b"x") -> FeedFrame:
    [frames] = encode_records(offset, encoded(offset, count), life)
    return decode_feed(frames)


def alive(next_offset: int, life: bytes = b"x") -> FeedFrame:
    return decode_feed(encode_alive(next_offset, life))


def snapshot(request: int, offset: int) -> SnapshotPart:
    return SnapshotPart(request, offset, 0, True, [], [])


def synced(offset: int = 0) -> FeedReader:
    reader = FeedReader()
    reader.start(0)
    reader.answer(snapshot(1, offset), b"x", 0)
    return reader


def test_many_records_are_cut_into_messages_of_bounded_number_and_size() -> None:
    payloads = [bytes(100)] * 70 + [bytes(MESSAGE_BYTES_MAX + 1)] + [bytes(MESSAGE_BYTES_MAX // 2)] * 3

    frames = [decode_feed(message) for message in encode_records(9, payloads, b"x")]

    assert [frame.offset for frame in frames] == [9, 73, 79, 80, 82]
    assert [len(frame.payloads) for frame in frames] == [FEED_RECORDS_PER_MESSAGE_MAX, 6, 1, 2, 1]
    assert [payload for frame in frames for payload in frame.payloads] == payloads


def test_too_old_means_a_snapshot() -> None:
    reader = synced()
    reader.receive(live(9), 0)

    assert reader.answer(TooOld(2, 7), b"x", 0) == [TakeSnapshot(3)]


def test_another_life_of_the_consolidator_means_a_snapshot_and_old_answers_are_ignored() -> None:
    reader = synced(5)

    assert reader.receive(live(3, b"y"), 0) == [TakeSnapshot(2)]
    assert reader.answer(snapshot(1, 99), b"y", 0) == []
    effects = reader.answer(snapshot(2, 2), b"y", 0)
    assert effects[0] == Snapshot(2, [], [], NO_SESSIONS)
    assert reader.next_offset == 2


@settings(max_examples=examples(30))
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
        begin = offset - data.draw(st.integers(0, min(3, offset)), "records before it in its message")
        for _ in range({"arrives": 1, "lost": 0, "twice": 2}[fate]):
            take(reader.receive(together(begin, offset + 1 - begin), now_ms))
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
