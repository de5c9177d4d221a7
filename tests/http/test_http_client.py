"""Connections that end when nobody expects it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

import pytest
import uvloop

from poolgrid.server.http.http_client import (
    HEADERS_BYTES_MAX,
    ClientExchange,
    Connection,
    HttpClient,
    HttpTarget,
    RequestFailed,
)
from poolgrid.server.process.clock import SystemClock

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


BEFORE = {
    "nothing": b"",
    "interim answers": b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n",
}
BEHIND = {
    "nothing": b"",
    "another answer": b"HTTP/1.1 503 no\r\nretry-after: 7\r\ncontent-length: 3\r\n\r\nbad",
    "no answer": b"SSH-2.0-OpenSSH\r\n\r\n",
}


@pytest.mark.parametrize("before", BEFORE.values(), ids=BEFORE.keys())
@pytest.mark.parametrize("behind", BEHIND.values(), ids=BEHIND.keys())
@pytest.mark.parametrize("body", [b"", b"abc"])
@pytest.mark.parametrize("size", [1, 7, 1200])
async def test_only_the_answer_to_the_request_counts(before: bytes, behind: bytes, body: bytes, size: int) -> None:
    answer = before + HEAD + b"content-length: %d\r\n\r\n" % len(body) + body + behind
    connection, taken = Connection(SystemClock()), _Taken()
    connection.connection_made(Recorded())
    asking = asyncio.ensure_future(connection.send((b"head", b""), taken))
    await asyncio.sleep(0)
    for at in range(0, len(answer), size):
        if connection.usable:
            connection.data_received(answer[at : at + size])

    await asking
    assert (taken.status, taken.body) == (200, body)
    assert connection.usable == (not behind)


async def test_interim_answers_without_end_are_given_up() -> None:
    connection = Connection(SystemClock())
    connection.connection_made(Recorded())
    asking = asyncio.ensure_future(connection.send((b"head", b""), _Taken()))
    await asyncio.sleep(0)
    fed = 0
    while connection.usable:
        assert fed < 8 * HEADERS_BYTES_MAX
        connection.data_received(b"HTTP/1.1 102 Processing\r\n\r\n" * 40)
        fed += 1080

    with pytest.raises(RequestFailed, match="protocol"):
        await asking


async def test_a_change_of_protocol_fails_the_request() -> None:
    connection = Connection(SystemClock())
    connection.connection_made(Recorded())
    asking = asyncio.ensure_future(connection.send((b"head", b""), _Taken()))
    await asyncio.sleep(0)
    connection.data_received(b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n{}")

    with pytest.raises(RequestFailed, match="switches protocols"):
        await asking
    assert not connection.usable


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
