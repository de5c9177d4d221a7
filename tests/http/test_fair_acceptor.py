"""Who connects gets its turn: real sockets, whose connections wait before the listener begins."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvloop

from poolgrid.server.http.guard import Guard
from poolgrid.server.http.http_server import OPENED_AT_ONCE, WAITING_MAX, HttpServer

PATIENCE_S = 120.0
BACKLOG = 2048
CROWD = "127.0.0.2"
NEIGHBOUR = "127.0.0.3"
SMALL_REQUEST = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"


def run(test: Callable[[Door], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        door = Door()
        try:
            async with asyncio.timeout(PATIENCE_S):
                await test(door)
        finally:
            door.close()

    uvloop.run(bounded())


class Door:
    """A listening socket with clients that wait before it, and what is opened of them, in order."""

    def __init__(self) -> None:
        self.socket = socket.socket()
        self.socket.bind(("127.0.0.1", 0))
        self.socket.listen(BACKLOG)
        self.opened: list[str] = []
        self.connections: list[Any] = []
        self._clients: list[socket.socket] = []
        self._came = asyncio.Event()

    def client(self, address: str) -> socket.socket:
        client = socket.socket()
        client.bind((address, 0))
        client.connect(self.socket.getsockname())
        self._clients.append(client)
        return client

    def reset_client(self) -> None:
        client = self.client(CROWD)
        client.sendall(SMALL_REQUEST)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        client.close()

    @asynccontextmanager
    async def served(self) -> AsyncIterator[None]:
        async def application(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
            await send({"type": "http.response.body", "body": b"ok"})

        door = self
        made = Guard.connection_made

        def note(connection: Guard, transport: Any) -> None:
            made(connection, transport)
            door.opened.append(transport.get_extra_info("peername")[0])
            door.connections.append(transport)
            door._came.set()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Guard, "connection_made", note)
            server = HttpServer(application, "127.0.0.1", 0, "port", listener=self.socket)
            server.start()
            try:
                yield
            finally:
                for transport in self.connections:
                    transport.abort()
                await server.stop()

    def close(self) -> None:
        for client in self._clients:
            client.close()
        self.socket.close()

    async def until_opened(self, count: int) -> None:
        while len(self.opened) < count:
            self._came.clear()
            await self._came.wait()


def test_one_who_comes_after_many_of_another_address_is_opened_second() -> None:
    async def test(door: Door) -> None:
        for _ in range(10 * OPENED_AT_ONCE):
            door.client(CROWD)
        door.client(NEIGHBOUR)
        async with door.served():
            await door.until_opened(10 * OPENED_AT_ONCE + 1)
        assert door.opened.index(NEIGHBOUR) == 1

    run(test)


def test_nothing_is_made_for_connections_that_their_clients_have_reset() -> None:
    async def test(door: Door) -> None:
        for _ in range(200):
            door.reset_client()
        door.client(CROWD)
        async with door.served():
            await door.until_opened(1)
        assert door.opened == [CROWD]

    run(test)


def test_those_beyond_what_may_wait_here_are_opened_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    assert WAITING_MAX < BACKLOG
    monkeypatch.setattr("poolgrid.server.http.http_server.WAITING_MAX", 6)

    async def test(door: Door) -> None:
        for _ in range(40):
            door.client(CROWD)
        async with door.served():
            await door.until_opened(40)
        assert door.opened == [CROWD] * 40

    run(test)


def test_what_waits_when_the_listener_is_closed_is_closed_too() -> None:
    async def test(door: Door) -> None:
        clients = [door.client(CROWD) for _ in range(5 * OPENED_AT_ONCE)]
        async with door.served():
            await door.until_opened(1)
        loop = asyncio.get_running_loop()
        for client in clients:
            client.setblocking(False)
            try:
                assert await loop.sock_recv(client, 1) == b""
            except ConnectionResetError:
                pass

    run(test)


def test_an_answer_is_written_at_once_and_not_held_back_for_more() -> None:
    async def test(door: Door) -> None:
        client = door.client(CROWD)
        client.setblocking(False)
        async with door.served():
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(client, SMALL_REQUEST)
            assert (await loop.sock_recv(client, 1000)).startswith(b"HTTP/1.1 200")
            connection = door.connections[0].get_extra_info("socket")
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

    run(test)
