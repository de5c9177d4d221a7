"""An HTTP server inside a running event loop: bound before it starts, stopped in order, deaf to signals.

Signals belong to ``poolgrid.process.lifecycle``, which decides in what order the parts of a process end.

Takes connections for an HTTP server, round robin over the addresses that they come from.

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
import time
from collections import deque
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry

from poolgrid.http.browser_requests import AllowedHosts
from poolgrid.http.connection import HttpConnection
from poolgrid.http.connections import HttpConnections, connections_that_fit, source_of
from poolgrid.http.http_settings import HttpLimits, ServerSettings
from poolgrid.process.lifecycle import GroupPlace
from poolgrid.process.tasks import Restart, cancel_all, detached, supervised
from poolgrid.transport.bound_socket import BACKLOG, bind
from poolgrid.transport.security import Tls, is_loopback

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


TICK_S = 0.25
"""Between two looks at what has run out of time, and at the date: each wakes an idle process."""

STOOD_STILL_S = 1.0
"""A tick that comes so late comes from a process that stood still."""

SHUTDOWN_GRACE_S = 1.0
"""Part of the shutdown time in which clients whose answers did not finish get an error; half of it at most."""

SERVER_ENDS = "the server is shutting down"
"""Message of the cancellation of a request that is not answered in time for the end of the server."""

IDLE_LOOK_S = 0.02
"""Between two looks at whether everything has finished."""

CUT_S = 0.5
"""How long tasks of connections that were cut may take to notice."""


def _noop() -> None:
    pass


class HttpServer:
    """An ASGI server on a socket of its own."""

    def __init__(
        self,
        app: Any,
        host: str,
        port: int,
        setting: str,
        stop_timeout_ms: float = 2000.0,
        tls: Tls | None = None,
        reuse_port: bool = False,
        registry: CollectorRegistry | None = None,
        limits: HttpLimits | None = None,
        has_keys: bool = False,
        listener: socket.socket | None = None,
    ) -> None:
        """Bind ``host:port`` (0 = any free port); raises ``OSError`` that names the ``setting``.

        With ``reuse_port`` several processes may serve one port, and the kernel spreads connections over them. Metrics
        of the server go into ``registry``. ``limits`` are those of ``HttpSettings``, and its defaults without.
        A server on loopback that asks for no API keys (``has_keys``) answers only requests that name it by a loopback
        name or one of ``limits.hosts``.

        With a ``listener``, a socket that listens already, nothing is bound: host and port are the socket's.
        """
        if listener is not None:
            host = listener.getsockname()[0]
        limits = limits or HttpLimits()
        limits = replace(limits, connections=connections_that_fit(limits.connections))
        hosts = None
        if not has_keys and is_loopback(host) and "*" not in limits.hosts:
            hosts = AllowedHosts(host, limits.hosts)
        self.connections = HttpConnections(app, limits, registry, hosts)
        self._tls = tls
        self._listener = listener or bind(host, port, setting, reuse_port)
        self.host = host
        self.port: int = self._listener.getsockname()[1]
        self._stop_timeout_s = stop_timeout_ms / 1000
        self._acceptor: FairAcceptor | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'http' if self._tls is None else 'https'}://{host}:{self.port}"

    def start(self) -> None:
        """Begin to answer; connections that came before wait in the backlog."""
        self._listener.listen(BACKLOG)
        if self._tls is not None:
            # Without a bound: the current certificate keeps serving.
            self._tasks.append(supervised(self._tls.watch, "certificate watch", Restart(limit=None)))
        self.connections.set_date(time.time())
        context = None if self._tls is None else self._tls.context
        self._acceptor = FairAcceptor(self._listener, context, self.connections)
        self._tasks.append(supervised(self._tick, "http server"))

    async def stop(self, end_requests: Callable[[], None] = _noop) -> None:
        """Accept nothing new, and let open responses finish for ``stop_timeout_ms``.

        Shortly before that is over ``end_requests`` is called, which ends them with errors; then their tasks are
        cancelled with ``SERVER_ENDS``, so that what still prepares an answer can answer that; then they are cut.
        """
        table = self.connections
        ends_s = asyncio.get_running_loop().time() + self._stop_timeout_s
        grace_s = min(SHUTDOWN_GRACE_S, self._stop_timeout_s / 2)
        try:
            if self._acceptor is None:
                return
            self._acceptor.close()
            for connection in list(table.open):
                connection.shutdown()
            if await self._is_idle(ends_s - grace_s):
                return
            end_requests()
            if await self._is_idle(ends_s - grace_s / 2):
                return
            # What is left is still prepared, or its client does not read.
            for task in list(table.tasks):
                task.cancel(SERVER_ENDS)
            if await self._is_idle(ends_s):
                return
            log.warning("shutting down: aborting %d connections with a request in flight", len(table.open))
            for connection in list(table.open):
                connection.transport.abort()
            await self._is_idle(ends_s + CUT_S)
        finally:
            self._listener.close()
            await cancel_all(self._tasks)

    async def _tick(self) -> None:
        """End what has run out of time."""
        table = self.connections
        now_s = asyncio.get_running_loop().time
        ticked_s = now_s()
        while True:
            await asyncio.sleep(TICK_S)
            late_s, ticked_s = now_s() - ticked_s, now_s()
            if late_s > STOOD_STILL_S:
                table.extend_deadlines(late_s)
            table.set_date(time.time())
            table.tick(ticked_s)

    async def _is_idle(self, until_s: float) -> bool:
        """Wait until nothing is open, at most until a time of the loop; return whether that is so."""
        now_s = asyncio.get_running_loop().time
        while not self.connections.is_idle() and now_s() < until_s:  # noqa: ASYNC110 - twice at the end of a process
            await asyncio.sleep(IDLE_LOOK_S)
        return self.connections.is_idle()


class RouterServers(NamedTuple):
    """The HTTP server of a router, and with ``--http-workers`` the one at which this process alone answers."""

    shared: HttpServer
    admin: HttpServer | None

    @property
    def url(self) -> str:
        return self.shared.url

    @property
    def admin_url(self) -> str:
        """Return where this process alone answers; empty when it shares its port with no other."""
        return "" if self.admin is None else self.admin.url

    def start(self) -> None:
        if self.admin is not None:
            self.admin.start()
        self.shared.start()


def open_server(
    opened: AsyncExitStack,
    settings: ServerSettings,
    registry: CollectorRegistry,
    app: Any,
    end_requests: Callable[[], None],
    has_keys: bool,
    place: GroupPlace | None = None,
    listener: socket.socket | None = None,
) -> RouterServers:
    """Return a router's servers, bound and not started; ``opened`` stops them, and then has their requests ended.
    ``listener`` is a socket that listens already, for clients.

    Raises ``OSError`` when a port cannot be bound, ``TlsError``.
    """

    def make(
        port: int,
        setting: str,
        registry: CollectorRegistry | None,
        reuse_port: bool,
        listener: socket.socket | None = None,
    ) -> HttpServer:
        server = HttpServer(
            app,
            settings.host,
            port,
            setting,
            settings.shutdown_timeout_ms,
            Tls.load(settings, registry or CollectorRegistry()),
            reuse_port=reuse_port,
            registry=registry,
            limits=settings.http_limits(),
            has_keys=has_keys,
            listener=listener,
        )
        opened.push_async_callback(server.stop, end_requests)
        return server

    admin = None if place is None else make(settings.admin_port, "admin_port", None, False)
    return RouterServers(make(settings.port, "port", registry, place is not None, listener), admin)
