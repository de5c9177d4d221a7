"""HTTP/1.1 of our server: what reaches the application, and what goes over the wire."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from poolgrid.server.http import http_server
from poolgrid.server.http.guard import AnswerSource
from poolgrid.server.http.http_server import HttpServer
from poolgrid.server.http.http_settings import HttpLimits
from tests.examples import examples


class Source(AnswerSource):
    """Reports that the client of an answer has left."""

    def __init__(self, left: asyncio.Event) -> None:
        self._left = left

    def client_gone(self) -> None:
        self._left.set()

    def pause(self) -> None:
        pass

    def resume(self) -> None:
        pass


class Application:
    """Answers with the size of the body, in the way that the headers of a request ask for; 404 at ``/other``."""

    def __init__(self) -> None:
        self.left = asyncio.Event()
        self.hold = asyncio.Event()
        self.entered = asyncio.Event()
        self.proceed = asyncio.Event()
        """What a stream waits for whose head has been sent."""
        self.hold.set()
        self.scope: Scope = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        if scope["path"] == "/other":
            await send({"type": "http.response.start", "status": 404, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return
        body = b""
        more = True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        scope["state"]["guard"].source = Source(self.left)
        self.entered.set()
        await self.hold.wait()
        headers = dict(scope["headers"])
        if headers.get(b"x-stream"):
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for part in (b"one", b"", b"two"):
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return
        if headers.get(b"x-wait"):
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"", "more_body": True})
            await self.proceed.wait()
            await send({"type": "http.response.body", "body": b"late", "more_body": False})
            return
        if headers.get(b"x-bare"):
            await send({"type": "http.response.start", "status": 200})
            await send({"type": "http.response.body", "body": b"bare"})
            return
        if headers.get(b"x-fail"):
            raise ValueError("injected")
        answer = b"w" * int(headers.get(b"x-bytes", b"0")) or b"%d" % len(body)
        length = int(headers.get(b"x-length", len(answer)))
        headers_out = [
            (b"content-length", b"%d" % length),
            (b"x-text", headers.get(b"x-text", b"").replace(b"|", b"\r\n")),
        ]
        if headers.get(b"x-close"):
            headers_out.append((b"connection", b"close"))
        await send({"type": "http.response.start", "status": 200, "headers": headers_out})
        await send({"type": "http.response.body", "body": answer, "more_body": False})


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def response(self) -> tuple[int, dict[str, str], bytes]:
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
        if "content-length" in headers:
            return int(head[0].split()[1]), headers, await self.reader.readexactly(int(headers["content-length"]))
        body = b""
        while True:
            size = int(await self.reader.readline(), 16)
            part = (await self.reader.readexactly(size + 2))[:-2]
            if not size:
                return int(head[0].split()[1]), headers, body
            body += part


@asynccontextmanager
async def talking(registry: CollectorRegistry | None = None) -> AsyncIterator[tuple[Application, Client]]:
    application = Application()
    server = HttpServer(application, "127.0.0.1", 0, "port", registry=registry, limits=HttpLimits(hosts=("*",)))
    server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        yield application, Client(reader, writer)
    finally:
        application.hold.set()
        writer.close()
        await server.stop()


def post(body: bytes, *headers: str, length: bool = True, path: str = "/") -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: x", *headers]
    if length:
        lines.append(f"content-length: {len(body)}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


CHUNKED = post(b"3\r\nabc\r\n0\r\n\r\n", "transfer-encoding: chunked", length=False)


async def test_a_large_answer_waits_for_a_client_that_reads_slowly() -> None:
    large = 16 * 2**20
    async with talking() as (_, client):
        client.writer.write(post(b"abc", f"x-bytes: {large}"))
        client.writer.write(post(b"abc", "x-bytes: 3"))
        for expected in (large, 3):
            _, _, body = await client.response()
            assert body == b"w" * expected


async def test_an_application_that_fails_is_answered_for(caplog: pytest.LogCaptureFixture) -> None:
    async with talking() as (_, client):
        client.writer.write(post(b"abc", "x-fail: 1"))
        status, _, body = await client.response()
        assert (status, json.loads(body)["error"]["code"]) == (500, "internal_error")
        assert await client.reader.read() == b""
    assert "the application failed" in caplog.text


async def test_a_header_with_a_line_break_ends_the_connection(caplog: pytest.LogCaptureFixture) -> None:
    async with talking() as (_, client):
        client.writer.write(post(b"abc", "x-text: a|b: c"))
        assert b"b: c" not in await client.reader.read()
    assert "Invalid HTTP header value" in caplog.text


@pytest.mark.parametrize("length", [2, 4])
async def test_a_body_of_another_length_than_announced_ends_the_connection(length: int) -> None:
    async with talking() as (_, client):
        client.writer.write(post(b"", "x-bytes: 3", f"x-length: {length}"))
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await client.response()


@pytest.mark.parametrize(
    ("request_bytes", "answer"),
    [
        (post(b"abc"), b"3"),
        (post(b""), b"0"),
        (post(b"x" * 300_000), b"300000"),
        (CHUNKED, b"3"),
        (post(b"abc", path="/?x=1"), b"3"),
        (post(b"abc", path="/other"), b""),
        (post(b"abc").replace(b"POST", b"PUT"), b"3"),
    ],
    ids=["short", "empty", "long", "chunked", "query", "other path", "other method"],
)
async def test_bodies_are_received(request_bytes: bytes, answer: bytes) -> None:
    async with talking() as (_, client):
        for _ in range(2):  # the connection is kept
            client.writer.write(request_bytes)
            status, _, body = await client.response()
            assert (status, body) == (200 if answer else 404, answer)


@pytest.mark.parametrize(
    ("target", "path", "raw_path", "query"),
    [
        ("/a/b?x=1?y", "/a/b", b"/a/b", b"x=1?y"),
        ("/a%20b", "/a b", b"/a%20b", b""),
        ("http://host/a?x", "/a", b"/a", b"x"),
    ],
)
async def test_a_target_becomes_the_path_and_query_of_a_scope(
    target: str, path: str, raw_path: bytes, query: bytes
) -> None:
    async with talking() as (application, client):
        client.writer.write(post(b"abc", path=target))
        await client.response()
        scope = application.scope
        assert (scope["path"], scope["raw_path"], scope["query_string"]) == (path, raw_path, query)
        assert (scope["method"], scope["scheme"], scope["client"][0]) == ("POST", "http", "127.0.0.1")


@pytest.mark.parametrize("request_line", [b"HEAD / HTTP/1.1", b"GET / HTTP/1.0"])
async def test_answers_without_a_body_and_to_http_1_0_end_where_they_should(request_line: bytes) -> None:
    async with talking() as (_, client):
        client.writer.write(request_line + b"\r\nhost: x\r\nx-stream: 1\r\nconnection: close\r\n\r\n")
        head, _, body = (await client.reader.read()).partition(b"\r\n\r\n")
        assert b"chunked" not in head
        assert body == (b"" if request_line.startswith(b"HEAD") else b"onetwo")


async def test_a_client_that_waits_for_100_continue_gets_it() -> None:
    async with talking() as (_, client):
        client.writer.write(post(b"abc", "expect: 100-continue")[:-3])
        assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.writer.write(b"abc")
        assert (await client.response())[2] == b"3"


async def test_a_stream_is_chunked_and_empty_parts_do_not_end_it() -> None:
    async with talking() as (_, client):
        for _ in range(2):
            client.writer.write(post(b"abc", "x-stream: 1"))
            assert (await client.response())[2] == b"onetwo"


async def test_the_head_of_a_stream_leaves_alone_where_its_first_part_is_empty() -> None:
    async with talking() as (application, client):
        client.writer.write(post(b"abc", "x-wait: 1"))
        assert (await client.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        application.proceed.set()
        assert await client.reader.readuntil(b"0\r\n\r\n") == b"4\r\nlate\r\n0\r\n\r\n"


PACES = ("whole", "in pieces", "behind the one before")


@settings(max_examples=examples(20))
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 12), st.sampled_from(PACES)), min_size=4, max_size=16))
def test_requests_of_one_connection_are_answered_as_if_each_had_its_own(asked: list[tuple[bool, int, str]]) -> None:
    async def go() -> None:
        async with talking() as (_, client):
            expected: list[bytes] = []
            answered: list[bytes] = []
            for is_found, size, pace in asked:
                request = post(b"b" * size, path="/" if is_found else "/other")
                expected.append(b"%d" % size if is_found else b"")
                if pace != "behind the one before":
                    while len(answered) < len(expected) - 1:
                        answered.append((await client.response())[2])
                if pace == "in pieces":
                    half = len(request) // 2
                    client.writer.write(request[:half])
                    await asyncio.sleep(0)
                    request = request[half:]
                client.writer.write(request)
            while len(answered) < len(expected):
                answered.append((await client.response())[2])
            assert answered == expected

    asyncio.run(go())


@pytest.mark.parametrize("who", ["client", "application"])
async def test_the_connection_closes_when_either_side_wants_it(who: str) -> None:
    async with talking() as (_, client):
        client.writer.write(post(b"abc", "connection: close" if who == "client" else "x-close: 1"))
        _, headers, _ = await client.response()
        assert headers["connection"] == "close"
        assert await client.reader.read() == b""


async def test_the_application_is_told_when_its_client_leaves() -> None:
    async with talking() as (application, client):
        application.hold.clear()
        client.writer.write(post(b"abc"))
        await asyncio.wait_for(application.entered.wait(), 120)
        assert not application.left.is_set()
        client.writer.transport.abort()
        await asyncio.wait_for(application.left.wait(), 120)


async def test_a_client_that_leaves_amid_its_body_reaches_nobody() -> None:
    async with talking() as (application, client):
        client.writer.write(post(b"abc")[:-1])
        await client.writer.drain()
        client.writer.close()
        await client.writer.wait_closed()
        # A second connection is served after the first one's end was seen.
        other = Client(*await asyncio.open_connection("127.0.0.1", client.writer.get_extra_info("peername")[1]))
        other.writer.write(post(b"abcd"))
        assert (await other.response())[2] == b"4"
        other.writer.close()
        assert application.entered.is_set()
        assert not application.left.is_set()


async def test_a_port_scan_is_counted_and_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    registry = CollectorRegistry()

    async with talking(registry) as (_, client):
        port = client.writer.get_extra_info("peername")[1]
        for nonsense in (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc", b"SSH-2.0-scanner\r\n", b"\r\n\x00\x00" * 9):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(nonsense)
            assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
            writer.close()

    assert registry.get_sample_value("poolgrid_http_refused_total", {"reason": "invalid_http"}) == 3
    (line,) = [record.getMessage() for record in caplog.records if "invalid_http" in record.getMessage()]
    assert "127.0.0.1" in line


async def test_a_request_to_upgrade_is_answered_as_what_it_is_otherwise(caplog: pytest.LogCaptureFixture) -> None:
    async with talking() as (_, client):
        client.writer.write(post(b"abc", "connection: upgrade", "upgrade: websocket"))
        status, _, _ = await client.response()
        assert status == 200

    assert not caplog.records


async def test_nonsense_is_answered_400() -> None:
    async with talking() as (_, client):
        client.writer.write(b"NONSENSE\r\n\r\n")
        status, _, _ = await client.response()
        assert status == 400


@pytest.mark.parametrize("header", [b"", b"x-stream: 1\r\n"])
async def test_nothing_of_an_answered_request_waits_for_the_collector(header: bytes) -> None:
    async with talking() as (_, client):
        gc.collect()
        # What other tests of this process still hold is not ours; holding it here keeps it apart from ours.
        earlier = [each for each in gc.get_objects() if isinstance(each, RequestResponseCycle)]
        gc.disable()
        try:
            for _ in range(20):
                client.writer.write(b"POST / HTTP/1.1\r\nhost: x\r\n" + header + b"content-length: 3\r\n\r\nabc")
                await client.response()
            alive = [each for each in gc.get_objects() if isinstance(each, RequestResponseCycle)]
            # The protocol has the last one until the next request.
            assert len(alive) - len(earlier) <= 1
        finally:
            gc.enable()


async def test_a_server_that_is_told_to_end_does_not_wait_for_its_next_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "TICK_S", 3600.0)
    limits = HttpLimits(hosts=("*",))
    server = HttpServer(Application(), "127.0.0.1", 0, "port", stop_timeout_ms=3_600_000, limits=limits)
    server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    client = Client(reader, writer)
    writer.write(post(b"abc"))
    assert (await client.response())[0] == 200
    async with asyncio.timeout(60):
        await server.stop()
        assert await reader.read() == b""
    writer.close()
