"""One engine server as a router reaches it: where it is, its kept connections, the key that it wants."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Iterable
from typing import Final

from poolgrid.server.http.http_client import HttpTarget
from poolgrid.server.proxy.server_connection import ServerConnection

CONNECT_TIMEOUT_S: Final = 5.0
"""For a new connection: servers of a cluster answer within a millisecond, over a lost packet or two within seconds."""

KEPT_CONNECTIONS_MAX: Final = 1024
"""Connections that are kept for the next request; more are closed. As many as requests at a time are usual."""

KEEP_ALIVE_IDLE_S: Final = 15
"""TCP probes a silent connection after this time, three times at ``KEEP_ALIVE_INTERVAL_S``: a host that lost its power
sends no end of its connections."""

KEEP_ALIVE_INTERVAL_S: Final = 5


class ForwardServer:
    """The connections to one server."""

    def __init__(self, url: str, api_key: str | None = None, trusted: ssl.SSLContext | None = None) -> None:
        """``api_key`` is the server's own; ``trusted`` are the authorities that may certify it."""
        self.target = target = HttpTarget(url)
        self.url = target.url
        self.base_path = target.path.encode("latin-1", "replace")
        self.tls = (trusted or ssl.create_default_context()) if target.secure else None
        self._kept: list[ServerConnection] = []
        self._host = f"host: {target.authority}\r\n".encode("latin-1")
        self.key_headers = [(b"authorization", f"Bearer {api_key}".encode("latin-1"))] if api_key else []
        self.keys = (api_key.encode("latin-1"),) if api_key else ()
        """What must not be seen in an answer."""

    def kept(self) -> ServerConnection | None:
        """Return a kept connection, if there is one."""
        while self._kept:
            connection = self._kept.pop()
            if connection.is_usable:
                return connection
        return None

    async def connect(self) -> ServerConnection:
        """Return a new connection; raises ``OSError``, ``TimeoutError`` among them."""
        loop, target = asyncio.get_running_loop(), self.target
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            transport, made = await loop.create_connection(
                lambda: ServerConnection(self._release), target.host, target.port, ssl=self.tls
            )
        if not made.is_usable:
            raise ConnectionResetError("the server closed the connection, or sent something, before any request")
        probe_when_idle(transport)
        return made

    def head(self, method: bytes, target: bytes, headers: Iterable[tuple[bytes, bytes]], length: int | None) -> bytes:
        """Return a request's head. ``headers`` are those that may pass; ``length`` is that of the body, ``None``
        without one."""
        lines = [method, b" ", self.base_path, target, b" HTTP/1.1\r\n", self._host]
        for name, value in headers:
            lines += (name, b": ", value, b"\r\n")
        lines.append(b"\r\n" if length is None else b"content-length: %d\r\n\r\n" % length)
        return b"".join(lines)

    def close(self) -> None:
        for connection in self._kept:
            connection.abort()
        self._kept.clear()

    def _release(self, connection: ServerConnection, keep: bool) -> None:
        if not keep:
            if connection in self._kept:
                self._kept.remove(connection)
        elif len(self._kept) < KEPT_CONNECTIONS_MAX:
            self._kept.append(connection)
        else:
            connection.abort()


def probe_when_idle(transport: asyncio.BaseTransport) -> None:
    """Have the system notice a peer that is gone without a word."""
    found = transport.get_extra_info("socket")
    if found is None:
        return
    found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", KEEP_ALIVE_IDLE_S),
        ("TCP_KEEPINTVL", KEEP_ALIVE_INTERVAL_S),
        ("TCP_KEEPCNT", 3),
    ):
        if hasattr(socket, name):
            found.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
