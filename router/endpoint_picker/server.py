"""The gRPC server at which Envoy asks: one stream for each HTTP request, read and answered by an ``Exchange``."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from poolgrid.router.endpoint_picker import envoy_messages as envoy
from poolgrid.router.endpoint_picker.exchange import Exchange, ProtocolError
from poolgrid.runtime.tasks import Restart, cancel_all, supervised

log = logging.getLogger(__name__)

MESSAGE_OVERHEAD_BYTES = 1024 * 1024
"""What a message may be larger than the largest body: headers, metadata and attributes beside it."""

STOP_GRACE_S = 1.0
"""How long answers that are under way to a gateway have when the router ends; its streams are reset then."""


class EndpointPickerServer:
    """Serves ext-proc."""

    def __init__(
        self,
        make_exchange: Callable[[], Exchange],
        renew: Callable[[], None],
        renew_interval_s: float,
        body_bytes_max: int,
        streams_max: int,
    ) -> None:
        """``renew`` is called in intervals, for the leases of what is under way."""
        self._make_exchange = make_exchange
        self._renew = renew
        self._renew_interval_s = renew_interval_s
        self._renewing: asyncio.Task[None] | None = None
        self._server = grpc.aio.server(
            maximum_concurrent_rpcs=streams_max,
            options=[
                ("grpc.max_receive_message_length", body_bytes_max + MESSAGE_OVERHEAD_BYTES),
                ("grpc.max_send_message_length", body_bytes_max + MESSAGE_OVERHEAD_BYTES),
            ],
        )
        process = grpc.stream_stream_rpc_method_handler(
            self._process,
            request_deserializer=envoy.ProcessingRequest.FromString,
            response_serializer=envoy.ProcessingResponse.SerializeToString,
        )
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(envoy.SERVICE, {envoy.METHOD: process}),)
        )

    async def start(self, host: str, port: int, tls: tuple[Path, Path] | None, client_ca: Path | None) -> str:
        """Serve; returns ``host:port``. Raises ``OSError`` that names the setting."""
        shown = f"[{host}]" if ":" in host else host
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
        self._renewing = supervised(self._renew_in_time, "leases of the endpoint picker", Restart())
        return f"{shown}:{bound}"

    async def stop(self) -> None:
        """End; what is under way is reset after a moment."""
        if self._renewing is not None:
            await cancel_all([self._renewing])
        await self._server.stop(STOP_GRACE_S)

    async def _process(self, _: Any, context: Any) -> None:
        exchange = self._make_exchange()
        try:
            while (said := await context.read()) is not grpc.aio.EOF:
                for answer in await exchange.on(said):
                    await context.write(answer)
        except ProtocolError as error:
            log.warning("%s", error)
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        finally:
            # Also when the gateway resets the stream: then this task is cancelled.
            exchange.close()

    async def _renew_in_time(self) -> None:
        while True:
            await asyncio.sleep(self._renew_interval_s)
            self._renew()


def _credentials(tls: tuple[Path, Path], client_ca: Path | None) -> Any:
    """Return credentials that follow their files: they are read anew for each handshake, and no connection is cut."""

    def read() -> Any:
        certificate, key = tls
        authorities = None if client_ca is None else client_ca.read_bytes()
        return grpc.ssl_server_certificate_configuration([(key.read_bytes(), certificate.read_bytes())], authorities)

    def changed() -> Any:
        try:
            return read()
        except OSError as error:
            log.error("reading the certificate of the endpoint picker: %s; it goes on with the one before", error)
            return None

    return grpc.dynamic_ssl_server_credentials(read(), changed, client_ca is not None)
