"""The end of a server amid requests that nobody ends for it: each is told, and what cannot be told is cut."""

from __future__ import annotations

import asyncio
import json
import logging

import httpx
import pytest

from poolgrid.kernel.requests.inference import InferenceRequest, StreamDelta
from poolgrid.kernel.wire.hashing import pack_tokens
from poolgrid.server.http.http_server import HttpServer
from tests.frontend.fake_backend import FakeBackend, Step
from tests.frontend.server import application

BODY = {"model": "tiny", "prompt": "Hello", "max_tokens": 100}


def begins(request: InferenceRequest) -> list[Step]:
    """Give one token, and never another."""
    return [[StreamDelta(pack_tokens([65]))], asyncio.Event()]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_is_still_prepared_is_answered_503(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    backend = FakeBackend()
    backend.admission = asyncio.Event()
    server = HttpServer(application(backend, tool_call_parser="none"), "127.0.0.1", 0, "port", 400.0)
    server.start()
    async with httpx.AsyncClient(base_url=server.url) as client:
        asked = asyncio.ensure_future(client.post("/v1/completions", json={**BODY, "stream": stream}))
        await backend.submitted.wait()
        await server.stop()
        answer = await asked

        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_ready")
        assert "shutting down" in answer.json()["error"]["message"]
        assert backend.abandoned.is_set()

    assert [record for record in caplog.records if record.levelno > logging.INFO] == []


async def test_a_stream_that_nobody_ends_is_ended_with_an_error_event(caplog: pytest.LogCaptureFixture) -> None:
    backend = FakeBackend(begins)
    server = HttpServer(application(backend, tool_call_parser="none"), "127.0.0.1", 0, "port", 400.0)
    server.start()
    async with httpx.AsyncClient(base_url=server.url) as client:
        asked = asyncio.ensure_future(client.post("/v1/completions", json={**BODY, "stream": True}))
        waiting = asyncio.Event()
        backend.on_waiting = waiting.set
        await waiting.wait()
        await server.stop()
        events = [line for line in (await asked).text.splitlines() if line.startswith("data: ")]

        assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "not_ready"
        assert backend.streams[0].cancelled.is_set(), "the worker hears of it"

    assert [record for record in caplog.records if record.levelno > logging.INFO] == []


async def test_one_who_sends_half_a_request_is_answered_503_in_time(caplog: pytest.LogCaptureFixture) -> None:
    server = HttpServer(application(FakeBackend()), "127.0.0.1", 0, "port", 200.0)
    server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{")
    while not server.connections.bodies:  # noqa: ASYNC110 - it tells nobody
        await asyncio.sleep(0.001)
    async with asyncio.timeout(120):
        await server.stop()
        answer = await reader.read()
    writer.close()

    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b"shutting down" in answer
    assert [record.getMessage() for record in caplog.records if record.levelno > logging.INFO] == []
