"""Connections to a plane's server, as the event loop and as libzmq keep them, against real ROUTER sockets."""

from __future__ import annotations

import asyncio
import os
import select
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, cast

import pytest
import uvloop
import zmq
import zmq.asyncio
from prometheus_client import CollectorRegistry

from poolgrid.server.process.tasks import MESSAGES_PER_TURN
from poolgrid.server.transport import dealer as dealers
from poolgrid.server.transport import zmq_socket, zmtp
from poolgrid.server.transport.dealer import Address, Dealer, StreamDealer, ZmqDealer, connect_dealer, plain_address
from poolgrid.server.transport.planes import PlaneContext, PlaneMetrics
from poolgrid.server.transport.zmtp import GREETING, PING_CONTEXT_BYTES_MAX, command
from tests.transport.test_zmtp import HANDSHAKE

TIMEOUT_S = 120.0

TCP_REPAIR = 19
"""Linux's option of a socket that is closed without a word then."""


class Owner:
    """Who connects."""

    def __init__(self) -> None:
        self.news: asyncio.Queue[str] = asyncio.Queue()
        self.frames: asyncio.Queue[bytes] = asyncio.Queue()
        self.on_each: Callable[[bytes], None] = lambda _: None

    def on_frame(self, frame: bytes) -> None:
        self.frames.put_nowait(frame)
        self.on_each(frame)

    def on_connected(self) -> None:
        self.news.put_nowait("connected")

    def on_disconnected(self) -> None:
        self.news.put_nowait(f"disconnected after {self.frames.qsize()}")

    def on_refused(self, why: str) -> None:
        self.news.put_nowait(why)


class Server:
    """A ROUTER of libzmq."""

    def __init__(self, port: int | None = None, **options: int) -> None:
        self.context = zmq.asyncio.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        for name, value in options.items():
            self.socket.setsockopt(getattr(zmq, name), value)
        self.socket.bind(f"tcp://127.0.0.1:{port or '*'}")
        self.endpoint = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.port = int(self.endpoint.rpartition(":")[2])

    def close(self) -> None:
        self.context.destroy(linger=0)


@contextmanager
def plain_context() -> Iterator[PlaneContext]:
    context = PlaneContext.make(None, PlaneMetrics(CollectorRegistry()))
    try:
        yield context
    finally:
        context.destroy(linger=0)


Make = Callable[[PlaneContext, str, Owner], Dealer]


def by_loop(context: PlaneContext, endpoint: str, owner: Owner) -> Dealer:
    dealer = connect_dealer(context, endpoint, owner)
    assert isinstance(dealer, StreamDealer)
    return dealer


def by_libzmq(context: PlaneContext, endpoint: str, owner: Owner) -> Dealer:
    return ZmqDealer(context, endpoint, owner)


KINDS = pytest.mark.parametrize("make", [by_loop, by_libzmq])
LOOPS = pytest.mark.parametrize("run_loop", [asyncio.run, uvloop.run])
"""Both, where sockets are written: their transports bound what waits in ways of their own."""
ROUTERS_LOOP = pytest.mark.parametrize("run_loop", [uvloop.run], ids=["uvloop"])
Run = Callable[[Awaitable[Any]], Any]


async def send_until(taken: bool, dealer: Dealer, frame: bytes) -> None:
    """Send until it is taken, or refused; libzmq tells of a connection, and of its end, a moment before."""
    while dealer.send(frame) != taken:  # noqa: ASYNC110 - there is no event for it
        await asyncio.sleep(0.001)


@KINDS
@LOOPS
def test_frames_of_all_sizes_go_there_and_back(make: Make, run_loop: Run) -> None:
    sizes = (0, 1, 255, 256, 65_536, 3_000_000)

    async def scenario(context: PlaneContext) -> None:
        server, owner = Server(), Owner()
        dealer = make(context, server.endpoint, owner)
        async with asyncio.timeout(TIMEOUT_S):
            assert await owner.news.get() == "connected"
            for size in sizes:
                await send_until(True, dealer, b"q" * size)
                peer, question = await server.socket.recv_multipart()
                assert question == b"q" * size
                await server.socket.send_multipart([peer, b"a" * size])
                assert await owner.frames.get() == b"a" * size
        dealer.close()
        server.close()

    with plain_context() as context:
        run_loop(scenario(context))


@KINDS
@LOOPS
def test_long_and_short_frames_of_one_turn_arrive_in_order(make: Make, run_loop: Run) -> None:
    frames = [bytes((65 + place,)) * size for place, size in enumerate((1, 65_536, 0, 9_000, 8_192, 300_000, 255))]

    async def scenario(context: PlaneContext) -> None:
        server, owner = Server(), Owner()
        dealer = make(context, server.endpoint, owner)
        async with asyncio.timeout(TIMEOUT_S):
            assert await owner.news.get() == "connected"
            for turn in (frames, frames[:1], frames[::-1]):
                for frame in turn:
                    assert dealer.send(frame)
                assert [(await server.socket.recv_multipart())[1] for _ in turn] == turn
        dealer.close()
        server.close()

    with plain_context() as context:
        run_loop(scenario(context))


@KINDS
@ROUTERS_LOOP
def test_a_server_that_ends_and_starts_again_is_found_again(make: Make, run_loop: Run) -> None:
    async def scenario(context: PlaneContext) -> None:
        server, owner = Server(), Owner()
        dealer = make(context, server.endpoint, owner)
        async with asyncio.timeout(TIMEOUT_S):
            assert await owner.news.get() == "connected"
            server.close()
            assert await owner.news.get() == "disconnected after 0"
            await send_until(False, dealer, b"to no server")
            server = Server(server.port)
            assert await owner.news.get() == "connected"
            await send_until(True, dealer, b"to the new one")
            assert (await server.socket.recv_multipart())[1] == b"to the new one"
        dealer.close()
        server.close()

    with plain_context() as context:
        run_loop(scenario(context))


@KINDS
def test_a_handler_that_fails_costs_its_own_frame(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(context: PlaneContext) -> None:
        server, owner = Server(), Owner()

        def fail_over_the_first(frame: bytes) -> None:
            if frame == b"1":
                raise RuntimeError("no such number")

        owner.on_each = fail_over_the_first
        dealer = make(context, server.endpoint, owner)
        async with asyncio.timeout(TIMEOUT_S):
            await owner.news.get()
            await send_until(True, dealer, b"hello")
            peer, _ = await server.socket.recv_multipart()
            for number in range(5):
                await server.socket.send_multipart([peer, b"%d" % number])
            assert [await owner.frames.get() for _ in range(5)] == [b"0", b"1", b"2", b"3", b"4"]
        dealer.close()
        server.close()

    with plain_context() as context:
        asyncio.run(scenario(context))

    assert "no such number" in caplog.text


@ROUTERS_LOOP
def test_heartbeats_of_a_server_are_answered_so_that_it_does_not_hang_up(run_loop: Run) -> None:
    async def scenario(context: PlaneContext) -> None:
        server, owner = Server(HEARTBEAT_IVL=20, HEARTBEAT_TIMEOUT=200), Owner()
        dealer = by_loop(context, server.endpoint, owner)
        async with asyncio.timeout(TIMEOUT_S):
            await owner.news.get()
            for number in range(50):
                await asyncio.sleep(0.02)
                assert dealer.send(b"%d" % number)
                assert (await server.socket.recv_multipart())[1] == b"%d" % number
        assert owner.news.empty()
        dealer.close()
        server.close()

    with plain_context() as context:
        run_loop(scenario(context))


Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]


@asynccontextmanager
async def endpoint_of(answer: Answer, **options: int) -> AsyncIterator[str]:
    """Serve with ``answer`` on loopback; return where."""
    server = await asyncio.start_server(answer, "127.0.0.1", 0, **options)
    try:
        yield f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


def saying(words: bytes, then: Callable[[asyncio.StreamWriter], None] = lambda _: None) -> Answer:
    """Return an answer that says ``words`` to everybody."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(words)
        then(writer)
        try:
            await reader.read()
        except ConnectionError:
            pass
        writer.close()

    return answer


@asynccontextmanager
async def connected_to(context: PlaneContext, answer: Answer, **options: int) -> AsyncIterator[tuple[Dealer, Owner]]:
    """Have the event loop connect to what answers so."""
    owner = Owner()
    async with endpoint_of(answer, **options) as endpoint:
        dealer = by_loop(context, endpoint, owner)
        try:
            yield dealer, owner
        finally:
            dealer.close()


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "no signature of ZMTP"),
        (GREETING[:12] + b"CURVE".ljust(20, b"\0") + GREETING[32:], "this process has no CURVE key"),
        (HANDSHAKE + b"\x02" + b"\xff" * 8, "reading a frame"),
    ],
)
@ROUTERS_LOOP
def test_what_does_not_speak_as_it_should_is_said_and_tried_again(words: bytes, why: str, run_loop: Run) -> None:
    async def scenario(context: PlaneContext) -> None:
        async with connected_to(context, saying(words)) as (_, owner), asyncio.timeout(TIMEOUT_S):
            heard = [await owner.news.get() for _ in range(6)]
        assert [each for each in heard if why in each][1:], heard

    with plain_context() as context:
        run_loop(scenario(context))


@ROUTERS_LOOP
def test_who_accepts_and_says_nothing_is_given_up_and_tried_again(
    run_loop: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dealers, "CONNECT_TIMEOUT_S", 0.05)

    async def scenario(context: PlaneContext) -> None:
        async with connected_to(context, saying(b"")) as (_, owner), asyncio.timeout(TIMEOUT_S):
            assert "no handshake" in await owner.news.get()
            assert "no handshake" in await owner.news.get()

    with plain_context() as context:
        run_loop(scenario(context))


@ROUTERS_LOOP
def test_all_that_came_is_handed_over_before_the_end_is_known(run_loop: Run) -> None:
    count = 500

    async def scenario(context: PlaneContext) -> None:
        answer = saying(HANDSHAKE + b"\x00\x01x" * count, lambda writer: writer.write_eof())
        async with connected_to(context, answer) as (_, owner), asyncio.timeout(TIMEOUT_S):
            owner.on_each = lambda _: _spin(0.0002)
            assert await owner.news.get() == "connected"
            assert await owner.news.get() == f"disconnected after {count}"

    with plain_context() as context:
        run_loop(scenario(context))


def _spin(seconds: float) -> None:
    ends_s = asyncio.get_running_loop().time() + seconds
    while asyncio.get_running_loop().time() < ends_s:
        pass


@ROUTERS_LOOP
def test_a_flood_leaves_others_their_turns(run_loop: Run) -> None:
    async def scenario(context: PlaneContext) -> None:
        flood = b"\x00\x01x" * 20_000
        async with connected_to(context, saying(HANDSHAKE + flood)) as (_, owner), asyncio.timeout(TIMEOUT_S):
            owner.on_each = lambda _: _spin(0.0001)
            await owner.frames.get()
            turns = 0
            while owner.frames.qsize() < 2_000:
                before = owner.frames.qsize()
                await asyncio.sleep(0)
                assert owner.frames.qsize() - before <= MESSAGES_PER_TURN
                turns += 1
            assert turns >= 2_000 / MESSAGES_PER_TURN

    with plain_context() as context:
        run_loop(scenario(context))


@LOOPS
def test_a_server_that_reads_nothing_is_refused_more_and_served_again_when_it_reads(
    run_loop: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zmtp, "SEND_BYTES_MAX", 1_000_000)

    async def scenario(context: PlaneContext) -> None:
        go_on = asyncio.Event()

        async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(HANDSHAKE)
            await go_on.wait()
            await reader.read()

        async with connected_to(context, slow, limit=1000) as (dealer, owner), asyncio.timeout(TIMEOUT_S):
            await owner.news.get()
            sent = 0
            while dealer.send(bytes(100_000)):
                sent += 1
                await asyncio.sleep(0)
            assert sent < 1000  # what the kernel takes, and the bound
            assert not dealer.send(b"more")
            go_on.set()
            await send_until(True, dealer, b"more")

    with plain_context() as context:
        run_loop(scenario(context))


@LOOPS
def test_what_is_flushed_leaves_at_once_and_all_else_at_the_end_of_the_turn(run_loop: Run) -> None:
    async def scenario(context: PlaneContext) -> None:
        there: asyncio.Future[socket.socket] = asyncio.get_running_loop().create_future()

        async def deaf(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(HANDSHAKE)
            await reader.readuntil(b"\0\5begin")
            cast(asyncio.Transport, writer.transport).pause_reading()
            there.set_result(socket.socket(fileno=os.dup(writer.get_extra_info("socket").fileno())))
            await reader.read()

        def has_come(peer: socket.socket) -> bool:
            return bool(select.select([peer], [], [], 0)[0])

        async with connected_to(context, deaf) as (dealer, _), asyncio.timeout(TIMEOUT_S):
            await send_until(True, dealer, b"begin")
            with await there as peer:
                assert dealer.send(b"one")
                assert not has_come(peer), "it waits for what else is sent in this turn"
                dealer.flush()
                assert has_come(peer)
                assert peer.recv(1000) == b"\0\3one"

                dealer.flush()  # nothing is left
                assert dealer.send(b"two")
                assert not has_come(peer)
                await asyncio.sleep(0)
                assert peer.recv(1000) == b"\0\3two"

    with plain_context() as context:
        run_loop(scenario(context))


@ROUTERS_LOOP
def test_answers_to_the_heartbeats_of_a_server_that_reads_nothing_are_bounded(
    run_loop: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zmtp, "SEND_BYTES_MAX", 100_000)
    pings = command(b"PING", b"\0\1" + bytes(PING_CONTEXT_BYTES_MAX)) * 4_000

    async def scenario(context: PlaneContext) -> None:
        all_sent = asyncio.Event()

        async def deaf(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(HANDSHAKE)
            for _ in range(120):  # 12 MB, of which the kernel keeps the answers to some
                writer.write(pings)
                await writer.drain()
            all_sent.set()

        async with connected_to(context, deaf, limit=1000) as (dealer, _), asyncio.timeout(TIMEOUT_S):
            await all_sent.wait()
            assert isinstance(dealer, StreamDealer)
            assert dealer.conversation is not None
            transport = dealer.conversation._transport
            assert transport is not None
            assert 0 < transport.get_write_buffer_size() < 1_000_000
            assert not dealer.send(b"a request"), "nor does it take anything else"

    with plain_context() as context:
        run_loop(scenario(context))


def may_forget_connections() -> bool:
    """Return whether a connection may be forgotten without a word to its other end: ``CAP_NET_ADMIN``."""
    with socket.socket() as probe:
        try:
            probe.setsockopt(socket.IPPROTO_TCP, TCP_REPAIR, 1)
        except (OSError, AttributeError):
            return False
    return True


@KINDS
@ROUTERS_LOOP
@pytest.mark.skipif(not may_forget_connections(), reason="only root may forget a connection as lost power does")
def test_a_server_whose_machine_lost_its_power_is_found_again_by_who_says_nothing(
    make: Make, run_loop: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zmq_socket, "PROBED_AFTER_S", 1)

    async def scenario(context: PlaneContext) -> None:
        owner = Owner()
        lose_power = asyncio.Event()

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(HANDSHAKE)
            await reader.readuntil(b"\x08Identity\0\0\0\0")  # its last word
            await lose_power.wait()
            writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, TCP_REPAIR, 1)
            writer.transport.abort()

        async with endpoint_of(answer) as endpoint, asyncio.timeout(TIMEOUT_S):
            dealer = make(context, endpoint, owner)
            assert await owner.news.get() == "connected"
            await asyncio.sleep(0.1)  # nothing is on its way any more, which would be answered
            lose_power.set()
            assert await owner.news.get() == "disconnected after 0"
            lose_power.clear()
            assert await owner.news.get() == "connected"
            dealer.close()

    with plain_context() as context:
        run_loop(scenario(context))


@KINDS
@ROUTERS_LOOP
def test_nothing_is_heard_after_it_was_closed_even_by_who_closes_it_over_a_frame(
    make: Make, run_loop: Run, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(context: PlaneContext) -> None:
        server, owner = Server(), Owner()
        dealer = make(context, server.endpoint, owner)
        owner.on_each = lambda _: dealer.close()
        async with asyncio.timeout(TIMEOUT_S):
            await owner.news.get()
            await send_until(True, dealer, b"hello")
            peer, _ = await server.socket.recv_multipart()
            for _ in range(100):
                await server.socket.send_multipart([peer, b"word"])
            await owner.frames.get()
            server.close()
            for _ in range(20):
                await asyncio.sleep(0.005)
        assert (owner.frames.qsize(), owner.news.qsize()) == (0, 0)

    with plain_context() as context:
        run_loop(scenario(context))

    assert not caplog.text


@LOOPS
def test_what_was_sent_just_before_it_was_closed_arrives(run_loop: Run) -> None:
    async def scenario(context: PlaneContext) -> None:
        server, owner = Server(), Owner()
        dealer = by_loop(context, server.endpoint, owner)
        async with asyncio.timeout(TIMEOUT_S):
            await owner.news.get()
            assert dealer.send(b"one")
            assert dealer.send(b"two")
            dealer.close()
            assert (await server.socket.recv_multipart())[1] == b"one"
            assert (await server.socket.recv_multipart())[1] == b"two"
        server.close()

    with plain_context() as context:
        run_loop(scenario(context))


def test_closing_in_the_midst_of_connecting_leaves_nothing() -> None:
    async def scenario(context: PlaneContext) -> None:
        owner = Owner()
        async with endpoint_of(saying(b"")) as endpoint, asyncio.timeout(TIMEOUT_S):
            for turns in range(10):
                dealer = by_loop(context, endpoint, owner)
                for _ in range(turns):
                    await asyncio.sleep(0)
                dealer.close()
            while len(asyncio.all_tasks()) > 1:  # noqa: ASYNC110 - nobody is told of the end of a detached task
                await asyncio.sleep(0.001)
        assert owner.news.empty()

    with plain_context() as context:
        asyncio.run(scenario(context))


@pytest.mark.parametrize("host", ["no.such.host.invalid", "a..b", "x" * 300, "127.0.0.1\0"])
@ROUTERS_LOOP
def test_a_host_that_does_not_exist_is_tried_until_it_does(host: str, run_loop: Run) -> None:
    async def scenario() -> None:
        owner = Owner()
        dealer = StreamDealer(host, 5000, owner)
        await asyncio.sleep(0.2)
        assert not dealer.send(b"to nobody")
        assert not dealer._task.done()
        assert owner.news.empty()
        dealer.close()

    run_loop(scenario())


@pytest.mark.parametrize(
    ("endpoint", "address"),
    [
        ("tcp://127.0.0.1:40001", Address("127.0.0.1", 40001)),
        ("tcp://[::1]:40001", Address("::1", 40001)),
        ("tcp://worker-7.pool.svc:40001", Address("worker-7.pool.svc", 40001)),
        ("ipc:///tmp/worker", None),
        ("inproc://worker", None),
        ("tcp://eth0;10.0.0.1:40001", None),
        ("tcp://*:40001", None),
        ("tcp://127.0.0.1:0", None),
        ("tcp://127.0.0.1:65536", None),
        ("tcp://127.0.0.1:port", None),
        ("tcp://:40001", None),
        ("tcp://127.0.0.1", None),
    ],
)
def test_addresses_that_are_plain_are_told_from_what_libzmq_knows(endpoint: str, address: Address | None) -> None:
    assert plain_address(endpoint) == address
