"""The entry points of this package: all that the rest of the product calls, through ``process.plugins``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack

from prometheus_client import CollectorRegistry

from poolgrid.consolidator.bootstrap import ConsolidatorEndpoints, open_server
from poolgrid.consolidator.journal.framing import JournalFenced
from poolgrid.consolidator.service import ConsolidatorService
from poolgrid.consolidator.settings import ConsolidatorProcessSettings
from poolgrid.frontend.responses_api.kept import TTL_S
from poolgrid.frontend.settings import FrontendSettings
from poolgrid.frontend.shared_state import SharedState, Sharing
from poolgrid.nats.commands import JournalInStream
from poolgrid.nats.connection import NatsConnection
from poolgrid.nats.election import LeaderElection, LeaderElectionMetrics
from poolgrid.nats.jetstream import JetStreamJournal, StreamShape, ThreadedStream
from poolgrid.nats.journal import StreamJournal, StreamJournalSettings, bytes_max_of
from poolgrid.nats.leader import LeaderWatch
from poolgrid.nats.limits import LimitsOnNats
from poolgrid.nats.responses import NatsResponseStore
from poolgrid.process.clock import Clock, SystemClock
from poolgrid.process.nats_settings import EventPlaneSettings, NatsSettings
from poolgrid.process.tasks import cancel_all, owned, unless
from poolgrid.transport.planes import CurveKeys, PlaneContext, PlaneMetrics
from poolgrid.wire.registration import Leader


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


def open_shared_state(
    opened: AsyncExitStack,
    nats: NatsSettings,
    frontend: FrontendSettings,
    sharing: Sharing,
    clock: Clock,
    registry: CollectorRegistry,
) -> SharedState:
    """Return what the routers of a pool share, to be closed with ``opened``."""
    limits = LimitsOnNats(nats, sharing.scope, sharing.place, sharing.lease_s, sharing.replicas, clock, registry)
    opened.push_async_callback(limits.close)
    responses = None
    if frontend.response_store_bytes:
        responses = NatsResponseStore(
            nats,
            sharing.scope,
            frontend.response_store_bytes,
            TTL_S,
            sharing.replicas,
            clock,
        )
        responses.start()
        opened.push_async_callback(responses.disconnect)
    return SharedState(limits, responses)


def open_journal(where: str, environment: Callable[[str], str | None]) -> JournalInStream:
    """Return a pool's journal for a command: ``nats://HOST:PORT/POOL``, settings by name from ``environment``."""
    return JournalInStream(where, environment)
