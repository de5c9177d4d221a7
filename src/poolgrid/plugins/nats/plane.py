"""The entry points of this package: all that the rest of the product calls, through ``process.plugins``."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack, suppress
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry

from poolgrid.kernel.journal.framing import JournalFenced
from poolgrid.kernel.wire.addresses import without_credentials
from poolgrid.kernel.wire.ingest import Leader
from poolgrid.plugins.nats.connection import NatsConnection
from poolgrid.plugins.nats.election import LeaderElection, LeaderElectionMetrics
from poolgrid.plugins.nats.history import StreamDirectory
from poolgrid.plugins.nats.jetstream import JetStreamJournal, StreamShape, ThreadedStream
from poolgrid.plugins.nats.journal import StreamJournal, StreamJournalSettings, bytes_max_of
from poolgrid.plugins.nats.leader import LeaderWatch, read_leader
from poolgrid.server.consolidator.bootstrap import ConsolidatorEndpoints, open_server
from poolgrid.server.consolidator.service import ConsolidatorService
from poolgrid.server.consolidator.settings import ConsolidatorProcessSettings
from poolgrid.server.process.clock import Clock, SystemClock
from poolgrid.server.process.nats_settings import EventPlaneSettings
from poolgrid.server.process.tasks import cancel_all, owned, unless, wait_from_thread
from poolgrid.server.transport.planes import CurveKeys, PlaneContext, PlaneMetrics

T = TypeVar("T")

CONNECT_TIMEOUT_S = 10.0
"""How long a command waits for a server that does not answer; services wait without limit."""

CLOSE_TIMEOUT_S = 2.0

FROM_ENVIRONMENT = ("nats_credentials", "nats_tls_ca", "nats_tls_certificate", "nats_tls_key")
"""Settings that are the same for every pool of an account: commands take them where services find them."""


class CommandConnection:
    """A connection of a command, on a loop of its own; both end with the process."""

    def __init__(self, text: str, environment: Callable[[str], str | None]) -> None:
        """Raises ``ValueError`` for an address that is none, ``OSError`` when nothing answers there."""
        self.url, _, pool = text.rpartition("/")
        if "://" not in self.url:
            self.url, pool = text, "default"
        given: dict[str, Any] = {name: value for name in FROM_ENVIRONMENT if (value := environment(name)) is not None}
        settings = EventPlaneSettings(
            event_plane="nats",
            nats_url=(self.url,),
            nats_pool=pool,
            **given,
        )
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True, name="NATS").start()
        self.nats = NatsConnection(settings, "poolgrid journal", SystemClock())
        # Also at the end of the process, if it is kept that long.
        end = weakref.finalize(self, _end, self.loop, self.nats)
        try:
            self.wait(self._open(), CONNECT_TIMEOUT_S + CLOSE_TIMEOUT_S)
        except BaseException as error:
            end()
            if isinstance(error, TimeoutError):
                raise OSError(
                    f"no NATS server answers at {without_credentials(self.url)} within {CONNECT_TIMEOUT_S:g} s"
                ) from None
            raise

    async def _open(self) -> None:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            await self.nats.open()

    def wait(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        return wait_from_thread(self.loop, work, "journal in a stream", timeout_s)


class JournalInStream(StreamDirectory):
    """A pool's journal that is read by a command."""

    def __init__(self, text: str, environment: Callable[[str], str | None]) -> None:
        """Raises ``ValueError`` for an address that is none, ``OSError`` when nothing answers there."""
        self._connection = connection = CommandConnection(text, environment)
        stream = ThreadedStream(JetStreamJournal(connection.nats), connection.loop)
        if not stream.facts().last_sequence:
            raise ValueError(
                f"{without_credentials(connection.url)} has no stream {stream.name}, or an empty one: no pool "
                f"{connection.nats.pool!r} has its journal there"
            )
        super().__init__(stream)

    def is_in_use(self) -> bool:
        return self._connection.wait(read_leader(self._connection.nats), CONNECT_TIMEOUT_S)[1] is not None


def _end(loop: asyncio.AbstractEventLoop, connection: NatsConnection) -> None:
    with suppress(TimeoutError):  # the process, or another time-out, ends anyway
        wait_from_thread(loop, _close(connection), "end of the connection", 2 * CLOSE_TIMEOUT_S)
    loop.call_soon_threadsafe(loop.stop)


async def _close(connection: NatsConnection) -> None:
    """Close a connection and end the tasks of its loop, also those of a library that waits for a server."""
    try:
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await connection.close()
    finally:
        this = asyncio.current_task()
        await cancel_all([task for task in asyncio.all_tasks() if task is not this])


async def serve_consolidator(
    opened: AsyncExitStack,
    settings: ConsolidatorProcessSettings,
    registry: CollectorRegistry,
    stop: asyncio.Event,
    ready: Callable[[ConsolidatorEndpoints], None],
) -> None:
    """Stand by and be active in turn: the journal is in a stream, and any consolidator of the pool may write it."""
    clock = SystemClock()
    loop = asyncio.get_running_loop()
    keys = CurveKeys.load(settings)
    planes = PlaneMetrics(registry)
    metrics = LeaderElectionMetrics(registry)
    connection = NatsConnection(settings, "poolgrid consolidator", clock)
    connection.foreign.count_in(registry)
    opened.push_async_callback(connection.close)
    bytes_max = bytes_max_of(settings.journal_retention_bytes)
    journal = JetStreamJournal(connection, StreamShape(settings.nats_replicas, bytes_max))
    sizes = StreamJournalSettings(settings.journal_retention_bytes, settings.journal_retention_ms, bytes_max)

    def make_service(consolidator_id: str, on_fenced: Callable[[JournalFenced], None]) -> ConsolidatorService:
        return ConsolidatorService(
            settings,
            registry,
            clock,
            lambda: StreamJournal(ThreadedStream(journal, loop), consolidator_id, clock, sizes),
            consolidator_id,
            lambda: PlaneContext.make(keys, planes),
            on_fenced,
        )

    succession = LeaderElection(settings, journal, clock, metrics, make_service)
    server = open_server(opened, settings, registry, succession)
    server.start()
    await unless(stop, connection.open(), "connection to NATS")
    if stop.is_set():
        return
    ready(ConsolidatorEndpoints(ingest="", feed="", query="", http=server.url))
    await succession.run(stop)


def follow_consolidator(
    opened: AsyncExitStack,
    settings: EventPlaneSettings,
    name: str,
    clock: Clock,
    on_leader: Callable[[Leader | None], None],
) -> asyncio.Task[None]:
    """Call ``on_leader`` whenever another consolidator becomes active; ``name`` names this process.

    The task ends once NATS is connected.
    """
    connection = NatsConnection(settings, f"poolgrid {name}", clock)
    opened.push_async_callback(connection.close)
    watch = LeaderWatch(connection, on_leader)
    opened.push_async_callback(watch.stop)

    async def begin() -> None:
        await connection.open()
        await watch.start()

    task = owned(begin(), "connection to NATS")
    opened.push_async_callback(cancel_all, [task])
    return task


def open_journal(where: str, environment: Callable[[str], str | None]) -> JournalInStream:
    """Return a pool's journal for a command: ``nats://HOST:PORT/POOL``, settings by name from ``environment``."""
    return JournalInStream(where, environment)
