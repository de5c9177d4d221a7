"""Picks the real things of a router process: clock, sockets, consolidator, HTTP. The only place that does."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import NamedTuple

from prometheus_client import CollectorRegistry

from dispatch.link_budget import links_that_fit
from frontend.app import create_app
from frontend.prompt_model import PromptModel
from frontend.settings import FrontendSettings
from router.consolidator.bootstrap import create as create_consolidator
from router.consolidator.service import ConsolidatorService
from router.consolidator.settings import ConsolidatorSettings
from router.core.approximate_index import ApproximateIndex
from router.core.load_ledger import LoadLedger
from router.core.policy import POLICY_NAMES
from router.core.prefix_index import PrefixIndex
from router.core.projection import Projection
from router.core.router_state import RouterState
from router.core.selector import Selector
from router.decision_journal.opening import open_recorder
from router.dry_run import add_route_endpoint
from router.feeds import EmbeddedFeed, RemoteFeed
from router.fleet_links import link_opener
from router.http_api import add_index_endpoint, add_pool_endpoint, add_router_endpoints, readiness, troubles
from router.metrics import DecisionRecordCollector, RouterMetrics, register_views
from router.policy_loading import load_policy
from router.ports import JournalFeed
from router.select_plane import SelectPlane
from router.service import RouterService
from router.settings import RouterSettings
from runtime.awake_clock import AwakeClock
from runtime.clock import SystemClock
from runtime.event_loop import LoopMetrics
from runtime.http_server import HttpServer
from runtime.planes import CurveKeys, PlaneContext, PlaneMetrics
from runtime.process_group import GroupMember, GroupMetrics, GroupPlace
from runtime.tasks import unless
from runtime.tls import Tls

log = logging.getLogger(__name__)


class Endpoints(NamedTuple):
    """Where a router answers."""

    http: str
    ingest: str
    """Where workers push their events; empty when the consolidator runs elsewhere."""
    select: str
    """Where global routers ask for workers."""


async def serve(
    settings: RouterSettings,
    frontend: FrontendSettings,
    consolidator: ConsolidatorSettings,
    stop: asyncio.Event,
    ready: Callable[[Endpoints], None],
    place: GroupPlace | None = None,
) -> None:
    """Run a router until ``stop`` is set; ``ready`` is told where it answers once its state is that of the pool.
    ``place`` is its place among processes that share the port, if there are several.

    Raises ``OSError`` when a port cannot be bound, ``PolicyError``, ``ModelDirectoryError``, ``JournalCorrupt``.
    """
    clock = SystemClock()
    awake = AwakeClock(clock, min(settings.worker_timeout_ms, settings.reservation_ttl_ms)).start()
    registry = CollectorRegistry()
    metrics = RouterMetrics(registry)
    LoopMetrics(registry)
    keys = CurveKeys.load(settings)
    plane_metrics = PlaneMetrics(registry)

    def make_context() -> PlaneContext:
        return PlaneContext.make(keys, plane_metrics)

    planes = "the select plane" if settings.feed_endpoint else "the select, ingest, feed and query planes"
    for warning in settings.exposures(settings.host, http=True, planes=planes, keyed=frontend.api_keys is not None):
        log.warning("%s", warning)
    policy = load_policy(settings)
    prompt_model = PromptModel.load(
        frontend.model_path,
        frontend.model_name,
        chat_template=frontend.chat_template,
        tokenization_cache_bytes=frontend.tokenization_cache_bytes,
        fast_tokenizer=frontend.fast_tokenizer,
        word_cache=frontend.word_cache,
    )
    index = PrefixIndex(settings.index_budget_bytes)
    ledger = LoadLedger(settings.reservation_ttl_ms, settings.ledger_budget_bytes)
    approximate = ApproximateIndex(index, settings.approximate_ttl_ms) if settings.policy == POLICY_NAMES[1] else None
    projection = Projection(index, ledger, approximate)
    state = RouterState(Selector(projection, policy, settings.worker_queue_factor))
    embedded: ConsolidatorService | None = None
    feed: JournalFeed
    if settings.feed_endpoint is not None and settings.query_endpoint is not None:
        feed = RemoteFeed(settings.feed_endpoint, settings.query_endpoint, awake, make_context)
    else:
        embedded = create_consolidator(consolidator, registry, clock, make_context)
        feed = EmbeddedFeed(embedded)
    recorder = open_recorder(settings, consolidator, state, awake)
    context = make_context()
    open_link = link_opener(context, settings, metrics, awake)
    service = RouterService(settings, state, feed, metrics, awake, open_link, links_that_fit())
    register_views(registry, service.view)
    if recorder is not None:
        service.books.record = recorder
        state.log = recorder
        registry.register(DecisionRecordCollector(recorder))
    member = GroupMember(place) if place is not None else None
    group_metrics = GroupMetrics(registry, member) if member is not None else None
    app = create_app(
        service,
        {prompt_model.name: prompt_model},
        settings=frontend,
        registry=registry,
        ready=readiness(service, member),
        troubles=lambda: troubles(service, recorder),
        clock=clock,
        exposed=group_metrics,
        place=place,
    )
    add_router_endpoints(app, service, clock)
    add_index_endpoint(app, service)
    add_route_endpoint(app, service)
    server = HttpServer(
        app,
        settings.host,
        settings.port,
        "port",
        settings.shutdown_timeout_ms,
        Tls.load(settings, registry),
        reuse_port=place is not None,
        registry=registry,
        limits=settings.http_limits(),
    )
    plane: SelectPlane | None = None
    try:
        plane = SelectPlane(context, settings.host, settings.select_port, service.view, state, metrics, awake)
        add_pool_endpoint(app, plane, service, recorder)
        if member is not None and group_metrics is not None:
            await member.start({"metrics": group_metrics.text})
        # HTTP answers /live and /ready while the state is still being rebuilt; requests are refused until then.
        server.start()
        if recorder is not None:
            recorder.start()
        await unless(stop, service.start(), "start of the router")
        if not stop.is_set():
            if member is not None:
                member.set_ready(True)
            log.info("router at %s, policy %s, journal offset %d", server.url, policy.name, projection.next_offset)
            ready(Endpoints(server.url, embedded.ingest_endpoint if embedded is not None else "", plane.endpoint))
            await stop.wait()
    finally:
        if member is not None:
            await member.stop()
        await server.stop()
        if plane is not None:
            plane.close()
        await service.stop()
        if recorder is not None:
            await recorder.stop()
        context.destroy(linger=0)
        awake.stop()
        log.info("router has ended")
