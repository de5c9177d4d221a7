"""What anybody may do over HTTP before it is known who that is: real sockets against a server with small limits."""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
import trustme
import uvloop
from prometheus_client import CollectorRegistry
from starlette.types import Receive, Scope, Send

from poolgrid.server.http import connections
from poolgrid.server.http.connections import (
    OTHER_FILES,
    SAID_EVERY_S,
    HttpConnections,
    source_of,
)
from poolgrid.server.http.guard import Guard
from poolgrid.server.http.http_server import STOOD_STILL_S, HttpServer
from poolgrid.server.http.http_settings import HttpLimits, HttpSettings
from poolgrid.server.http.request_framing import SLICE_BYTES, SLICE_PIECES, ChunkedBody
from poolgrid.server.http.request_reader import RequestReader
from poolgrid.server.transport.security import SecuritySettings, Tls
from tests.http.test_http_protocol import Source

T = TypeVar("T")

PATIENCE_S = 120.0
"""How long anything here may take on a busy machine; nothing waits for it to pass."""

FOREVER_S = 3600.0

SMALL = HttpLimits(
    head_bytes=2048,
    chunk_overhead_bytes=2048,
    headers=10,
    header_timeout_s=FOREVER_S,
    body_timeout_s=FOREVER_S,
    keep_alive_timeout_s=FOREVER_S,
    write_timeout_s=FOREVER_S,
    pipeline_bytes=4096,
    connections=100,
    unfinished_bytes=2**20,
)


class Application:
    """Each path answers with the size of its body once ``hold`` is open."""

    def __init__(self) -> None:
        self.hold = asyncio.Event()
        self.hold.set()
        self.begin = asyncio.Event()
        """Lets the answer of ``/stream`` begin."""
        self.begin.set()
        self.entered = asyncio.Event()
        self.left = asyncio.Event()
        self.begun = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.passes = True
        self.passed = 0
        """Bytes of bodies for ``/passed``, which are passed on while it ``passes``."""
        self.answer_bytes = 0
        """Length of answers that have one of their own."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.begun += 1
        self.entered.set()
        self.headers = scope["headers"]
        if scope["path"] == "/unread":
            await self._answer(send, b"unread")
            return
        size = 0
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.left.set()
                return
            size += len(message.get("body", b""))
            more = message.get("more_body", False)
            if scope["path"] == "/passed" and self.passes:
                scope["state"]["guard"].passed(size - self.passed)
                self.passed = size
        watch = None
        if scope["path"] == "/watched":
            # As ASGI has it; the inference endpoints use the extension.
            watch = asyncio.ensure_future(self._watch(receive))
        else:
            scope["state"]["guard"].source = Source(self.left)
        if scope["path"] == "/stream":
            await self.begin.wait()
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"first", "more_body": True})
        await self.hold.wait()
        if watch is not None:
            watch.cancel()
        if scope["path"] == "/stream":
            await send({"type": "http.response.body", "body": b"last", "more_body": False})
        else:
            await self._answer(send, b"x" * self.answer_bytes or b"%d bytes" % size)

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.left.set()

    async def _answer(self, send: Send, body: bytes) -> None:
        headers = [(b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})


class Pair:
    """A server, its application, and clients of it."""

    def __init__(self, server: HttpServer, application: Application, registry: CollectorRegistry) -> None:
        self.server = server
        self.application = application
        self.registry = registry
        self.writers: list[asyncio.StreamWriter] = []
        self.client_ssl: ssl.SSLContext | None = None

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        name = None if self.client_ssl is None else "127.0.0.1"
        streams = await asyncio.open_connection(
            "127.0.0.1", self.server.port, ssl=self.client_ssl, server_hostname=name
        )
        self.writers.append(streams[1])
        return streams

    async def ask(self, request: bytes) -> bytes:
        """Return all that comes after ``request`` until the server closes."""
        reader, writer = await self.connect()
        writer.write(request)
        return await within(reader.read())

    def refused(self, reason: str) -> float:
        return self.registry.get_sample_value("poolgrid_http_refused_total", {"reason": reason}) or 0

    async def until(self, condition: Callable[[], bool]) -> None:
        async def poll() -> None:
            while not condition():  # noqa: ASYNC110 - the server has no event for it
                await asyncio.sleep(0.002)

        await within(poll())


async def within(work: Coroutine[Any, Any, T]) -> T:
    return await asyncio.wait_for(work, PATIENCE_S)


@asynccontextmanager
async def serving(limits: HttpLimits = SMALL, tls: Tls | None = None, **fields: Any) -> AsyncIterator[Pair]:
    application = Application()
    registry = CollectorRegistry()
    limits = replace(limits, hosts=("*",), **fields)
    server = HttpServer(application, "127.0.0.1", 0, "port", tls=tls, registry=registry, limits=limits)
    server.start()
    pair = Pair(server, application, registry)
    try:
        yield pair
    finally:
        application.hold.set()
        for writer in pair.writers:
            writer.transport.abort()
        await server.stop()
        assert server.connections.count == 0
        assert server.connections.unfinished_bytes == 0
        assert not any(
            (
                server.connections.idle,
                server.connections.heads,
                server.connections.bodies,
                server.connections.closing,
                server.connections.lingering,
                server.connections.stuck,
            )
        )


LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture(params=sorted(LOOPS))
def run(request: pytest.FixtureRequest) -> Callable[[Coroutine[Any, Any, None]], None]:
    """Run a scenario on the event loop of the service, and on Python's own."""

    def go(scenario: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=LOOPS[request.param]) as runner:
            runner.run(asyncio.wait_for(scenario, 3 * PATIENCE_S))

    return go


Run = Callable[[Coroutine[Any, Any, None]], None]


def get(path: str = "/", *headers: str) -> bytes:
    return "\r\n".join([f"GET {path} HTTP/1.1", "host: x", *headers]).encode() + b"\r\n\r\n"


def post(body: bytes, path: str = "/", announced: int | None = None, *headers: str) -> bytes:
    length = len(body) if announced is None else announced
    head = [f"POST {path} HTTP/1.1", "host: x", f"content-length: {length}", *headers]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


CLOSE = "connection: close"


# -- heads -------------------------------------------------------------------------------------------------------------


def test_a_header_without_an_end_is_answered_431_while_it_comes(run: Run) -> None:
    async def scenario() -> None:
        async with serving() as pair:
            reader, writer = await pair.connect()
            writer.write(b"GET / HTTP/1.1\r\nendless: ")
            sent = 0

            async def pour() -> None:
                nonlocal sent
                while True:
                    writer.write(b"x" * 512)
                    sent += 512
                    await writer.drain()
                    await asyncio.sleep(0)

            pouring = asyncio.ensure_future(pour())
            head = await within(reader.readuntil(b"\r\n\r\n"))
            pouring.cancel()
            assert head.startswith(b"HTTP/1.1 431 ")
            assert b"connection: close" in head
            assert b"content-type: application/json" in head
            error = json.loads(await within(reader.read()))["error"]
            assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", None, "head_too_large")
            assert pair.refused("head_too_large") == 1
            assert pair.application.begun == 0

    run(scenario())


@pytest.mark.parametrize("pace", [1, 7, 4096])
def test_a_head_has_its_limit_whatever_pieces_it_comes_in(run: Run, pace: int) -> None:
    def of_size(size: int) -> bytes:
        request = get("/", CLOSE, "a: " + "a" * 900, "c: " + "c" * 600, "b: ")
        return request[:-4] + b"b" * (size - len(request)) + b"\r\n\r\n"

    async def scenario() -> None:
        async with serving() as pair:
            for size, status in ((SMALL.head_bytes, b"200"), (SMALL.head_bytes + 1, b"431")):
                reader, writer = await pair.connect()
                request = of_size(size)
                assert len(request) == size
                for at in range(0, size, pace):
                    writer.write(request[at : at + pace])
                    await asyncio.sleep(0)
                assert (await within(reader.read())).split()[1] == status

    run(scenario())


@pytest.mark.parametrize(
    ("request_head", "status"),
    [
        (get("/", CLOSE, "a: " + "a" * 1900), b"200"),
        (get("/", CLOSE, "a: " + "a" * 2030), b"431"),
        (get("/" + "a" * 1900, CLOSE), b"200"),
        (get("/" + "a" * 2030, CLOSE), b"431"),
        (get("/", CLOSE, *(f"h{n}: x" for n in range(8))), b"200"),
        (get("/", CLOSE, *(f"h{n}: x" for n in range(9))), b"431"),
    ],
    ids=["line fits", "line too long", "path fits", "path too long", "as many fields", "too many fields"],
)
async def test_lines_and_their_number_have_limits(request_head: bytes, status: bytes) -> None:
    async with serving() as pair:
        assert (await pair.ask(request_head)).split()[1] == status
        assert pair.application.begun == (status == b"200")


async def test_a_header_line_of_16_kb_passes_by_default() -> None:
    async with serving(HttpLimits()) as pair:
        token = "authorization: Bearer " + "t" * 16_000
        assert (await pair.ask(get("/", CLOSE, token))).split()[1] == b"200"
        assert dict(pair.application.headers)[b"authorization"] == b"Bearer " + b"t" * 16_000
        assert (await pair.ask(get("/", CLOSE, *[token] * 5))).split()[1] == b"431"


async def test_a_body_behind_a_head_that_is_refused_is_dropped() -> None:
    async with serving() as pair:
        request = post(b"x" * 100_000, "/", None, *(f"h{n}: x" for n in range(20)))
        answer = await pair.ask(request + get("/", CLOSE))
        assert answer.count(b"HTTP/1.1 ") == 1
        assert answer.split()[1] == b"431"


def test_a_head_has_a_time(run: Run) -> None:
    async def scenario() -> None:
        async with serving(header_timeout_s=0.05) as pair:
            answer = await pair.ask(b"GET / HTTP/1.1\r\nslow: ")
            assert answer.startswith(b"HTTP/1.1 408 ")
            assert b"setting http_request_timeout_ms" in answer
            assert await pair.ask(b"") == b"", "who said nothing is told nothing"
            assert pair.refused("header_timeout") == 2

    run(scenario())


def test_a_time_in_which_the_server_stood_still_is_nobodys(run: Run) -> None:
    async def scenario() -> None:
        async with serving(header_timeout_s=STOOD_STILL_S, keep_alive_timeout_s=STOOD_STILL_S) as pair:
            kept, amid_a_head = await pair.connect(), await pair.connect()
            for _, writer in (kept, amid_a_head):
                writer.write(get())
            for reader, _ in (kept, amid_a_head):
                assert await within(reader.readuntil(b"0 bytes"))
            amid_a_head[1].write(b"GET / HT")
            await pair.until(lambda: len(pair.server.connections.heads) == 1)

            threading.Event().wait(1.5 * STOOD_STILL_S)  # the whole loop stands still
            await asyncio.sleep(0.25)  # more than one tick

            kept[1].write(get())
            amid_a_head[1].write(b"TP/1.1\r\nhost: x\r\n\r\n")
            for reader, _ in (kept, amid_a_head):
                assert await within(reader.readuntil(b"0 bytes"))

    run(scenario())


def test_the_head_of_a_further_request_has_a_time_of_its_own(run: Run) -> None:
    async def scenario() -> None:
        async with serving() as pair:
            table = pair.server.connections
            reader, writer = await pair.connect()
            writer.write(get())
            assert await within(reader.readuntil(b"0 bytes"))
            writer.write(b"GET / HT")
            await pair.until(lambda: len(table.heads) == 1)
            [since_s] = table.heads.values()
            table.tick(since_s + FOREVER_S - 1)
            assert len(table.heads) == 1, "it is not over yet"
            table.tick(since_s + FOREVER_S + 1)
            assert (await within(reader.read())).startswith(b"HTTP/1.1 408 ")

    run(scenario())


async def test_blank_lines_do_not_lengthen_the_time_of_a_head() -> None:
    async with serving(header_timeout_s=0.1) as pair:
        reader, writer = await pair.connect()

        async def drip() -> None:
            while True:
                writer.write(b"\r\n")
                await asyncio.sleep(0.005)

        dripping = asyncio.ensure_future(drip())
        assert (await within(reader.read())).startswith(b"HTTP/1.1 408 ")
        dripping.cancel()


def test_a_connection_that_waits_for_a_further_request_is_closed(run: Run) -> None:
    async def scenario() -> None:
        async with serving(keep_alive_timeout_s=0.05) as pair:
            answer = await pair.ask(get())
            assert answer.startswith(b"HTTP/1.1 200 ")
            assert answer.endswith(b"0 bytes")
            assert pair.server.connections.refused == {}, "that is no refusal"

    run(scenario())


# -- bodies ------------------------------------------------------------------------------------------------------------


def test_a_body_that_is_passed_on_as_it_comes_is_not_held_and_does_not_give_way(run: Run) -> None:
    async def scenario() -> None:
        async with serving(unfinished_bytes=1_000_000) as pair:
            table = pair.server.connections
            passing_reader, passing = await pair.connect()
            passing.write(post(b"x" * 250_000, "/passed", 1_000_000, CLOSE))
            await pair.until(lambda: pair.application.passed == 250_000)
            assert table.unfinished_bytes == 0
            reader, writer = await pair.connect()
            writer.write(post(b"x" * 700_000, "/", 800_000, CLOSE))
            await pair.until(lambda: table.unfinished_bytes == 700_000)
            pair.application.passes = False
            passing.write(b"x" * 500_000)
            assert (await within(reader.read())).startswith(b"HTTP/1.1 503 ")
            pair.application.passes = True
            passing.write(b"x" * 250_000)
            assert (await within(passing_reader.read())).endswith(b"1000000 bytes")
            assert table.unfinished_bytes == 0
            assert pair.refused("unfinished_bytes") == 1

    run(scenario())


def test_the_body_that_began_first_gives_way_when_too_much_is_held(run: Run) -> None:
    async def scenario() -> None:
        async with serving(unfinished_bytes=300_000) as pair:
            table = pair.server.connections
            streams = []
            for _ in range(3):
                streams.append(await pair.connect())
                streams[-1][1].write(post(b"x" * 90_000, "/", 200_000, CLOSE))
                await pair.until(lambda: table.unfinished_bytes == 90_000 * len(streams))
            (first, _), *others = streams
            for reader, writer in others:
                writer.write(b"x" * 110_000)
                assert (await within(reader.read())).endswith(b"200000 bytes")
            refused = await within(first.read())
            assert refused.startswith(b"HTTP/1.1 503 ")
            assert b"retry-after: 1\r\n" in refused
            assert table.unfinished_bytes == 0
            assert pair.refused("unfinished_bytes") == 1

    run(scenario())


async def test_chunks_must_hold_more_than_what_is_around_them() -> None:
    async with serving() as pair:
        chunked = b"POST / HTTP/1.1\r\nhost: x\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"
        tiny = b"1\r\nx\r\n" * 5000 + b"0\r\n\r\n"
        assert (await pair.ask(chunked + tiny)).endswith(b"5000 bytes")
        extended = b"1;" + b"e" * 500 + b"\r\nx\r\n"
        assert (await pair.ask(chunked + extended * 100)).startswith(b"HTTP/1.1 400 ")
        assert (await pair.ask(chunked + b"1\r\nx\r\n0\r\ntrailer: " + b"t" * 9000)).startswith(b"HTTP/1.1 400 ")
        assert pair.refused("chunk_overhead") == 2
        await pair.ask(chunked + b"1\r\nx\r\n0\r\nauthorization: Bearer other\r\n\r\n")
        assert b"authorization" not in dict(pair.application.headers), "a trailer is no header"


def test_one_that_is_refused_amid_a_body_and_stays_is_cut(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("poolgrid.server.http.connections.LINGER_S", 0.05)

    async def scenario() -> None:
        async with serving() as pair:
            _, writer = await pair.connect()
            chunked = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
            writer.write(chunked + (b"1;" + b"e" * 500 + b"\r\nx\r\n") * 100)
            await pair.until(lambda: pair.refused("chunk_overhead") == 1)
            writer.write(b"more of it")
            await pair.until(lambda: pair.server.connections.count == 0)

    run(scenario())


@pytest.mark.parametrize("piece", [b"x", b"\r\n\r\n"], ids=["of one byte", "of an empty line"])
def test_a_body_of_tiny_chunks_is_read_in_slices(run: Run, piece: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    genuine = RequestReader._read_body

    def read(self: RequestReader, data: bytes | bytearray, sink: Guard) -> None:
        body = self.body
        assert isinstance(body, ChunkedBody)
        genuine(self, data, sink)
        taken.append(body.pieces)

    monkeypatch.setattr(RequestReader, "_read_body", read)
    count = 50_000
    chunk = b"%x\r\n%b\r\n" % (len(piece), piece)

    async def scenario() -> None:
        async with serving() as pair:
            reader, writer = await pair.connect()
            head = get("/watched", "transfer-encoding: chunked").replace(b"GET", b"POST")
            writer.write(head + chunk * count + b"0\r\n\r\n" + get("/", CLOSE))
            answers = await within(reader.read())
            assert answers.count(b"HTTP/1.1 200 ") == 2
            assert b"%d bytes" % (count * len(piece)) in answers

    run(scenario())

    assert sum(taken) >= count
    assert max(taken) <= SLICE_PIECES + SLICE_BYTES // len(chunk) + 1


async def test_a_body_that_nobody_wants_is_skipped_and_a_huge_one_ends_the_connection() -> None:
    async with serving() as pair:
        reader, writer = await pair.connect()
        writer.write(post(b"x" * 70_000, "/unread", 80_000))
        assert await within(reader.readuntil(b"unread"))
        writer.write(b"x" * 10_000 + post(b"abc", "/", None, CLOSE))
        assert (await within(reader.read())).endswith(b"3 bytes")
        answer = await pair.ask(post(b"x", "/unread", 2**40))
        assert answer.endswith(b"unread")
        assert answer.count(b"HTTP/1.1 ") == 1
        assert pair.refused("unread_body") == 1


# -- requests behind a request -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "further",
    [get("/watched"), post(b"abc"), b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"],
    ids=["without body", "with body", "chunked"],
)
def test_requests_behind_one_in_work_wait_unparsed_and_unread(run: Run, further: bytes) -> None:
    async def scenario() -> None:
        async with serving() as pair:
            table = pair.server.connections
            application = pair.application
            application.hold.clear()
            reader, writer = await pair.connect()
            number = 12_000
            writer.write(further * number)
            await within(application.entered.wait())
            # What one read of the event loop brings at most, beyond the limit.
            most = SMALL.pipeline_bytes + 2**18
            await pair.until(lambda: table.unfinished_bytes >= SMALL.pipeline_bytes)
            for _ in range(20):
                await asyncio.sleep(0)
                assert table.unfinished_bytes <= most
            assert application.begun == 1
            application.hold.set()
            whole = 0
            while whole < number:
                part = await within(reader.readuntil(b" bytes"))
                assert part.startswith(b"HTTP/1.1 200 ")
                assert table.unfinished_bytes <= most
                whole += 1
            await pair.until(lambda: table.unfinished_bytes == 0)
            assert application.begun == number

    run(scenario())


def test_a_client_that_leaves_with_requests_waiting_is_noticed_and_forgotten(run: Run) -> None:
    async def scenario() -> None:
        async with serving() as pair:
            pair.application.hold.clear()
            _, writer = await pair.connect()
            writer.write(post(b"abc") * 20)
            await within(pair.application.entered.wait())
            await pair.until(lambda: pair.server.connections.unfinished_bytes > 0)
            writer.transport.abort()
            await within(pair.application.left.wait())
            await pair.until(lambda: pair.server.connections.count == 0)
            assert pair.server.connections.unfinished_bytes == 0
            assert pair.application.begun == 1

    run(scenario())


async def test_requests_that_nobody_has_begun_are_dropped_when_there_is_no_room_for_them() -> None:
    async with serving(unfinished_bytes=1000) as pair:
        pair.application.hold.clear()
        reader, writer = await pair.connect()
        writer.write(post(b"abc") * 100)
        await within(pair.application.entered.wait())
        await pair.until(lambda: pair.refused("unfinished_bytes") == 1)
        pair.application.hold.set()
        answer = await within(reader.read())
        assert answer.count(b"HTTP/1.1 200 ") == 1
        assert b"connection: close" in answer


async def test_the_ends_of_requests_are_found_in_any_pieces() -> None:
    requests = [
        post(b"abc"),
        get(),
        b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n4\r\n\r\n\r\n\r\n0\r\nt: x\r\n\r\n",
        post(b"\r\n\r\n" * 5, "/watched"),
        get("/", CLOSE),
    ]
    whole = b"".join(requests)

    async with serving() as pair:
        for cut in range(1, len(whole)):
            reader, writer = await pair.connect()
            writer.write(whole[:cut])
            await writer.drain()
            await asyncio.sleep(0)
            writer.write(whole[cut:])
            answer = await within(reader.read())
            sizes = [part.split(b"\r\n\r\n")[1] for part in answer.split(b"HTTP/1.1 200 OK")[1:]]
            assert sizes == [b"3 bytes", b"0 bytes", b"4 bytes", b"20 bytes", b"0 bytes"], cut


async def test_requests_behind_a_chunked_body_wait_for_its_answer_wherever_its_end_is_cut() -> None:
    chunked = b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
    behind = get("/", CLOSE)

    async with serving() as pair:
        table = pair.server.connections
        for cut in range(1, 6):
            pair.application.hold.clear()
            reader, writer = await pair.connect()
            writer.write(chunked[:-cut])
            await pair.until(lambda: table.unfinished_bytes == 3)
            writer.write(chunked[-cut:] + behind)
            await pair.until(lambda: table.unfinished_bytes == len(behind))
            pair.application.hold.set()
            answer = await within(reader.read())
            sizes = [part.split(b"\r\n\r\n")[1] for part in answer.split(b"HTTP/1.1 200 OK")[1:]]
            assert sizes == [b"3 bytes", b"0 bytes"], cut


# -- connections -------------------------------------------------------------------------------------------------------


def test_whoever_only_holds_connections_gives_way_to_others(run: Run) -> None:
    async def scenario() -> None:
        async with serving(connections=4, connections_per_address=100) as pair:
            table = pair.server.connections
            silent, _ = await pair.connect()
            await pair.until(lambda: len(table.heads) == 1)
            idle, idle_writer = await pair.connect()
            idle_writer.write(get())
            await within(idle.readuntil(b"0 bytes"))
            for _ in range(2):
                await pair.connect()
                await pair.until(lambda: table.count == len(pair.writers))
            for reader in (idle, silent):
                assert (await pair.ask(get("/", CLOSE))).endswith(b"0 bytes")
                assert await within(reader.read()) == b""
                # The next one must find no room of the one before.
                await pair.until(lambda: table.count == 3)
                await pair.connect()
                await pair.until(lambda: table.count == 4)
            assert pair.refused("gave_way") == 2

    run(scenario())


def test_with_a_request_in_work_on_every_connection_a_new_one_is_answered_503(run: Run) -> None:
    async def scenario() -> None:
        async with serving(connections=2, connections_per_address=100) as pair:
            pair.application.hold.clear()
            busy = [await pair.connect() for _ in range(2)]
            for _, writer in busy:
                writer.write(post(b"abc", "/", None, CLOSE))
            await pair.until(lambda: pair.application.begun == 2)
            assert (await pair.ask(b"")).startswith(b"HTTP/1.1 503 ")
            assert pair.refused("connections") == 1
            pair.application.hold.set()
            for reader, _ in busy:
                assert (await within(reader.read())).endswith(b"3 bytes")
            assert (await pair.ask(get("/", CLOSE))).endswith(b"0 bytes")

    run(scenario())


async def test_one_address_has_its_share_of_the_connections() -> None:
    async with serving(connections=8) as pair:
        for _ in range(6):
            await pair.connect()
            await pair.until(lambda: pair.server.connections.count == len(pair.writers))
        answer = await pair.ask(b"")
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"127.0.0.1" in answer
        assert pair.refused("connections_per_address") == 1


@pytest.mark.parametrize(
    ("host", "source"),
    [
        ("10.1.2.3", "10.1.2.3"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2:ffff::", "2001:db8:1:2::/64"),
        ("::ffff:10.1.2.3", "10.1.2.3"),
        ("fe80::1%eth0", "fe80::/64"),
        ("unix", "unix"),
    ],
)
def test_connections_are_counted_by_address_or_network(host: str, source: str) -> None:
    assert source_of(host) == source


def test_the_limit_of_open_files_bounds_the_connections(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    limits = (1024, 4096)

    def get_limits(_: int) -> tuple[int, int]:
        return limits

    def set_limits(_: int, wanted: tuple[int, int]) -> None:
        nonlocal limits
        limits = wanted

    monkeypatch.setattr(resource, "getrlimit", get_limits)
    monkeypatch.setattr(resource, "setrlimit", set_limits)
    monkeypatch.setattr(connections, "_open_files", lambda: 40)
    for wanted, fit, raised in (
        (100, 100, (1024, 4096)),
        (2000, 2000, (2000 + OTHER_FILES, 4096)),
        (16_384, 4096 - OTHER_FILES, (4096, 4096)),
    ):
        assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
        table = HttpConnections(HttpLimits(connections=wanted))
        table.fit_files()
        assert (table.limits.connections, limits) == (fit, raised)
    assert "max_connections" in caplog.text


# -- clients that end their side ---------------------------------------------------------------------------------------


def final(answer: bytes) -> bytes:
    """Return an answer without the probes before it."""
    probe = b"HTTP/1.1 100 Continue\r\n\r\n"
    while answer.startswith(probe):
        answer = answer.removeprefix(probe)
    return answer


@pytest.mark.parametrize("held", [False, True], ids=["at once", "later"])
def test_a_client_that_ends_its_side_gets_its_answers(run: Run, held: bool) -> None:
    async def scenario() -> None:
        async with serving() as pair:
            application = pair.application
            if held:
                application.hold.clear()
            reader, writer = await pair.connect()
            writer.write(post(b"abc") + post(b"defg"))
            writer.write_eof()
            if held:
                # The probes begin, so it is known to be still there.
                assert await within(reader.readuntil(b"100 Continue\r\n\r\n"))
                application.hold.set()
            answer = final(await within(reader.read()))
            assert answer.count(b"HTTP/1.1 200 ") == 2
            assert b"3 bytes" in answer
            assert answer.endswith(b"4 bytes")
            assert not application.left.is_set()

    run(scenario())


def test_a_stream_goes_on_for_a_client_that_has_ended_its_side(run: Run) -> None:
    async def scenario() -> None:
        async with serving() as pair:
            pair.application.hold.clear()
            pair.application.begin.clear()
            reader, writer = await pair.connect()
            writer.write(post(b"abc", "/stream"))
            writer.write_eof()
            assert await within(reader.readuntil(b"100 Continue\r\n\r\n"))
            pair.application.begin.set()
            assert await within(reader.readuntil(b"first"))
            pair.application.hold.set()
            assert b"last\r\n" in await within(reader.read())

    run(scenario())


def test_a_client_that_leaves_after_it_ended_its_side_is_noticed(run: Run) -> None:
    async def scenario() -> None:
        async with serving() as pair:
            pair.application.hold.clear()
            reader, writer = await pair.connect()
            writer.write(post(b"abc"))
            writer.write_eof()
            assert await within(reader.readuntil(b"100 Continue\r\n\r\n"))
            writer.close()
            await within(pair.application.left.wait())

    run(scenario())


def test_a_client_that_leaves_in_the_moment_in_which_a_silent_answer_begins_is_noticed(run: Run) -> None:
    async def scenario() -> None:
        async with serving() as pair:
            pair.application.hold.clear()
            pair.application.begin.clear()
            _, writer = await pair.connect()
            writer.write(post(b"abc", "/stream"))
            await within(pair.application.entered.wait())
            [guard] = pair.server.connections.open
            assert isinstance(guard, Guard)
            writer.close()
            await pair.until(lambda: guard._probe is not None)
            pair.application.begin.set()
            await within(pair.application.left.wait())

    run(scenario())


@pytest.mark.parametrize("unfinished", [b"GET / HT", post(b"abc", "/", 10), post(b"abc", "/watched", 10)])
def test_a_request_that_ends_before_it_is_whole_is_over(run: Run, unfinished: bytes) -> None:
    async def scenario() -> None:
        async with serving() as pair:
            for before in (b"", post(b"abc")):
                reader, writer = await pair.connect()
                writer.write(before + unfinished)
                writer.write_eof()
                answer = final(await within(reader.read()))
                assert answer.count(b"HTTP/1.1 200 ") == (1 if before else 0)
            await pair.until(lambda: pair.server.connections.count == 0)

    run(scenario())


# -- clients that do not read ------------------------------------------------------------------------------------------


def test_a_client_that_takes_nothing_of_its_answer_is_cut(run: Run) -> None:
    async def scenario() -> None:
        async with serving(write_timeout_s=0.1) as pair:
            pair.application.answer_bytes = 2**25
            bare = socket.create_connection(("127.0.0.1", pair.server.port))
            try:
                bare.sendall(get())
                await pair.until(lambda: pair.refused("write_timeout") == 1)
                await pair.until(lambda: pair.server.connections.count == 0)
            finally:
                bare.close()

    run(scenario())


def test_a_client_that_takes_its_answer_slowly_is_not_cut(run: Run) -> None:
    async def scenario() -> None:
        async with serving() as pair:
            table = pair.server.connections
            size = pair.application.answer_bytes = 2**25
            reader, writer = await pair.connect()
            writer.write(get("/", CLOSE))
            await pair.until(lambda: len(table.stuck) == 1)
            now_s = asyncio.get_running_loop().time()
            taken = 0
            while part := await within(reader.read(2**19)):
                taken += len(part)
                while table.stuck and taken < size // 2:
                    # More of what waits is on its way to the client whenever it has taken some.
                    now_s += FOREVER_S
                    [connection] = table.stuck
                    assert isinstance(connection, Guard)
                    unsent_bytes = connection.transport.get_write_buffer_size()
                    if unsent_bytes < connection._unsent_bytes:
                        table.tick(now_s)
                        break
                    taken += len(await within(reader.read(2**19)))
            assert taken > size
            assert now_s > asyncio.get_running_loop().time() + 3 * FOREVER_S, "its time was over several times"
            assert pair.refused("write_timeout") == 0

    run(scenario())


# -- TLS ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def tls(authority: trustme.CA, tmp_path: Path) -> Tls:
    issued = authority.issue_cert("127.0.0.1")
    certificate, key = tmp_path / "server.pem", tmp_path / "server.key"
    issued.private_key_pem.write_to_path(key)
    certificate.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    settings = SecuritySettings(tls_certificate=certificate, tls_key=key)
    loaded = Tls.load(settings, CollectorRegistry())
    assert loaded is not None
    return loaded


def trusting(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


def test_the_limits_hold_under_tls(run: Run, tls: Tls, authority: trustme.CA) -> None:
    async def scenario() -> None:
        async with serving(tls=tls, body_timeout_s=0.05, keep_alive_timeout_s=0.05) as pair:
            pair.client_ssl = trusting(authority)
            assert (await pair.ask(b"GET / HTTP/1.1\r\nendless: " + b"x" * 5000)).startswith(b"HTTP/1.1 431 ")
            assert (await pair.ask(post(b"abc", "/", 10))).startswith(b"HTTP/1.1 408 ")
            assert (await pair.ask(get())).endswith(b"0 bytes"), "and then it is closed"
            reader, writer = await pair.connect()
            writer.write(get() * 1000)
            for _ in range(1000):
                await within(reader.readuntil(b"0 bytes"))
            pair.application.hold.clear()
            _, leaver = await pair.connect()
            leaver.write(post(b"abc"))
            await pair.until(lambda: pair.application.begun == 1002)
            leaver.close()
            await within(pair.application.left.wait())

    run(scenario())


def test_a_connection_counts_before_its_handshake(run: Run, tls: Tls) -> None:
    async def scenario() -> None:
        async with serving(tls=tls, connections=8, connections_per_address=2, header_timeout_s=0.3) as pair:
            silent = [await pair.connect() for _ in range(2)]
            await pair.until(lambda: pair.server.connections.count == 2)
            assert await pair.ask(b"") == b"", "one more is closed"
            assert pair.refused("connections_per_address") == 1
            for reader, _ in silent:
                assert await within(reader.read()) == b""
            await pair.until(lambda: pair.refused("tls_handshake") == 2)
            assert pair.server.connections.count == 0

    run(scenario())


# -- settings, log -----------------------------------------------------------------------------------------------------


def test_the_settings_are_the_limits() -> None:
    assert HttpSettings().http_limits() == HttpLimits()
    changed = HttpSettings(http_request_timeout_ms=1500, max_connections=7).http_limits()
    assert (changed.header_timeout_s, changed.connections) == (1.5, 7)


def test_the_log_says_each_reason_once_a_minute_with_its_number(caplog: pytest.LogCaptureFixture) -> None:
    table = HttpConnections(SMALL)
    for now_s in (0.0, 1.0, 2.0, SAID_EVERY_S):
        table.note("head_too_large", "10.0.0.1", now_s)
    table.note("connections", "10.0.0.2", 3.0)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 3
    assert ["head_too_large" in line for line in lines] == [True, True, False]
    assert ["1 since" in lines[0], "3 since" in lines[1], "1 since" in lines[2]] == [True, True, True]
    assert table.refused == {"head_too_large": 4, "connections": 1}


@pytest.mark.parametrize("announced", [100, 100_000])
def test_a_body_has_a_time(run: Run, announced: int) -> None:
    async def scenario() -> None:
        async with serving(body_timeout_s=0.05) as pair:
            answer = await pair.ask(post(b"abc", "/", announced))
            assert answer.startswith(b"HTTP/1.1 408 ")
            assert b"http_request_timeout_ms" in answer
            assert pair.refused("body_timeout") == 1
            await within(pair.application.left.wait())

    run(scenario())


def test_a_client_that_is_answered_without_its_body_and_sends_none_is_closed_in_time(run: Run) -> None:
    async def scenario() -> None:
        async with serving(body_timeout_s=0.05) as pair:
            answer = await pair.ask(post(b"", "/unread", 100, "expect: 100-continue"))
            assert answer.startswith(b"HTTP/1.1 200 ")
            assert answer.endswith(b"unread")
            assert pair.refused("body_timeout") == 1

    run(scenario())
