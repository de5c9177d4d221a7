"""The gRPC server at which Envoy asks: one stream for each HTTP request, read and answered by an ``Exchange``.

The same server takes the gateways' access logs, which have the ends of requests."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from prometheus_client import CollectorRegistry

from poolgrid.kernel.routing.router_state import RouterState
from poolgrid.kernel.wire.addresses import bracketed
from poolgrid.plugins.endpoint_picker import envoy_messages as envoy
from poolgrid.plugins.endpoint_picker.access_log import LOG_STREAMS_MAX, GatewayLogs, ended_bookings
from poolgrid.plugins.endpoint_picker.exchange import PickerExchange, ProtocolError
from poolgrid.plugins.endpoint_picker.metrics import PickerMetrics
from poolgrid.plugins.endpoint_picker.picker import Booking, Picker
from poolgrid.plugins.endpoint_picker.stream_table import StreamTable
from poolgrid.server.frontend.access.tenants import CacheDomains
from poolgrid.server.frontend.app import Application
from poolgrid.server.frontend.request_body import RequestIds
from poolgrid.server.frontend.settings import FrontendSettings
from poolgrid.server.process.clock import Clock
from poolgrid.server.process.log_lines import Complaints
from poolgrid.server.process.tasks import Restart, cancel_all, supervised
from poolgrid.server.proxy.prompt_reading import PromptReader
from poolgrid.server.router.service import RouterService
from poolgrid.server.router.settings import RouterSettings

log = logging.getLogger(__name__)

MESSAGE_OVERHEAD_BYTES = 1024 * 1024
"""By how much a message may exceed the largest body: headers, metadata and attributes."""

TICK_S = 0.25
"""How often times are looked at."""

STOOD_STILL_S = 1.0
"""A tick that comes later by as much: this process stood still, and read nothing."""

STREAMS_ENDING = 2
"""Streams that gRPC lets in for each that there may be: those beyond are being ended."""

STOP_GRACE_S = 1.0
"""Time for answers in flight to a gateway when the router ends; its streams are reset then."""


class EndpointPickerServer:
    """Serves ext-proc."""

    def __init__(
        self,
        table: StreamTable,
        make_exchange: Callable[[str], PickerExchange],
        renew: Callable[[Iterable[Booking]], None],
        renew_interval_s: float,
        metrics: PickerMetrics,
        clock: Clock,
        logs: GatewayLogs,
        logged: Callable[[str], None],
    ) -> None:
        """``make_exchange`` gets the gateway's address; ``renew`` is called in intervals, with what is booked for open
        streams; ``logged`` gets the bookings that a gateway's log has ended."""
        self._table = table
        self._make_exchange = make_exchange
        self._renew = renew
        self._renew_interval_s = renew_interval_s
        self._ended = metrics.streams_ended
        self._clock = clock
        self._logs = logs
        self._logged = logged
        self._complaints = Complaints(log, clock)
        self._tasks: list[asyncio.Task[None]] = []
        message_bytes_max = table.body_bytes_max + MESSAGE_OVERHEAD_BYTES
        self._server = grpc.aio.server(
            maximum_concurrent_rpcs=STREAMS_ENDING * (table.limits.connections + LOG_STREAMS_MAX),
            options=[
                ("grpc.max_receive_message_length", message_bytes_max),
                ("grpc.max_send_message_length", message_bytes_max),
            ],
        )
        process = grpc.stream_stream_rpc_method_handler(
            self._process,
            # Read in ``_process``: what fails here would be a traceback in gRPC's log.
            request_deserializer=None,
            response_serializer=envoy.ProcessingResponse.SerializeToString,
        )
        read_log = grpc.stream_unary_rpc_method_handler(self._read_log, None, None)
        self._server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(envoy.SERVICE, {envoy.METHOD: process}),
                grpc.method_handlers_generic_handler(envoy.LOG_SERVICE, {envoy.LOG_METHOD: read_log}),
            )
        )

    async def start(self, host: str, port: int, tls: tuple[Path, Path] | None, client_ca: Path | None) -> str:
        """Serve; returns ``host:port``. Raises ``OSError`` that names the setting."""
        shown = bracketed(host)
        place = f"{shown}:{port}"
        try:
            if tls is None:
                bound = self._server.add_insecure_port(place)
            else:
                bound = self._server.add_secure_port(place, _credentials(tls, client_ca))
        except RuntimeError as error:
            raise OSError(f"binding ext_proc_port: {place}: {error}") from error
        if not bound:
            raise OSError(f"binding ext_proc_port: {place}: the address is in use, or none of this machine")
        await self._server.start()
        self._tasks = [
            supervised(self._renew_in_time, "leases of the endpoint picker", Restart()),
            supervised(self._look_at_times, "time limits of the endpoint picker", Restart()),
        ]
        return f"{shown}:{bound}"

    async def stop(self) -> None:
        """End; answers in flight are reset after a moment."""
        await cancel_all(self._tasks)
        await self._server.stop(STOP_GRACE_S)

    async def _process(self, _: Any, context: Any) -> None:
        exchange = self._make_exchange(_address_of(context))
        if not self._table.enter(exchange):
            self._ended.labels("refused").inc()
            most = self._table.limits.connections
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{most} requests have an endpoint, the limit",
            )
        stream = _Stream(context, exchange, self._table)
        try:
            await stream.serve()
            if exchange.parting is None and stream.was_ended:
                self._ended.labels("silent").inc()
                await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "no request came, or its answer has ended")
        except (ProtocolError, DecodeError) as error:
            self._ended.labels("protocol").inc()
            what = error if isinstance(error, ProtocolError) else f"a message that cannot be read: {error}"
            self._complaints.about(f"gateway {_address_of(context)}", what)
            exchange.close()
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(what))
        finally:
            # Also when the gateway resets the stream: then this task is cancelled.
            if stream.was_reset:
                self._ended.labels("write_timeout").inc()
            exchange.close()

    async def _read_log(self, _: Any, context: Any) -> bytes:
        gateway = _address_of(context)
        if len(self._logs) >= LOG_STREAMS_MAX:
            self._ended.labels("refused").inc()
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED, f"{LOG_STREAMS_MAX} access logs are open, the limit"
            )
        self._logs.opened(gateway)
        try:
            while (data := await context.read()) is not grpc.aio.EOF:
                for name in ended_bookings(envoy.StreamAccessLogsMessage.FromString(data)):
                    self._logged(name)
        except DecodeError as error:
            self._ended.labels("protocol").inc()
            self._complaints.about(f"access log of gateway {gateway}", error)
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"an access log that cannot be read: {error}")
        finally:
            self._logs.closed(gateway, self._clock.monotonic_ms())
        return b""

    async def _look_at_times(self) -> None:
        now_s = asyncio.get_running_loop().time
        looked_s = now_s()
        while True:
            await asyncio.sleep(TICK_S)
            late_s = now_s() - looked_s - TICK_S
            if late_s > STOOD_STILL_S:
                self._table.leave_out(late_s)
            looked_s = now_s()
            self._table.tick()

    async def _renew_in_time(self) -> None:
        while True:
            await asyncio.sleep(self._renew_interval_s)
            self._renew(self._table.bookings())


class _Stream:
    """Reads and answers one stream, until the gateway or its exchange ends it."""

    def __init__(self, context: Any, exchange: PickerExchange, table: StreamTable) -> None:
        self._context = context
        self._exchange = exchange
        self._table = table
        self._task = asyncio.current_task()
        self._is_reading = False
        self.was_ended = False
        """Whether the exchange was ended while it waited for the gateway."""
        self.was_reset = False
        """Whether the gateway took nothing of an answer."""
        exchange.wake, exchange.reset = self._wake, self._reset

    async def serve(self) -> None:
        exchange = self._exchange
        while not exchange.is_over:
            data = await self._read()
            if data is None:
                break
            said = envoy.ProcessingRequest.FromString(data)
            del data
            answering = exchange.on(said)
            del said
            answers = await answering
            if answers:
                await self._write(answers)
                del answers
                exchange.sent()
        if exchange.parting is not None:
            await self._write([exchange.parting])

    async def _read(self) -> bytes | None:
        """Return the next message; ``None`` after the last, or once the exchange is ended meanwhile."""
        self._is_reading = True
        try:
            data = await self._context.read()
        except asyncio.CancelledError:
            if not self.was_ended or (self._task is not None and self._task.uncancel()):
                raise
            return None
        finally:
            self._is_reading = False
        return None if data is grpc.aio.EOF else data

    async def _write(self, answers: list[Any]) -> None:
        for answer in answers:
            self._table.writes(self._exchange)
            await self._context.write(answer)
        self._table.wrote(self._exchange)

    def _wake(self) -> None:
        self.was_ended = True
        if self._is_reading and self._task is not None:
            self._is_reading = False
            self._task.cancel()

    def _reset(self) -> None:
        self.was_reset = True
        if self._task is not None:
            self._task.cancel()


def _address_of(context: Any) -> str:
    """Return the address of a gateway: its streams have several connections, and ports."""
    peer: str = context.peer()
    return peer.rpartition(":")[0]


def _credentials(tls: tuple[Path, Path], client_ca: Path | None) -> Any:
    """Return credentials that follow their files: they are read again for each handshake, and no connection is cut."""

    def read() -> Any:
        certificate, key = tls
        authorities = None if client_ca is None else client_ca.read_bytes()
        return grpc.ssl_server_certificate_configuration([(key.read_bytes(), certificate.read_bytes())], authorities)

    def changed() -> Any:
        try:
            return read()
        except OSError as error:
            log.error("reading the certificate of the endpoint picker: %s; the previous one stays in use", error)
            return None

    return grpc.dynamic_ssl_server_credentials(read(), changed, client_ca is not None)


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
    metrics.streams.labels("request").set_function(lambda: float(len(table)))
    reader = PromptReader(
        app.front.preparation,
        app.front.tokenization,
        # Engines get the bodies as they are: a salt that only this process knew would be in none of their blocks.
        CacheDomains(isolate=False),
        frontend.max_body_values,
    )
    logs = GatewayLogs()
    metrics.streams.labels("access_log").set_function(lambda: float(len(logs)))
    picker = Picker(
        service,
        state,
        reader,
        lambda request: service.chooser.path_now(request, service.chooser.block_size(request.model)),
        service.chooser.without_adapter,
        service.links.of,
        service.tracker.gateway_realised,
        RequestIds(f"g{secrets.token_hex(6)}"),
        FALLBACKS,
        metrics,
        clock,
        logs,
    )
    server = EndpointPickerServer(
        table,
        lambda gateway: PickerExchange(picker, table, gateway),
        picker.renew,
        settings.reservation_ttl_ms / 1000 / RENEWALS_PER_LEASE,
        metrics,
        clock,
        logs,
        picker.logged,
    )
    opened.push_async_callback(server.stop)
    return await server.start(settings.host, settings.ext_proc_port, settings.tls_pair(), settings.tls_client_ca)
