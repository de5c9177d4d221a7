"""Subscriptions to a plane's feed, as the event loop and as libzmq keep them, against real XPUB sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvloop
import zmq
import zmq.asyncio

from poolgrid.process.turns import MESSAGES_PER_TURN
from poolgrid.transport.planes import PlaneContext
from poolgrid.transport.stream_subscriber import StreamSubscriber
from poolgrid.transport.subscriber import Subscriber
from poolgrid.transport.subscriber_choice import subscribe
from poolgrid.transport.zmq_subscriber import ZmqSubscriber
from poolgrid.transport.zmtp import GREETING, MESSAGE_FRAMES_MAX
from tests.transport.test_dealer import endpoint_of, plain_context, saying
from tests.transport.test_zmtp import ready

TIMEOUT_S = 20.0
TOPIC = b"news"
HANDSHAKE = GREETING + ready(b"XPUB")


class Publisher:
    """An XPUB of libzmq."""

    def __init__(self, port: int | None = None) -> None:
        self.context = zmq.asyncio.Context()
        self.socket = self.context.socket(zmq.XPUB)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(f"tcp://127.0.0.1:{port or '*'}")
        self.endpoint = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.port = int(self.endpoint.rpartition(":")[2])

    async def subscribed(self) -> bytes:
        """Wait for the next who subscribes, and return the topic."""
        words = await self.socket.recv()
        assert words[:1] == b"\x01"
        return bytes(words[1:])

    def close(self) -> None:
        self.context.destroy(linger=0)


class Heard:
    """What came."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[list[bytes]] = asyncio.Queue()

    def __call__(self, messages: list[list[bytes]]) -> None:
        for message in messages:
            self.messages.put_nowait(message)


Make = Callable[[PlaneContext, str, Heard], Subscriber]
Run = Callable[[Awaitable[Any]], Any]


def by_loop(context: PlaneContext, endpoint: str, heard: Heard) -> Subscriber:
    made = subscribe(context, endpoint, TOPIC, heard)
    assert isinstance(made, StreamSubscriber)
    return made


def by_libzmq(context: PlaneContext, endpoint: str, heard: Heard) -> Subscriber:
    return ZmqSubscriber(context, endpoint, TOPIC, heard)


@asynccontextmanager
async def listening(make: Make, context: PlaneContext) -> AsyncIterator[tuple[Publisher, Heard, Subscriber]]:
    """A publisher and who listens to it, for a test that is over in time."""
    publisher, heard = Publisher(), Heard()
    subscriber = make(context, publisher.endpoint, heard)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            assert await publisher.subscribed() == TOPIC
            yield publisher, heard, subscriber
    finally:
        subscriber.close()
        publisher.close()


KINDS = pytest.mark.parametrize("make", [by_loop, by_libzmq])
LOOPS = pytest.mark.parametrize("run_loop", [asyncio.run, uvloop.run])


@KINDS
@LOOPS
def test_messages_of_a_topic_come_with_all_their_frames_in_order(make: Make, run_loop: Run) -> None:
    sent = [
        [TOPIC],
        [TOPIC, b""],
        [TOPIC + b".more", *[b"%d" % at for at in range(70)]],
        [TOPIC, bytes(3_000_000), b"end"],
    ]

    async def scenario(context: PlaneContext) -> None:
        async with listening(make, context) as (publisher, heard, subscriber):
            await publisher.socket.send_multipart([b"other", b"words"])
            for message in sent:
                await publisher.socket.send_multipart(message)
            assert [await heard.messages.get() for _ in sent] == sent
            assert not subscriber.has_more

    with plain_context() as context:
        run_loop(scenario(context))


@KINDS
@LOOPS
def test_a_publisher_that_ends_and_starts_again_is_subscribed_to_again(make: Make, run_loop: Run) -> None:
    async def scenario(context: PlaneContext) -> None:
        publisher, heard = Publisher(), Heard()
        subscriber = make(context, publisher.endpoint, heard)
        async with asyncio.timeout(TIMEOUT_S):
            for _ in range(2):
                assert await publisher.subscribed() == TOPIC
                await publisher.socket.send_multipart([TOPIC, b"1"])
                assert await heard.messages.get() == [TOPIC, b"1"]
                port = publisher.port
                publisher.close()
                publisher = Publisher(port)
        subscriber.close()
        publisher.close()

    with plain_context() as context:
        run_loop(scenario(context))


@KINDS
@LOOPS
def test_nothing_is_heard_after_the_end(make: Make, run_loop: Run) -> None:
    async def scenario(context: PlaneContext) -> None:
        async with listening(make, context) as (publisher, heard, subscriber):
            await publisher.socket.send_multipart([TOPIC, b"1"])
            await heard.messages.get()
            subscriber.close()
            await publisher.socket.send_multipart([TOPIC, b"2"])
            await asyncio.sleep(0.05)
            assert heard.messages.empty()

    with plain_context() as context:
        run_loop(scenario(context))


@LOOPS
def test_a_flood_leaves_others_their_turns_and_what_is_left_is_known(run_loop: Run) -> None:
    async def scenario(context: PlaneContext) -> None:
        heard = Heard()
        async with endpoint_of(saying(HANDSHAKE + (b"\x01\x04news" + b"\x00\x01x") * 5_000)) as endpoint:
            subscriber = by_loop(context, endpoint, heard)
            async with asyncio.timeout(TIMEOUT_S):
                await heard.messages.get()
                assert subscriber.has_more
                while heard.messages.qsize() < 4_999:
                    before = heard.messages.qsize()
                    await asyncio.sleep(0)
                    assert heard.messages.qsize() - before <= MESSAGES_PER_TURN
            await asyncio.sleep(0)
            assert not subscriber.has_more
            subscriber.close()

    with plain_context() as context:
        run_loop(scenario(context))


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (GREETING + ready(b"ROUTER"), "the peer is a ROUTER"),
        (HANDSHAKE + b"\x01\x01x" * MESSAGE_FRAMES_MAX, f"{MESSAGE_FRAMES_MAX} frames"),
        (HANDSHAKE + b"\x02" + b"\xff" * 8, "reading a frame"),
    ],
    ids=["another kind of socket", "a message without an end", "a frame beyond all limits"],
)
@LOOPS
def test_what_does_not_speak_as_it_should_is_said_once_and_tried_again(
    words: bytes, why: str, run_loop: Run, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(context: PlaneContext) -> None:
        connections: asyncio.Queue[None] = asyncio.Queue()
        async with endpoint_of(saying(words, lambda _: connections.put_nowait(None))) as endpoint:
            subscriber = by_loop(context, endpoint, Heard())
            async with asyncio.timeout(TIMEOUT_S):
                for _ in range(4):
                    await connections.get()
            subscriber.close()

    with plain_context() as context:
        run_loop(scenario(context))

    said = [record.getMessage() for record in caplog.records if why in record.getMessage()]
    assert len(said) == 1, said
