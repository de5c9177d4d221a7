"""Puts the data path in front of a router's application."""

from __future__ import annotations

from contextlib import AsyncExitStack
from functools import partial

from poolgrid.frontend.access.gate import is_path_of_tenants
from poolgrid.frontend.app import Application
from poolgrid.frontend.settings import FrontendSettings
from poolgrid.process.clock import Clock
from poolgrid.proxy.application import ForwardApplication, MakeServer
from poolgrid.proxy.forward_server import ForwardServer
from poolgrid.proxy.ports import ForwardBackend
from poolgrid.proxy.prompt_reading import PromptReader
from poolgrid.proxy.prompt_record import PromptRecord


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
    state = app.state
    reader = PromptReader(state.preparation, state.tokenization, state.domains, settings.max_body_values)
    front = ForwardApplication(
        app,
        backend,
        reader,
        prompts,
        state.bodies,
        state.request_ids,
        state.metrics,
        settings,
        app.traffic,
        state.domains,
        clock,
        make_server or partial(ForwardServer, api_key=settings.engine_api_key or None),
        state.tracing,
        state.keys,
        own_paths_of(app),
    )
    front.open(opened)
    return front
