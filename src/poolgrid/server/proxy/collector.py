"""A whole answer of one engine server, for requests that the router makes itself: lists of models, where an id is
known, and prompts whose answer another server writes."""

from __future__ import annotations

import asyncio
from typing import Final, NamedTuple

from poolgrid.server.proxy.forward_server import ForwardServer
from poolgrid.server.proxy.server_connection import AnswerFailed, HeaderList

ANSWER_BYTES_MAX: Final = 4 << 20
"""Longest answer that is read. The ids of a prompt of 500,000 tokens have as many bytes."""

ANSWER_TIMEOUT_S: Final = 5.0
"""For what servers answer without their engine."""

ROUTER_TIMEOUT_S: Final = 2 * ANSWER_TIMEOUT_S
"""For that of a pool's router, which waits for its servers."""


class Collector:
    """Implements ``poolgrid.server.proxy.server_connection.AnswerSink``."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: HeaderList = []
        self.body = bytearray()
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.is_stale = False

    def on_head(self, status: int, headers: HeaderList, is_chunked: bool) -> None:
        self.status, self.headers = status, headers

    def on_data(self, data: bytes, chunks: bytes = b"") -> None:
        self.body += data
        if len(self.body) > ANSWER_BYTES_MAX:
            self.on_failed(AnswerFailed(f"the answer has more than {ANSWER_BYTES_MAX} bytes"), False)

    def on_end(self) -> None:
        if not self.over.done():
            self.over.set_result(None)

    def on_failed(self, error: AnswerFailed, is_stale: bool) -> None:
        self.is_stale = is_stale
        if not self.over.done():
            self.over.set_exception(error)


class WholeAnswer(NamedTuple):
    """What a server has answered."""

    status: int
    headers: HeaderList
    body: bytes


async def collect(
    server: ForwardServer, parts: tuple[bytes, ...], timeout_s: float | None = ANSWER_TIMEOUT_S
) -> WholeAnswer:
    """Send a request, given as the bytes that are written; return the answer.

    Raises ``AnswerFailed``, or ``OSError`` without a connection, ``TimeoutError`` among them.
    """
    async with asyncio.timeout(timeout_s):
        connection = server.kept()
        while True:
            found = Collector()
            if connection is None:
                connection = await server.connect()
            connection.send(found, parts)
            try:
                await found.over
            except BaseException as error:
                connection.abort()
                if not isinstance(error, AnswerFailed) or not found.is_stale:
                    raise
                connection = None
                continue
            return WholeAnswer(found.status, found.headers, bytes(found.body))


async def look_up(
    server: ForwardServer, target: bytes, is_router: bool = False, headers: HeaderList | None = None
) -> WholeAnswer:
    """Return the answer of a server, or of a pool's router, to a ``GET`` with more headers; raises what ``collect``
    does."""
    head = server.head(b"GET", target, [*(headers or ()), *server.key_headers], None)
    return await collect(server, (head,), ROUTER_TIMEOUT_S if is_router else ANSWER_TIMEOUT_S)
