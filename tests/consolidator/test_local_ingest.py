"""Events of a worker in the consolidator's own process: no socket, the same acknowledgements, the same bounds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import zmq.asyncio
from prometheus_client import CollectorRegistry

from poolgrid.kernel.wire import codec
from poolgrid.kernel.wire.events import AnyEvent, RequestFinished
from poolgrid.kernel.wire.ingest import BATCH_FRAME, CONTROL_FRAME, Acknowledged, FromConsolidator, Hello, Welcome
from poolgrid.kernel.worker_protocol.push_stream import PushStream
from poolgrid.server.consolidator import ingest_plane
from poolgrid.server.consolidator.bootstrap import create
from poolgrid.server.consolidator.service import ConsolidatorService
from poolgrid.server.consolidator.settings import ConsolidatorSettings
from poolgrid.server.process.clock import SystemClock
from poolgrid.server.workers.metrics import WorkerMetrics
from poolgrid.server.workers.publisher import EventPublisher
from tests.clock import HandClock
from tests.consolidator.pusher import batch
from tests.router.fleet_builder import make_card, stored

PATIENCE_S = 60.0

HELLO = [CONTROL_FRAME, codec.to_consolidator.encode(Hello("w", 0, 1, make_card(), 0, 0))]


def end(seq: int) -> list[bytes]:
    ended: list[AnyEvent] = [RequestFinished(f"r{seq}", "stop")]
    return [BATCH_FRAME, codec.event_batch.encode(batch(ended, seq))]


@asynccontextmanager
async def started() -> AsyncIterator[ConsolidatorService]:
    service = create(ConsolidatorSettings(lease_ms=60_000), CollectorRegistry(), HandClock())
    await service.start()
    try:
        yield service
    finally:
        await service.stop()


class Replies:
    """What came back."""

    def __init__(self) -> None:
        self.messages: list[FromConsolidator] = []

    def take(self, frames: list[bytes]) -> None:
        (frame,) = frames
        self.messages.append(codec.from_consolidator.decode(frame))

    async def until(self, count: int) -> None:
        """Wait for so many."""
        async with asyncio.timeout(PATIENCE_S):
            while len(self.messages) < count:  # noqa: ASYNC110 - what is under test tells a list
                await asyncio.sleep(0)


async def test_a_publisher_beside_a_consolidator_joins_and_has_its_batches_acknowledged_without_a_socket() -> None:
    clock = SystemClock()
    async with started() as service:
        stream = PushStream("w", 0, 5, make_card())
        metrics = WorkerMetrics(CollectorRegistry())
        publisher = EventPublisher(
            lambda endpoint, on_frames: service.open_local(on_frames),
            "here",
            stream,
            lambda: ([], []),
            clock,
            metrics,
            100,
        )
        publisher.start()
        async with asyncio.timeout(PATIENCE_S):
            await publisher.until_registered()
            publisher.publish([stored(list(range(10)))])
            assert await publisher.say_goodbye("drained", PATIENCE_S)
        publisher.close(orderly=True)
        assert service.core.tally.batches >= 1
        assert not service.core.pool.workers, "it has left"


async def test_what_is_sent_in_a_turn_is_taken_in_together_in_order_and_answered_in_a_later_turn() -> None:
    async with started() as service:
        replies = Replies()
        link = service.open_local(replies.take)
        for frames in (HELLO, end(0), end(1), end(2)):
            assert link.send(frames)
        assert (service.offset, replies.messages) == (0, []), "nothing happens within the sender's turn"
        await replies.until(2)
        assert isinstance(replies.messages[0], Welcome)
        last = replies.messages[-1]
        assert isinstance(last, Acknowledged)
        assert last.next_seq == 3
        assert (service.core.tally.batches, service.core.tally.gaps) == (3, 0)


async def test_beyond_the_bound_a_sender_is_told_and_what_waits_through_a_pause_is_taken_in_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ingest_plane, "INGEST_QUEUE_MAX", 3)
    async with started() as service:
        replies = Replies()
        link = service.open_local(replies.take)
        service._ingest.pause()
        assert [link.send(frames) for frames in (HELLO, end(0), end(1), end(2))] == [True, True, True, False]
        for _ in range(5):
            await asyncio.sleep(0)
        assert service.offset == 0
        service._ingest.resume()
        await replies.until(2)
        assert service.core.tally.batches == 2
        assert link.send(end(2))
        await replies.until(3)
        assert service.core.tally.batches == 3


async def test_many_messages_are_taken_in_over_several_turns_none_lost() -> None:
    async with started() as service:
        replies = Replies()
        link = service.open_local(replies.take)
        assert all(link.send(frames) for frames in (HELLO, *map(end, range(500))))
        async with asyncio.timeout(PATIENCE_S):
            while service.core.tally.batches < 500:  # noqa: ASYNC110 - what is under test tells a count
                await asyncio.sleep(0)
        assert (service.core.tally.duplicates, service.core.tally.gaps) == (0, 0)


async def test_a_link_that_is_closed_gets_nothing_and_sends_nothing_any_more() -> None:
    async with started() as service:
        replies = Replies()
        link = service.open_local(replies.take)
        assert link.send(HELLO)
        link.close(orderly=True)
        assert not link.send(end(0))
        for _ in range(20):
            await asyncio.sleep(0)
        assert replies.messages == []
        assert [key.worker_id for key in service.core.pool.workers] == ["w"], "what was sent before counts"


async def test_what_cannot_be_decoded_costs_that_message_alone() -> None:
    async with started() as service:
        replies = Replies()
        link = service.open_local(replies.take)
        for frames in (HELLO, [BATCH_FRAME, b"nonsense"], [b"X", b""], [BATCH_FRAME], end(0)):
            assert link.send(frames)
        await replies.until(2)
        assert service.core.tally.batches == 1
        assert service.measure()[0]["undecodable_frames"] == 3


async def test_local_messages_keep_no_worker_behind_the_socket_waiting() -> None:
    async with started() as service:
        link = service.open_local(lambda frames: None)
        context = zmq.asyncio.Context()
        remote = context.socket(zmq.DEALER)
        remote.connect(service.ingest_endpoint)
        try:
            await remote.send_multipart([HELLO[0], codec.to_consolidator.encode(Hello("far", 0, 1, make_card(), 0, 0))])
            assert link.send(HELLO)
            seq = 0
            async with asyncio.timeout(PATIENCE_S):
                while len(service.core.pool.workers) < 2:
                    assert link.send(end(seq)), "it waits"
                    seq += 1
                    if seq % 8 == 0:
                        await asyncio.sleep(0)
            assert isinstance(codec.from_consolidator.decode((await remote.recv_multipart())[-1]), Welcome)
        finally:
            context.destroy(linger=0)
