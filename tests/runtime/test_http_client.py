"""Connections that end when nobody expects it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

import pytest
import uvloop

from poolgrid.runtime.clock import SystemClock
from poolgrid.runtime.http_client import Connection, Exchange, HttpClient, RequestFailed
from poolgrid.runtime.http_target import Target

LOOPS = pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
TIMEOUT_S = 30.0

Run = Callable[[Coroutine[Any, Any, None]], None]


class Recorded(asyncio.Transport):
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[bytes] = []

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        self.sent += list_of_data


def test_one_that_its_server_has_ended_is_not_used_again_before_it_is_lost() -> None:
    connection = Connection(SystemClock())
    connection.connection_made(Recorded())
    assert connection.usable

    connection.eof_received()

    assert not connection.usable


def test_nothing_is_sent_or_awaited_on_one_that_was_lost_before() -> None:
    async def scenario() -> None:
        connection, transport = Connection(SystemClock()), Recorded()
        connection.connection_made(transport)
        connection.connection_lost(None)
        with pytest.raises(RequestFailed, match="disconnect: the server closed the connection before"):
            await connection.send((b"head", b"body"), Exchange())
        assert transport.sent == []

    asyncio.run(scenario())


@LOOPS
def test_a_server_that_hangs_up_on_everybody_fails_every_request_at_once(run: Run) -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async def scenario() -> None:
        async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as server, asyncio.timeout(TIMEOUT_S):
            port = server.sockets[0].getsockname()[1]
            client = HttpClient(Target(f"http://127.0.0.1:{port}"), SystemClock())
            for _ in range(20):
                with pytest.raises(RequestFailed, match="disconnect"):
                    await client.send("GET", "/", b"", Exchange())
            client.close()

    run(scenario())
