"""The gRPC server of the picker, asked by gRPC's own client: limits, TLS, ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import trustme

from poolgrid.router.endpoint_picker import envoy_messages as envoy
from poolgrid.router.endpoint_picker.exchange import Exchange
from poolgrid.router.endpoint_picker.server import EndpointPickerServer
from tests.endpoint_picker.test_picking import Gateway, body, card_at, endpoints, request_headers

BODY_MAX = 6 * 2**20
PATIENCE_S = 60


class Watched(Exchange):
    """Says when it is over."""

    def __init__(self, gateway: Gateway, over: asyncio.Event) -> None:
        super().__init__(gateway.picker, gateway.bodies)
        self._over = over

    def close(self) -> None:
        super().close()
        self._over.set()


class Asking:
    """A server of a picker over one engine, and what its gateways see."""

    def __init__(self) -> None:
        self.gateway = Gateway()
        self.gateway.bodies.body_bytes_max = self.gateway.bodies.total_bytes_max = BODY_MAX
        self.gateway.joined(a=card_at("10.0.0.1:80"))
        self.at = ""
        self.renewed = asyncio.Event()
        self.over = asyncio.Event()
        """Set when a stream has ended."""

    def exchange(self) -> Exchange:
        return Watched(self.gateway, self.over)


@asynccontextmanager
async def serving(streams: int = 10, tls: Any = None, client_ca: Path | None = None) -> AsyncIterator[Asking]:
    asking = Asking()
    server = EndpointPickerServer(asking.exchange, asking.renewed.set, 0.001, BODY_MAX, streams)
    asking.at = await server.start("127.0.0.1", 0, tls, client_ca)
    try:
        yield asking
    finally:
        await server.stop()


def stream(channel: Any) -> Any:
    return channel.stream_stream(
        f"/{envoy.SERVICE}/{envoy.METHOD}",
        request_serializer=envoy.ProcessingRequest.SerializeToString,
        response_deserializer=envoy.ProcessingResponse.FromString,
    )()


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def whole() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await scenario()

    asyncio.run(whole())


async def picked(call: Any, content: bytes = b"{}") -> list[str]:
    await call.write(request_headers())
    await call.write(body(content))
    return endpoints([await call.read()])


def test_a_body_may_be_larger_than_grpc_takes_by_default_and_leases_are_renewed() -> None:
    async def scenario() -> None:
        # Envoy has no bound on what it is told, unlike this client.
        unbounded = [("grpc.max_receive_message_length", -1)]
        async with serving() as asking, grpc.aio.insecure_channel(asking.at, unbounded) as channel:
            call = stream(channel)
            assert await picked(call, bytes(5 * 2**20)) == ["10.0.0.1:80"]
            await asking.renewed.wait()
            assert asking.gateway.booked()
            given_back = (await call.read()).request_body.response.body_mutation.streamed_response
            assert (len(given_back.body), given_back.end_of_stream) == (5 * 2**20, True)
            await call.done_writing()
            assert await call.read() is grpc.aio.EOF
            assert asking.gateway.booked() == {}

    run(scenario)


def test_a_stream_that_is_reset_takes_its_request_off_the_books() -> None:
    async def scenario() -> None:
        async with serving() as asking, grpc.aio.insecure_channel(asking.at) as channel:
            call = stream(channel)
            await picked(call)
            assert asking.gateway.booked()
            call.cancel()
            await asking.over.wait()
            assert asking.gateway.booked() == {}

    run(scenario)


def test_one_stream_more_than_there_may_be_is_refused_at_once() -> None:
    async def scenario() -> None:
        async with serving(streams=1) as asking, grpc.aio.insecure_channel(asking.at) as channel:
            first = stream(channel)
            await picked(first)
            assert await stream(channel).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            first.cancel()

    run(scenario)


def test_what_is_no_message_of_ext_proc_ends_its_stream_with_the_reason() -> None:
    async def scenario() -> None:
        async with serving() as asking, grpc.aio.insecure_channel(asking.at) as channel:
            call = stream(channel)
            await call.write(envoy.ProcessingRequest())
            assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT

    run(scenario)


def test_with_a_certificate_it_speaks_tls_and_lets_in_whom_its_authority_knows(tmp_path: Path) -> None:
    authority, other = trustme.CA(), trustme.CA()
    server = authority.issue_cert("127.0.0.1")
    files = tmp_path / "certificate.pem", tmp_path / "key.pem"
    files[0].write_bytes(b"".join(each.bytes() for each in server.cert_chain_pems))
    files[1].write_bytes(server.private_key_pem.bytes())
    ca = tmp_path / "ca.pem"
    ca.write_bytes(authority.cert_pem.bytes())

    async def scenario() -> None:
        async with serving(tls=files, client_ca=ca) as asking:
            for issuer, welcome in ((authority, True), (other, False)):
                mine = issuer.issue_cert("gateway")
                credentials = grpc.ssl_channel_credentials(
                    ca.read_bytes(), mine.private_key_pem.bytes(), mine.cert_chain_pems[0].bytes()
                )
                async with grpc.aio.secure_channel(asking.at, credentials) as channel:
                    call = stream(channel)
                    if welcome:
                        assert await picked(call) == ["10.0.0.1:80"]
                    else:
                        assert await call.code() is grpc.StatusCode.UNAVAILABLE

    run(scenario)


def test_a_port_that_is_taken_is_named() -> None:
    async def scenario() -> None:
        server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        picker = EndpointPickerServer(Gateway().exchange, lambda: None, 60.0, BODY_MAX, 1)
        with pytest.raises(OSError, match=f"binding ext_proc_port: 127.0.0.1:{port}"):
            await picker.start("127.0.0.1", port, None, None)
        await picker.stop()
        server.close()
        await server.wait_closed()

    run(scenario)
