"""The parts that the processes of both routers open in the same way; each has its way to end.

A router's ``bootstrap`` decides the order; what is opened is closed again in reverse order.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp

from poolgrid.kernel.requests.inference import InferenceBackend
from poolgrid.kernel.wire.trace_context import TraceContext
from poolgrid.server.frontend.app import Application, Endpoints, Readiness, create_app
from poolgrid.server.frontend.errors import RequestError
from poolgrid.server.frontend.first_view import FirstView
from poolgrid.server.frontend.openapi import add_fleet_list
from poolgrid.server.frontend.prompt_model import PromptModel
from poolgrid.server.frontend.settings import FrontendSettings
from poolgrid.server.frontend.traffic import open_report
from poolgrid.server.http.http_server import RouterServers, open_server
from poolgrid.server.process.clock import AwakeClock, SystemClock
from poolgrid.server.process.lifecycle import GroupPlace, LoopMetrics
from poolgrid.server.process.tracing.tracing import Tracing, open_tracing
from poolgrid.server.serving.admission_queue import AdmissionQueue
from poolgrid.server.serving.links import OpenLink, link_opener
from poolgrid.server.serving.metrics import ServingMetrics
from poolgrid.server.serving.router_settings import ServingSettings
from poolgrid.server.transport.bound_socket import inherited_listener
from poolgrid.server.transport.planes import CurveKeys, PlaneContext, PlaneMetrics

if TYPE_CHECKING:
    from poolgrid.server.discovery.discovery import Discovery

log = logging.getLogger(__name__)


class Service(InferenceBackend, Protocol):
    """A router's service."""

    @property
    def queue(self) -> AdmissionQueue[Any]: ...


class RouterProcess:
    """One router process while it opens and runs."""

    def __init__(
        self,
        opened: AsyncExitStack,
        settings: ServingSettings,
        frontend: FrontendSettings,
        place: GroupPlace | None,
    ) -> None:
        """Read the prompt model, before any clock that judges others runs: a large vocabulary takes half a second, and
        the loop stands still. A thread that reads it during the imports saves nothing, because ``tokenizers`` holds
        the interpreter's lock. ``place`` is that of the process among several that share the port."""
        self.opened = opened
        self.settings = settings
        self.frontend = frontend
        self.place = place
        self.prompt_model = _prompt_model(frontend)
        self.clock = SystemClock()
        self.registry = CollectorRegistry()
        LoopMetrics(self.registry)
        self.names: Discovery | None = None
        self.tracing: Tracing | None = None
        self._ready: Readiness | None = None

    # -- below HTTP ------------------------------------------------------------------------------------------------

    def start_clock(self, *timeouts_ms: float) -> AwakeClock:
        awake = AwakeClock(self.clock, min(timeouts_ms)).start()
        self.opened.callback(awake.stop)
        return awake

    def context_maker(self) -> Callable[[], PlaneContext]:
        keys, metrics = CurveKeys.load(self.settings), PlaneMetrics(self.registry)
        return lambda: PlaneContext.make(keys, metrics)

    def open_context(self, make: Callable[[], PlaneContext]) -> PlaneContext:
        context = make()
        self.opened.callback(context.destroy, linger=0)
        return context

    def warn_of_exposures(self, planes: str) -> None:
        """Warn of sockets that any host of the network can use; ``planes`` names those of ZMQ."""
        settings = self.settings
        for warning in settings.exposures(
            settings.host, http=True, planes=planes, keyed=self.frontend.api_keys is not None
        ):
            log.warning("%s", warning)

    def link_opener(self, context: PlaneContext, awake: AwakeClock, metrics: ServingMetrics) -> OpenLink:
        on_undecodable = metrics.stream_faults.labels("undecodable").inc
        return link_opener(context, self.settings.worker_timeout_ms, awake, on_undecodable)

    async def open_names(self) -> None:
        if self.settings.has_names:
            # Imported when it is used: most pools are given addresses.
            from poolgrid.server.discovery.directory import open_discovery

            self.names = await open_discovery(self.opened, self.settings, self.clock, self.registry)

    def open_tracing(self, service_name: str, instance: str) -> TraceContext | None:
        """Open tracing; return the context that workers get with requests whose traces are not kept, if any are."""
        self.tracing = open_tracing(self.opened, self.settings, self.clock, service_name, instance)
        return None if self.tracing is None else self.tracing.not_kept

    # -- HTTP ------------------------------------------------------------------------------------------------------

    def open_app(
        self,
        service: Service,
        ready: Readiness,
        endpoints: Endpoints,
        stop: asyncio.Event,
        troubles: Callable[[], list[str]] = list,
        data_dir: Path | None = None,
    ) -> Application:
        """Open the application, which is not ready once ``stop`` is set."""
        app = create_app(
            service,
            {} if self.prompt_model is None else {self.prompt_model.name: self.prompt_model},
            settings=self.frontend,
            registry=self.registry,
            ready=ready,
            is_ending=stop.is_set,
            endpoints=endpoints,
            troubles=troubles,
            clock=self.clock,
            place=self.place,
            data_dir=data_dir,
            tracing=self.tracing,
        )
        self.opened.push_async_callback(app.close)
        self._ready = ready
        if self.names is not None:
            add_fleet_list(app, self.names.fleet)
        open_report(self.opened, app.traffic, lambda: service.queue.view().requests, self.clock)
        return app

    def open_server(self, app: ASGIApp, end_requests: Callable[[], None]) -> RouterServers:
        """Open the servers of an application, at which clients wait for the router's first view."""
        assert self._ready is not None, "the application is open"
        model = self.prompt_model
        first = FirstView(app, self._ready, lambda: None if model is None else model.begin_proof())

        def end() -> None:
            end_requests()
            first.end()

        servers = open_server(
            self.opened,
            self.settings,
            self.registry,
            first,
            end,
            has_keys=self.frontend.api_keys is not None,
            place=self.place,
            listener=inherited_listener(os.environ),
        )
        self.opened.callback(first.end)
        first.start()
        return servers

    @staticmethod
    def make_ready(app: Application, service: Service) -> None:
        """Make ready for the models that are served."""
        app.front.preparation.forms.make_ready(service.models())


def _prompt_model(settings: FrontendSettings) -> PromptModel | None:
    if not settings.has_tokenizer:
        return None
    return PromptModel.load(
        settings.model_path,
        settings.served_model_name,
        chat_template=settings.chat_template,
        tokenization_cache_bytes=settings.tokenization_cache_bytes,
        word_cache=settings.word_cache,
        proves_later=True,
    )


def decision_not_found(
    request_id: str, decisions: int, oldest_ms: int | None, *, is_recorded: bool = False
) -> RequestError:
    """Return the answer about a request of which no decision is kept; ``oldest_ms`` is the time of the oldest one."""
    message = f"no decision about request {request_id!r} is kept: "
    if oldest_ms is None:
        message += "none is yet"
    else:
        since = datetime.fromtimestamp(oldest_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")
        message += f"the last {decisions:,} are, since {since} UTC"
    if is_recorded:
        message += "; older ones are in the recording (poolgrid explain --journal DATA_DIR)"
    return RequestError(404, "decision_not_found", message, param="request_id")
