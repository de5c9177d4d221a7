"""uvicorn inside a running event loop, with an acceptor that serves client addresses round robin.

uvicorn reads requests, calls the application and writes answers; ``poolgrid.server.http.guard`` checks connections
first. Signals belong to ``poolgrid.server.process.lifecycle``, which decides in what order the parts of a process end.

The kernel hands connections out in the order of their arrival. A client that opens thousands of connections and resets
them would delay all others: each connection costs a transport, a protocol and a parser.

Rules
    1. Connections that wait in the kernel are accepted at once and wait here in a queue of their address.
    2. A few connections are opened in a turn of the event loop, round robin over the addresses. A connection that its
       client has reset by then is closed without a protocol.
    3. At most ``WAITING_MAX`` connections wait here. Further ones wait in the kernel, in order.
    4. A connection with TLS is counted by its address before the handshake, and has the time limit of a head to finish
       it: asyncio calls the protocol after the handshake, so a client that connects and sends nothing would not be
       seen. A connection without TLS is counted by its protocol, which can send the reason of a refusal.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from collections import deque
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import NamedTuple, cast

import uvicorn
from prometheus_client import CollectorRegistry

from poolgrid.kernel.wire.addresses import bracketed
from poolgrid.server.http.browser_requests import AllowedHosts
from poolgrid.server.http.connections import HttpConnections, source_of
from poolgrid.server.http.guard import SERVER_ENDS, Application, Guard, GuardedApplication
from poolgrid.server.http.http_settings import HttpLimits, ServerSettings
from poolgrid.server.process.clock import shared_moment_s
from poolgrid.server.process.lifecycle import GroupPlace
from poolgrid.server.process.tasks import Restart, cancel_all, detached, supervised
from poolgrid.server.transport.bound_socket import BACKLOG, bind
from poolgrid.server.transport.security import Tls, is_loopback

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

FREED_PAUSE_S = 0.01
"""Pause when a connection gave way for want of a file descriptor: it is closed in one of the next turns of the loop."""

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
        make: Callable[[], Guard],
    ) -> None:
        """Begin at once, with what ``make`` returns for each connection; without ``context`` there is no TLS."""
        self._listener = listener
        self._context = context
        self._table = table
        self._make = make
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[str, deque[socket.socket]] = {}
        """Connections that are not opened, by address; the address whose turn it is comes first."""
        self._count = 0
        self.accepted = 0
        """Connections so far."""
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
                self._pause()
                if self._table.free_file("a client that waits", self._loop.time()):
                    self._resume = self._loop.call_later(FREED_PAUSE_S, self._listen)
                else:
                    log.error("accepting a connection: %s; trying again in %g s", error, OUT_OF_FILES_PAUSE_S)
                    self._resume = self._loop.call_later(OUT_OF_FILES_PAUSE_S, self._listen)
                break
            self._waiting.setdefault(address[0], deque()).append(connection)
            self._count += 1
            self.accepted += 1
            if self._table.take_file(connection.fileno()):
                break  # what waits is opened, and makes room, before more is accepted
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
        protocol = self._make()
        protocol.address = source
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
            protocol.leave()
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
"""Between two looks at what has run out of time: each wakes an idle process."""

DATE_S = 1.0
"""Between two dates of answers."""

STOOD_STILL_S = 1.0
"""A tick that comes so late comes from a process that stood still."""

SHUTDOWN_GRACE_S = 1.0
"""Part of the shutdown time in which clients whose answers did not finish get an error; half of it at most."""

QUIET_S = 0.25
"""A server that is to end serves until so long has passed without a new connection or a complete answer. Balancers that
probe ``/ready`` meanwhile send nothing more."""

COMING_SHARE = 0.25
"""Part of the shutdown time in which new clients are served; the rest is for the answers that are open."""

IDLE_LOOK_S = 0.02
"""Between two looks at whether everything has finished."""

CUT_S = 0.5
"""How long tasks of connections that were cut may take to notice."""

NEVER_S = 10 * 365 * 86_400
"""uvicorn's limit for idle connections: the guard has one, which knows when the process stood still."""


def _noop() -> None:
    pass


class HttpServer:
    """uvicorn on a socket of its own."""

    def __init__(
        self,
        app: Application,
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
        """Bind ``host:port`` (0 = any free port), unless a bound ``listener`` is given; raises ``OSError`` that names
        the ``setting``.

        With ``reuse_port`` several processes may serve one port, and the kernel spreads connections over them. Metrics
        of the server go into ``registry``. ``limits`` are those of ``HttpSettings``, and its defaults without.
        A server on loopback that asks for no API keys (``has_keys``) answers only requests that name it by a loopback
        name or one of ``limits.hosts``.

        With a ``listener``, a socket that listens already, nothing is bound: host and port are the socket's.
        """
        if listener is not None:
            host = listener.getsockname()[0]
        limits = limits or HttpLimits()
        hosts = None
        if not has_keys and is_loopback(host) and "*" not in limits.hosts:
            hosts = AllowedHosts(host, limits.hosts)
        self.connections = HttpConnections(limits, registry, hosts)
        self._tls = tls
        self._listener = listener or bind(host, port, setting, reuse_port)
        self.host = host
        self.port: int = self._listener.getsockname()[1]
        self._config = uvicorn.Config(
            GuardedApplication(app),
            http=cast("type[asyncio.Protocol]", partial(Guard, table=self.connections)),  # it is called, as a class is
            ws="none",
            lifespan="off",
            interface="asgi3",
            workers=1,  # not WEB_CONCURRENCY's
            # What it says of single requests that are not HTTP is counted by the guard.
            log_config=None,
            log_level=logging.ERROR,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=NEVER_S,
        )
        self._config.load()
        self._uvicorn = uvicorn.Server(self._config)
        self._stop_timeout_s = stop_timeout_ms / 1000
        self._ends_s: float | None = None
        """When everything has ended, once that is to be."""
        self._acceptor: FairAcceptor | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def url(self) -> str:
        return f"{'http' if self._tls is None else 'https'}://{bracketed(self.host)}:{self.port}"

    def start(self) -> None:
        """Begin to answer; connections that came before wait in the backlog."""
        self._listener.listen(BACKLOG)
        self.connections.fit_files()
        if self._tls is not None:
            # Without a bound: the current certificate keeps serving.
            self._tasks.append(supervised(self._tls.watch, "certificate watch", Restart(limit=None)))
        self._tasks.append(supervised(self._tick, "http server"))
        context = None if self._tls is None else self._tls.context
        self._acceptor = FairAcceptor(self._listener, context, self.connections, self._make_guard)

    def _make_guard(self) -> Guard:
        """Return what uvicorn's own listener would: an instance of its configuration's protocol."""
        made = cast(Callable[..., Guard], self._config.http_protocol_class)
        return made(config=self._config, server_state=self._uvicorn.server_state, app_state={})

    async def serve_until_quiet(self) -> None:
        """Serve while clients still come, for a part of the time that ``stop`` may take.

        Each connection ends with its next answer.
        """
        self.connections.is_ending = True
        now_s = asyncio.get_running_loop().time
        self._ends_s = now_s() + self._stop_timeout_s
        until_s = now_s() + self._stop_timeout_s * COMING_SHARE
        seen = None
        while self._acceptor is not None:
            before, seen = seen, (self._acceptor.accepted, self._uvicorn.server_state.total_requests)
            pause_s = min(QUIET_S, until_s - now_s())
            if seen == before or pause_s <= 0:
                return
            await asyncio.sleep(pause_s)

    async def stop(self, end_requests: Callable[[], None] = _noop) -> None:
        """Accept nothing new, and let open responses finish for ``stop_timeout_ms``.

        Shortly before that is over ``end_requests`` is called, which ends them with errors; then their tasks are
        cancelled with ``SERVER_ENDS``, so that what still prepares an answer can answer that; then they are cut.
        """
        table = self.connections
        table.is_ending = True
        now_s = asyncio.get_running_loop().time()
        ends_s = self._ends_s or now_s + self._stop_timeout_s
        grace_s = min(SHUTDOWN_GRACE_S, self._stop_timeout_s / 2)
        try:
            if self._acceptor is None:
                return
            self._acceptor.close()
            self._listener.close()
            # What has been accepted may have sent its request already.
            await self._until(lambda: not table.heads, min(now_s + QUIET_S, ends_s - grace_s))
            for connection in list(table.open):
                connection.shutdown()
            if await self._until(self._is_idle, ends_s - grace_s):
                return
            end_requests()
            if await self._until(self._is_idle, ends_s - grace_s / 2):
                return
            # What is left is still prepared, or its client does not read.
            for task in list(self._uvicorn.server_state.tasks):
                task.cancel(SERVER_ENDS)
            if await self._until(self._is_idle, ends_s):
                return
            log.warning("shutting down: aborting %d connections with a request in flight", len(table.open))
            for connection in list(table.open):
                connection.transport.abort()
            await self._until(self._is_idle, ends_s + CUT_S)
        finally:
            self._listener.close()
            await cancel_all(self._tasks)

    async def _tick(self) -> None:
        """End what has run out of time, and have uvicorn set the date of its answers."""
        table = self.connections
        now_s = asyncio.get_running_loop().time
        ticked_s = now_s()
        dated_s = float("-inf")
        while True:
            if ticked_s >= dated_s + DATE_S:
                dated_s = ticked_s
                await self._uvicorn.on_tick(0)
            await asyncio.sleep(shared_moment_s(ticked_s, TICK_S) - ticked_s)
            late_s, ticked_s = now_s() - ticked_s, now_s()
            if table.open:
                if late_s > STOOD_STILL_S:
                    table.extend_deadlines(late_s)
                table.tick(ticked_s)

    def _is_idle(self) -> bool:
        # A task that is cancelled before its first step is over, and still there.
        return not self.connections.open and all(task.done() for task in self._uvicorn.server_state.tasks)

    async def _until(self, holds: Callable[[], bool], until_s: float) -> bool:
        """Wait until something holds, at most until a time of the loop; return whether it does."""
        now_s = asyncio.get_running_loop().time
        while not holds() and now_s() < until_s:  # noqa: ASYNC110 - twice at the end of a process
            await asyncio.sleep(IDLE_LOOK_S)
        return holds()


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
    app: Application,
    end_requests: Callable[[], None],
    has_keys: bool,
    place: GroupPlace | None = None,
    listener: socket.socket | None = None,
) -> RouterServers:
    """Return a router's servers, bound and not started; ``opened`` stops them, and then has their requests ended.

    ``listener`` is a socket that listens already, for clients: its other owners keep it when this process ends. Raises
    ``OSError`` when a port cannot be bound, ``TlsError``.
    """

    def make(
        port: int, setting: str, registry: CollectorRegistry | None, bound: socket.socket | None, reuse_port: bool
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
            listener=bound,
        )
        opened.push_async_callback(server.stop, end_requests)
        return server

    admin = None if place is None else make(settings.admin_port, "admin_port", None, None, False)
    shared = make(settings.port, "port", registry, listener, place is not None)
    opened.push_async_callback(shared.serve_until_quiet)
    return RouterServers(shared, admin)
