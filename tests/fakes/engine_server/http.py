"""A small HTTP/1.1 server in the test's own loop, whose answers can be cut, delayed and torn anywhere."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any


@dataclass
class Request:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class Cut(Exception):
    """End the connection here, without a word."""


class Reply:
    """What a handler answers with."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self.streaming = False

    async def whole(self, status: int, value: Any, kind: str = "application/json", headers: str = "") -> None:
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        head = f"HTTP/1.1 {status} said\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n{headers}\r\n"
        self._writer.write(head.encode() + body)
        await self._writer.drain()

    async def begin(self, status: int = 200) -> None:
        self.streaming = True
        head = f"HTTP/1.1 {status} said\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        self._writer.write(head.encode())

    async def chunk(self, data: bytes) -> None:
        self._writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        await self._writer.drain()

    async def event(self, value: Any, torn: bool = False) -> None:
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        data = b"data: " + data + b"\n\n"
        # Torn: a piece of an event a packet, as slow networks deliver it.
        parts = [data[: len(data) // 2], data[len(data) // 2 :]] if torn else [data]
        for part in parts:
            await self.chunk(part)
            await asyncio.sleep(0)

    async def end(self) -> None:
        self._writer.write(b"0\r\n\r\n")
        await self._writer.drain()


async def _body(reader: asyncio.StreamReader, headers: dict[str, str]) -> bytes:
    """Read a body, in pieces where it comes in pieces: proxies send it so."""
    if headers.get("transfer-encoding") != "chunked":
        return await reader.readexactly(int(headers.get("content-length", "0")))
    parts = []
    while size := int(await reader.readuntil(b"\r\n"), 16):
        parts.append(await reader.readexactly(size))
        await reader.readexactly(2)
    await reader.readuntil(b"\r\n")
    return b"".join(parts)


Handler = Callable[[Request, Reply], Awaitable[None]]


class HttpServer:
    """Serves one handler; ``start`` takes a port that was used before, so that a server can come back."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self.port = 0

    async def start(self, port: int = 0, host: str = "127.0.0.1") -> None:
        self._server = await asyncio.start_server(self._serve, host, port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """End at once: every connection is reset, as when a process is killed."""
        assert self._server is not None
        self._server.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                first, *lines = head.rstrip().split("\r\n")
                method, path, _ = first.split(" ")
                headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
                body = await _body(reader, headers)
                reply = Reply(writer)
                # Who asks may leave amid the answer: then its handler ends, as in real servers.
                handling = asyncio.ensure_future(self._handler(Request(method, path, headers, body), reply))
                gone = asyncio.ensure_future(reader.read(1))
                try:
                    await asyncio.wait({handling, gone}, return_when=asyncio.FIRST_COMPLETED)
                    if not handling.done():
                        return
                    await handling
                finally:
                    for each in (handling, gone):
                        each.cancel()
                    await asyncio.gather(handling, gone, return_exceptions=True)
        except (asyncio.IncompleteReadError, ConnectionError, Cut, asyncio.CancelledError):
            pass
        finally:
            self._connections.discard(task)
            if writer.transport is not None:
                writer.transport.abort()
