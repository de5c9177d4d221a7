"""Takes TLS connections for an HTTP server: counted when they come, before a handshake has cost anything.

A server of asyncio calls the protocol when the handshake is done, so whoever connects and is silent would be seen by
nobody. Here a connection is accepted, counted by its address, and then has ``handshake_timeout_s``.

Connections without TLS are uvloop's to accept. Taking a few of them a turn here was tried: a flood of connections that
are reset then delays everybody who comes after it three to six times as much, since each costs more in Python.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import Callable

from poolgrid.runtime.bounded_protocol import BoundedProtocol
from poolgrid.runtime.http_connections import HttpConnections, source_of
from poolgrid.runtime.tasks import detached

log = logging.getLogger(__name__)

ACCEPTED_AT_ONCE = 64
"""Connections accepted in one turn of the event loop."""

OUT_OF_FILES_PAUSE_S = 1.0
"""Pause when the process has no more file descriptors, as asyncio's servers have it."""

SHUTDOWN_TIMEOUT_S = 2.0
"""How long a client may take to confirm the end of a TLS connection; then it is cut."""

_OUT_OF_FILES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class TlsListener:
    """Accepts on a listening socket, in the running event loop."""

    def __init__(
        self,
        listener: socket.socket,
        context: ssl.SSLContext,
        table: HttpConnections,
        make_protocol: Callable[[], BoundedProtocol],
    ) -> None:
        """Begin at once."""
        self._listener = listener
        self._context = context
        self._table = table
        self._make_protocol = make_protocol
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[None]] = set()
        self._resume: asyncio.TimerHandle | None = None
        listener.setblocking(False)
        self._loop.add_reader(listener.fileno(), self._accept)

    def close(self) -> None:
        """Accept nothing more, and give up the handshakes that are not done."""
        self._loop.remove_reader(self._listener.fileno())
        if self._resume is not None:
            self._resume.cancel()
        for task in self._opening:
            task.cancel()

    def _accept(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                connection, address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _OUT_OF_FILES:
                    raise
                log.error("accepting a TLS connection: %s; trying again in %g s", error, OUT_OF_FILES_PAUSE_S)
                self._loop.remove_reader(self._listener.fileno())
                self._resume = self._loop.call_later(OUT_OF_FILES_PAUSE_S, self._listen)
                return
            source = source_of(address[0])
            if self._table.admit(source, self._loop.time()) is not None:
                connection.close()  # nothing can be said before the handshake
                continue
            connection.setblocking(False)
            task = detached(self._open(connection, source), "opening of a connection")
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    def _listen(self) -> None:
        self._resume = None
        self._loop.add_reader(self._listener.fileno(), self._accept)

    async def _open(self, connection: socket.socket, source: str) -> None:
        protocol = self._make_protocol()
        protocol.source = source
        try:
            await self._loop.connect_accepted_socket(
                lambda: protocol,
                connection,
                ssl=self._context,
                ssl_handshake_timeout=self._table.limits.header_timeout_s,
                ssl_shutdown_timeout=SHUTDOWN_TIMEOUT_S,
            )
        except BaseException as error:
            connection.close()
            if protocol.transport is None:
                self._table.leave(source)
            if not isinstance(error, OSError):  # ssl.SSLError is one
                raise
            self._table.note("tls_handshake", source, self._loop.time())
