"""Picks the real things of a router process: clock, sockets, consolidator, HTTP. The only place that does."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, cast

from prometheus_client import CollectorRegistry

from poolgrid.kernel.routing.router_state import RouterState
from poolgrid.kernel.wire.addresses import CONSOLIDATOR, ROUTER, is_name
from poolgrid.kernel.wire.card import WorkerCard
from poolgrid.kernel.wire.ingest import Leader
from poolgrid.server.consolidator.settings import ConsolidatorSettings
from poolgrid.server.frontend.prompt_model import PromptModel
from poolgrid.server.frontend.settings import FrontendSettings
from poolgrid.server.process.clock import Clock
from poolgrid.server.process.lifecycle import GroupPlace
from poolgrid.server.process.plugins import EVENT_PLANES, PARTS, has_plugin, load_part, load_plugin
from poolgrid.server.process.tasks import detached, unless
from poolgrid.server.proxy.opening import open_forwarding
from poolgrid.server.proxy.prompt_record import PromptRecord
from poolgrid.server.router.feeds import EmbeddedFeed, JournalFeed, RemoteFeed
from poolgrid.server.router.http_api import (
    Completeness,
    add_drain_endpoint,
    add_index_endpoint,
    add_pool_endpoint,
    add_route_endpoint,
    add_router_endpoints,
    endpoints,
    readiness,
    troubles,
)
from poolgrid.server.router.metrics import RouterMetrics
from poolgrid.server.router.policy_loading import make_state
from poolgrid.server.router.select_plane import SelectPlane
from poolgrid.server.router.service import RouterService
from poolgrid.server.router.settings import RouterSettings
from poolgrid.server.router.state_metrics import DecisionRecordCollector, register_views
from poolgrid.server.serving.links import links_that_fit
from poolgrid.server.serving.router_process import RouterProcess
from poolgrid.server.transport.planes import MakeContext

if TYPE_CHECKING:
    from poolgrid.server.consolidator.service import ConsolidatorService
    from poolgrid.server.discovery.discovery import Discovery
    from poolgrid.server.router.decision_journal.recorder import DecisionRecorder

log = logging.getLogger(__name__)

VOCABULARY_PADDING = 1.05
"""How many more token ids than its tokenizer a model may have: matrices are padded to multiples of a few hundred."""


class Endpoints(NamedTuple):
    """Where a router answers."""

    http: str
    ingest: str
    """Where workers push their events; empty when the consolidator runs elsewhere."""
    select: str
    """Where global routers ask for workers."""
    ext_proc: str = ""
    """Where gateways ask for endpoints; empty where they cannot."""
    admin: str = ""
    """Where this process alone answers, when several share the port."""


FLEET_PAGE = "fleet-page-of-router"
ENDPOINT_PICKER = "endpoint-picker"
"""Parts that an installation may lack."""


async def serve(
    settings: RouterSettings,
    frontend: FrontendSettings,
    consolidator: ConsolidatorSettings,
    stop: asyncio.Event,
    ready: Callable[[Endpoints], None],
    place: GroupPlace | None = None,
) -> None:
    """Run a router until ``stop`` is set; ``ready`` gets its address once its state is that of the pool.
    ``place`` is its place among processes that share the port, if there are several.

    Raises ``OSError`` when a port cannot be bound, ``PolicyError``, ``ModelDirectoryError``, ``JournalCorrupt``.
    Whatever ends it, what was opened is closed again, in reverse order.
    """
    async with AsyncExitStack() as opened:
        process = RouterProcess(opened, settings, frontend, place)
        clock, registry = process.clock, process.registry
        awake = process.start_clock(settings.worker_timeout_ms, settings.reservation_ttl_ms)
        metrics = RouterMetrics(registry)
        make_context = process.context_maker()
        process.warn_of_exposures(_exposed_planes(settings))
        state = make_state(settings)
        await process.open_names()
        feed, embedded = _make_feed(settings, consolidator, registry, clock, awake, make_context)
        following = None
        if settings.on_nats and isinstance(feed, RemoteFeed):
            following = _follow_leader(opened, settings, feed, clock)
        if process.names is not None and isinstance(feed, RemoteFeed):
            _follow_by_name(settings, process.names, feed, awake)
        context = process.open_context(make_context)
        recorder = _open_recorder(opened, settings, consolidator, state, awake, registry)
        not_sampled = process.open_tracing("poolgrid-router", settings.router_id)
        open_link = process.link_opener(context, awake, metrics)
        check = partial(vocabulary_check, process.prompt_model)
        service = RouterService(settings, state, feed, metrics, awake, open_link, links_that_fit(), check, not_sampled)
        opened.push_async_callback(service.stop)
        service.tracker.recorder = recorder
        register_views(registry, service)
        plane = SelectPlane(
            context, settings.host, settings.select_port, service, state, awake, process.tracing, feed.loading
        )
        opened.callback(plane.close)
        completeness = Completeness()
        app = process.open_app(
            service,
            readiness(service, completeness),
            lambda: endpoints(service),
            stop,
            lambda: troubles(service, recorder, completeness),
            consolidator.data_dir,
        )
        prompts = PromptRecord(app.front.metrics)
        add_router_endpoints(app, service, clock, feed.loading, prompts.findings)
        add_index_endpoint(app, service)
        add_route_endpoint(app.front, service)
        add_drain_endpoint(app, service)
        add_pool_endpoint(app, plane, service, recorder)
        front = open_forwarding(opened, app, service, frontend, clock, prompts)
        server = process.open_server(front, service.end_requests)
        if frontend.fleet_page and has_plugin(PARTS, FLEET_PAGE):
            open_page = load_plugin(PARTS, FLEET_PAGE)
            open_page(opened, app, settings, service, state, clock, place)
        # HTTP answers /live and /ready while the state is still being rebuilt; requests are refused until then.
        server.start()
        if recorder is not None:
            recorder.start()
        await unless(stop, _start(service, following), "start of the router")
        if stop.is_set():
            return
        process.make_ready(app, service)
        ext_proc = ""
        if settings.ext_proc_port is not None:
            # Late: it brings gRPC, which most routers have no use for.
            open_picker = load_part(ENDPOINT_PICKER, f"ext_proc_port {settings.ext_proc_port}")
            ext_proc = await open_picker(opened, settings, frontend, app, service, state, registry, awake)
        offset = state.projection.next_offset
        if process.names is not None:
            await _register(opened, settings, process.names, server.url, plane, embedded)
        log.info("router at %s, policy %s, journal offset %d", server.url, state.selector.policy.name, offset)
        ingest = embedded.ingest_endpoint if embedded is not None else ""
        ready(Endpoints(server.url, ingest, plane.endpoint, ext_proc, server.admin_url))
        await stop.wait()


def vocabulary_check(model: PromptModel | None, card: WorkerCard) -> str:
    """Say why the output of a worker with this card could not be read with a model's tokenizer; empty = it can.

    ``None`` = there is no tokenizer.
    """
    if model is None:
        return "" if card.server_url else "this router has no tokenizer (--model-path none)"
    if card.model != model.name or card.vocabulary_size <= model.vocab_size * VOCABULARY_PADDING:
        return ""
    return (
        f"by its card token ids are below {card.vocabulary_size}, the tokenizer of model {model.name!r} here "
        f"has {model.vocab_size} tokens: most of its output would have no text. Start the worker with the vocabulary "
        "of this model (simulated: --vocabulary-size, --model-path), or the router with the worker's (--model-path)"
    )


def _exposed_planes(settings: RouterSettings) -> str:
    own = settings.feed_endpoint is None and not settings.on_nats
    planes = "the select, ingest, feed and query planes" if own else "the select plane"
    if settings.ext_proc_port is not None and settings.tls_certificate is None:
        planes += " and the endpoint picker"
    return planes


def _make_feed(
    settings: RouterSettings,
    consolidator: ConsolidatorSettings,
    registry: CollectorRegistry,
    clock: Clock,
    awake: Clock,
    make_context: MakeContext,
) -> tuple[JournalFeed, ConsolidatorService | None]:
    """Return the feed, and the consolidator if it is one of this process; the service starts and ends both."""
    if settings.feed_endpoint is not None and settings.query_endpoint is not None:
        feed, query = settings.feed_endpoint, settings.query_endpoint
        if is_name(feed):
            feed = query = ""  # service discovery has their addresses
        return RemoteFeed(feed, query, awake, make_context), None
    if settings.on_nats:
        return RemoteFeed("", "", awake, make_context), None  # the event plane knows which consolidator is active
    # Late: most routers follow a consolidator elsewhere.
    from poolgrid.server.consolidator.bootstrap import create as create_consolidator

    embedded = create_consolidator(consolidator, registry, clock, make_context)
    return EmbeddedFeed(embedded), embedded


async def _start(service: RouterService, following: asyncio.Task[None] | None) -> None:
    """Start a router, once the event plane is connected that knows its consolidator's address."""
    if following is not None:
        await following
    await service.start()


def _follow_leader(
    opened: AsyncExitStack, settings: RouterSettings, feed: RemoteFeed, clock: Clock
) -> asyncio.Task[None]:
    """Follow the journal of the pool's active consolidator, as the event plane knows."""
    plane = load_plugin(EVENT_PLANES, settings.event_plane)

    def move(leader: Leader | None) -> None:
        # One that is active and has no address yet still reads the journal.
        if leader is not None and leader.feed:
            detached(feed.move(leader.feed, leader.query), "move to another consolidator")

    following = plane.follow_consolidator(opened, settings, f"router {settings.router_id}", clock, move)
    return cast("asyncio.Task[None]", following)


def _follow_by_name(settings: RouterSettings, names: Discovery, feed: RemoteFeed, clock: Clock) -> None:
    """Follow the journal of a consolidator given by name, at its current address."""
    feed_name, query_name = settings.feed_endpoint, settings.query_endpoint
    if feed_name is None or query_name is None or not is_name(feed_name):
        return
    from poolgrid.server.discovery.discovery import DiscoveredConsolidator

    def move(where: list[str]) -> None:
        detached(feed.move(where[0], where[1]), "move to another consolidator")

    DiscoveredConsolidator(names, [feed_name, query_name], move, feed.answers, clock).start()


async def _register(
    opened: AsyncExitStack,
    settings: RouterSettings,
    names: Discovery,
    url: str,
    plane: SelectPlane,
    embedded: ConsolidatorService | None,
) -> None:
    """Have the names of a router, and of the consolidator in it; they are given back before anything else ends."""
    opened.push_async_callback(names.withdraw)
    reachable = settings.reachable
    endpoints = {"http": reachable(url), "select": reachable(plane.endpoint)}
    await names.register(ROUTER, settings.router_id, endpoints)
    if embedded is not None:
        planes = {
            "ingest": reachable(embedded.ingest_endpoint),
            "feed": reachable(embedded.feed_endpoint),
            "query": reachable(embedded.query_endpoint),
        }
        await names.register(CONSOLIDATOR, settings.router_id, planes)


def _open_recorder(
    opened: AsyncExitStack,
    settings: RouterSettings,
    consolidator: ConsolidatorSettings,
    state: RouterState,
    awake: Clock,
    registry: CollectorRegistry,
) -> DecisionRecorder | None:
    if consolidator.data_dir is None:
        return None
    # Late: routers without a data_dir record nothing.
    from poolgrid.server.router.decision_journal.opening import open_recorder

    recorder = open_recorder(settings, consolidator, state, awake)
    if recorder is not None:
        opened.push_async_callback(recorder.stop)
        state.log = recorder
        registry.register(DecisionRecordCollector(recorder))
    return recorder
