"""What applications have of the guard of a connection, and what clients have of it that uvicorn alone gives none."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from poolgrid.server.http.guard import AnswerSource, Application, Guard, Receive, Scope, Send
from poolgrid.server.http.http_server import HttpServer, open_server
from poolgrid.server.http.http_settings import HttpLimits, ServerSettings

PATIENCE_S = 60.0

Answer = Callable[[Guard, Scope, Receive, Send], Awaitable[None]]


class Source(AnswerSource):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.gone = asyncio.Event()
        self.paused = asyncio.Event()
        self.resumed = asyncio.Event()

    def client_gone(self) -> None:
        self.told.append("gone")
        self.gone.set()

    def pause(self) -> None:
        self.told.append("pause")
        self.paused.set()

    def resume(self) -> None:
        self.told.append("resume")
        self.resumed.set()


def application(answer: Answer) -> Application:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await answer(scope["state"]["guard"], scope, receive, send)

    return app


@asynccontextmanager
async def serving(answer: Answer, **limits: Any) -> AsyncIterator[HttpServer]:
    limits = {"hosts": ("*",), **limits}
    server = HttpServer(application(answer), "127.0.0.1", 0, "port", limits=HttpLimits(**limits))
    server.start()
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield server
    finally:
        await server.stop()
        assert server.connections.count == 0
        assert not server.connections.open


async def connected(server: HttpServer) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", server.port)


async def ask(server: HttpServer, request: bytes) -> bytes:
    reader, writer = await connected(server)
    writer.write(request)
    answer = await reader.read()
    writer.close()
    return answer


async def head(send: Send, *headers: tuple[bytes, bytes]) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": list(headers)})


async def end(send: Send, body: bytes = b"") -> None:
    await send({"type": "http.response.body", "body": body})


async def whole(receive: Receive) -> bytes:
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return body


async def sizes(guard: Guard, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with the size of the body."""
    body = b"%d" % len(await whole(receive))
    await head(send, (b"content-length", b"%d" % len(body)))
    await end(send, body)


async def chunks(guard: Guard, scope: Scope, receive: Receive, send: Send) -> None:
    """Write the middle of an answer past uvicorn, as whole chunks."""
    await head(send)
    guard.write(b"3\r\none\r\n4;x=y\r\n-two\r\n")
    await send({"type": "http.response.body", "body": b"-three", "more_body": True})
    guard.write(b"5\r\n-four\r\n")
    await end(send, b"-five")


# -- for applications --------------------------------------------------------------------------------------------------


async def test_chunks_that_are_written_to_the_guard_stand_where_they_were_written() -> None:
    async with serving(chunks) as server:
        for _ in range(2):
            answer = await ask(server, b"GET / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
            body = answer.partition(b"\r\n\r\n")[2]
            assert body == b"3\r\none\r\n4;x=y\r\n-two\r\n6\r\n-three\r\n5\r\n-four\r\n5\r\n-five\r\n0\r\n\r\n"


@pytest.mark.parametrize("version", [b"1.0", b"0.9", b"2.0"])
async def test_a_client_of_another_version_gets_no_chunks_and_an_end_of_the_connection(version: bytes) -> None:
    async with serving(chunks) as server:
        answer = await ask(server, b"GET / HTTP/%b\r\nhost: a\r\nconnection: keep-alive\r\n\r\n" % version)
        lines, _, body = answer.partition(b"\r\n\r\n")
        assert b"chunked" not in lines
        assert b"connection: close" in lines
        assert body == b"one-two-three-four-five"


async def test_what_an_answer_comes_from_hears_that_its_client_does_not_read_and_reads_again() -> None:
    source = Source()

    async def pour(guard: Guard, scope: Scope, receive: Receive, send: Send) -> None:
        guard.source = source
        await head(send)
        while not source.paused.is_set():
            guard.write(b"%x\r\n%b\r\n" % (2**16, b"x" * 2**16))
        await source.resumed.wait()
        await end(send)

    async with serving(pour) as server:
        reader, writer = await connected(server)
        writer.write(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
        await source.paused.wait()
        assert source.told == ["pause"]
        while not (await reader.read(2**20)).endswith(b"0\r\n\r\n"):
            pass
        assert source.told == ["pause", "resume"]
        writer.close()


@pytest.mark.parametrize("body_bytes", [0, 3, 1_000_000])
@pytest.mark.parametrize("abort", [False, True])
async def test_what_an_answer_comes_from_hears_once_that_its_client_has_left(body_bytes: int, abort: bool) -> None:
    source = Source()
    entered, ended = asyncio.Event(), asyncio.Event()

    async def hang(guard: Guard, scope: Scope, receive: Receive, send: Send) -> None:
        await whole(receive)
        guard.source = source
        await head(send)
        assert not guard.is_lost
        entered.set()
        await source.gone.wait()
        assert guard.is_lost
        guard.write(b"3\r\nend\r\n")  # which goes nowhere
        await end(send)
        ended.set()

    async with serving(hang) as server:
        reader, writer = await connected(server)
        writer.write(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % body_bytes + b"b" * body_bytes)
        await reader.readuntil(b"\r\n\r\n")
        await entered.wait()
        if abort:
            writer.transport.abort()
        else:
            writer.close()
        await ended.wait()
    assert source.told == ["gone"]


async def test_the_source_of_one_answer_hears_nothing_of_the_next() -> None:
    sources: list[Source] = []

    async def first_alone(guard: Guard, scope: Scope, receive: Receive, send: Send) -> None:
        if not sources:
            sources.append(Source())
            guard.source = sources[0]
        await sizes(guard, scope, receive, send)

    async with serving(first_alone) as server:
        reader, writer = await connected(server)
        for _ in range(2):
            writer.write(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
            await reader.readuntil(b"\r\n\r\n0")
        writer.transport.abort()
    assert sources[0].told == []


async def test_a_diverted_connection_is_the_applications_own(caplog: pytest.LogCaptureFixture) -> None:
    came: list[bytes] = []
    lost = asyncio.Event()

    async def tunnel(guard: Guard, scope: Scope, receive: Receive, send: Send) -> None:
        def echo(data: bytes) -> None:
            came.append(data)
            guard.write(data.upper())
            if data == b"bye":
                guard.close()

        guard.write(b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n")
        guard.divert(echo, lost.set)

    async with serving(tunnel, keep_alive_timeout_s=0.05, header_timeout_s=0.05) as server:
        reader, writer = await connected(server)
        writer.write(b"GET /t HTTP/1.1\r\nhost: a\r\nconnection: Upgrade\r\nupgrade: websocket\r\n\r\n\x00early")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101 ")
        assert await reader.readexactly(6) == b"\x00EARLY"
        await asyncio.sleep(0.6)  # more than two ticks: no limit of requests holds here
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        assert await reader.readexactly(18) == b"GET / HTTP/1.1\r\n\r\n"
        assert server.connections.count == 1
        writer.write(b"bye")
        assert await reader.read() == b"BYE"
        await lost.wait()
        writer.close()
    assert came == [b"\x00early", b"GET / HTTP/1.1\r\n\r\n", b"bye"]
    assert not caplog.records


async def test_a_tunnel_hears_that_its_client_does_not_read() -> None:
    source = Source()

    async def tunnel(guard: Guard, scope: Scope, receive: Receive, send: Send) -> None:
        def pour(data: bytes) -> None:
            while not source.paused.is_set():
                guard.write(b"x" * 2**16)

        guard.source = source
        guard.divert(pour, lambda: source.told.append("lost"))

    async with serving(tunnel) as server:
        reader, writer = await connected(server)
        writer.write(b"GET /t HTTP/1.1\r\nhost: a\r\nconnection: Upgrade\r\nupgrade: websocket\r\n\r\n")
        await asyncio.sleep(0.01)
        writer.write(b"pour")
        await source.paused.wait()
        while not source.resumed.is_set():
            await reader.read(2**20)
        writer.transport.abort()
    assert source.told == ["pause", "resume", "gone", "lost"]


async def test_a_tunnel_is_cut_at_the_end_of_the_server() -> None:
    lost = asyncio.Event()

    async def tunnel(guard: Guard, scope: Scope, receive: Receive, send: Send) -> None:
        guard.divert(guard.write, lost.set)

    server = HttpServer(application(tunnel), "127.0.0.1", 0, "port", 200.0, limits=HttpLimits(hosts=("*",)))
    server.start()
    reader, writer = await connected(server)
    writer.write(b"GET /t HTTP/1.1\r\nhost: a\r\nconnection: Upgrade\r\nupgrade: websocket\r\n\r\nx")
    assert await reader.readexactly(1) == b"x"
    async with asyncio.timeout(PATIENCE_S):
        await server.stop()
    assert lost.is_set()
    writer.close()


# -- for clients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "framing", [b"content-length: 3\r\n\r\nabc", b"transfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"]
)
async def test_a_request_that_offers_another_protocol_keeps_its_body_and_its_connection(framing: bytes) -> None:
    offer = b"POST / HTTP/1.1\r\nhost: a\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
    async with serving(sizes) as server:
        reader, writer = await connected(server)
        for _ in range(2):
            writer.write(offer + framing)
            assert (await reader.readuntil(b"\r\n\r\n3")).startswith(b"HTTP/1.1 200 ")
        writer.close()


async def test_a_websocket_that_is_not_taken_is_answered_and_its_connection_ends() -> None:
    async with serving(sizes) as server:
        answer = await ask(server, b"GET / HTTP/1.1\r\nhost: a\r\nconnection: Upgrade\r\nupgrade: WebSocket\r\n\r\nxyz")
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert b"connection: close" in answer


async def test_a_client_that_awaits_permission_for_its_body_is_not_asked_for_one_that_is_not_read() -> None:
    async def refuse(guard: Guard, scope: Scope, receive: Receive, send: Send) -> None:
        await head(send, (b"content-length", b"2"), (b"connection", b"close"))
        await end(send, b"no")

    async with serving(refuse) as server:
        request = b"POST / HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\ncontent-length: 1000\r\n\r\n"
        answer = await ask(server, request)
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert answer.endswith(b"no")


async def test_a_client_of_1_0_is_not_told_to_continue() -> None:
    async with serving(sizes) as server:
        answer = await ask(server, b"POST / HTTP/1.0\r\nexpect: 100-continue\r\ncontent-length: 3\r\n\r\nabc")
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert answer.endswith(b"3")


async def test_head_has_the_headers_of_its_answer_and_no_body_and_the_connection_stays() -> None:
    async def answer(guard: Guard, scope: Scope, receive: Receive, send: Send) -> None:
        await head(send, (b"content-length", b"5"))
        await end(send, b"12345")

    async with serving(answer) as server:
        reader, writer = await connected(server)
        writer.write(b"HEAD / HTTP/1.1\r\nhost: a\r\n\r\nGET / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
        answers = await reader.read()
        assert answers.count(b"HTTP/1.1 200 ") == 2
        assert answers.count(b"12345") == 1
        writer.close()


async def test_empty_lines_before_a_request_are_skipped() -> None:
    async with serving(sizes) as server:
        get = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"
        answers = await ask(server, b"\r\n" + get + b"\r\n\r\n\r\n" + get[:-2] + b"connection: close\r\n\r\n")
        assert answers.count(b"HTTP/1.1 200 ") == 2


@pytest.mark.parametrize(
    "nonsense",
    [
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\n\r\n",
        b"GET http://a HTTP/1.1\r\n\r\n",
        b"CONNECT a:443 HTTP/1.1\r\n\r\n",
        b"POST / HTTP/1.1\r\ncontent-length: 3\r\ncontent-length: 4\r\n\r\nabc",
        b"POST / HTTP/1.1\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"GET / HTTP/1.1\nhost: a\n\n\r\n\r\n",
        b"get / HTTP/1.1\r\n",
        b"\x16\x03\x01\x02\x00\x01",
    ],
)
async def test_what_is_not_a_request_is_answered_400_at_once(nonsense: bytes) -> None:
    async with serving(sizes) as server:
        answer = await ask(server, nonsense)
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert answer.count(b"HTTP/1.1 4") == 1
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_http"
        assert server.connections.refused == {"invalid_http": 1}


async def test_an_answer_has_a_date_from_the_first_one_on() -> None:
    async with serving(sizes) as server:
        assert b"\r\ndate: " in await ask(server, b"GET / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")


# -- sockets -----------------------------------------------------------------------------------------------------------


async def test_a_server_takes_a_socket_whose_owner_keeps_it_beyond_the_servers_end() -> None:
    settings = ServerSettings(port=1, http_hosts=("*",), shutdown_timeout_ms=400)
    with socket.socket() as owned:
        owned.bind(("127.0.0.1", 0))
        owned.listen()
        for _ in range(2):
            client = socket.create_connection(owned.getsockname())  # it waits for whoever serves next
            client.sendall(b"GET / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
            copy = owned.dup()
            async with AsyncExitStack() as opened:
                servers = open_server(
                    opened, settings, CollectorRegistry(), application(sizes), lambda: None, False, listener=copy
                )
                servers.start()
                assert servers.url == f"http://127.0.0.1:{owned.getsockname()[1]}"
                reader, writer = await asyncio.open_connection(sock=client)
                assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
                writer.close()


async def test_a_server_that_is_to_end_serves_until_clients_stop_coming() -> None:
    server = HttpServer(application(sizes), "127.0.0.1", 0, "port", 8_000.0, limits=HttpLimits(hosts=("*",)))
    server.start()
    reader, writer = await connected(server)
    get = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"
    writer.write(get)
    assert b"connection: close" not in await reader.readuntil(b"\r\n\r\n0")
    ending = asyncio.ensure_future(server.serve_until_quiet())
    await asyncio.sleep(0)
    writer.write(get)
    for answer in (await reader.read(), await ask(server, get)):
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert b"connection: close" in answer
    async with asyncio.timeout(PATIENCE_S):
        await ending
        await server.stop()
    with pytest.raises(ConnectionRefusedError):
        await connected(server)
    writer.close()
