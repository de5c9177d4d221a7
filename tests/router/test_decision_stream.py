"""A decision journal in a stream: what is read of it, answers that are lost, several lives, heads that are removed."""

from __future__ import annotations

import asyncio

import pytest

from poolgrid.consolidator.journal.stored_records import stored_payloads
from poolgrid.consolidator.stream.ports import StreamUnavailable
from poolgrid.router.decision_journal.entries import DECISIONS, Checkpoint, DecisionMade, RequestEnded, encoder
from poolgrid.router.decision_journal.reader import decisions_about, stored_entries
from poolgrid.router.decision_journal.stream_segments import DecisionsInStream, StreamSegments
from tests.consolidator.fake_stream import FakeStream
from tests.router.recorded_router import NAMES, RecordedRouter, written
from tests.router.test_decision_journal import recorded


def entry(number: int) -> bytes:
    return encoder.encode(RequestEnded(f"r{number}", number, 1000 + number))


def segments(stream: FakeStream, life: str = "a") -> StreamSegments:
    made = StreamSegments(stream, life)
    made.mend()
    return made


def numbers(stream: FakeStream) -> list[tuple[str, int]]:
    """Return the segment and the number of each entry."""
    found = [(each.file[18:20], each.number) for each in stored_payloads(DecisionsInStream(stream), DECISIONS)]
    for each in stored_payloads(DecisionsInStream(stream), DECISIONS):
        assert each.payload == entry(each.number)
    return found


def test_what_was_appended_is_read_as_segments_of_a_directory() -> None:
    stream = FakeStream()
    made = segments(stream)
    made.begin([entry(0), entry(1)], 10)
    made.append([entry(2)])
    made.begin([entry(3)], 20)
    made.append([entry(4), entry(5)])

    assert numbers(stream) == [("00", 0), ("00", 1), ("00", 2), ("03", 3), ("03", 4), ("03", 5)]
    assert made.sizes() == (2, stream.facts().bytes)
    with pytest.raises(OSError, match="opened for reading"):
        DecisionsInStream(stream).append("x", b"")


def test_an_append_that_does_not_fit_a_message_is_read_whole_or_not_at_all() -> None:
    stream = FakeStream(body_bytes_max=100)
    made = segments(stream)
    made.begin([entry(0)], 10)
    made.append([entry(number) for number in range(1, 20)])
    assert len(stream.messages) > 5
    stream.answers_lost_after = 2
    with pytest.raises(StreamUnavailable):
        made.append([entry(number) for number in range(20, 40)])

    assert [number for _, number in numbers(stream)] == list(range(20))
    again = segments(stream, "b")
    again.begin([entry(again._next)], 30)
    assert [number for _, number in numbers(stream)][:20] == list(range(20))


@pytest.mark.parametrize("stored", [0, 1])
def test_what_was_not_answered_is_cut_whether_it_was_stored_or_not(stored: int) -> None:
    stream = FakeStream()
    made = segments(stream)
    made.begin([entry(0)], 10)
    stream.answers_lost_after = stored
    with pytest.raises(StreamUnavailable):
        made.append([entry(1)])

    made.mend()
    stream.deliver_late()
    made.begin([entry(1)], 20)
    made.append([entry(2)])

    assert numbers(stream) == [("00", 0), ("01", 1), ("01", 2)]


def test_a_segment_whose_beginning_was_not_answered_is_begun_once() -> None:
    stream = FakeStream()
    made = segments(stream)
    made.begin([entry(0)], 10)
    stream.answers_lost_after = 1
    with pytest.raises(StreamUnavailable):
        made.begin([entry(1), entry(2)], 20)
    made.mend()
    made.begin([entry(1)], 30)

    assert numbers(stream) == [("00", 0), ("01", 1)]


def test_a_segment_whose_beginning_was_removed_is_left_out() -> None:
    stream = FakeStream()
    made = segments(stream)
    for first in (0, 3, 6):
        made.begin([entry(first)], 10)
        made.append([entry(first + 1), entry(first + 2)])
    stream.remove_before(2)

    assert [number for _, number in numbers(stream)] == [3, 4, 5, 6, 7, 8]
    stream.remove_before(stream.last + 1)
    assert numbers(stream) == []


def test_the_router_that_began_last_writes_and_the_one_before_says_why_it_does_not() -> None:
    stream = FakeStream()
    old = segments(stream, "old")
    old.begin([entry(0)], 10)
    new = segments(stream, "new")
    new.begin([entry(1)], 20)

    with pytest.raises(StreamUnavailable):
        old.append([entry(1)])
    for _ in range(2):
        with pytest.raises(StreamUnavailable, match="give each router a router_id of its own"):
            old.mend()
    new.append([entry(2)])

    assert numbers(stream) == [("00", 0), ("01", 1), ("01", 2)]


def test_a_writer_whose_messages_grew_old_or_were_lost_goes_on_behind_what_is_there() -> None:
    stream = FakeStream()
    made = segments(stream)
    made.begin([entry(0)], 10)
    stream.remove_before(stream.last + 1)  # as servers do with what is too old
    with pytest.raises(StreamUnavailable):
        made.append([entry(1)])
    made.mend()
    made.begin([entry(1)], 20)
    made.append([entry(2)])
    assert [number for _, number in numbers(stream)] == [1, 2]

    stream.lose_end(stream.last - 1)
    with pytest.raises(StreamUnavailable):
        made.append([entry(3)])
    made.mend()
    made.begin([entry(made._next)], 20)
    assert [number for _, number in numbers(stream)] == [1, 2]


def test_every_decision_in_a_stream_is_derived_again_and_explained() -> None:
    router = recorded(seed=12, steps=300, segment_bytes=30_000, stream=FakeStream())

    outcome = router.replay()

    assert outcome.difference is None
    assert (outcome.identical, outcome.not_derivable, outcome.lost_decisions) == (router.made, 0, 0)
    assert len(router.decisions.names()) > 1
    (found,) = decisions_about(router.decisions, "request-7")
    assert {row.worker for row in found.decision.explanation().rows} <= set(NAMES)


def test_servers_that_are_away_stop_the_record_and_not_the_router_and_the_record_goes_on_from_a_checkpoint() -> None:
    stream = FakeStream()

    async def run() -> RecordedRouter:
        router = RecordedRouter(seed=10, stream=stream)
        for name in NAMES:
            router.join(name)
        for number in range(600):
            router.step()
            if number == 200:
                await written(router)
                stream.down = True
            if number in (250, 300):
                await written(router, lambda: bool(router.recorder.failing))
            if number == 400:
                stream.down = False
                await written(router, lambda: not router.recorder.failing)
        await router.recorder.stop()
        return router

    router = asyncio.run(run())
    outcome = router.replay()

    assert outcome.difference is None
    assert 0 < outcome.lost_decisions < router.made
    assert outcome.identical + outcome.not_derivable + outcome.lost_decisions == router.made
    assert sum(isinstance(each.entry, Checkpoint) for each in stored_entries(router.decisions)) == 2
    assert sum(isinstance(each.entry, DecisionMade) for each in stored_entries(router.decisions)) == outcome.identical
