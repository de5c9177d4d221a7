"""Connections that end when nobody expects it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

import pytest
import uvloop

from poolgrid.http.http_client import (
    HEADERS_BYTES_MAX,
    ClientExchange,
    Connection,
    HttpClient,
    HttpTarget,
    RequestFailed,
)
from poolgrid.process.clock import SystemClock

LOOPS = pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
TIMEOUT_S = 120.0

Run = Callable[[Coroutine[Any, Any, None]], None]


class Recorded(asyncio.Transport):
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[bytes] = []

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        self.sent += list_of_data

    def abort(self) -> None:
        pass


def test_one_that_its_server_has_ended_is_not_used_again_before_it_is_lost() -> None:
    connection = Connection(SystemClock())
    connection.connection_made(Recorded())
    assert connection.usable

    connection.eof_received()

    assert not connection.usable


async def test_nothing_is_sent_or_awaited_on_one_that_was_lost_before() -> None:
    connection, transport = Connection(SystemClock()), Recorded()
    connection.connection_made(transport)
    connection.connection_lost(None)
    with pytest.raises(RequestFailed, match="disconnect: the server closed the connection before"):
        await connection.send((b"head", b"body"), ClientExchange())
    assert transport.sent == []


@LOOPS
def test_a_server_that_hangs_up_on_everybody_fails_every_request_at_once(run: Run) -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async def scenario() -> None:
        async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as server, asyncio.timeout(TIMEOUT_S):
            port = server.sockets[0].getsockname()[1]
            client = HttpClient(HttpTarget(f"http://127.0.0.1:{port}"), SystemClock())
            for _ in range(20):
                with pytest.raises(RequestFailed, match="disconnect"):
                    await client.send("GET", "/", b"", ClientExchange())
            client.close()

    run(scenario())


class _Taken(ClientExchange):
    """Counts what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.body = b""
        self.headers = 0

    def take_header(self, name: bytes, value: bytes) -> None:
        self.headers += 1

    def take_body(self, data: bytes) -> None:
        self.body += data


HEAD = b"HTTP/1.1 200 OK\r\n"
ENDLESS = {
    "a header's value": (HEAD + b"x: ", b"a"),
    "a header's name": (HEAD, b"a"),
    "headers": (HEAD, b"x: y\r\n"),
    "the status line": (b"HTTP/1.1 200 ", b"a"),
    "a trailer": (HEAD + b"transfer-encoding: chunked\r\n\r\n1\r\nx\r\n0\r\nx: ", b"a"),
    "trailers": (HEAD + b"transfer-encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n", b"x: y\r\n"),
    "a chunk's extension": (HEAD + b"transfer-encoding: chunked\r\n\r\n1;", b"a"),
    "empty lines": (b"", b"\r\n"),
}


@pytest.mark.parametrize("what", ENDLESS)
@pytest.mark.parametrize("size", [7, 1200, 250_000])
async def test_an_answer_that_does_not_come_to_its_body_is_given_up_after_some_bytes(what: str, size: int) -> None:
    beginning, more = ENDLESS[what]
    piece = (more * (size // len(more) + 1))[: size // len(more) * len(more)] or more
    fed = 0

    connection = Connection(SystemClock())
    connection.connection_made(Recorded())
    asking = asyncio.ensure_future(connection.send((b"head", b""), _Taken()))
    await asyncio.sleep(0)
    if beginning:
        connection.data_received(beginning)
    while connection.usable:
        assert fed < 8 * HEADERS_BYTES_MAX
        connection.data_received(piece)
        fed += len(piece)
    with pytest.raises(RequestFailed, match="protocol"):
        await asking
    assert fed <= 2 * HEADERS_BYTES_MAX + len(piece)


async def test_whole_answers_of_any_size_and_in_any_pieces_are_read() -> None:
    body = bytes(range(256)) * 2000
    chunked = b"".join(b"%x\r\n%b\r\n" % (len(body[at : at + 7]), body[at : at + 7]) for at in range(0, len(body), 7))
    answers = (
        HEAD + b"content-length: %d\r\n\r\n" % len(body) + body,
        HEAD + b"transfer-encoding: chunked\r\nx: y\r\n\r\n" + chunked + b"0\r\nafter: all\r\n\r\n",
    )

    for answer in answers:
        for size in (1200, len(answer)):
            connection, taken = Connection(SystemClock()), _Taken()
            connection.connection_made(Recorded())
            asking = asyncio.ensure_future(connection.send((b"head", b""), taken))
            await asyncio.sleep(0)
            for at in range(0, len(answer), size):
                connection.data_received(answer[at : at + size])
            await asking
            assert taken.body == body


async def test_the_failure_of_an_answer_does_not_keep_what_arrived() -> None:
    class Unread(ClientExchange):
        def take_body(self, data: bytes) -> None:
            raise RequestFailed("protocol", "it cannot be read")

    connection = Connection(SystemClock())
    connection.connection_made(Recorded())
    answer = asyncio.ensure_future(connection.send((b"head", b"body"), Unread()))
    await asyncio.sleep(0)
    connection.data_received(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nlarge")
    with pytest.raises(RequestFailed, match="it cannot be read") as caught:
        await answer
    assert "take_body" not in [entry.name for entry in caught.traceback]
    assert caught.value.__context__ is None
