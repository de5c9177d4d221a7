"""Puts an endpoint picker together from the parts of a router; imported by routers that answer gateways."""

from __future__ import annotations

import secrets
from contextlib import AsyncExitStack
from dataclasses import replace

from prometheus_client import CollectorRegistry

from poolgrid.frontend.access.cache_domains import CacheDomains
from poolgrid.frontend.app import Application
from poolgrid.frontend.request_ids import RequestIds
from poolgrid.frontend.settings import FrontendSettings
from poolgrid.process.clock import Clock
from poolgrid.router.core.router_state import RouterState
from poolgrid.router.endpoint_picker.exchange import PickerExchange
from poolgrid.router.endpoint_picker.metrics import PickerMetrics
from poolgrid.router.endpoint_picker.picker import Picker
from poolgrid.router.endpoint_picker.prompt_reading import PromptReader
from poolgrid.router.endpoint_picker.server import EndpointPickerServer
from poolgrid.router.endpoint_picker.stream_table import StreamTable
from poolgrid.router.service import RouterService
from poolgrid.router.settings import RouterSettings

FALLBACKS = 2
"""Endpoints that a gateway gets in addition to the first: two outlive a pod that is gone and its neighbour; each costs
a further choice."""

RENEWALS_PER_LEASE = 3
"""A lease is renewed so often in its time: one renewal may come late."""


async def open_endpoint_picker(
    opened: AsyncExitStack,
    settings: RouterSettings,
    frontend: FrontendSettings,
    app: Application,
    service: RouterService,
    state: RouterState,
    registry: CollectorRegistry,
    clock: Clock,
) -> str:
    """Serve ext-proc; returns where. Raises ``OSError``."""
    assert settings.ext_proc_port is not None, "a picker has a port"
    metrics = PickerMetrics(registry)
    limits = replace(
        settings.http_limits(), connections=settings.max_ext_proc_streams, unfinished_bytes=settings.ext_proc_body_bytes
    )
    table = StreamTable(limits, frontend.max_body_bytes)
    metrics.body_bytes.set_function(lambda: float(table.used_bytes))
    metrics.streams.set_function(lambda: float(len(table)))
    reader = PromptReader(
        app.state.preparation,
        app.state.tokenization,
        # Engines get the bodies as they are: a salt that only this process knew would be in none of their blocks.
        CacheDomains(isolate=False),
        frontend.max_body_values,
    )
    picker = Picker(
        service,
        state,
        reader,
        service.chooser.path_now,
        service.tracker.gateway_realised,
        RequestIds(f"g{secrets.token_hex(6)}"),
        FALLBACKS,
        metrics,
        clock,
    )
    server = EndpointPickerServer(
        table,
        lambda: PickerExchange(picker, table),
        picker.renew,
        settings.reservation_ttl_ms / 1000 / RENEWALS_PER_LEASE,
        metrics,
        clock,
    )
    opened.push_async_callback(server.stop)
    return await server.start(settings.host, settings.ext_proc_port, settings.tls_pair(), settings.tls_client_ca)
