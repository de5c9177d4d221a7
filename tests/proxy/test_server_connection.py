"""Answers of a server as its connection reads them: cut anywhere, and before any request."""

from __future__ import annotations

import asyncio

import pytest

from poolgrid.server.proxy.collector import look_up
from poolgrid.server.proxy.forward_server import ForwardServer
from poolgrid.server.proxy.server_connection import (
    SLICE_BREAKS,
    SLICE_BYTES,
    AnswerFailed,
    HeaderList,
    ServerConnection,
)

TIMEOUT_S = 60.0
GREETINGS = {
    "nothing": b"",
    "an answer": b"HTTP/1.1 400 Early\r\ncontent-length: 2\r\n\r\n{}",
    "half an answer": b"HTTP/1.1 400 Ea",
    "another protocol": b"SSH-2.0-OpenSSH\r\n\r\n",
}


@pytest.mark.parametrize("greeting", GREETINGS.values(), ids=GREETINGS.keys())
async def test_server_that_answers_before_the_request_and_leaves_fails_it_at_most(greeting: bytes) -> None:
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting)
        writer.close()

    async with await asyncio.start_server(greet, "127.0.0.1", 0) as listener, asyncio.timeout(TIMEOUT_S):
        server = ForwardServer(f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}")
        for _ in range(30):
            try:
                answer = await look_up(server, b"/v1/models")
                assert (answer.status, answer.body) == (400, b"{}")
            except (AnswerFailed, OSError):
                pass
        server.close()


class Recorded(asyncio.Transport):
    """Takes what is written; closed is closed."""

    def __init__(self) -> None:
        super().__init__()
        self._is_closing = False
        self.is_paused = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self._is_closing

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        self._is_closing = True

    def abort(self) -> None:
        self._is_closing = True

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        assert not self._is_closing
        self.is_paused = False


class Taken:
    """An ``AnswerSink`` that keeps what it gets."""

    def __init__(self) -> None:
        self.status = self.ends = self.failures = 0
        self.body = b""

    def on_head(self, status: int, headers: HeaderList, is_chunked: bool) -> None:
        assert not self.status, "one head"
        self.status = status

    def on_data(self, data: bytes, chunks: bytes = b"") -> None:
        assert self.status, "the head is first"
        assert not self.ends
        self.body += data

    def on_end(self) -> None:
        assert self.status, "the head is first"
        self.ends += 1

    def on_failed(self, error: AnswerFailed, is_stale: bool) -> None:
        self.failures += 1


OK = b"HTTP/1.1 200 OK\r\n"
INTERIM = b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n"
WHOLE = {
    "with a length": OK + b"content-length: 2\r\n\r\n{}",
    "in chunks": OK + b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n1;x\r\n}\r\n0\r\nx: y\r\n\r\n",
    "behind interim answers": INTERIM * 3 + OK + b"content-length: 2\r\n\r\n{}",
}
BEHIND = {"nothing": b"", "another answer": OK + b"content-length: 0\r\n\r\n", "no answer": b"SSH-2.0\r\n\r\n"}
BROKEN = {
    "interim answers without end": INTERIM * 200,
    "an interim answer that is none": b"HTTP/1.1 099 Odd\r\n\r\n" + OK + b"content-length: 2\r\n\r\n{}",
    "a change of protocol": b"HTTP/1.1 101 No\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n{}",
    "empty lines": b"\r\n\r\n" * 100,
    "a head without end": OK + b"x: " + b"y" * 70_000,
}


async def taken(data: bytes, size: int, method: bytes = b"GET") -> tuple[Taken, list[bool], ServerConnection]:
    """Hand an answer to a connection in pieces of a size."""
    released: list[bool] = []
    connection, sink, transport = ServerConnection(lambda _, keep: released.append(keep)), Taken(), Recorded()
    connection.connection_made(transport)
    connection.send(sink, (b"request",), method == b"HEAD")
    for at in range(0, len(data), size):
        if not transport.is_closing():
            connection.data_received(data[at : at + size])
        for _ in range(min(size, len(data)) // 400 + 2):
            await asyncio.sleep(0)
    return sink, released, connection


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
@pytest.mark.parametrize("behind", BEHIND.values(), ids=BEHIND.keys())
@pytest.mark.parametrize("answer", WHOLE.values(), ids=WHOLE.keys())
async def test_answer_is_read_however_it_is_cut_and_with_anything_behind_it(
    answer: bytes, behind: bytes, size: int
) -> None:
    sink, released, connection = await taken(answer + behind, size)

    assert (sink.status, sink.body, sink.ends, sink.failures) == (200, b"{}", 1, 0)
    assert connection.is_usable is (not behind)
    if not behind:
        assert released == [True]


@pytest.mark.parametrize("size", [1, 7, 100_000])
@pytest.mark.parametrize("answer", BROKEN.values(), ids=BROKEN.keys())
async def test_what_is_no_answer_fails_its_request_once(answer: bytes, size: int) -> None:
    sink, released, connection = await taken(answer, size)

    assert (sink.status, sink.ends, sink.failures) == (0, 0, 1)
    assert released == []
    assert not connection.is_usable


@pytest.mark.parametrize(
    ("method", "head"),
    [
        (b"HEAD", OK + b"content-length: 2\r\n\r\n"),
        (b"HEAD", OK + b"transfer-encoding: chunked\r\n\r\n"),
        (b"GET", b"HTTP/1.1 204 No Content\r\ncontent-length: 2\r\n\r\n"),
        (b"GET", b"HTTP/1.1 304 Not Modified\r\ncontent-length: 2\r\n\r\n"),
    ],
)
async def test_connection_is_not_kept_after_an_answer_that_announces_a_body_and_has_none(
    method: bytes, head: bytes
) -> None:
    """What the server sends all the same would be the beginning of the next answer."""
    sink, released, connection = await taken(head, 1000, method)

    assert (sink.ends, sink.body, released) == (1, b"", [])
    assert not connection.is_usable


@pytest.mark.parametrize("head", [b"204 No Content", b"304 Not Modified", b"204 No Content\r\ncontent-length: 0"])
async def test_connection_is_kept_after_an_answer_that_announces_no_body(head: bytes) -> None:
    sink, released, connection = await taken(b"HTTP/1.1 " + head + b"\r\n\r\n", 7)

    assert (sink.ends, sink.body, released) == (1, b"", [True])
    assert connection.is_usable


TINY = b"1\r\nx\r\n" * 50_000
BIG = {
    "tiny chunks": (OK + b"transfer-encoding: chunked\r\n\r\n" + TINY + b"0\r\n\r\n", b"x" * 50_000),
    "a length": (OK + b"content-length: 300000\r\n\r\n" + b"y" * 300_000, b"y" * 300_000),
    "big chunks": (
        OK + b"transfer-encoding: chunked\r\n\r\n" + (b"7d00\r\n" + b"z" * 32_000 + b"\r\n") * 9 + b"0\r\n\r\n",
        b"z" * 288_000,
    ),
}


@pytest.mark.parametrize(("answer", "body"), BIG.values(), ids=BIG.keys())
@pytest.mark.parametrize("behind", BEHIND.values(), ids=BEHIND.keys())
async def test_long_read_is_taken_in_turns_of_the_event_loop(answer: bytes, body: bytes, behind: bytes) -> None:
    loop, turns = asyncio.get_running_loop(), 0

    def count() -> None:
        nonlocal turns
        turns += 1
        loop.call_soon(count)

    loop.call_soon(count)
    sink, released, connection = await taken(answer + behind, len(answer) + 100)

    assert (sink.body, sink.ends, sink.failures) == (body, 1, 0)
    breaks = answer.count(b"\r") + answer.count(b"\n")
    assert turns >= len(answer) // SLICE_BYTES + breaks // SLICE_BREAKS
    assert released == ([] if behind else [True])
    assert connection.is_usable is (not behind)


async def test_client_that_takes_nothing_within_a_long_read_holds_the_server_back_after_it() -> None:
    answer, _ = BIG["a length"]
    connection, sink, transport = ServerConnection(lambda *_: None), Taken(), Recorded()
    connection.connection_made(transport)
    connection.send(sink, (b"request",))
    connection.data_received(answer[:200_000])
    connection.pause()
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(sink.body) > 190_000
    assert transport.is_paused
    connection.resume()
    assert not transport.is_paused


@pytest.mark.parametrize("end", ["lost", "aborted"])
async def test_end_of_a_connection_within_a_long_read(end: str) -> None:
    answer, body = BIG["tiny chunks"]
    connection, sink, transport = ServerConnection(lambda *_: None), Taken(), Recorded()
    connection.connection_made(transport)
    connection.send(sink, (b"request",))
    connection.data_received(answer)
    transport.close()
    if end == "aborted":
        connection.abort()
    connection.connection_lost(None)
    for _ in range(1000):
        await asyncio.sleep(0)

    if end == "lost":
        assert (sink.body, sink.ends, sink.failures) == (body, 1, 0), "all of it had come"
    else:
        assert (sink.ends, sink.failures) == (0, 0)
