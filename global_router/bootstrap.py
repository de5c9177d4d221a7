"""Picks the real things of a global router process: clock, sockets, HTTP. The only place that does."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import ssl
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

from poolgrid.kernel.pool_grids.grid_document import GridDocument, GridDocumentError, TargetDefaults
from poolgrid.kernel.wire.addresses import GLOBAL_ROUTER, ROUTER, is_name, parse_name
from poolgrid.kernel.wire.secret_texts import without_received_bytes
from poolgrid.server.frontend.settings import FrontendSettings
from poolgrid.server.global_router.configuration import Configuration
from poolgrid.server.global_router.document.history import Reload
from poolgrid.server.global_router.document.reader import LoadedDocument
from poolgrid.server.global_router.document_file import read_document_file
from poolgrid.server.global_router.http_api import add_global_router_endpoints, register_views
from poolgrid.server.global_router.metrics import GlobalRouterMetrics
from poolgrid.server.global_router.pools import Pools, RouterAddress, Routers, select_endpoint
from poolgrid.server.global_router.router_link import Discover, PoolNetwork
from poolgrid.server.global_router.service import GlobalRouterService
from poolgrid.server.global_router.settings import TIMINGS, GlobalRouterSettings
from poolgrid.server.process.lifecycle import GroupPlace
from poolgrid.server.process.plugins import PARTS, has_plugin, load_plugin
from poolgrid.server.process.tasks import Restart, cancel_all, supervised, unless
from poolgrid.server.proxy.forward_server import ForwardServer
from poolgrid.server.proxy.opening import open_forwarding
from poolgrid.server.proxy.prompt_record import PromptRecord
from poolgrid.server.serving.links import LinksOnDemand, links_that_fit
from poolgrid.server.serving.router_process import RouterProcess
from poolgrid.server.transport.security import client_context

if TYPE_CHECKING:
    from poolgrid.server.discovery.discovery import Discovery

log = logging.getLogger(__name__)

DISCOVER_TIMEOUT_S = 2.0
"""A pool's router that takes longer to report its select plane counts as absent."""


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
            raise OSError(f"asking {url}/v1/pool: {without_received_bytes(error)}") from None

    return discover


def _check_urls(document: GridDocument, urls: dict[str, str]) -> None:
    names = {pool.name for stage in document.stages.values() for pool in stage.pools}
    unknown = sorted(set(urls) - names)
    if unknown:
        raise ValueError(f"pool_url names {', '.join(unknown)}; the document's pools are {', '.join(sorted(names))}")


def named_routers(names: Discovery) -> Routers:
    """Return the way from the name of a pool's routers to those that are registered, the oldest first."""

    def routers(address: str) -> list[RouterAddress]:
        name = parse_name(address)
        return [
            RouterAddress(each.life, each.endpoints.get("http", ""), each.endpoints["select"])
            for each in names.registry.instances(name.namespace, name.component)
            if "select" in each.endpoints
        ]

    return routers


def _pool_key(path: Path | None) -> str | None:
    """Return what opens the pools' routers; raises ``OSError``, and ``ValueError`` for an empty file."""
    if path is None:
        return None
    key = path.read_text().strip()
    if not key:
        raise ValueError(f"reading pool_api_key: {path} is empty; put an operator's key of the pools there")
    return key


FLEET_PAGE = "fleet-page-of-global-router"
"""A part that an installation may lack."""


async def serve(
    settings: GlobalRouterSettings,
    frontend: FrontendSettings,
    stop: asyncio.Event,
    ready: Callable[..., None],
    place: GroupPlace | None = None,
) -> None:
    """Run a global router until ``stop`` is set; ``ready`` gets the words of the ready line, its URL
    first, once every pool was looked for.
    ``place`` is its place among processes that share the port, if there are several.

    Pools that are missing then are used when they come. Raises ``OSError`` when the port cannot be bound,
    ``ValueError`` with every problem of the document, ``ModelDirectoryError``. Whatever ends it, what was opened is
    closed again, in reverse order.
    """
    async with AsyncExitStack() as opened:
        loaded = _read_document(settings)
        process = RouterProcess(opened, settings, frontend, place)
        metrics = GlobalRouterMetrics(process.registry)
        process.warn_of_exposures("")
        context = process.open_context(process.context_maker())
        awake = process.start_clock(settings.worker_timeout_ms, TIMINGS.select_timeout_ms, TIMINGS.connect_timeout_ms)
        key, trusted = _pool_key(settings.pool_api_key), client_context(settings.pool_ca, settings.tls_pair())
        client = await _open_client(opened, key, trusted)
        targets = TargetDefaults(ttft_target_ms=frontend.ttft_target_ms, itl_target_ms=frontend.itl_target_ms)
        configuration = Configuration(loaded, settings.config, awake, targets)
        await process.open_names()
        names = process.names
        network = PoolNetwork(context, discovery(client), awake, TIMINGS.status_interval_ms, TIMINGS.status_timeout_ms)
        pools = Pools(settings.pool_urls(), network, None if names is None else named_routers(names))
        opened.callback(pools.close)
        links = LinksOnDemand(
            process.link_opener(context, awake, metrics), TIMINGS.link_idle_ms, awake, links_that_fit()
        )
        opened.callback(links.close)
        not_sampled = process.open_tracing("poolgrid-global-router", f"pid-{os.getpid()}")
        service = GlobalRouterService(settings, configuration, pools, links, metrics, awake, not_sampled)
        opened.callback(service.stop)
        register_views(process.registry, service)

        def use_document() -> None:
            document = configuration.active.document
            pools.use(document)
            metrics.use_pools({pool.name for stage in document.stages.values() for pool in stage.pools})

        def on_reload(outcome: Reload) -> None:
            metrics.reloads.labels(outcome.outcome).inc()
            use_document()

        configuration.listen(on_reload)
        app = process.open_app(service, service.view.missing, service.view.endpoints, stop)
        add_global_router_endpoints(app, service, awake)
        background: list[asyncio.Task[None]] = []
        opened.push_async_callback(cancel_all, background)
        connect = partial(ForwardServer, api_key=key, trusted=trusted)
        prompts = PromptRecord(app.front.metrics)
        front = open_forwarding(opened, app, service, frontend, process.clock, prompts, connect)
        server = process.open_server(front, service.stop)
        if frontend.fleet_page and has_plugin(PARTS, FLEET_PAGE):
            namespace = settings.namespace if settings.has_names else ""
            open_page = load_plugin(PARTS, FLEET_PAGE)
            open_page(opened, app, service, client, namespace, process.clock, awake, place)
        hang_up = _take_hang_ups(opened)
        if names is not None:
            from poolgrid.server.discovery.registry import Scope

            names.follow(Scope(component=ROUTER), pools.look_for_routers)
            await unless(stop, names.first_look(), "first look at names")
        use_document()
        server.start()
        reload_s = TIMINGS.reload_interval_ms / 1000
        background.append(supervised(service.run_housekeeping, "global router housekeeping", Restart()))
        background.append(supervised(lambda: configuration.watch(reload_s, hang_up), "reload", Restart()))
        await unless(stop, pools.first_look(), "first look at the pools")
        if stop.is_set():
            return
        process.make_ready(app, service)
        missing = [pool.name for pool in pools.all() if pool.status is None]
        if names is not None:
            instance = "global-router" if place is None else f"global-router.{place.index}"
            await names.register(GLOBAL_ROUTER, instance, {"http": settings.reachable(server.url)})
            opened.push_async_callback(names.withdraw)
        log.info("global router at %s, revision 1", server.url)
        if missing:
            log.warning(
                "pools without a router that answers: %s; name its address with --pool-url %s=http://HOST:PORT",
                *(", ".join(missing), missing[0]),
            )
        ready(server.url, *([f"admin={server.admin_url}"] if server.admin_url else []))
        await stop.wait()


def _read_document(settings: GlobalRouterSettings) -> LoadedDocument:
    try:
        loaded = read_document_file(settings.config)
    except GridDocumentError as error:
        raise ValueError(str(error)) from None
    for warning in loaded.warnings:
        log.warning("%s: %s", settings.config, warning)
    _check_urls(loaded.document, settings.pool_urls())
    return loaded


async def _open_client(opened: AsyncExitStack, key: str | None, trusted: ssl.SSLContext) -> httpx.AsyncClient:
    """Open what asks pools where their select planes are."""
    client = httpx.AsyncClient(
        timeout=DISCOVER_TIMEOUT_S,
        trust_env=False,
        headers={} if key is None else {"authorization": f"Bearer {key}"},
        verify=trusted,
    )
    return await opened.enter_async_context(client)


def _take_hang_ups(opened: AsyncExitStack) -> asyncio.Event:
    """Return what SIGHUP sets: the document is to be read again."""
    hang_up = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, hang_up.set)
    opened.callback(loop.remove_signal_handler, signal.SIGHUP)
    return hang_up
