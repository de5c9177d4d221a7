"""Picks the real things of a global router process: clock, sockets, HTTP. The only place that does."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import httpx
import zmq
from prometheus_client import CollectorRegistry

from poolgrid.fleet_page.endpoints import open_fleet_page
from poolgrid.fleet_page.served_seconds import open_served_seconds
from poolgrid.frontend.app import create_app
from poolgrid.frontend.fleet_list import add_fleet_list
from poolgrid.frontend.prompt_model import PromptModel
from poolgrid.frontend.settings import FrontendSettings
from poolgrid.frontend.shared_state import SharedState, Sharing
from poolgrid.frontend.traffic import open_report
from poolgrid.global_router.configuration import Configuration
from poolgrid.global_router.configuration_group import ConfigurationGroup
from poolgrid.global_router.core.document.grid_document import GridDocument
from poolgrid.global_router.core.document.history import Reload
from poolgrid.global_router.core.document.problems import GridDocumentError
from poolgrid.global_router.core.document.reader import LoadedDocument
from poolgrid.global_router.document_file import read_document_file
from poolgrid.global_router.fleet_source import GlobalFleetSource
from poolgrid.global_router.http_api import add_global_router_endpoints, decisions_of
from poolgrid.global_router.metrics import GlobalRouterMetrics
from poolgrid.global_router.pools import Pools, RouterAddress, Routers, select_endpoint
from poolgrid.global_router.router_link import Discover
from poolgrid.global_router.service import GlobalRouterService
from poolgrid.global_router.settings import TIMINGS, GlobalRouterSettings
from poolgrid.global_router.state_metrics import register_views
from poolgrid.http.http_server import open_server
from poolgrid.process.awake_clock import AwakeClock
from poolgrid.process.clock import Clock, SystemClock
from poolgrid.process.event_loop import LoopMetrics
from poolgrid.process.plugins import EVENT_PLANES, load_plugin
from poolgrid.process.process_group import GroupMember, GroupMetrics, GroupPlace, LoopAnswer
from poolgrid.process.tasks import Restart, cancel_all, supervised, unless
from poolgrid.process.tracing.opening import open_tracing
from poolgrid.process.tracing.tracing import Tracing
from poolgrid.serving.links import LinksOnDemand, link_opener, links_that_fit
from poolgrid.transport.planes import CurveKeys, PlaneContext, PlaneMetrics
from poolgrid.transport.tls import client_context
from poolgrid.wire.names import GLOBAL_ROUTER, ROUTER, is_name, parse_name

if TYPE_CHECKING:
    from poolgrid.discovery.names import Names

log = logging.getLogger(__name__)

SHARED_BY = "=global"
"""Stands for global routers where routers name their pool, and is no pool's name."""

DISCOVER_TIMEOUT_S = 2.0
"""A pool's router that takes longer to say where its select plane is counts as not there."""


def discovery(client: httpx.AsyncClient) -> Discover:
    """Return the way from a pool's URL to its select plane: ``GET /v1/pool``."""

    async def discover(url: str) -> str:
        if is_name(url):
            raise ValueError(f"the pool's url is {url} and names is none: nothing knows where that is")
        if not url:
            raise ValueError("the pool has no url: give one in the document, or --pool-url NAME=URL, or --names")
        try:
            answer = await client.get(f"{url}/v1/pool")
            answer.raise_for_status()
            return select_endpoint(url, answer.json())
        except httpx.HTTPError as error:
            raise OSError(f"asking {url}/v1/pool: {error or type(error).__name__}") from None

    return discover


def _check_urls(document: GridDocument, urls: dict[str, str]) -> None:
    names = {pool.name for stage in document.stages.values() for pool in stage.pools}
    unknown = sorted(set(urls) - names)
    if unknown:
        raise ValueError(f"pool_url names {', '.join(unknown)}; the document's pools are {', '.join(sorted(names))}")


def named_routers(names: Names) -> Routers:
    """Return the way from the name of a pool's routers to those that are registered, the oldest first."""

    def routers(address: str) -> list[RouterAddress]:
        name = parse_name(address)
        return [
            RouterAddress(each.life, each.endpoints.get("http", ""), each.endpoints["select"])
            for each in names.registry.instances(name.namespace, name.component)
            if "select" in each.endpoints
        ]

    return routers


def _pool_headers(path: Path | None) -> dict[str, str]:
    """Return what opens the pools' routers; raises ``OSError``, and ``ValueError`` for an empty file."""
    if path is None:
        return {}
    key = path.read_text().strip()
    if not key:
        raise ValueError(f"reading pool_api_key: {path} is empty; put an operator's key of the pools there")
    return {"authorization": f"Bearer {key}"}


async def serve(
    settings: GlobalRouterSettings,
    frontend: FrontendSettings,
    stop: asyncio.Event,
    ready: Callable[[str], None],
    place: GroupPlace | None = None,
) -> None:
    """Run a global router until ``stop`` is set; ``ready`` is told its URL once every pool was looked for.
    ``place`` is its place among processes that share the port, if there are several.

    Pools that are missing then are used when they come. Raises ``OSError`` when the port cannot be bound,
    ``ValueError`` with every problem of the document, ``ModelDirectoryError``. Whatever ends it, what was opened is
    closed again, in reverse order.
    """
    async with AsyncExitStack() as opened:
        opened.callback(log.info, "global router has ended")
        clock = SystemClock()
        loaded = _read_document(settings)
        prompt_model = _load_prompt_model(frontend)
        registry = CollectorRegistry()
        metrics = GlobalRouterMetrics(registry)
        LoopMetrics(registry)
        _warn_of_exposures(settings, frontend)
        context = _open_context(opened, settings, registry)
        awake = _start_clock(opened, settings, clock)
        client = await _open_client(opened, settings)
        configuration = Configuration(loaded, settings.config, awake)
        names: Names | None = None
        if settings.has_names:
            # Imported when it is used: most pools are given addresses.
            from poolgrid.discovery.opening import open_names

            names = await open_names(opened, settings, clock, registry)
        shared = _open_shared(opened, settings, frontend, clock, registry, place)
        pools = _open_pools(opened, settings, context, client, awake, names)
        links = _open_links(opened, settings, context, awake, metrics)
        tracing = open_tracing(opened, settings, clock, "poolgrid-global-router", f"pid-{os.getpid()}")
        service = _open_service(opened, settings, configuration, pools, links, metrics, awake, tracing)
        register_views(registry, service)
        if shared is not None:
            shared.limits.on_routers = service.queue.divide

        def use_document() -> None:
            document = configuration.active.document
            pools.use(document)
            metrics.use_pools({pool.name for stage in document.stages.values() for pool in stage.pools})

        def on_reload(outcome: Reload) -> None:
            metrics.reloads.labels(outcome.outcome).inc()
            use_document()

        configuration.listen(on_reload)
        member = GroupMember(place) if place is not None else None
        group_metrics = GroupMetrics(registry, member) if member is not None else None
        group = ConfigurationGroup(configuration, member)
        app = create_app(
            service,
            {prompt_model.name: prompt_model},
            settings=frontend,
            registry=registry,
            ready=lambda: service.view.missing() or (member.missing() if member is not None else None),
            endpoints=service.view.endpoints,
            clock=clock,
            exposed=group_metrics,
            place=place,
            tracing=tracing,
            shared=shared,
        )
        opened.push_async_callback(app.close)
        decisions = decisions_of(service, member)
        add_global_router_endpoints(app, service, awake, group, decisions)
        if names is not None:
            add_fleet_list(app, names.fleet)
        open_report(opened, app.traffic, lambda: service.queue.view().requests, clock)
        background: list[asyncio.Task[None]] = []
        opened.push_async_callback(cancel_all, background)
        server = open_server(
            opened,
            settings,
            registry,
            app,
            service.stop,
            reuse_port=place is not None,
            has_keys=frontend.api_keys is not None,
        )
        of_page: dict[str, LoopAnswer] = {}
        if frontend.fleet_page:
            served = open_served_seconds(opened, app.served, clock)
            namespace = settings.namespace if settings.has_names else ""
            source = GlobalFleetSource(service, client, awake, served, place, namespace)
            of_page = open_fleet_page(opened, app, source, clock, member)
        hang_up = _take_hang_ups(opened, group)
        if member is not None and group_metrics is not None:
            await _join_group(opened, member, group_metrics, group, {**of_page, **decisions.answers()})
        if names is not None:
            from poolgrid.discovery.ports import Scope

            names.follow(Scope(component=ROUTER), pools.look_for_routers)
            await unless(stop, names.first_look(), "first look at names")
        use_document()
        server.start()
        reload_s = TIMINGS.reload_interval_ms / 1000
        background.append(supervised(service.run_housekeeping, "global router housekeeping", Restart()))
        background.append(supervised(lambda: configuration.watch(reload_s, hang_up), "reload", Restart()))
        await unless(stop, pools.first_look(), "first look at the pools")
        if shared is not None:
            await unless(stop, shared.limits.first_shares(), "first shares of limits")
        if stop.is_set():
            return
        app.state.preparation.forms.make_ready(service.models())
        missing = [pool.name for pool in pools.all() if pool.status is None]
        if member is not None:
            member.set_ready(True)
        if names is not None:
            instance = "global-router" if place is None else f"global-router.{place.index}"
            await names.register(GLOBAL_ROUTER, instance, {"http": settings.reachable(server.url)})
            opened.push_async_callback(names.withdraw)
        log.info("global router at %s, revision 1; pools missing: %s", server.url, ", ".join(missing) or "none")
        ready(server.url)
        await stop.wait()


# -- made: nothing of it has to be closed ------------------------------------------------------------------------------


def _read_document(settings: GlobalRouterSettings) -> LoadedDocument:
    try:
        loaded = read_document_file(settings.config)
    except GridDocumentError as error:
        raise ValueError(str(error)) from None
    for warning in loaded.warnings:
        log.warning("%s: %s", settings.config, warning)
    _check_urls(loaded.document, settings.pool_urls())
    return loaded


def _load_prompt_model(frontend: FrontendSettings) -> PromptModel:
    return PromptModel.load(
        frontend.model_path,
        frontend.model_name,
        chat_template=frontend.chat_template,
        tokenization_cache_bytes=frontend.tokenization_cache_bytes,
        fast_tokenizer=frontend.fast_tokenizer,
        word_cache=frontend.word_cache,
    )


def _warn_of_exposures(settings: GlobalRouterSettings, frontend: FrontendSettings) -> None:
    for exposure in settings.exposures(settings.host, http=True, planes="", keyed=frontend.api_keys is not None):
        log.warning("%s", exposure)


# -- opened: each says how it ends -------------------------------------------------------------------------------------


def _open_context(opened: AsyncExitStack, settings: GlobalRouterSettings, registry: CollectorRegistry) -> PlaneContext:
    context = PlaneContext.make(CurveKeys.load(settings), PlaneMetrics(registry))
    opened.callback(context.destroy, linger=0)
    return context


def _start_clock(opened: AsyncExitStack, settings: GlobalRouterSettings, clock: Clock) -> AwakeClock:
    shortest_ms = min(settings.worker_timeout_ms, TIMINGS.select_timeout_ms, TIMINGS.connect_timeout_ms)
    awake = AwakeClock(clock, shortest_ms).start()
    opened.callback(awake.stop)
    return awake


async def _open_client(opened: AsyncExitStack, settings: GlobalRouterSettings) -> httpx.AsyncClient:
    """Open what asks pools where their select planes are."""
    client = httpx.AsyncClient(
        timeout=DISCOVER_TIMEOUT_S,
        trust_env=False,
        headers=_pool_headers(settings.pool_api_key),
        verify=client_context(settings.pool_ca, settings.tls_pair()),
    )
    return await opened.enter_async_context(client)


def _open_shared(
    opened: AsyncExitStack,
    settings: GlobalRouterSettings,
    frontend: FrontendSettings,
    clock: Clock,
    registry: CollectorRegistry,
    place: GroupPlace | None,
) -> SharedState | None:
    """Open what global routers of one namespace share, if they do."""
    if settings.share_state == "none":
        return None
    # A port that is given has one process at a time at each place of its group; one of the system's choice may have
    # been anybody's.
    address, index = settings.advertise_host or settings.host, 0 if place is None else place.index
    where = f"{socket.gethostname()} {address}:{settings.port} {index}" if settings.port else ""
    scope = f"{settings.namespace}.{SHARED_BY}"
    sharing = Sharing(scope, where, settings.names_lease_s, settings.names_replicas)
    plane = load_plugin(EVENT_PLANES, settings.share_state)
    return cast(SharedState, plane.open_shared_state(opened, settings, frontend, sharing, clock, registry))


def _open_pools(
    opened: AsyncExitStack,
    settings: GlobalRouterSettings,
    context: zmq.Context[Any],
    client: httpx.AsyncClient,
    awake: Clock,
    names: Names | None,
) -> Pools:
    discover = discovery(client)
    routers = None if names is None else named_routers(names)
    pools = Pools(
        settings.pool_urls(), context, discover, awake, TIMINGS.status_interval_ms, TIMINGS.status_timeout_ms, routers
    )
    opened.callback(pools.close)
    return pools


def _open_links(
    opened: AsyncExitStack,
    settings: GlobalRouterSettings,
    context: zmq.Context[Any],
    awake: Clock,
    metrics: GlobalRouterMetrics,
) -> LinksOnDemand:
    on_undecodable = metrics.stream_faults.labels("undecodable").inc
    open_link = link_opener(context, settings.worker_timeout_ms, awake, on_undecodable)
    links = LinksOnDemand(open_link, TIMINGS.link_idle_ms, awake, links_that_fit())
    opened.callback(links.close)
    return links


def _open_service(
    opened: AsyncExitStack,
    settings: GlobalRouterSettings,
    configuration: Configuration,
    pools: Pools,
    links: LinksOnDemand,
    metrics: GlobalRouterMetrics,
    awake: Clock,
    tracing: Tracing | None,
) -> GlobalRouterService:
    not_sampled = None if tracing is None else tracing.not_kept
    service = GlobalRouterService(settings, configuration, pools, links, metrics, awake, not_sampled)
    opened.callback(service.stop)
    return service


async def _join_group(
    opened: AsyncExitStack,
    member: GroupMember,
    metrics: GroupMetrics,
    group: ConfigurationGroup,
    loop_answers: Mapping[str, LoopAnswer],
) -> None:
    opened.push_async_callback(member.stop)
    await member.start({"metrics": metrics.text, **group.answers()}, loop_answers)
    await group.adopt()


def _take_hang_ups(opened: AsyncExitStack, group: ConfigurationGroup) -> asyncio.Event:
    """Return what SIGHUP sets: the document is to be read again."""
    hang_up = asyncio.Event()

    def on_hang_up() -> None:
        group.forget()
        hang_up.set()

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, on_hang_up)
    opened.callback(loop.remove_signal_handler, signal.SIGHUP)
    return hang_up
