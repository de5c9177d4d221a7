"""Put a consolidator together with the real things: the only place that picks them."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, NamedTuple, Protocol

import zmq
from prometheus_client import CollectorRegistry

from poolgrid.kernel.journal.ports import Journal
from poolgrid.kernel.wire.addresses import CONSOLIDATOR
from poolgrid.server.consolidator.journal.files import FileJournal, JournalSettings
from poolgrid.server.consolidator.journal.memory import MemoryJournal
from poolgrid.server.consolidator.journal.posix_disk import PosixDisk
from poolgrid.server.consolidator.service import ConsolidatorService
from poolgrid.server.consolidator.settings import ConsolidatorProcessSettings, ConsolidatorSettings, Tuning
from poolgrid.server.http.guard import Application
from poolgrid.server.http.health_app import HealthApp, Observed
from poolgrid.server.http.http_server import HttpServer
from poolgrid.server.process.clock import Clock, SystemClock
from poolgrid.server.process.lifecycle import LoopMetrics
from poolgrid.server.process.plugins import EVENT_PLANES, load_plugin
from poolgrid.server.transport.planes import CurveKeys, MakeContext, PlaneContext, PlaneMetrics
from poolgrid.server.transport.security import Tls


class ConsolidatorHealth:
    """Implements ``poolgrid.server.http.health_app.Observed``: it is well while it takes events."""

    def __init__(self, service: ConsolidatorService) -> None:
        self._service = service

    @property
    def is_ready(self) -> bool:
        return self._service.ready

    @property
    def is_healthy(self) -> bool:
        return self._service.ready

    def describe(self) -> dict[str, object]:
        service = self._service
        return {
            "status": "ready" if service.ready else "journal unavailable" if service.stalled else "starting",
            "reason": service.trouble if service.stalled else "",
            "degraded": service.trouble,
            "consolidator_id": service.consolidator_id,
            "offset": service.offset,
            "workers": len(service.core.pool.workers),
            "degraded_sources": [source.name for source in service.sources() if source.degraded],
            "sources": [source.row() for source in service.sources()],
        }


if TYPE_CHECKING:
    from poolgrid.server.discovery.discovery import Discovery

log = logging.getLogger(__name__)


class ConsolidatorEndpoints(NamedTuple):
    """Where a consolidator answers."""

    ingest: str
    feed: str
    query: str
    http: str


MakePlanes = Callable[[], PlaneContext]


class Companion(Protocol):
    """What runs in the process of a consolidator, and pushes its events without a socket."""

    def around(self, app: HealthApp) -> Application:
        """Return an application that answers for it, too."""
        ...

    async def run(self, service: ConsolidatorService, make_context: MakePlanes, stop: asyncio.Event) -> None:
        """Run until ``stop`` is set, and what it has is over; ``make_context`` makes a context for its own sockets."""
        ...


def open_journal(settings: ConsolidatorSettings, tuning: Tuning) -> Journal:
    """Return the journal that the settings name; raises ``OSError`` or ``JournalCorrupt``."""
    if settings.data_dir is None:
        return MemoryJournal(tuning.memory_journal_bytes)
    disk = PosixDisk(settings.data_dir)
    try:
        return FileJournal(
            disk,
            JournalSettings(
                tuning.segment_bytes_of(settings.journal_retention_bytes),
                settings.journal_retention_bytes,
                settings.journal_retention_ms,
            ),
        )
    except BaseException:
        disk.close()
        raise


def create(
    settings: ConsolidatorSettings,
    registry: CollectorRegistry,
    clock: Clock,
    make_context: MakeContext = zmq.Context,
    tuning: Tuning | None = None,
) -> ConsolidatorService:
    """Return a consolidator; it holds nothing until ``start``, and its endpoints are known after that."""
    values = tuning or Tuning()
    return ConsolidatorService(
        settings, registry, clock, lambda: open_journal(settings, values), make_context=make_context, tuning=values
    )


async def serve(
    settings: ConsolidatorProcessSettings,
    stop: asyncio.Event,
    ready: Callable[[ConsolidatorEndpoints], None],
    tuning: Tuning | None = None,
    companion: Companion | None = None,
) -> None:
    """Run a consolidator in a process of its own until ``stop`` is set; ``ready`` gets its address.

    ``companion`` runs in the process of a consolidator with its own journal, from when that takes events to its end.

    With an event plane on NATS it is ready when it stands by, and answers on its planes while it is active.
    Whatever ends it, what was opened is closed again, in reverse order.
    """
    async with AsyncExitStack() as opened:
        registry = CollectorRegistry()
        LoopMetrics(registry)
        for warning in settings.exposures(settings.host, http=True, planes="the ingest, feed and query planes"):
            log.warning("%s", warning)
        if settings.on_nats:
            plane = load_plugin(EVENT_PLANES, settings.event_plane)
            await plane.serve_consolidator(opened, settings, registry, stop, ready)
            return
        names: Discovery | None = None
        if settings.has_names:
            # Imported when it is used: most pools are given addresses.
            from poolgrid.server.discovery.directory import open_discovery

            names = await open_discovery(opened, settings, SystemClock(), registry)
        make_context = _context_maker(settings, registry)
        service = create(settings, registry, SystemClock(), make_context, tuning)
        opened.push_async_callback(service.stop)
        await service.start()
        around = _alone if companion is None else companion.around
        server = open_server(opened, settings, registry, ConsolidatorHealth(service), around)
        server.start()
        if names is not None:
            opened.push_async_callback(names.withdraw)
            planes = {
                "ingest": service.ingest_endpoint,
                "feed": service.feed_endpoint,
                "query": service.query_endpoint,
                "http": server.url,
            }
            own = {name: settings.reachable(address) for name, address in planes.items()}
            await names.register(CONSOLIDATOR, f"{CONSOLIDATOR}-{os.getpid()}", own)
        ready(
            ConsolidatorEndpoints(
                ingest=service.ingest_endpoint,
                feed=service.feed_endpoint,
                query=service.query_endpoint,
                http=server.url,
            )
        )
        if companion is not None:
            await companion.run(service, make_context, stop)
        await stop.wait()


def _context_maker(settings: ConsolidatorProcessSettings, registry: CollectorRegistry) -> MakePlanes:
    keys, metrics = CurveKeys.load(settings), PlaneMetrics(registry)
    return lambda: PlaneContext.make(keys, metrics)


def _alone(app: HealthApp) -> Application:
    return app


def open_server(
    opened: AsyncExitStack,
    settings: ConsolidatorProcessSettings,
    registry: CollectorRegistry,
    observed: Observed,
    around: Callable[[HealthApp], Application] = _alone,
) -> HttpServer:
    """Return the server of health and metrics, to be started; it stops with ``opened``."""
    server = HttpServer(
        around(HealthApp(registry, observed)),
        settings.host,
        settings.http_port,
        "http_port",
        tls=Tls.load(settings, registry),
        registry=registry,
        limits=settings.http_limits(),
    )
    opened.push_async_callback(server.stop)
    return server
