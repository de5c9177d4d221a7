"""Picks the real things of a worker process: clock, sockets, engine, HTTP. The only place that does."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

import msgspec
from prometheus_client import CollectorRegistry

from poolgrid.kernel.wire.addresses import COMPONENTS
from poolgrid.kernel.wire.card import ChatSpec, WorkerCard
from poolgrid.kernel.wire.ingest import Leader, LoadingWorker
from poolgrid.kernel.wire.limits import CHAT_TEMPLATE_CHARS_MAX, IDENTIFIER_BYTES_MAX
from poolgrid.kernel.worker_protocol.push_stream import PushStream, PushTiming
from poolgrid.server.http.health_app import HealthApp
from poolgrid.server.http.http_server import HttpServer
from poolgrid.server.process.clock import AwakeClock, Clock, SystemClock
from poolgrid.server.process.lifecycle import LoopMetrics
from poolgrid.server.process.parser_names import AUTO
from poolgrid.server.process.plugins import EVENT_PLANES, load_plugin
from poolgrid.server.process.tasks import cancel_all, detached, supervised, unless
from poolgrid.server.process.tracing.tracing import open_tracing
from poolgrid.server.transport.planes import CurveKeys, PlaneContext, PlaneMetrics, end_security
from poolgrid.server.transport.security import Tls
from poolgrid.server.workers.adapters.http_api import FollowedApi, HttpApi
from poolgrid.server.workers.adapters.sockets import CONSOLIDATOR, DealerSocket, RequestSocket
from poolgrid.server.workers.engines.definition import EngineDefinition, EngineHost, OpenedEngine, close_in_order
from poolgrid.server.workers.engines.registry import engine_definition
from poolgrid.server.workers.metrics import WorkerMetrics
from poolgrid.server.workers.model_fetch import fetched_model
from poolgrid.server.workers.publisher import ConnectIngest, ConsolidatorPlace, EventPublisher, tell_while_loading
from poolgrid.server.workers.server_workers import ServerWorkers
from poolgrid.server.workers.service import ServiceLimits, WorkerService
from poolgrid.server.workers.settings import WorkerProcessSettings
from poolgrid.server.workers.start_phases import Phase, StartPhases

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from poolgrid.server.discovery.discovery import Discovery


class SharedPlanes(NamedTuple):
    """What the workers of one process have together."""

    context: PlaneContext
    connect: ConnectIngest | None = None
    """The way to a consolidator in the same process; ``None`` = it is elsewhere."""


async def serve(
    settings: WorkerProcessSettings,
    stop: asyncio.Event,
    ready: Callable[[str], None],
) -> None:
    """Run the workers of a process until ``stop`` is set and their requests are done."""
    definition = engine_definition(settings.engine_name)
    if definition.follow is not None:
        await serve_followed(settings, stop, ready)
        return
    workers = definition.workers(settings)
    if len(workers) == 1:
        await serve_worker(workers[0], stop, ready)
    else:
        await ServerWorkers(workers, serve_worker, ready).run(stop)


class FollowedServers:
    """Workers that come and go in this process; made on a running event loop."""

    def __init__(self, settings: WorkerProcessSettings) -> None:
        self._settings = settings
        follow = engine_definition(settings.engine_name).follow
        assert follow is not None, "its workers come and go"
        self._planes: SharedPlanes | None = None
        self._follower = follow(settings, ServerWorkers((), self._serve, lambda url: None))

    # What is shown: ``poolgrid.server.http.health_app.Observed``.

    is_ready = is_healthy = True

    def describe(self) -> dict[str, object]:
        return {"status": "ready", **self._follower.describe()}

    def around(self, app: HealthApp) -> FollowedApi:
        """Return an application that answers for what is followed, too."""
        return FollowedApi(app, self._follower.answer)

    async def run(self, stop: asyncio.Event, context: PlaneContext, connect: ConnectIngest | None = None) -> None:
        """Follow until ``stop`` is set, and the requests of all workers are done. ``context`` ends with it; ``connect``
        is the way to a consolidator in the same process."""
        async with AsyncExitStack() as opened:
            _end_with(opened, context)
            self._planes = SharedPlanes(context, connect)
            await self._follower.run(stop)

    async def _serve(self, settings: WorkerProcessSettings, stop: asyncio.Event, ready: Callable[[str], None]) -> None:
        await serve_worker(settings, stop, ready, self._planes)


async def serve_followed(settings: WorkerProcessSettings, stop: asyncio.Event, ready: Callable[[str], None]) -> None:
    """Run workers that come and go until ``stop`` is set; ``ready`` gets the URL of this process's HTTP at once."""
    async with AsyncExitStack() as opened:
        registry = CollectorRegistry()
        LoopMetrics(registry)
        for warning in settings.exposures(settings.host, http=True, planes="the request planes"):
            log.warning("%s", warning)
        followed = FollowedServers(settings)
        http = _open_server(opened, settings, registry, followed.around(HealthApp(registry, followed)))
        http.start()
        ready(http.url)
        await followed.run(stop, _make_context(settings, registry))


async def serve_worker(
    settings: WorkerProcessSettings,
    stop: asyncio.Event,
    ready: Callable[[str], None],
    planes: SharedPlanes | None = None,
) -> None:
    """Run a worker until ``stop`` is set and its requests are done.

    ``ready`` is called once, with the URL of the worker's HTTP, when the consolidator has welcomed the worker.
    Raises ``OSError`` when a port cannot be bound, ``ValueError`` when the chat template cannot be read, and what
    opening the engine raises. Whatever ends it, what was opened is closed again, in reverse order; on cancellation (a
    second signal) without waiting.
    """
    definition = engine_definition(settings.engine_name)
    chat = chat_spec(settings)
    async with AsyncExitStack() as opened:
        clock = SystemClock()
        awake = _start_clock(opened, clock, min(settings.peer_lease_ms, definition.shortest_timeout_ms(settings)))
        registry = CollectorRegistry()
        metrics = WorkerMetrics(registry)
        LoopMetrics(registry)
        if planes is None:
            planes = SharedPlanes(_make_context(settings, registry))
            _end_with(opened, planes.context)
            for warning in settings.exposures(settings.host, http=True, planes="the request plane"):
                log.warning("%s", warning)
        context = planes.context
        connect = planes.connect or partial(DealerSocket, context, CONSOLIDATOR)
        names: Discovery | None = None
        if settings.has_names:
            # Imported when it is used: most pools are given addresses.
            from poolgrid.server.discovery.directory import open_discovery

            names = await open_discovery(opened, settings, clock, registry)
        epoch = time.time_ns()
        api = HttpApi(registry)
        http = _open_server(opened, settings, registry, api)
        # Before the engine: loading one takes minutes, and probes ask all the while.
        http.start()
        is_found = planes.connect is None and bool(settings.on_nats or settings.consolidator_name)
        place = ConsolidatorPlace("" if is_found else settings.consolidator)
        publishers = place.publishers
        close_in_order(opened, partial(_close_publishers, publishers))
        # Before the engine, too: a worker that loads reports it to the consolidator.
        following = _follow_consolidator(opened, settings, place, clock) if is_found and settings.on_nats else None
        if names is not None and is_found and settings.consolidator_name:
            _follow_by_name(names, settings.consolidator_name, place, clock)
        requests = _open_requests(opened, settings, context)
        start = StartPhases(metrics, clock, api.say_start)
        around = EngineHost(
            context, registry, metrics, clock, awake, epoch, requests.port, http.port, api.say_start, start
        )
        opening = _open_engine(opened, definition, settings, around)
        telling = _tell_while_loading(settings, definition.serves(settings), start, connect, place)
        try:
            engine = await unless(stop, opening, "start of the engine")
        finally:
            await cancel_all([telling])
        if engine is None:
            log.info("worker %s was stopped before its engine was ready", settings.worker_id)
            return
        start.enter(Phase.REGISTER)
        card = named_card(told_card(engine.card, settings, chat), settings)
        # Engines that cannot fail by themselves never report their health.
        metrics.engine_healthy.set(not engine.engine.unhealthy_reason)
        metrics.info.labels(settings.worker_id, card.model, card.role.name.lower(), settings.engine_name).set(1)
        service = WorkerService(
            settings.worker_id,
            epoch,
            card,
            engine.engine,
            requests,
            ServiceLimits(settings.peer_lease_ms, settings.shutdown_timeout_ms),
            awake,
            metrics,
            engine.kv,
            engine.embeddings,
            open_tracing(opened, settings, clock, "poolgrid-worker", settings.worker_id),
            engine.forward_books,
        )
        api.show(service)
        for dp_rank in range(engine.engine.dp_size):
            _open_publisher(connect, place, settings, around, service, card_of_rank(card, dp_rank), dp_rank)
        if following is not None:
            await unless(stop, _ended(following), "connection to NATS")
        if names is not None:
            await _register(opened, settings, names, card)
        if engine.observe_card is not None:

            def introduce(changed: WorkerCard) -> None:
                card = named_card(told_card(changed, settings, chat), settings)
                service.card = card
                for dp_rank, publisher in enumerate(publishers):
                    publisher.introduce(card_of_rank(card, dp_rank))

            engine.observe_card(introduce)
        _announce_when_registered(opened, publishers, start, card.http_endpoint, ready)
        log.info("worker %s at %s, health at %s", settings.worker_id, card.request_endpoint, card.http_endpoint)
        await service.run(publishers, stop, engine.until_known)


def _start_clock(opened: AsyncExitStack, clock: Clock, shortest_timeout_ms: float) -> AwakeClock:
    awake = AwakeClock(clock, shortest_timeout_ms).start()
    opened.callback(awake.stop)
    return awake


def _make_context(settings: WorkerProcessSettings, registry: CollectorRegistry) -> PlaneContext:
    return PlaneContext.make(CurveKeys.load(settings), PlaneMetrics(registry))


def _end_with(opened: AsyncExitStack, context: PlaneContext) -> None:
    async def end() -> None:
        end_security(context)
        # In a thread: it waits for frames on their way, at most as long as the sockets linger.
        await asyncio.to_thread(context.destroy, linger=0)

    opened.push_async_callback(end)


def _open_server(
    opened: AsyncExitStack, settings: WorkerProcessSettings, registry: CollectorRegistry, api: HealthApp | FollowedApi
) -> HttpServer:
    tls = Tls.load(settings, registry)
    limits = settings.http_limits()
    http = HttpServer(api, settings.host, settings.http_port, "http_port", tls=tls, registry=registry, limits=limits)
    opened.push_async_callback(http.stop)
    return http


def _open_requests(opened: AsyncExitStack, settings: WorkerProcessSettings, context: PlaneContext) -> RequestSocket:
    requests = RequestSocket(context, settings.host, settings.request_port)
    close_in_order(opened, requests.close)
    return requests


def _tell_while_loading(
    settings: WorkerProcessSettings,
    serves: tuple[str, str],
    start: StartPhases,
    connect: ConnectIngest,
    place: ConsolidatorPlace,
) -> asyncio.Task[None]:
    """Report the progress of the start to the consolidator, at its current address."""

    def now() -> LoadingWorker:
        phase = start.phase or Phase.LOAD
        model, role = serves
        return LoadingWorker(
            settings.worker_id, model[:IDENTIFIER_BYTES_MAX], role, phase, start.done_bytes, start.total_bytes
        )

    return detached(tell_while_loading(connect, lambda: place.endpoint, now), "words of loading")


async def _open_engine(
    opened: AsyncExitStack,
    definition: EngineDefinition[WorkerProcessSettings],
    settings: WorkerProcessSettings,
    around: EngineHost,
) -> OpenedEngine:
    definition.check_library()
    settings = await fetched_model(settings, definition.loads(settings), definition.with_model, around.start)
    around.start.enter(Phase.LOAD)
    return await opened.enter_async_context(definition.open(settings, around))


def _open_publisher(
    connect: ConnectIngest,
    place: ConsolidatorPlace,
    settings: WorkerProcessSettings,
    around: EngineHost,
    service: WorkerService,
    card: WorkerCard,
    dp_rank: int,
) -> None:
    """Open what carries a rank's events; with the others it is closed after the engine's last report."""
    timing = PushTiming(heartbeat_ms=settings.heartbeat_ms)
    stream = PushStream(settings.worker_id, dp_rank, around.epoch, card, timing)
    publisher = EventPublisher(
        connect,
        place.endpoint,
        stream,
        partial(service.restate, dp_rank),
        around.clock,
        around.metrics,
        settings.load_interval_ms,
    )
    place.publishers.append(publisher)


def _follow_consolidator(
    opened: AsyncExitStack, settings: WorkerProcessSettings, place: ConsolidatorPlace, clock: Clock
) -> asyncio.Task[None]:
    """Push to the pool's active consolidator, as the event plane knows."""
    plane = load_plugin(EVENT_PLANES, settings.event_plane)

    def move(leader: Leader | None) -> None:
        # A consolidator that is active and has no address yet takes nothing in; the one before it does not either.
        place.move("" if leader is None else leader.ingest)

    following = plane.follow_consolidator(opened, settings, f"worker {settings.worker_id}", clock, move)
    return cast("asyncio.Task[None]", following)


async def _ended(task: asyncio.Task[None]) -> None:
    await task


def _follow_by_name(names: Discovery, name: str, place: ConsolidatorPlace, clock: Clock) -> None:
    """Push to the consolidator of the namespace, at its current address."""
    from poolgrid.server.discovery.discovery import DiscoveredConsolidator

    DiscoveredConsolidator(names, [name], lambda where: place.move(where[0]), place.answers, clock).start()


async def _register(
    opened: AsyncExitStack, settings: WorkerProcessSettings, names: Discovery, card: WorkerCard
) -> None:
    opened.push_async_callback(names.withdraw)
    endpoints = {"generate": card.request_endpoint, "http": card.http_endpoint}
    await names.register(COMPONENTS[card.role], settings.worker_id, endpoints)


def _close_publishers(publishers: Sequence[EventPublisher], orderly: bool) -> None:
    for publisher in publishers:
        publisher.close(orderly)


def _announce_when_registered(
    opened: AsyncExitStack,
    publishers: Sequence[EventPublisher],
    start: StartPhases,
    url: str,
    ready: Callable[[str], None],
) -> None:
    async def announce() -> None:
        for publisher in publishers:
            await publisher.started.wait()
            await publisher.until_registered()
        start.end()
        ready(url)

    opened.push_async_callback(cancel_all, [supervised(announce, "announcement")])


MEBIBYTE = 1024 * 1024


def chat_spec(settings: WorkerProcessSettings) -> ChatSpec:
    """Return the chat settings of a worker; raises ``ValueError`` when its template cannot be read, or is too long."""
    return ChatSpec(
        "" if settings.reasoning_parser == AUTO else settings.reasoning_parser,
        "" if settings.tool_call_parser == AUTO else settings.tool_call_parser,
        "" if settings.chat_template is None else _read_template(settings.chat_template),
    )


def told_card(card: WorkerCard, settings: WorkerProcessSettings, chat: ChatSpec) -> WorkerCard:
    """Return an engine's card with the worker's chat settings."""
    media = card.media
    if settings.max_file_size_mb is not None:
        media = msgspec.structs.replace(media, item_bytes_max=settings.max_file_size_mb * MEBIBYTE)
    return msgspec.structs.replace(card, media=media, chat=chat)


def named_card(card: WorkerCard, settings: WorkerProcessSettings) -> WorkerCard:
    """Return a card with the name that the worker has in its namespace, where it has one and the engine gave none."""
    if not settings.has_names or card.endpoint_name:
        return card
    name = f"{settings.namespace}.{COMPONENTS[card.role]}.generate"
    return msgspec.structs.replace(card, endpoint_name=name)


def card_of_rank(card: WorkerCard, dp_rank: int) -> WorkerCard:
    """Return the card of one rank: the template is in the first one's only, because a pool may have thousands."""
    if dp_rank == 0 or not card.chat.chat_template:
        return card
    return msgspec.structs.replace(card, chat=msgspec.structs.replace(card.chat, chat_template=""))


def _read_template(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"chat_template is {path}, which cannot be read as text: {error}") from None
    if not 1 <= len(text) <= CHAT_TEMPLATE_CHARS_MAX:
        raise ValueError(
            f"chat_template is {path} with {len(text)} characters, allowed are 1 to {CHAT_TEMPLATE_CHARS_MAX}"
        )
    return text
