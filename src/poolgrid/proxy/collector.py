"""A whole answer of one engine server, for requests that the router makes itself: lists of models, and where an id is
known."""

from __future__ import annotations

import asyncio
from typing import Final

from poolgrid.proxy.chunks import payloads
from poolgrid.proxy.forward_server import ForwardServer
from poolgrid.proxy.server_connection import AnswerFailed, HeaderList

ANSWER_BYTES_MAX: Final = 1 << 20
"""Longest answer that is read."""

ANSWER_TIMEOUT_S: Final = 5.0
"""For the whole of it: servers answer such requests without their engine."""

ROUTER_TIMEOUT_S: Final = 2 * ANSWER_TIMEOUT_S
"""For that of a pool's router, which waits for its servers."""


class Collector:
    """Implements ``poolgrid.proxy.server_connection.AnswerSink``."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: HeaderList = []
        self.body = bytearray()
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.is_stale = False

    def on_head(self, status: int, headers: HeaderList, is_chunked: bool) -> None:
        self.status, self.headers = status, headers

    def on_chunks(self, data: bytes) -> None:
        self.on_data(payloads(data))

    def on_data(self, data: bytes) -> None:
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


async def collect(server: ForwardServer, method: bytes, target: bytes, is_router: bool = False) -> tuple[int, bytes]:
    """Return status and body of the answer of a server, or of a pool's router; raises ``AnswerFailed``, or ``OSError``
    without a connection."""
    head = server.head(method, target, server.key_headers, None)
    async with asyncio.timeout(ROUTER_TIMEOUT_S if is_router else ANSWER_TIMEOUT_S):
        connection = server.kept()
        while True:
            found = Collector()
            if connection is None:
                connection = await server.connect()
            connection.send(found, (head,))
            try:
                await found.over
            except BaseException as error:
                connection.abort()
                if not isinstance(error, AnswerFailed) or not found.is_stale:
                    raise
                connection = None
                continue
            return found.status, bytes(found.body)
