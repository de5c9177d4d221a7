"""What is around the answers: compressed bodies, signs of life, other origins."""

from __future__ import annotations

import asyncio
import gzip
import http.client
import json
from contextlib import closing
from typing import Any

import httpx
import pytest

from poolgrid.server.frontend.request_body import accepts_gzip
from tests.frontend.fake_backend import FakeBackend, speak
from tests.frontend.server import application, in_process, post_to_shared, served_in_thread

BODY = json.dumps({"model": "tiny", "prompt": "hi"}).encode()


def _gzip(body: bytes) -> bytes:
    return gzip.compress(body, mtime=0)  # the same bytes in every process that collects these tests


def post(body: bytes, headers: dict[str, str], backend: FakeBackend | None = None, **settings: Any) -> httpx.Response:
    headers = {"content-type": "application/json", **headers}
    return post_to_shared(backend, "/v1/completions", settings, content=body, headers=headers)


@pytest.mark.parametrize("body", [_gzip(BODY), _gzip(BODY[:5]) + _gzip(BODY[5:])])
def test_a_body_may_be_compressed(body: bytes) -> None:
    answer = post(body, {"content-encoding": "gzip"})
    assert answer.json()["choices"][0]["text"] == "Hello, world!"
    assert post(BODY, {"content-encoding": "identity"}).status_code == 200


@pytest.mark.parametrize(
    ("body", "encoding", "status", "code"),
    [
        (_gzip(b" " * 1_000_000), "gzip", 413, "body_too_large"),
        (_gzip(BODY)[:-9], "gzip", 400, "invalid_encoding"),
        (BODY, "gzip", 400, "invalid_encoding"),
        (BODY, "br", 415, "unsupported_content_encoding"),
    ],
)
def test_a_body_that_does_not_inflate_is_refused(body: bytes, encoding: str, status: int, code: str) -> None:
    answer = post(body, {"content-encoding": encoding}, max_body_bytes=100_000)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


def test_long_answers_are_compressed_for_clients_that_take_it() -> None:
    backend = FakeBackend(lambda _: speak("word " * 2000))
    long = post(BODY, {"accept-encoding": "gzip"}, backend)
    assert long.headers["content-encoding"] == "gzip"
    assert int(long.headers["content-length"]) < 2000
    assert long.json()["choices"][0]["text"] == "word " * 2000
    assert "content-encoding" not in post(BODY, {"accept-encoding": "gzip;q=0, br"}, backend).headers
    assert "content-encoding" not in post(BODY, {"accept-encoding": "gzip"}).headers


def test_accept_encoding_is_read_as_the_standard_says() -> None:
    assert accepts_gzip(b"br, GZIP;q=0.5")
    assert accepts_gzip(b"*")
    assert not accepts_gzip(b"")
    assert not accepts_gzip(b"gzip; q=0.0")
    assert not accepts_gzip(b"br")


def test_a_silent_stream_carries_comments_and_a_talking_one_none() -> None:

    async def go() -> tuple[list[bytes], bytes]:
        silence = asyncio.Event()
        steps = speak("Hello, world!")
        backend = FakeBackend(lambda _: [*steps[:2], silence, *steps[2:]])
        app = application(backend, keep_alive_interval_s=0.01)
        sent: list[bytes] = []

        async def receive() -> dict[str, Any]:
            if not sent:
                sent.append(b"")
                return {"type": "http.request", "body": json.dumps({**json.loads(BODY), "stream": True}).encode()}
            await asyncio.Event().wait()
            raise AssertionError

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                sent.append(message["body"])
                if sent.count(b": keep-alive\n\n") == 2:
                    silence.set()

        headers = [(b"content-type", b"application/json")]
        await app(
            {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers, "query_string": b""},
            receive,
            send,
        )
        await app.close()
        async with in_process(application(FakeBackend())) as client:
            quiet = await client.post("/v1/completions", json={**json.loads(BODY), "stream": True})
        return sent, quiet.content

    sent, quiet = asyncio.run(asyncio.wait_for(go(), 120))
    events = b"".join(sent)
    assert events.count(b": keep-alive\n\n") >= 2
    assert events.endswith(b"data: [DONE]\n\n")
    assert b"".join(events.split(b": keep-alive\n\n")).count(b"data: {") == quiet.count(b"data: {")
    assert b"keep-alive" not in quiet


def test_pages_of_allowed_origins_may_call() -> None:
    origin = {"origin": "https://page.example"}
    assert "access-control-allow-origin" not in post(BODY, origin).headers
    answer = post(BODY, origin, cors_allow_origins=("https://page.example",))
    assert answer.headers["access-control-allow-origin"] == "https://page.example"
    assert "x-request-id" in answer.headers["access-control-expose-headers"].lower()
    other = post(BODY, {"origin": "https://other.example"}, cors_allow_origins=("https://page.example",))
    assert "access-control-allow-origin" not in other.headers

    async def preflight() -> httpx.Response:
        async with in_process(application(FakeBackend(), cors_allow_origins=("*",))) as client:
            return await client.options(
                "/v1/chat/completions", headers={**origin, "access-control-request-method": "POST"}
            )

    assert asyncio.run(preflight()).status_code == 200


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"content-type": "application/json"}, 413),
        ({"content-type": "application/json", "transfer-encoding": "chunked"}, 413),
        ({"content-type": "text/plain"}, 415),
    ],
)
def test_client_that_sends_its_whole_body_first_reads_the_refusal(headers: dict[str, str], code: int) -> None:
    parts = [b" " * 1_000_000] * 24
    with served_in_thread(application(FakeBackend(), max_body_bytes=1_000_000)) as url:
        connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
        chunked = "transfer-encoding" in headers
        length = {} if chunked else {"content-length": str(sum(map(len, parts)))}
        with closing(connection):
            connection.request("POST", "/v1/completions", iter(parts), {**headers, **length}, encode_chunked=chunked)
            assert connection.getresponse().status == code
