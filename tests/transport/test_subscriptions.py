"""A feed and peers that subscribe to it, one of them to everything there is."""

from __future__ import annotations

import asyncio
import os
import socket as sockets
from collections.abc import Callable

import zmq
from prometheus_client import CollectorRegistry

from poolgrid.server.transport.planes import PlaneContext, PlaneMetrics, name_plane
from poolgrid.server.transport.subscriptions import TOPICS_PER_CONNECTION_MAX, Subscriptions
from poolgrid.server.transport.zmq_socket import CallbackSocket

TIMEOUT_S = 120.0
TOPIC = b"poolgrid"
TOPICS = 100_000

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
"""ZMTP 3.0 (RFC 23): signature, version, mechanism, as-server, filler."""
READY = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03SUB"


class Feed:
    """A feed that speaks whenever it is told to."""

    def __init__(self, context: PlaneContext) -> None:
        self.socket = context.socket(zmq.XPUB)
        self.socket.setsockopt(zmq.LINGER, 0)
        name_plane(self.socket, "feed")
        self.refused: list[str] = []
        self.subscriptions = Subscriptions(self.socket, self.refused.append, TOPIC)
        self.socket.bind("tcp://127.0.0.1:*")
        self.endpoint = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.subscriptions.start()

    def say(self, text: bytes) -> None:
        self.socket.send_multipart([TOPIC, text], zmq.NOBLOCK)
        self.subscriptions.look()

    def close(self) -> None:
        self.subscriptions.close()
        self.socket.close(linger=0)


class Reader:
    """A router's subscription."""

    def __init__(self, context: PlaneContext, endpoint: str) -> None:
        socket = context.socket(zmq.SUB)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SUBSCRIBE, TOPIC)
        self.heard: set[bytes] = set()
        self._socket = CallbackSocket(socket, lambda frames: self.heard.add(frames[-1]))
        socket.connect(endpoint)

    def close(self) -> None:
        self._socket.close()


def flood(port: int) -> int:
    """Subscribe to ever new topics until the connection ends; return how many were sent, of at most ``TOPICS``."""
    with sockets.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S) as connection:
        connection.sendall(GREETING + READY)
        heard = 0
        while heard <= len(GREETING):  # its greeting, and the beginning of its own READY: it takes subscriptions now
            heard += len(connection.recv(4096))
        sent = 0
        try:
            while sent < TOPICS:
                many = [b"\x00\x09\x01" + (sent + number).to_bytes(8, "big") for number in range(100)]
                connection.sendall(b"".join(many))
                sent += 100
            while connection.recv(4096):
                pass
        except ConnectionError:
            pass
        return sent


async def test_a_peer_that_subscribes_to_everything_is_hung_up_on_and_the_others_go_on_hearing() -> None:
    context = PlaneContext.make(None, PlaneMetrics(CollectorRegistry()))
    feed = Feed(context)
    readers = [Reader(context, feed.endpoint) for _ in range(3)]
    said = 0

    async def until_all_hear() -> None:
        nonlocal said
        for reader in readers:
            reader.heard.clear()
        while not all(reader.heard for reader in readers):
            said += 1
            feed.say(b"%d" % said)
            await asyncio.sleep(0.005)

    try:
        async with asyncio.timeout(TIMEOUT_S):
            await until_all_hear()
            assert not feed.refused
            port = int(feed.endpoint.rpartition(":")[2])
            for times in (1, 2):
                await asyncio.to_thread(flood, port)
                assert feed.refused == ["127.0.0.1"] * times
                await until_all_hear()
    finally:
        for reader in readers:
            reader.close()
        feed.close()
        context.destroy(linger=0)


async def test_whether_anybody_listens_is_known_from_the_first_who_comes_to_the_last_who_goes() -> None:
    context = PlaneContext.make(None, PlaneMetrics(CollectorRegistry()))
    feed = Feed(context)

    async def until(check: Callable[[], bool]) -> None:
        while not check():  # noqa: ASYNC110 - what ZMQ does by itself comes with no event
            await asyncio.sleep(0.005)

    try:
        async with asyncio.timeout(TIMEOUT_S):
            other = context.socket(zmq.SUB)
            other.setsockopt(zmq.LINGER, 0)
            other.setsockopt(zmq.SUBSCRIBE, b"another topic")
            other.connect(feed.endpoint)
            first, second = Reader(context, feed.endpoint), Reader(context, feed.endpoint)
            await until(lambda: feed.subscriptions.has_readers)
            await until(lambda: feed.say(b"to both") or bool(first.heard and second.heard))  # type: ignore[func-returns-value]
            first.close()
            await asyncio.sleep(0.05)
            assert feed.subscriptions.has_readers
            second.close()
            await until(lambda: not feed.subscriptions.has_readers)
            third = Reader(context, feed.endpoint)
            await until(lambda: feed.subscriptions.has_readers)
            third.close()
            other.close()
    finally:
        feed.close()
        context.destroy(linger=0)


class Message:
    """A message whose connection has ended, and whose descriptor is something else's by now."""

    bytes = b"\x01other"

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def get(self, _: int) -> int:
        return self._descriptor


async def test_a_descriptor_that_is_something_elses_by_now_is_left_alone_and_none_is_kept() -> None:
    context = PlaneContext.make(None, PlaneMetrics(CollectorRegistry()))
    feed = Feed(context)
    here, there = sockets.socketpair()
    reader, writer = os.pipe()
    with (
        sockets.create_server(("127.0.0.1", 0)) as server,
        sockets.create_connection(server.getsockname()) as other,
    ):
        before = len(os.listdir("/proc/self/fd"))
        for descriptor in (reader, here.fileno(), server.fileno(), other.fileno(), 10**6):
            for _ in range(2 * TOPICS_PER_CONNECTION_MAX):
                feed.subscriptions._take(Message(descriptor))  # type: ignore[arg-type]
        assert len(os.listdir("/proc/self/fd")) == before
        here.send(b"alive")
        assert there.recv(5) == b"alive"
        assert not feed.refused
        assert other.send(b"alive") == 5
    for each in (here, there):
        each.close()
    for descriptor in (reader, writer):
        os.close(descriptor)
    feed.close()
    context.destroy(linger=0)
