"""WebSockets to an engine server (``/v1/realtime``): after its head a request and its answer are two streams of bytes.

Rules
    1. The head goes to the server with the headers that ask for the upgrade. Whatever the server answers goes back as
       it is but for the server's key: 101 and what follows, or its refusal, after which both connections end.
    2. A side that does not read has the other one paused: at most ``WRITE_BUFFER_BYTES`` wait in each direction.
    3. The end of one side ends the other.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final, cast

import httptools

from poolgrid.kernel.wire.secret_texts import blotted_part
from poolgrid.server.http.guard import Guard
from poolgrid.server.proxy.forward_server import CONNECT_TIMEOUT_S, ForwardServer, probe_when_idle
from poolgrid.server.proxy.server_connection import HEAD_BYTES_MAX

log = logging.getLogger(__name__)

TUNNELS_MAX: Final = 1024
"""Tunnels of one process at a time: each is a conversation of audio, which keeps an engine busy."""

WRITE_BUFFER_BYTES: Final = 256 * 1024


class Tunnel(asyncio.Protocol):
    """The server's side of one tunnel; also ``AnswerSource`` of its client's connection."""

    def __init__(self, guard: Guard, head: bytes, keys: tuple[bytes, ...]) -> None:
        """``keys`` of the server are blotted out of its answer to ``head``."""
        self._guard = guard
        self._head = head
        self._keys = keys
        self._held = b""
        """The end of what has come of that answer, which may be the beginning of a key."""
        self._transport: asyncio.Transport | None = None
        self._is_open = False
        """Whether the server has switched protocols."""
        self._came = 0
        self._parser = httptools.HttpResponseParser(self)
        self.status = 0
        """Of the server's answer; 0 = none has come."""
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def open(self, server: ForwardServer) -> None:
        """Connect; raises ``OSError``, ``TimeoutError`` among them."""
        target = server.target
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            transport, _ = await asyncio.get_running_loop().create_connection(
                lambda: self, target.host, target.port, ssl=server.tls
            )
        probe_when_idle(transport)

    # -- the server ----------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = made = cast(asyncio.Transport, transport)
        made.set_write_buffer_limits(WRITE_BUFFER_BYTES)
        made.write(self._head)
        self._guard.divert(self.send, self.client_gone)

    def data_received(self, data: bytes) -> None:
        if self._is_open:
            self._guard.write(data)
            return
        passed, self._held = blotted_part(self._held + data, self._keys)
        self._guard.write(passed)
        self._came += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._is_open = True
            self.status = self._parser.get_status_code()
        except httptools.HttpParserError as error:
            log.warning("an engine server's answer to an upgrade cannot be read: %s", error)
            self._end()
            return
        if self._is_open:
            self._pass_held()
        elif not self.status and self._came > HEAD_BYTES_MAX:
            self._end()

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        if self.status == 101:
            self._is_open = True

    def on_message_complete(self) -> None:
        if not self._is_open:
            self._end()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._end()

    def pause_writing(self) -> None:
        self._guard.pause_reading()

    def resume_writing(self) -> None:
        self._guard.resume_reading()

    # -- the client ----------------------------------------------------------------------------------------------------

    def send(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def client_gone(self) -> None:
        if self._transport is not None:
            self._transport.abort()
        self._settle()

    def pause(self) -> None:
        if self._transport is not None:
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._transport is not None:
            self._transport.resume_reading()

    def _pass_held(self) -> None:
        held, self._held = self._held, b""
        if held:
            self._guard.write(held)

    def _end(self) -> None:
        self._pass_held()
        if self._transport is not None:
            self._transport.close()
        self._guard.close()
        self._settle()

    def _settle(self) -> None:
        if not self.over.done():
            self.over.set_result(None)
