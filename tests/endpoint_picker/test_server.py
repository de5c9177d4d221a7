"""The gRPC server of the picker, asked by gRPC's own client: limits, TLS, ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import trustme

from poolgrid.plugins.endpoint_picker import envoy_messages as envoy
from poolgrid.plugins.endpoint_picker.exchange import PickerExchange
from poolgrid.plugins.endpoint_picker.picker import Booking
from poolgrid.plugins.endpoint_picker.server import EndpointPickerServer
from poolgrid.plugins.endpoint_picker.stream_table import StreamTable
from poolgrid.server.http.http_settings import HttpLimits
from poolgrid.server.process.tasks import cancel_all
from tests.endpoint_picker.test_picking import (
    EVENTS,
    Gateway,
    body,
    card_at,
    endpoints,
    log_of,
    request_headers,
    response_headers,
)

BODY_MAX = 6 * 2**20
PATIENCE_S = 60


class Watched(PickerExchange):
    """Says when it is over."""

    def __init__(self, gateway: Gateway, over: asyncio.Event, of: str) -> None:
        super().__init__(gateway.picker, gateway.table, of)
        self._over = over

    def close(self) -> None:
        super().close()
        self._over.set()


class Asking:
    """A server of a picker over one engine, and what its gateways see."""

    def __init__(self, limits: HttpLimits) -> None:
        self.gateway = Gateway()
        self.gateway.table = StreamTable(limits, BODY_MAX)
        self.gateway.joined(a=card_at("10.0.0.1:80"))
        self.at = ""
        self.renewed = asyncio.Event()
        self.over = asyncio.Event()
        """Set when a stream has ended."""

    def exchange(self, gateway: str) -> PickerExchange:
        return Watched(self.gateway, self.over, gateway)

    def server(self) -> EndpointPickerServer:
        gateway = self.gateway
        return EndpointPickerServer(
            gateway.table,
            self.exchange,
            self._renew,
            0.001,
            gateway.metrics,
            gateway.clock,
            gateway.logs,
            gateway.picker.logged,
        )

    def _renew(self, held: Iterable[Booking]) -> None:
        self.gateway.picker.renew(held)
        self.renewed.set()

    def ended(self, reason: str) -> float:
        name = "poolgrid_router_gateway_streams_ended_total"
        return self.gateway.registry.get_sample_value(name, {"reason": reason}) or 0.0


@asynccontextmanager
async def serving(
    streams: int = 10, tls: Any = None, client_ca: Path | None = None, **limits: Any
) -> AsyncIterator[Asking]:
    asking = Asking(HttpLimits(connections=streams, **{"unfinished_bytes": BODY_MAX + 4096, **limits}))
    server = asking.server()
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


async def test_a_body_may_be_larger_than_grpc_takes_by_default_and_leases_are_renewed() -> None:
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


async def test_a_stream_that_is_reset_takes_its_request_off_the_books() -> None:
    async with serving() as asking, grpc.aio.insecure_channel(asking.at) as channel:
        call = stream(channel)
        await picked(call)
        assert asking.gateway.booked()
        call.cancel()
        await asking.over.wait()
        assert asking.gateway.booked() == {}


async def test_a_gateway_that_logs_is_let_go_with_the_first_piece_of_a_stream() -> None:
    async with serving() as asking, grpc.aio.insecure_channel(asking.at) as channel:
        log = channel.stream_unary(
            f"/{envoy.LOG_SERVICE}/{envoy.LOG_METHOD}",
            request_serializer=envoy.StreamAccessLogsMessage.SerializeToString,
        )()
        await log.write(log_of())
        call = stream(channel)
        await call.write(request_headers(response_mode=envoy.STREAMED))
        await call.write(body(b"{}"))
        name = (await call.read()).dynamic_metadata["envoy.lb"]["x-poolgrid-booking"]
        assert (await call.read()).WhichOneof(envoy.SAID) == "request_body"
        while not len(asking.gateway.logs):  # noqa: ASYNC110 - the server has read it some time
            await asyncio.sleep(0.01)
        for message in (response_headers(kind=EVENTS), body(b"data: {}\n\n", ends=False, kind="response_body")):
            await call.write(message)
            assert (await call.read()).WhichOneof(envoy.SAID) == message.WhichOneof(envoy.SAID)
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK
        await asking.over.wait()
        asking.renewed.clear()
        await asking.renewed.wait()
        assert len(asking.gateway.booked()) == 1

        await log.write(log_of(name))
        await log.done_writing()
        await log
        assert asking.gateway.booked() == {}
        assert len(asking.gateway.logs) == 0


async def test_an_access_log_that_cannot_be_read_ends_with_the_reason() -> None:
    async with serving() as asking, grpc.aio.insecure_channel(asking.at) as channel:
        log = channel.stream_unary(f"/{envoy.LOG_SERVICE}/{envoy.LOG_METHOD}")()
        await log.write(b"\xff")
        with pytest.raises(grpc.aio.AioRpcError, match="an access log that cannot be read"):
            await log
        assert asking.ended("protocol") == 1
        async with asyncio.timeout(10):  # the client has its answer before the server has tidied up
            while len(asking.gateway.logs):  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def test_one_access_log_more_than_there_may_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("poolgrid.plugins.endpoint_picker.server.LOG_STREAMS_MAX", 0)
    async with serving() as asking, grpc.aio.insecure_channel(asking.at) as channel:
        log = channel.stream_unary(f"/{envoy.LOG_SERVICE}/{envoy.LOG_METHOD}")()
        with pytest.raises(grpc.aio.AioRpcError, match="0 access logs are open, the limit"):
            await log
        assert asking.ended("refused") == 1


async def test_one_stream_more_than_there_may_be_is_refused_at_once() -> None:
    async with serving(streams=1) as asking, grpc.aio.insecure_channel(asking.at) as channel:
        first = stream(channel)
        await picked(first)
        assert await stream(channel).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        first.cancel()


def raw_stream(channel: Any) -> Any:
    return channel.stream_stream(f"/{envoy.SERVICE}/{envoy.METHOD}")()


@pytest.mark.parametrize(
    "message",
    [b"", b"\xff\xff\xff", b"hello", b"\x12\xff\xff\xff\xff\x0f", b"\x12\x06\x0a\x04\x0a\x02\x0a\xff"],
    ids=["empty", "not protobuf", "text", "cut", "not UTF-8"],
)
async def test_what_is_no_message_of_ext_proc_ends_its_stream_with_the_reason(
    message: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving() as asking, grpc.aio.insecure_channel(asking.at) as channel:
        call = raw_stream(channel)
        await call.write(message)
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        await asking.over.wait()
        assert asking.ended("protocol") == 1
    # gRPC's own poller may still wake the loop of the test before, which is closed.
    assert not [each for each in caplog.records if each.exc_info and "PollerCompletionQueue" not in each.getMessage()]


async def test_a_second_request_on_a_stream_is_refused_and_every_booking_ends() -> None:
    async with serving(streams=100) as asking, grpc.aio.insecure_channel(asking.at) as channel:
        for _ in range(20):
            asking.over.clear()
            call = stream(channel)
            await call.write(request_headers(ends=True))
            await call.read()
            with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                for _ in range(29):
                    await call.write(request_headers(ends=True))
            call.cancel()
            await asking.over.wait()
        call = stream(channel)
        await call.write(request_headers(ends=True))
        await call.read()
        await call.write(request_headers(ends=True))
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert asking.gateway.booked() == {}
        assert asking.gateway.registry.get_sample_value("poolgrid_router_gateway_in_flight") == 0


async def test_slow_uploads_give_way_with_429_to_bodies_that_come_whole() -> None:
    async with serving(streams=100) as asking, grpc.aio.insecure_channel(asking.at) as channel:
        slow = [stream(channel) for _ in range(16)]
        for call in slow:
            await call.write(request_headers())
            await call.write(body(bytes(2**20), False))
        for _ in range(5):
            call = stream(channel)
            assert await picked(call, bytes(2**20)) == ["10.0.0.1:80"]
            call.cancel()
        reads = {asyncio.create_task(call.read()): call for call in slow}
        done, waiting = await asyncio.wait(reads, return_when=asyncio.FIRST_COMPLETED)
        for read in done:
            answer = read.result().immediate_response
            assert (answer.status.code, answer.details) == (429, "poolgrid_bodies_full")
            assert await reads[read].read() is grpc.aio.EOF
            assert await reads[read].code() is grpc.StatusCode.OK
        await cancel_all(waiting)
        assert asking.gateway.table.used_bytes <= BODY_MAX + 4096


async def test_streams_with_headers_only_give_way_and_their_time_ends() -> None:
    limited = serving(streams=8, header_timeout_s=0.2, body_timeout_s=0.2)
    async with limited as asking, grpc.aio.insecure_channel(asking.at) as channel:
        held = [stream(channel) for _ in range(7)]
        for call in held:
            await call.write(request_headers())
        silent = stream(channel)
        await silent.wait_for_connection()
        call = stream(channel)
        assert await picked(call) == ["10.0.0.1:80"]
        told = {(await each.read()).immediate_response.details for each in held}
        assert told <= {"poolgrid_streams_full", "poolgrid_body_timeout"}
        assert "poolgrid_body_timeout" in told
        assert await silent.code() in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.RESOURCE_EXHAUSTED)
        assert asking.gateway.booked() != {}


async def test_a_gateway_that_does_not_take_its_body_back_is_reset_and_the_memory_is_free() -> None:
    # This client's window stays at 64 KiB: it would grow to take the whole body unread, and its bound on messages
    # (4 MiB) would end the stream.
    fixed = [("grpc.http2.bdp_probe", 0), ("grpc.max_receive_message_length", -1)]
    async with serving(write_timeout_s=0.3) as asking, grpc.aio.insecure_channel(asking.at, fixed) as channel:
        call = stream(channel)
        await call.write(request_headers())
        await call.write(body(bytes(5 * 2**20)))
        await asking.over.wait()
        assert asking.gateway.table.used_bytes == 0
        assert asking.gateway.booked() == {}
        assert asking.ended("write_timeout") == 1


async def test_with_a_certificate_it_speaks_tls_and_lets_in_whom_its_authority_knows(tmp_path: Path) -> None:
    authority, other = trustme.CA(), trustme.CA()
    server = authority.issue_cert("127.0.0.1")
    files = tmp_path / "certificate.pem", tmp_path / "key.pem"
    files[0].write_bytes(b"".join(each.bytes() for each in server.cert_chain_pems))
    files[1].write_bytes(server.private_key_pem.bytes())
    ca = tmp_path / "ca.pem"
    ca.write_bytes(authority.cert_pem.bytes())

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


async def test_a_port_that_is_taken_is_named() -> None:
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    picker = Asking(HttpLimits()).server()
    with pytest.raises(OSError, match=f"binding ext_proc_port: 127.0.0.1:{port}"):
        await picker.start("127.0.0.1", port, None, None)
    await picker.stop()
    server.close()
    await server.wait_closed()
