"""Picks the real things of a router process: clock, sockets, consolidator, HTTP. The only place that does."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import zmq
from prometheus_client import CollectorRegistry

from poolgrid.consolidator.bootstrap import create as create_consolidator
from poolgrid.consolidator.service import ConsolidatorService
from poolgrid.consolidator.settings import ConsolidatorSettings
from poolgrid.fleet_page.endpoints import open_fleet_page
from poolgrid.fleet_page.playback.player import Player
from poolgrid.fleet_page.served_seconds import open_served_seconds
from poolgrid.frontend.app import Application, create_app
from poolgrid.frontend.fleet_list import add_fleet_list
from poolgrid.frontend.group_decisions import GroupDecisions
from poolgrid.frontend.prompt_model import PromptModel
from poolgrid.frontend.settings import FrontendSettings
from poolgrid.frontend.shared_state import SharedState, Sharing
from poolgrid.frontend.traffic import open_report
from poolgrid.http.http_server import open_server
from poolgrid.process.awake_clock import AwakeClock
from poolgrid.process.clock import Clock, SystemClock
from poolgrid.process.event_loop import LoopMetrics
from poolgrid.process.plugins import EVENT_PLANES, load_plugin
from poolgrid.process.process_group import GroupMember, GroupMetrics, GroupPlace, LoopAnswer
from poolgrid.process.tasks import detached, unless
from poolgrid.process.tracing.opening import open_tracing
from poolgrid.process.tracing.tracing import Tracing
from poolgrid.router.core.approximate_index import ApproximateIndex
from poolgrid.router.core.load_ledger import LoadLedger
from poolgrid.router.core.policy import POLICY_NAMES
from poolgrid.router.core.prefix_index import PrefixIndex
from poolgrid.router.core.projection import Projection
from poolgrid.router.core.retention.learner import RetentionLearner
from poolgrid.router.core.router_state import RouterState
from poolgrid.router.core.selector import Selector
from poolgrid.router.decision_journal.opening import open_recorder
from poolgrid.router.decision_journal.recorder import DecisionRecorder
from poolgrid.router.drain_endpoint import add_drain_endpoint
from poolgrid.router.dry_run import add_route_endpoint
from poolgrid.router.feeds import EmbeddedFeed, JournalFeed, RemoteFeed
from poolgrid.router.fleet_source import RouterFleetSource
from poolgrid.router.fleet_watch import FleetWatch
from poolgrid.router.health import Completeness
from poolgrid.router.http_api import (
    add_index_endpoint,
    add_pool_endpoint,
    add_router_endpoints,
    decisions_of,
    endpoints,
    readiness,
    troubles,
)
from poolgrid.router.metrics import RouterMetrics
from poolgrid.router.policy_loading import load_policy
from poolgrid.router.select_plane import SelectPlane
from poolgrid.router.service import RouterService
from poolgrid.router.settings import RouterSettings
from poolgrid.router.state_metrics import DecisionRecordCollector, register_views
from poolgrid.serving.links import link_opener, links_that_fit
from poolgrid.transport.planes import CurveKeys, MakeContext, PlaneContext, PlaneMetrics
from poolgrid.wire.card import WorkerCard
from poolgrid.wire.names import CONSOLIDATOR, ROUTER, is_name

if TYPE_CHECKING:
    from poolgrid.discovery.names import Names

log = logging.getLogger(__name__)

VOCABULARY_PADDING = 1.05
"""How many more token ids than its tokenizer a model may have: matrices are padded to multiples of some hundred."""


class Endpoints(NamedTuple):
    """Where a router answers."""

    http: str
    ingest: str
    """Where workers push their events; empty when the consolidator runs elsewhere."""
    select: str
    """Where global routers ask for workers."""
    ext_proc: str = ""
    """Where gateways ask for endpoints; empty where they cannot."""


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
    Whatever ends it, what was opened is closed again, in reverse order.
    """
    async with AsyncExitStack() as opened:
        opened.callback(log.info, "router has ended")
        # Before the clock that judges others runs: a large vocabulary takes a second or two, and the loop stands still.
        prompt_model = _load_prompt_model(frontend)
        clock = SystemClock()
        awake = _start_clock(opened, settings, clock)
        registry = CollectorRegistry()
        LoopMetrics(registry)
        metrics = RouterMetrics(registry)
        make_context = _context_maker(settings, registry)
        _warn_of_exposures(settings, frontend)
        state = _make_state(settings)
        names: Names | None = None
        if settings.has_names:
            # Imported when it is used: most pools are given addresses.
            from poolgrid.discovery.opening import open_names

            names = await open_names(opened, settings, clock, registry)
        shared = _open_shared(opened, settings, frontend, clock, registry)
        feed, embedded = _make_feed(settings, consolidator, registry, clock, awake, make_context)
        if names is not None and isinstance(feed, RemoteFeed):
            _follow_by_name(settings, names, feed, awake)
        context = _open_context(opened, make_context)
        recorder = _open_recorder(opened, settings, consolidator, state, awake, registry)
        tracing = open_tracing(opened, settings, clock, "poolgrid-router", settings.router_id)
        service = _open_service(opened, settings, state, feed, metrics, awake, context, recorder, prompt_model, tracing)
        register_views(registry, service)
        if shared is not None:
            shared.limits.on_routers = service.queue.divide
        plane = _open_select_plane(opened, settings, context, service, state, awake, tracing, feed)
        member = GroupMember(place) if place is not None else None
        group_metrics = GroupMetrics(registry, member) if member is not None else None
        completeness = Completeness()
        app = create_app(
            service,
            {prompt_model.name: prompt_model},
            settings=frontend,
            registry=registry,
            ready=readiness(service, member, completeness),
            endpoints=lambda: endpoints(service),
            troubles=lambda: troubles(service, recorder, completeness),
            clock=clock,
            exposed=group_metrics,
            place=place,
            data_dir=consolidator.data_dir,
            tracing=tracing,
            shared=shared,
        )
        opened.push_async_callback(app.close)
        decisions = decisions_of(service, member)
        _add_endpoints(app, service, feed, clock, plane, recorder, decisions)
        if names is not None:
            add_fleet_list(app, names.fleet)
        open_report(opened, app.traffic, lambda: service.queue.view().requests, clock)
        server = open_server(
            opened,
            settings,
            registry,
            app,
            service.end_requests,
            reuse_port=place is not None,
            has_keys=frontend.api_keys is not None,
        )
        of_page: dict[str, LoopAnswer] = {}
        if frontend.fleet_page:
            player, watch = _make_player(consolidator, embedded), FleetWatch(state, has_siblings=member is not None)
            served = open_served_seconds(opened, app.served, clock)
            source = RouterFleetSource(settings, service, watch, player, served, place)
            of_page = open_fleet_page(opened, app, source, clock, member)
        if member is not None and group_metrics is not None:
            await _join_group(opened, member, group_metrics, {**of_page, **decisions.answers()})
        # HTTP answers /live and /ready while the state is still being rebuilt; requests are refused until then.
        server.start()
        if recorder is not None:
            recorder.start()
        await unless(stop, service.start(), "start of the router")
        if stop.is_set():
            return
        app.state.preparation.forms.make_ready(service.models())
        if shared is not None:
            await unless(stop, shared.limits.first_shares(), "first shares of limits")
            if stop.is_set():
                return
        ext_proc = ""
        if settings.ext_proc_port is not None:
            # Late: it brings gRPC, which most routers have no use for.
            from poolgrid.router.endpoint_picker.opening import open_endpoint_picker

            ext_proc = await open_endpoint_picker(opened, settings, frontend, app, service, state, registry, awake)
        if member is not None:
            member.set_ready(True)
        offset = state.projection.next_offset
        if names is not None:
            await _register(opened, settings, names, server.url, plane, embedded)
        log.info("router at %s, policy %s, journal offset %d", server.url, state.selector.policy.name, offset)
        ingest = embedded.ingest_endpoint if embedded is not None else ""
        ready(Endpoints(server.url, ingest, plane.endpoint, ext_proc))
        await stop.wait()


def vocabulary_check(model: PromptModel, card: WorkerCard) -> str:
    """Say why the output of a worker with this card could not be read with a model's tokenizer; empty = it can."""
    if card.model != model.name or card.vocabulary_size <= model.vocab_size * VOCABULARY_PADDING:
        return ""
    return (
        f"its card says that token ids are below {card.vocabulary_size}, the tokenizer of model {model.name!r} here "
        f"has {model.vocab_size} tokens: most of its output would have no text. Start the worker with the vocabulary "
        "of this model (simulated: --vocabulary-size, --tokenizer-path), or the router with the worker's (--model-path)"
    )


# -- made: nothing of it has to be closed ------------------------------------------------------------------------------


def _context_maker(settings: RouterSettings, registry: CollectorRegistry) -> MakeContext:
    keys = CurveKeys.load(settings)
    metrics = PlaneMetrics(registry)
    return lambda: PlaneContext.make(keys, metrics)


def _warn_of_exposures(settings: RouterSettings, frontend: FrontendSettings) -> None:
    planes = (
        "the select plane"
        if settings.feed_endpoint or settings.on_nats
        else "the select, ingest, feed and query planes"
    )
    if settings.ext_proc_port is not None and settings.tls_certificate is None:
        planes += " and the endpoint picker"
    for warning in settings.exposures(settings.host, http=True, planes=planes, keyed=frontend.api_keys is not None):
        log.warning("%s", warning)


def _make_state(settings: RouterSettings) -> RouterState:
    policy = load_policy(settings)
    index = PrefixIndex(settings.index_budget_bytes)
    ledger = LoadLedger(settings.reservation_ttl_ms, settings.ledger_budget_bytes)
    approximate = ApproximateIndex(index, settings.approximate_ttl_ms) if settings.policy == POLICY_NAMES[1] else None
    retention = RetentionLearner() if settings.retention == "learned" else None
    return RouterState(
        Selector(Projection(index, ledger, approximate, retention), policy, settings.worker_queue_factor)
    )


def _load_prompt_model(frontend: FrontendSettings) -> PromptModel:
    return PromptModel.load(
        frontend.model_path,
        frontend.model_name,
        chat_template=frontend.chat_template,
        tokenization_cache_bytes=frontend.tokenization_cache_bytes,
        fast_tokenizer=frontend.fast_tokenizer,
        word_cache=frontend.word_cache,
    )


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
            feed = query = ""  # names say where they are
        return RemoteFeed(feed, query, awake, make_context), None
    if settings.on_nats:
        plane = load_plugin(EVENT_PLANES, settings.event_plane)
        followed = plane.open_feed(
            settings, settings.router_id, registry, clock, awake, consolidator.blocks_per_worker_max
        )
        return cast(JournalFeed, followed), None
    embedded = create_consolidator(consolidator, registry, clock, make_context)
    return EmbeddedFeed(embedded), embedded


def _follow_by_name(settings: RouterSettings, names: Names, feed: RemoteFeed, clock: Clock) -> None:
    """Follow the journal of a consolidator wherever it is, when it was given by name."""
    feed_name, query_name = settings.feed_endpoint, settings.query_endpoint
    if feed_name is None or query_name is None or not is_name(feed_name):
        return
    from poolgrid.discovery.consolidators import NamedConsolidator

    def move(where: list[str]) -> None:
        detached(feed.move(where[0], where[1]), "move to another consolidator")

    NamedConsolidator(names, [feed_name, query_name], move, feed.answers, clock).start()


async def _register(
    opened: AsyncExitStack,
    settings: RouterSettings,
    names: Names,
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


def _make_player(consolidator: ConsolidatorSettings, embedded: ConsolidatorService | None) -> Player:
    kept = embedded.kept_records if embedded is not None and consolidator.data_dir is None else None
    # A data_dir beside a stream has no journal in it, only decisions.
    return Player(None if consolidator.on_nats else consolidator.data_dir, kept, consolidator.blocks_per_worker_max)


def _add_endpoints(
    app: Application,
    service: RouterService,
    feed: JournalFeed,
    clock: Clock,
    plane: SelectPlane,
    recorder: DecisionRecorder | None,
    decisions: GroupDecisions,
) -> None:
    add_router_endpoints(app, service, clock, feed.loading, decisions)
    add_index_endpoint(app, service)
    add_route_endpoint(app, service)
    add_drain_endpoint(app, service)
    add_pool_endpoint(app, plane, service, recorder)


# -- opened: each says how it ends -------------------------------------------------------------------------------------


def _start_clock(opened: AsyncExitStack, settings: RouterSettings, clock: Clock) -> AwakeClock:
    awake = AwakeClock(clock, min(settings.worker_timeout_ms, settings.reservation_ttl_ms)).start()
    opened.callback(awake.stop)
    return awake


def _open_context(opened: AsyncExitStack, make_context: MakeContext) -> zmq.Context[Any]:
    context = make_context()
    opened.callback(context.destroy, linger=0)
    return context


def _open_recorder(
    opened: AsyncExitStack,
    settings: RouterSettings,
    consolidator: ConsolidatorSettings,
    state: RouterState,
    awake: Clock,
    registry: CollectorRegistry,
) -> DecisionRecorder | None:
    recorder = open_recorder(settings, consolidator, state, awake)
    if recorder is not None:
        opened.push_async_callback(recorder.stop)
        state.log = recorder
        registry.register(DecisionRecordCollector(recorder))
    return recorder


def _open_service(
    opened: AsyncExitStack,
    settings: RouterSettings,
    state: RouterState,
    feed: JournalFeed,
    metrics: RouterMetrics,
    awake: Clock,
    context: zmq.Context[Any],
    recorder: DecisionRecorder | None,
    model: PromptModel,
    tracing: Tracing | None,
) -> RouterService:
    on_undecodable = metrics.stream_faults.labels("undecodable").inc
    open_link = link_opener(context, settings.worker_timeout_ms, awake, on_undecodable)
    check = partial(vocabulary_check, model)
    not_sampled = None if tracing is None else tracing.not_kept
    service = RouterService(settings, state, feed, metrics, awake, open_link, links_that_fit(), check, not_sampled)
    opened.push_async_callback(service.stop)
    if recorder is not None:
        service.tracker.recorder = recorder
    return service


def _open_select_plane(
    opened: AsyncExitStack,
    settings: RouterSettings,
    context: zmq.Context[Any],
    service: RouterService,
    state: RouterState,
    awake: Clock,
    tracing: Tracing | None,
    feed: JournalFeed,
) -> SelectPlane:
    plane = SelectPlane(context, settings.host, settings.select_port, service, state, awake, tracing, feed.loading)
    opened.callback(plane.close)
    return plane


def _open_shared(
    opened: AsyncExitStack,
    settings: RouterSettings,
    frontend: FrontendSettings,
    clock: Clock,
    registry: CollectorRegistry,
) -> SharedState | None:
    if settings.share_state == "none":
        return None
    # A port that is given has one process at a time; one of the system's choice may have been anybody's.
    address = settings.advertise_host or settings.host
    place = f"{socket.gethostname()} {address}:{settings.port} {settings.router_id}" if settings.port else ""
    scope = f"{settings.namespace}.{settings.nats_pool}"
    sharing = Sharing(scope, place, settings.names_lease_s, settings.names_replicas)
    plane = load_plugin(EVENT_PLANES, settings.share_state)
    return cast(SharedState, plane.open_shared_state(opened, settings, frontend, sharing, clock, registry))


async def _join_group(
    opened: AsyncExitStack, member: GroupMember, metrics: GroupMetrics, loop_answers: Mapping[str, LoopAnswer]
) -> None:
    opened.push_async_callback(member.stop)
    await member.start({"metrics": metrics.text}, loop_answers)
