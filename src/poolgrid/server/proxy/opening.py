"""Puts the data path in front of a router's application."""

from __future__ import annotations

from contextlib import AsyncExitStack
from functools import partial

from poolgrid.server.frontend.access.gate import is_path_of_tenants
from poolgrid.server.frontend.app import Application
from poolgrid.server.frontend.settings import FrontendSettings
from poolgrid.server.process.clock import Clock
from poolgrid.server.proxy.application import ForwardApplication, MakeServer
from poolgrid.server.proxy.forward_server import ForwardServer
from poolgrid.server.proxy.ports import ForwardBackend
from poolgrid.server.proxy.prompt_reading import PromptReader
from poolgrid.server.proxy.prompt_record import PromptRecord


def own_paths_of(app: Application) -> frozenset[str]:
    """Return what begins the paths that are the router's own, though engine servers may have some of the same name."""
    paths = (getattr(route, "path", "") for route in app.routes)
    return frozenset(path.partition("/{")[0] for path in paths if path and not is_path_of_tenants(path))


def open_forwarding(
    opened: AsyncExitStack,
    app: Application,
    backend: ForwardBackend,
    settings: FrontendSettings,
    clock: Clock,
    prompts: PromptRecord,
    make_server: MakeServer | None = None,
) -> ForwardApplication:
    """Return the application that serves all requests: it forwards what is for engine servers, and gives ``app`` the
    rest. ``opened`` ends it. ``make_server`` opens a server by its URL; by default it is an engine server."""
    parts = app.front
    reader = PromptReader(parts.preparation, parts.tokenization, parts.domains, settings.max_body_values)
    front = ForwardApplication(
        app,
        backend,
        reader,
        prompts,
        parts.bodies,
        parts.request_ids,
        parts.metrics,
        settings,
        app.traffic,
        parts.domains,
        clock,
        make_server or partial(ForwardServer, api_key=settings.engine_api_key or None),
        parts.tracing,
        parts.keys,
        own_paths_of(app),
    )
    front.open(opened)
    return front
