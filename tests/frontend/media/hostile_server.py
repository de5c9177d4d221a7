"""A raw HTTP server that plays scripts: it lies about lengths, drips, redirects, hangs up; and counts who connects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

Play = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def answer(body: bytes = b"", status: str = "200 OK", length: int | None = -1, **headers: str) -> bytes:
    """Return a whole response; ``length`` -1 = true, ``None`` = no content-length, else the lie."""
    lines = [f"HTTP/1.1 {status}", "connection: close"]
    if length is not None:
        lines.append(f"content-length: {len(body) if length == -1 else length}")
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + body


class HostileServer:
    def __init__(self, port: int) -> None:
        self.port = port
        self.plays: dict[str, bytes | Play] = {}
        self.asked: list[tuple[str, str]] = []
        """(path, Host header) of each request."""
        self.connections = 0
        self.open = 0
        self.all_closed = asyncio.Event()
        self.all_closed.set()

    def url(self, path: str, host: str = "media.test") -> str:
        return f"http://{host}:{self.port}{path}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open += 1
        self.all_closed.clear()
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            path = head.split(" ", 2)[1]
            host = next(line[6:] for line in head.split("\r\n") if line.lower().startswith("host: "))
            self.asked.append((path, host))
            play = self.plays[path.partition("?")[0]]
            if isinstance(play, bytes):
                writer.write(play)
                await writer.drain()
            else:
                await play(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()
            self.open -= 1
            if not self.open:
                self.all_closed.set()


@asynccontextmanager
async def hostile_server(host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[HostileServer]:
    playing: HostileServer | None = None

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert playing is not None
        await playing.serve(reader, writer)

    server = await asyncio.start_server(serve, host, port)
    playing = HostileServer(server.sockets[0].getsockname()[1])
    try:
        yield playing
        # A client that left a socket behind is found here, not by whoever runs out of them later.
        async with asyncio.timeout(120):
            await playing.all_closed.wait()
    finally:
        server.close()
        await server.wait_closed()
