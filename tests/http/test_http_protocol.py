"""The short way through the HTTP server: what reaches the endpoint, and what goes over the wire."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from starlette.types import Receive, Scope, Send

from poolgrid.http import http_server
from poolgrid.http.direct_cycle import CONNECTION, Connection, DirectCycle
from poolgrid.http.http_connections import SAID_EVERY_S, InvalidRequests
from poolgrid.http.http_protocol import HEADS_TRIED_MAX, DirectProtocol
from poolgrid.http.http_server import HttpServer
from poolgrid.http.http_settings import HttpLimits

LIMIT = 1000


class Endpoint:
    """Answers with the size of the body, and whether it came gathered."""

    body_bytes_max = LIMIT

    def __init__(self, name: bytes = b"") -> None:
        self.name = name
        """What its answers begin with."""
        self.left = asyncio.Event()
        self.hold = asyncio.Event()
        self.entered = asyncio.Event()
        self.proceed = asyncio.Event()
        """What a stream waits for whose head has been sent."""
        self.hold.set()
        self.wrote_at_once: list[bool] = []
        self.left_behind: list[object] = []
        """What it finds in the scope of each request of what it puts there."""
        self.of_head: list[int | None] = []
        """How many requests with its head were before each, as far as the connection keeps that."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection: Connection | None = (scope.get("extensions") or {}).get(CONNECTION)
        if connection is None:
            body = b""
            more = True
            while more:
                message = await receive()
                body += message.get("body", b"")
                more = message.get("more_body", False)
        else:
            body = connection.body
            connection.on_left = self.left.set
            kept = connection.of_head
            self.of_head.append(None if kept is None else kept.get("before", 0))
            if kept is not None:
                kept["before"] = kept.get("before", 0) + 1
        self.entered.set()
        self.left_behind.append(scope.get("left behind"))
        scope["left behind"] = True
        await self.hold.wait()
        how = b"received" if connection is None else b"gathered"
        headers = dict(scope["headers"])
        if headers.get(b"x-stream"):
            await send({"type": "http.response.start", "status": 200, "headers": [(b"x-how", how)]})
            for part in (b"one", b"", b"two"):
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return
        if headers.get(b"x-wait"):
            await send({"type": "http.response.start", "status": 200, "headers": [(b"x-how", how)]})
            await send({"type": "http.response.body", "body": b"", "more_body": True})
            await self.proceed.wait()
            await send({"type": "http.response.body", "body": b"late", "more_body": False})
            return
        if headers.get(b"x-bare"):
            await send({"type": "http.response.start", "status": 200})
            await send({"type": "http.response.body", "body": b"bare"})
            return
        if headers.get(b"x-whole") and connection is not None:
            answer = b"w" * int(headers[b"x-whole"])
            self.wrote_at_once.append(connection.answer(200, [(b"x-how", how)], answer))
            if not self.wrote_at_once[-1]:
                length = (b"content-length", b"%d" % len(answer))
                await send({"type": "http.response.start", "status": 200, "headers": [length]})
                await send({"type": "http.response.body", "body": answer, "more_body": False})
            assert connection.answer(500, [], b"again"), "after the last byte it is taken and goes nowhere"
            return
        answer = b"%b%d %b" % (self.name, len(body), how)
        headers_out = [(b"content-length", b"%d" % len(answer))]
        if headers.get(b"x-close"):
            headers_out.append((b"connection", b"close"))
        await send({"type": "http.response.start", "status": 200, "headers": headers_out})
        await send({"type": "http.response.body", "body": answer, "more_body": False})


class Application:
    """Direct endpoints at ``/direct`` and ``/second``, ordinary ASGI elsewhere."""

    def __init__(self) -> None:
        self.endpoint = Endpoint()
        self.second = Endpoint(b"second ")
        self.is_closed = False
        """Whether the short way is."""

    def direct_endpoint(self, url: bytes) -> Endpoint | None:
        return None if self.is_closed else {b"/direct": self.endpoint, b"/second": self.second}.get(url)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = {"/direct": self.endpoint, "/second": self.second}.get(scope["path"])
        if endpoint is not None and scope["method"] == "POST" and not scope["query_string"]:
            await endpoint(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 404, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def response(self) -> tuple[int, dict[str, str], bytes]:
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
        if "content-length" in headers:
            return int(head[0].split()[1]), headers, await self.reader.readexactly(int(headers["content-length"]))
        body = b""
        while True:
            size = int(await self.reader.readline(), 16)
            part = (await self.reader.readexactly(size + 2))[:-2]
            if not size:
                return int(head[0].split()[1]), headers, body
            body += part


@asynccontextmanager
async def talking(registry: CollectorRegistry | None = None) -> AsyncIterator[tuple[Application, Client]]:
    application = Application()
    server = HttpServer(application, "127.0.0.1", 0, "port", registry=registry, limits=HttpLimits(hosts=("*",)))
    server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        yield application, Client(reader, writer)
    finally:
        application.endpoint.hold.set()
        writer.close()
        await server.stop()


def post(body: bytes, *headers: str, length: bool = True, path: str = "/direct") -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: x", *headers]
    if length:
        lines.append(f"content-length: {len(body)}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


CHUNKED = post(b"3\r\nabc\r\n0\r\n\r\n", "transfer-encoding: chunked", length=False)


def test_a_whole_answer_goes_out_at_once_with_its_length() -> None:
    async def go() -> None:
        async with talking() as (application, client):
            for close in ((), ("connection: close",)):
                client.writer.write(post(b"abc", "x-whole: 5", *close))
                status, headers, body = await client.response()
                assert (status, headers["x-how"], body) == (200, "gathered", b"wwwww")
                assert headers.get("connection") == ("close" if close else None)
            assert await client.reader.read() == b"", "the second asked for the end of the connection"
        assert application.endpoint.wrote_at_once == [True, True]

    asyncio.run(go())


def test_a_whole_answer_waits_for_a_client_that_reads_slowly() -> None:
    async def go() -> None:
        large = 16 * 2**20
        async with talking() as (application, client):
            client.writer.write(post(b"abc", f"x-whole: {large}"))
            client.writer.write(post(b"abc", "x-whole: 3"))
            for expected in (large, 3):
                _, _, body = await client.response()
                assert body == b"w" * expected
        assert application.endpoint.wrote_at_once == [True, False]

    asyncio.run(go())


def test_an_endpoint_that_fails_is_answered_for_and_its_connection_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def go() -> None:
        async with talking() as (_, client):
            client.writer.write(post(b"abc", "x-whole: none"))
            status, _, body = await client.response()
            assert (status, body) == (500, b"Internal Server Error")
        assert "an endpoint failed" in caplog.text

    asyncio.run(go())


@pytest.mark.parametrize(
    ("request_bytes", "answer"),
    [
        (post(b"abc"), b"3 gathered"),
        (post(b""), b"0 gathered"),
        (post(b"x" * LIMIT), b"%d gathered" % LIMIT),
        (post(b"x" * (LIMIT + 1)), b"%d received" % (LIMIT + 1)),
        (CHUNKED, b"3 received"),
        (post(b"abc", path="/direct?x=1"), b""),
        (post(b"abc", path="/other"), b""),
        (post(b"abc").replace(b"POST", b"PUT"), b""),
    ],
    ids=["short", "empty", "at the limit", "above the limit", "chunked", "query", "other path", "other method"],
)
def test_bodies_of_known_length_are_gathered_and_all_else_goes_the_usual_way(
    request_bytes: bytes, answer: bytes
) -> None:
    async def go() -> None:
        async with talking() as (_, client):
            for _ in range(2):  # the connection is kept
                client.writer.write(request_bytes)
                status, _, body = await client.response()
                assert (status, body) == (200 if answer else 404, answer)

    asyncio.run(go())


def test_a_body_may_come_in_any_pieces() -> None:
    async def go() -> None:
        async with talking() as (_, client):
            for byte in post(b"hello"):
                client.writer.write(bytes([byte]))
                await client.writer.drain()
            assert (await client.response())[2] == b"5 gathered"

    asyncio.run(go())


def test_a_stream_is_chunked_and_empty_parts_do_not_end_it() -> None:
    async def go() -> None:
        async with talking() as (_, client):
            for _ in range(2):
                client.writer.write(post(b"abc", "x-stream: 1"))
                assert (await client.response())[2] == b"onetwo"

    asyncio.run(go())


def test_the_head_of_a_stream_leaves_with_its_first_part(monkeypatch: pytest.MonkeyPatch) -> None:
    writes: list[bytes] = []

    class Recording:
        def __init__(self, transport: asyncio.Transport) -> None:
            self._transport = transport

        def write(self, data: bytes) -> None:
            writes.append(data)
            self._transport.write(data)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._transport, name)

    begun = DirectCycle.__init__

    def begin(cycle: DirectCycle, *given: Any, **named: Any) -> None:
        begun(cycle, *given, **named)
        cycle.transport = cast(asyncio.Transport, Recording(cycle.transport))

    monkeypatch.setattr(DirectCycle, "__init__", begin)

    async def go() -> None:
        async with talking() as (_, client):
            client.writer.write(post(b"abc", "x-stream: 1"))
            assert (await client.response())[2] == b"onetwo"

    asyncio.run(go())
    assert [write.rpartition(b"\r\n\r\n")[2] for write in writes[:1]] == [b"3\r\none\r\n"]
    assert writes[1:] == [b"3\r\ntwo\r\n", b"0\r\n\r\n"]


def test_the_head_of_a_stream_leaves_alone_where_its_first_part_is_empty() -> None:
    async def go() -> None:
        async with talking() as (application, client):
            client.writer.write(post(b"abc", "x-wait: 1"))
            assert (await client.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
            application.endpoint.proceed.set()
            assert await client.reader.readuntil(b"0\r\n\r\n") == b"4\r\nlate\r\n0\r\n\r\n"

    asyncio.run(go())


def test_pipelined_requests_are_answered_in_order() -> None:
    async def go() -> None:
        async with talking() as (_, client):
            client.writer.write(post(b"a") + post(b"bb", "x-stream: 1") + post(b"", path="/other") + post(b"dddd"))
            answers = [await client.response() for _ in range(4)]
            assert [status for status, _, _ in answers] == [200, 200, 404, 200]
            assert [body.split()[0] if body else b"" for _, _, body in answers] == [b"1", b"onetwo", b"", b"4"]

    asyncio.run(go())


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What goes to the parser."""
    pieces: list[bytes] = []
    read = DirectProtocol._read

    def noted(protocol: DirectProtocol, data: bytes | bytearray) -> int:
        pieces.append(bytes(data))
        return read(protocol, data)

    monkeypatch.setattr(DirectProtocol, "_read", noted)
    return pieces


@contextmanager
def arrivals() -> Iterator[asyncio.Event]:
    """An event that is set whenever something comes to a server."""
    arrived = asyncio.Event()
    plain = DirectProtocol.data_received

    def noted(protocol: DirectProtocol, data: bytes) -> None:
        arrived.set()
        plain(protocol, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DirectProtocol, "data_received", noted)
        yield arrived


async def send_in_pieces(client: Client, request: bytes, arrived: asyncio.Event) -> None:
    """Send half of a request, and the rest once that has come; whatever was sent before has come already."""
    half = len(request) // 2
    arrived.clear()
    client.writer.write(request[:half])
    await arrived.wait()
    client.writer.write(request[half:])


async def sizes(client: Client, *requests: bytes) -> list[bytes]:
    """Return what is answered to requests that are sent one after the other."""
    answers = []
    for each in requests:
        client.writer.write(each)
        answers.append((await client.response())[2])
    return answers


def test_a_head_that_came_before_is_not_parsed_again(parsed: list[bytes]) -> None:
    async def go() -> None:
        async with talking() as (application, client):
            bodies = [b"a", b"bb", b"", b"c" * LIMIT, b"dd"]
            found = await sizes(client, *(post(body) for body in bodies))
            assert found == [b"%d gathered" % len(body) for body in bodies]
            assert application.endpoint.left_behind == [None] * len(bodies), "each request has a scope of its own"

    asyncio.run(go())
    assert parsed == [post(b"a")]


def test_what_an_endpoint_keeps_of_a_head_is_there_for_the_next_request_with_it_and_for_no_other() -> None:
    async def go() -> None:
        async with talking() as (application, client):
            other = post(b"abc", "x-request-id: other")
            await sizes(client, post(b"a"), post(b"bb"), post(b"ccc"), other, other, post(b"a"), post(b"bb"))
            assert application.endpoint.of_head == [None, 0, 1, None, 0, None, 0]

    asyncio.run(go())


def test_what_differs_in_more_than_its_length_is_parsed(parsed: list[bytes]) -> None:
    others = [post(b"abc", "x-stream: 1"), post(b"abc", path="/other"), CHUNKED, post(b"x" * (LIMIT + 1)), post(b"ab")]

    async def go() -> None:
        async with talking() as (_, client):
            found = await sizes(client, post(b"a"), *others, post(b"abc"))
            assert found == [
                b"1 gathered", b"onetwo", b"", b"3 received", b"%d received" % (LIMIT + 1), b"2 gathered", b"3 gathered"
            ]  # fmt: skip

    asyncio.run(go())
    assert parsed[: len(others) + 1] == [post(b"a"), *others]


def test_a_repeated_head_may_come_in_pieces_and_be_followed_by_another(parsed: list[bytes]) -> None:
    async def go() -> None:
        async with talking() as (_, client):
            assert await sizes(client, post(b"a"), post(b"bb")) == [b"1 gathered", b"2 gathered"]
            for byte in post(b"hello"):
                client.writer.write(bytes([byte]))
                await client.writer.drain()
            assert (await client.response())[2] == b"5 gathered"
            client.writer.write(post(b"a") + post(b"bb") + post(b"ccc"))
            assert [(await client.response())[2] for _ in range(3)] == [b"1 gathered", b"2 gathered", b"3 gathered"]
            del parsed[:]
            assert await sizes(client, post(b"dddd"), post(b"eeeee")) == [b"4 gathered", b"5 gathered"]

    asyncio.run(go())
    assert parsed == [post(b"dddd")]


def test_a_connection_whose_heads_never_come_again_keeps_none(parsed: list[bytes]) -> None:
    requests = [post(b"abc", f"x-request-id: {number}") for number in range(2 * HEADS_TRIED_MAX)]

    async def go() -> None:
        async with talking() as (_, client):
            assert set(await sizes(client, *requests)) == {b"3 gathered"}
            same = post(b"abc", "x-request-id: same")
            assert set(await sizes(client, same, same, same)) == {b"3 gathered"}
            assert parsed == [*requests, same, same, same], "nothing is remembered any more"

    asyncio.run(go())


def test_a_head_that_came_before_goes_to_its_own_endpoint_whatever_came_between() -> None:
    """Not to the endpoint of the request before: one that came in pieces, or after more heads than are kept."""

    async def go() -> None:
        with arrivals() as arrived:
            await talk(arrived)

    async def talk(arrived: asyncio.Event) -> None:
        async with talking() as (_, client):
            assert await sizes(client, post(b"a")) == [b"1 gathered"]
            second = post(b"xyz", path="/second")
            await send_in_pieces(client, second, arrived)
            assert (await client.response())[2] == b"second 3 gathered"
            assert await sizes(client, post(b"bb")) == [b"2 gathered"]
            for number in range(HEADS_TRIED_MAX):
                await sizes(client, post(b"abc", f"x-request-id: {number}"))
            last = post(b"abcd", f"x-request-id: {HEADS_TRIED_MAX - 1}")
            assert await sizes(client, second, last, second, last) == [b"second 3 gathered", b"4 gathered"] * 2

    asyncio.run(go())


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["/direct", "/direct", "/second", "/second", "/other"]),
            st.sampled_from([(), (), ("x-request-id: 1",)]),
            st.integers(0, 12),  # bytes of the body
            st.integers(0, 2),  # how often it comes again before the next
            st.sampled_from(["whole", "whole", "in pieces", "behind the one before"]),
        ),
        min_size=4,
        max_size=16,
    )
)
def test_requests_of_one_connection_are_answered_as_if_each_had_its_own(
    asked: list[tuple[str, tuple[str, ...], int, int, str]],
) -> None:
    async def go() -> None:
        with arrivals() as arrived:
            await talk(arrived)

    async def talk(arrived: asyncio.Event) -> None:
        async with talking() as (_, client):
            expected: list[bytes] = []
            answered: list[bytes] = []
            for path, headers, size, again, how in asked:
                for _ in range(again + 1):
                    request = post(b"b" * size, *headers, path=path)
                    name = {"/direct": b"", "/second": b"second "}.get(path)
                    expected.append(b"" if name is None else b"%b%d gathered" % (name, size))
                    if how == "behind the one before":
                        client.writer.write(request)
                        continue
                    while len(answered) < len(expected) - 1:
                        answered.append((await client.response())[2])
                    if how == "in pieces":
                        await send_in_pieces(client, request, arrived)
                    else:
                        client.writer.write(request)
                    answered.append((await client.response())[2])
            while len(answered) < len(expected):
                answered.append((await client.response())[2])
            assert answered == expected

    asyncio.run(go())


def test_an_endpoint_that_is_no_longer_there_is_not_called_again(parsed: list[bytes]) -> None:
    async def go() -> None:
        async with talking() as (application, client):
            assert await sizes(client, post(b"a"), post(b"bb")) == [b"1 gathered", b"2 gathered"]
            application.is_closed = True
            client.writer.write(post(b"ccc"))
            assert (await client.response())[2] == b"3 received"

    asyncio.run(go())
    assert parsed == [post(b"a"), post(b"ccc")]


@pytest.mark.parametrize("who", ["client", "endpoint"])
def test_the_connection_closes_when_either_side_wants_it(who: str) -> None:
    async def go() -> None:
        async with talking() as (_, client):
            client.writer.write(post(b"abc", "connection: close" if who == "client" else "x-close: 1"))
            _, headers, _ = await client.response()
            assert headers["connection"] == "close"
            assert await client.reader.read() == b""

    asyncio.run(go())


def test_the_endpoint_is_told_when_its_client_leaves() -> None:
    async def go() -> None:
        async with talking() as (application, client):
            endpoint = application.endpoint
            endpoint.hold.clear()
            client.writer.write(post(b"abc"))
            await asyncio.wait_for(endpoint.entered.wait(), 10)
            assert not endpoint.left.is_set()
            client.writer.transport.abort()
            await asyncio.wait_for(endpoint.left.wait(), 10)

    asyncio.run(go())


def test_a_client_that_leaves_amid_its_body_reaches_nobody() -> None:
    async def go() -> None:
        async with talking() as (application, client):
            client.writer.write(post(b"abc")[:-1])
            await client.writer.drain()
            client.writer.close()
            await client.writer.wait_closed()
            # A second connection is served after the first one's end was seen.
            other = Client(*await asyncio.open_connection("127.0.0.1", client.writer.get_extra_info("peername")[1]))
            other.writer.write(post(b"abcd"))
            assert (await other.response())[2] == b"4 gathered"
            other.writer.close()
            assert application.endpoint.entered.is_set()
            assert not application.endpoint.left.is_set()

    asyncio.run(go())


def test_a_port_scan_is_counted_and_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    registry = CollectorRegistry()

    async def run() -> None:
        async with talking(registry) as (_, client):
            port = client.writer.get_extra_info("peername")[1]
            for nonsense in (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc", b"SSH-2.0-scanner\r\n", b"\r\n\x00\x00" * 9):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(nonsense)
                assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
                writer.close()

    asyncio.run(run())

    assert registry.get_sample_value("poolgrid_http_invalid_requests_total") == 3
    (line,) = [record.getMessage() for record in caplog.records if "not HTTP" in record.getMessage()]
    assert "127.0.0.1" in line
    assert not [record for record in caplog.records if record.name.startswith("uvicorn")]


def test_the_log_says_how_many_there_were_since_it_last_said_so(caplog: pytest.LogCaptureFixture) -> None:
    invalid = InvalidRequests()
    for now_s in (5.0, 6.0, 7.0, 5.0 + SAID_EVERY_S):
        invalid.note("10.0.0.1", now_s)

    assert invalid.count == 4
    assert [
        f"{number} since" in record.getMessage() for record, number in zip(caplog.records, (1, 3), strict=True)
    ] == [
        True,
        True,
    ]


def test_a_request_to_upgrade_is_answered_as_what_it_is_otherwise(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with talking() as (_, client):
            client.writer.write(post(b"abc", "connection: upgrade", "upgrade: websocket"))
            status, _, _ = await client.response()
            assert status == 200

    asyncio.run(run())

    assert not caplog.records


def test_nonsense_is_answered_400() -> None:
    async def go() -> None:
        async with talking() as (_, client):
            client.writer.write(b"NONSENSE\r\n\r\n")
            status, _, _ = await client.response()
            assert status == 400

    asyncio.run(go())


def test_what_asgi_lets_an_endpoint_leave_out_has_its_default() -> None:
    async def go() -> None:
        async with talking() as (_, client):
            client.writer.write(post(b"", "x-bare: 1"))
            status, headers, body = await client.response()
            assert (status, headers["transfer-encoding"], body) == (200, "chunked", b"bare")

    asyncio.run(go())


@pytest.mark.parametrize("header", [b"", b"x-stream: 1\r\n"])
def test_nothing_of_an_answered_request_waits_for_the_collector(header: bytes) -> None:
    async def scenario() -> None:
        async with talking() as (_, client):
            gc.collect()
            # What other tests of this process still hold is not ours; holding it here keeps it apart from ours.
            earlier = [each for each in gc.get_objects() if isinstance(each, DirectCycle)]
            gc.disable()
            try:
                for _ in range(20):
                    client.writer.write(
                        b"POST /direct HTTP/1.1\r\nhost: x\r\n" + header + b"content-length: 3\r\n\r\nabc"
                    )
                    await client.response()
                alive = [each for each in gc.get_objects() if isinstance(each, DirectCycle)]
                # The protocol has the last one until the next request.
                assert len(alive) - len(earlier) <= 1
            finally:
                gc.enable()

    asyncio.run(scenario())


def test_a_server_that_is_told_to_end_does_not_wait_for_its_next_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        limits = HttpLimits(hosts=("*",))
        server = HttpServer(Application(), "127.0.0.1", 0, "port", stop_timeout_ms=3_600_000, limits=limits)
        server.start()
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        client = Client(reader, writer)
        writer.write(post(b"abc"))
        assert (await client.response())[0] == 200
        async with asyncio.timeout(60):
            await server.stop()
            assert await reader.read() == b""
        writer.close()

    monkeypatch.setattr(http_server, "TICK_S", 3600.0)
    asyncio.run(scenario())
