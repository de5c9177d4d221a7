"""Connections to an engine server that are kept for the next request."""

from __future__ import annotations

import asyncio

from poolgrid.server.proxy.forward_server import ForwardServer
from poolgrid.server.proxy.server_connection import AnswerFailed, ServerConnection

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello"
PATIENCE_S = 30.0


class SlowClient:
    """Takes an answer, and does not read on when its bytes come."""

    def __init__(self, connection: ServerConnection) -> None:
        self.connection = connection
        self.over: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.body = b""

    def on_head(self, status: int, headers: list[tuple[bytes, bytes]], is_chunked: bool) -> None:
        """Take the head."""

    def on_data(self, data: bytes, chunks: bytes = b"") -> None:
        """Take some of the body."""
        self.body += data
        self.connection.pause()

    def on_end(self) -> None:
        """Take the end."""
        self.over.set_result(self.body)

    def on_failed(self, error: AnswerFailed, is_stale: bool) -> None:
        """Take a failure."""
        self.over.set_exception(error)


async def test_an_answer_that_ends_while_its_client_does_not_read_leaves_a_connection_that_reads() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(ANSWER)
        except asyncio.IncompleteReadError:
            writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    server = ForwardServer(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}")
    try:
        async with asyncio.timeout(PATIENCE_S):
            first = await server.connect()
            for _ in range(3):
                client = SlowClient(first)
                first.send(client, (server.head(b"GET", b"/", [], None),))
                assert await client.over == b"hello"
                assert server.kept() is first
    finally:
        first.abort()
        server.close()
        listening.close()
        await listening.wait_closed()
