"""An engine server as a worker's engine: its cache is what its events say, its requests are what routers report.

Rules:

1. Requests go from routers straight to the server. What the pool knows of them are the books (``server_books``).
2. Loads are those books. Each second, less often while idle, the engine's own figures are compared with them: what is
   beyond is load of others.
3. A server that does not answer, or whose requests make no progress, is *silent*: its worker leaves the pool until it
   is well again (``health``).
4. An exception in a callback is not caught: it ends the worker (``poolgrid.server.process.lifecycle``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from poolgrid.kernel.wire.events import AnyEvent, BlocksStored, LoadReported
from poolgrid.kernel.wire.requests import Generate
from poolgrid.kernel.worker_protocol.cache_facts import RestatedEvent
from poolgrid.kernel.worker_protocol.engine import EngineReport
from poolgrid.kernel.worker_protocol.refusal import UnableError
from poolgrid.server.process.clock import Clock
from poolgrid.server.process.tasks import cancel_all, owned
from poolgrid.server.workers.engines.server.cache_events import CacheEvents
from poolgrid.server.workers.engines.server.core.engine_figures import EngineFigures
from poolgrid.server.workers.engines.server.health import ServerHealth
from poolgrid.server.workers.engines.server.kinds import HEALTH_PATH
from poolgrid.server.workers.engines.server.server_books import ServerBooks
from poolgrid.server.workers.engines.server.server_client import ServerClient, ServerError
from poolgrid.server.workers.engines.server.settings import EngineServerSettings
from poolgrid.server.workers.engines.server.started_server import StartedServer
from poolgrid.server.workers.metrics import WorkerMetrics

FIGURES_INTERVAL_S = 1.0
"""Time between two looks at the engine's own figures: a page of metrics costs a server some milliseconds."""

IDLE_LOOK_SHARE = 4
"""How many times as long it is while neither the engine nor the books have a request."""

REPORTED_WITHIN_S = 0.2
"""Time after which routers have reported what they sent: they do so 20 times a second."""


class ServerEngine:
    """``poolgrid.kernel.worker_protocol.engine.Engine`` over an engine server."""

    def __init__(
        self,
        client: ServerClient,
        dp_size: int,
        block_size: int,
        total_blocks: int,
        settings: EngineServerSettings,
        events: CacheEvents,
        confirm: Callable[[bool], Awaitable[str]],
        about: Callable[[], dict[str, object]],
        clock: Clock,
        metrics: WorkerMetrics,
        server: StartedServer | None = None,
        health_path: str = HEALTH_PATH,
        figures: EngineFigures | None = None,
    ) -> None:
        """``confirm`` asks what the server serves, or all that it is, and says in what it differs from before;
        ``about`` is for people.

        ``server`` is one that the worker has started.
        """
        self._client = client
        self.dp_size = dp_size
        self._events = events
        self._about = about
        self._server = server
        self._clock = clock
        self._metrics = metrics
        self.books = ServerBooks(
            dp_size,
            block_size,
            total_blocks,
            settings.progress_timeout_ms,
            events.cached_blocks,
            events.is_behind,
            clock,
            self._lose,
            events.note_salt,
        )
        self._health = ServerHealth(
            client,
            confirm,
            events.is_current,
            self._stalled,
            self.books.lives_since,
            settings.health_interval_ms,
            settings.health_timeout_ms,
            clock,
            metrics,
            None if server is None else server.excuse,
            health_path,
        )
        self._figures = figures
        self._health.observe(self._on_health)
        self._observer: Callable[[], None] | None = None
        self._watching: list[asyncio.Task[None]] = []
        self._follows = asyncio.Event()
        """Set once the server's cache events are followed."""
        self._fault: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Fails when a report is lost."""

    # -- what the worker sees ------------------------------------------------------------------------------------------

    @property
    def unhealthy_reason(self) -> str:
        return self._health.unhealthy_reason

    @property
    def is_silent(self) -> bool:
        return self._health.is_silent

    def observe_health(self, changed: Callable[[], None]) -> None:
        self._observer = changed

    def describe(self) -> dict[str, object]:
        return {"engine_server": {**self._about(), **self._events.describe()}}

    def load(self, dp_rank: int) -> LoadReported:
        return self.books.load(dp_rank)

    def resident_blocks(self, dp_rank: int) -> list[BlocksStored]:
        raise NotImplementedError("an engine server cannot list its cache; only its events show it")

    def restate(self, dp_rank: int) -> Sequence[RestatedEvent]:
        return self._events.restate(dp_rank)

    async def until_known(self) -> None:
        """Wait until what the server held before this process is known; ``run`` has begun, or is about to."""
        await self._follows.wait()
        await self._events.until_current()

    def submit(self, request: Generate) -> None:
        """Refuse a request by token ids: clients' own requests go to the server."""
        raise UnableError("the engine server takes requests as their clients wrote them, and not as token ids")

    def cancel(self, request_id: str) -> None:
        """Do nothing: no request was taken."""

    async def run(self, deliver: Callable[[EngineReport], None]) -> None:
        """Hand over reports until cancelled.

        Raises ``EngineBrokenError`` when the server came back as another, or is not started again any more, and what
        a report was lost by.
        """
        self.books.report.open(deliver)
        self._events.open(self._on_cache)
        self._follows.set()
        self._watching = [owned(self._health.run(), "health of the server")]
        if self._figures is not None:
            self._watching.append(
                owned(follow_figures(self._client, self._figures, self.books, self.dp_size), "figures")
            )
        if self._server is not None:
            self._watching.append(owned(self._server.watch(self._health.doubt), "watch over the server"))
        done, _ = await asyncio.wait([*self._watching, self._fault], return_when=asyncio.FIRST_COMPLETED)
        for each in done:
            each.result()

    # -- its life ------------------------------------------------------------------------------------------------------

    def _on_cache(self, dp_rank: int, events: Sequence[AnyEvent]) -> None:
        self.books.cache_changed(dp_rank, events)
        # At once: a restatement must not know more than the reports have told.
        self.books.report.flush()

    def _lose(self, error: Exception) -> None:
        if not self._fault.done():
            self._fault.set_exception(error)

    def _stalled(self, now_ms: float) -> str:
        """Return what has not moved for too long; empty = nothing."""
        silent_ms = self.books.silent_ms(now_ms)
        self._metrics.engine_silence_seconds.set(silent_ms / 1e3)
        return self.books.stall(silent_ms)

    def _on_health(self) -> None:
        if self._health.is_silent:
            # At once: the worker's next message is its exit.
            self.books.report.flush()
        if self._observer is not None:
            self._observer()

    async def close(self) -> None:
        """Stop following."""
        self.books.report.close()
        self._events.close()
        await cancel_all(self._watching)


async def follow_figures(client: ServerClient, figures: EngineFigures, books: ServerBooks, dp_size: int) -> None:
    """Compare the requests that the engine reports with the books, again and again."""
    while True:
        before = books.booked()
        try:
            page = await client.ask(figures.path)
        except ServerError:
            page = b""
        await asyncio.sleep(REPORTED_WITHIN_S)
        found, after = figures.read(page, dp_size), books.booked()
        books.compare(found, before, after)
        is_idle = not any((*before, *after, *(found or ())))
        await asyncio.sleep(FIGURES_INTERVAL_S * (IDLE_LOOK_SHARE if is_idle else 1))
