"""An HTTP server inside a running event loop: bound before it starts, stopped in order, deaf to signals.

Signals belong to ``poolgrid.process.lifecycle``, which decides in what order the parts of a process end.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import uvicorn
from prometheus_client import CollectorRegistry

from poolgrid.http.browser_requests import AllowedHosts
from poolgrid.http.fair_listener import FairListener
from poolgrid.http.http_connections import connections_that_fit
from poolgrid.http.http_protocol import SERVER_ENDS, DirectProtocol
from poolgrid.http.http_settings import HttpLimits, ServerSettings
from poolgrid.process.tasks import Restart, cancel_all, supervised
from poolgrid.transport.bound_socket import bind
from poolgrid.transport.security import is_loopback
from poolgrid.transport.tls import Tls

log = logging.getLogger(__name__)

TICK_S = 0.1
"""Between two looks at what has run out of time; uvicorn's own interval."""

STOOD_STILL_S = 1.0
"""A tick that comes so late comes from a process that stood still."""

LAST_WORDS_S = 1.0
"""Part of the time for the end that is kept for telling clients whose answers did not finish; half of it at most."""

IDLE_LOOK_S = 0.02
"""Between two looks at whether everything has finished."""

CUT_S = 0.5
"""How long tasks of connections that were cut may take to notice."""

BACKLOG = 2048
"""Connections that wait to be accepted; the kernel refuses more."""


def _nothing() -> None:
    pass


class _Server(uvicorn.Server):
    def __init__(
        self, config: uvicorn.Config, protocol: type[DirectProtocol], tls: Tls | None, listener: socket.socket
    ) -> None:
        super().__init__(config)
        self._protocol = protocol
        self._tls = tls
        self._listener = listener
        self._accepting: FairListener | None = None
        self._ticked_s: float | None = None
        self._ending = asyncio.Event()
        self.end_requests: Callable[[], None] = _nothing
        self.ends_s = 0.0
        """When the last connection is cut, in the loop's time."""
        self.last_words_s = 0.0
        """How long before that requests are ended."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept, in uvicorn's place."""
        await super().startup([])
        make = partial(self._protocol, self.config, self.server_state, self.lifespan.state)
        context = None if self._tls is None else self._tls.context
        self._accepting = FairListener(self._listener, context, self._protocol.table, make)

    def end(self) -> None:
        """Have ``serve`` end now."""
        self.should_exit = True
        self._ending.set()

    async def main_loop(self) -> None:
        """Tick until the end, which uvicorn would notice only at its next tick."""
        for counter in itertools.count():
            if await self.on_tick(counter):
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await self._ending.wait()

    async def on_tick(self, counter: int) -> bool:
        """End what has run out of time."""
        table = self._protocol.table
        now_s = asyncio.get_running_loop().time()
        if self._ticked_s is not None and now_s - self._ticked_s > STOOD_STILL_S:
            table.leave_out(now_s - self._ticked_s)
        self._ticked_s = now_s
        table.tick(now_s)
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept nothing new and let what is open finish, in uvicorn's place; what does not is told, then cut."""
        if self._accepting is not None:
            self._accepting.close()
        state = self.server_state
        for connection in list(state.connections):
            connection.shutdown()
        if await self._is_idle(self.ends_s - self.last_words_s):
            return
        self.end_requests()
        if await self._is_idle(self.ends_s - self.last_words_s / 2):
            return
        # What is left is still prepared, or its client does not read.
        for task in list(state.tasks):
            task.cancel(SERVER_ENDS)
        if await self._is_idle(self.ends_s):
            return
        log.warning("ending: %d connections are cut amid a request", len(state.connections))
        for connection in list(state.connections):
            connection.transport.abort()
        await self._is_idle(self.ends_s + CUT_S)

    async def _is_idle(self, until_s: float) -> bool:
        """Wait until nothing is open, at most until a time of the loop; tell whether that is so."""
        state = self.server_state
        now_s = asyncio.get_running_loop().time
        while (state.connections or state.tasks) and now_s() < until_s:  # noqa: ASYNC110 - uvicorn tells nobody
            await asyncio.sleep(IDLE_LOOK_S)
        return not state.connections and not state.tasks


class HttpServer:
    """uvicorn on a socket of our own."""

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
    ) -> None:
        """Bind ``host:port`` (0 = any free port); raises ``OSError`` that names the ``setting``.

        With ``reuse_port`` several processes may serve one port, and the kernel spreads connections over them. Metrics
        of the server go into ``registry``. ``limits`` are those of ``HttpSettings``, and its defaults without.
        A server on loopback that asks for no API keys (``has_keys``) answers only requests that name it by a loopback
        name or one of ``limits.hosts``.
        """
        limits = limits or HttpLimits()
        limits = replace(limits, connections=connections_that_fit(limits.connections))
        hosts = None
        if not has_keys and is_loopback(host) and "*" not in limits.hosts:
            hosts = AllowedHosts(host, limits.hosts)
        protocol = DirectProtocol.serving(limits, registry, hosts)
        self.connections = protocol.table
        """Its connections, for whoever looks on."""
        self._tls = tls
        self._listener = bind(host, port, setting, reuse_port)
        self.host = host
        self.port: int = self._listener.getsockname()[1]
        self._stop_timeout_s = stop_timeout_ms / 1000
        self._server = _Server(
            uvicorn.Config(
                app,
                http=protocol,
                ws="none",
                loop="none",
                log_config=None,
                access_log=False,
                lifespan="off",
                backlog=BACKLOG,
                server_header=False,
                # Nothing here asks who the client is, and one wrapper less runs for every message.
                proxy_headers=False,
            ),
            protocol,
            tls,
            self._listener,
        )
        self._task: asyncio.Task[None] | None = None
        self._watch: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """Return where the server answers."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'http' if self._tls is None else 'https'}://{host}:{self.port}"

    def start(self) -> None:
        """Begin to answer; connections that came before wait in the backlog."""
        self._listener.listen(BACKLOG)
        if self._tls is not None:
            # Without a bound: the certificate that is in use goes on serving.
            self._watch = supervised(self._tls.watch, "certificate watch", Restart(limit=None))
        self._task = supervised(lambda: self._server.serve([self._listener]), "http server")

    async def stop(self, end_requests: Callable[[], None] = _nothing) -> None:
        """Accept nothing new, and let open responses finish for ``stop_timeout_ms``.

        A moment before that is over ``end_requests`` is called, which is to let them end with errors; then they are
        cancelled with ``SERVER_ENDS``, so that whoever is still preparing an answer can say so; then they are cut.
        """
        server = self._server
        server.end_requests = end_requests
        server.ends_s = asyncio.get_running_loop().time() + self._stop_timeout_s
        server.last_words_s = min(LAST_WORDS_S, self._stop_timeout_s / 2)
        server.end()
        tasks = [task for task in (self._watch, self._task) if task is not None]
        try:
            if self._task is not None:
                await asyncio.wait({self._task}, timeout=self._stop_timeout_s + CUT_S + 1)
        finally:
            self._listener.close()
            await cancel_all(tasks)


def open_server(
    opened: AsyncExitStack,
    settings: ServerSettings,
    registry: CollectorRegistry,
    app: Any,
    end_requests: Callable[[], None],
    reuse_port: bool,
    has_keys: bool,
) -> HttpServer:
    """Return a router's server, bound and not started; ``opened`` stops it, and then has its requests ended.

    Raises ``OSError`` when the port cannot be bound, ``TlsError``.
    """
    server = HttpServer(
        app,
        settings.host,
        settings.port,
        "port",
        settings.shutdown_timeout_ms,
        Tls.load(settings, registry),
        reuse_port=reuse_port,
        registry=registry,
        limits=settings.http_limits(),
        has_keys=has_keys,
    )
    opened.push_async_callback(server.stop, end_requests)
    return server
