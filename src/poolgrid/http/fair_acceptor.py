"""Takes connections for an HTTP server, round robin over the addresses that they come from.

The kernel hands connections out in the order of their coming. A client that opens thousands and resets them would make
all others wait behind them while each is made a transport, a protocol and a parser, only to be taken apart again.

Rules
    1. What waits in the kernel is accepted at once, which costs little, and waits here in a queue of its address.
    2. Connections are opened a few in a turn of the event loop, the addresses taking turns. One that its client has
       ended by then is closed, and nothing is made for it.
    3. At most ``WAITING_MAX`` connections wait here. While so many do, the others wait in the kernel, in order.
    4. A connection with TLS is counted by its address before a handshake has cost anything, and then has the time for
       a head to finish it: a server of asyncio calls the protocol when the handshake is done, so a client that
       connects and is silent would not be seen. One without TLS is counted by its protocol, which can send why it is
       refused.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from collections import deque

from poolgrid.http.connection import HttpConnection
from poolgrid.http.connections import HttpConnections, source_of
from poolgrid.process.tasks import detached

log = logging.getLogger(__name__)

ACCEPTED_AT_ONCE = 64
"""Connections accepted in one turn of the event loop."""

OPENED_AT_ONCE = 4
"""Connections opened in one turn of the event loop: what else is due waits for about a millisecond."""

LOOKED_AT_ONCE = 64
"""Connections looked at in one turn of the event loop for whether their client is there still."""

WAITING_MAX = 1024
"""Connections that are accepted and not opened: each is a file descriptor."""

OUT_OF_FILES_PAUSE_S = 1.0
"""Pause when the process has no more file descriptors, as asyncio's servers have it."""

SHUTDOWN_TIMEOUT_S = 2.0
"""How long a client may take to confirm the end of a TLS connection; then it is cut."""

_OUT_OF_FILES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})

_TCP_INFO: int | None = getattr(socket, "TCP_INFO", None)
_TCP_CLOSE = 7
"""State of a connection that its client has reset (Linux, ``tcp_states.h``)."""


class FairAcceptor:
    """Accepts on a listening socket, in the running event loop."""

    def __init__(
        self,
        listener: socket.socket,
        context: ssl.SSLContext | None,
        table: HttpConnections,
    ) -> None:
        """Begin at once; without ``context`` there is no TLS."""
        self._listener = listener
        self._context = context
        self._table = table
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[str, deque[socket.socket]] = {}
        """Connections that are not opened, by address; the address whose turn it is comes first."""
        self._count = 0
        self._turn: asyncio.Handle | None = None
        self._opening: set[asyncio.Task[None]] = set()
        self._resume: asyncio.TimerHandle | None = None
        self._accepts = False
        listener.setblocking(False)
        self._listen()

    def close(self) -> None:
        """Accept nothing more, and give up what is not opened."""
        self._pause()
        for handle in (self._resume, self._turn):
            if handle is not None:
                handle.cancel()
        for waiting in self._waiting.values():
            for connection in waiting:
                connection.close()
        self._waiting.clear()
        for task in self._opening:
            task.cancel()

    def _listen(self) -> None:
        self._resume = None
        if not self._accepts:
            self._accepts = True
            self._loop.add_reader(self._listener.fileno(), self._accept)

    def _pause(self) -> None:
        if self._accepts:
            self._accepts = False
            self._loop.remove_reader(self._listener.fileno())

    def _accept(self) -> None:
        for _ in range(min(ACCEPTED_AT_ONCE, WAITING_MAX - self._count)):
            try:
                connection, address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                break
            except OSError as error:
                if error.errno not in _OUT_OF_FILES:
                    raise
                log.error("accepting a connection: %s; trying again in %g s", error, OUT_OF_FILES_PAUSE_S)
                self._pause()
                self._resume = self._loop.call_later(OUT_OF_FILES_PAUSE_S, self._listen)
                break
            self._waiting.setdefault(address[0], deque()).append(connection)
            self._count += 1
        if self._count >= WAITING_MAX:
            self._pause()
        if self._count and self._turn is None:
            self._open_some()

    def _open_some(self) -> None:
        """Open a few of those that wait; the rest in the next turns of the loop."""
        self._turn = None
        opened = 0
        for _ in range(LOOKED_AT_ONCE):
            address = next(iter(self._waiting), None)
            if address is None or opened == OPENED_AT_ONCE:
                break
            waiting = self._waiting.pop(address)
            connection = waiting.popleft()
            self._count -= 1
            if waiting:
                self._waiting[address] = waiting  # at the end: others come first
            if has_ended(connection):
                connection.close()
            else:
                opened += 1
                self._open(connection, address)
        if self._waiting:
            self._turn = self._loop.call_soon(self._open_some)
        if not self._accepts and self._resume is None and self._count < WAITING_MAX:
            self._listen()

    def _open(self, connection: socket.socket, address: str) -> None:
        source = ""
        if self._context is not None:
            source = source_of(address)
            if self._table.admit(source, self._loop.time()) is not None:
                connection.close()  # nothing can be sent before the handshake
                return
        connection.setblocking(False)
        task = detached(self._connect(connection, source), "opening of a connection")
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _connect(self, connection: socket.socket, source: str) -> None:
        protocol = HttpConnection(self._table, source)
        context = self._context
        if context is None:
            await self._loop.connect_accepted_socket(lambda: protocol, connection)
            return
        try:
            await self._loop.connect_accepted_socket(
                lambda: protocol,
                connection,
                ssl=context,
                ssl_handshake_timeout=self._table.limits.header_timeout_s,
                ssl_shutdown_timeout=SHUTDOWN_TIMEOUT_S,
            )
        except BaseException as error:
            connection.close()
            if not protocol.is_made:
                self._table.leave(source)
            if not isinstance(error, OSError):  # ssl.SSLError is one
                raise
            self._table.note("tls_handshake", source, self._loop.time())


def has_ended(connection: socket.socket) -> bool:
    """Return whether the client has reset a connection, without reading; ``False`` where that cannot be seen."""
    if _TCP_INFO is None:
        return False
    try:
        return connection.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, 1)[0] == _TCP_CLOSE
    except OSError:
        return True
