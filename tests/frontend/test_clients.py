"""The official client and raw sockets against a real server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from prometheus_client import CollectorRegistry

from poolgrid.kernel.requests.inference import InferenceRequest
from tests.frontend.fake_backend import FakeBackend, Step, speak, with_logprobs
from tests.frontend.server import application, served, served_in_thread

TEXT = "Once upon a time there was a wörld 😀."


def talk(request: InferenceRequest) -> list[Step]:
    steps = speak(TEXT, cached_tokens=2)
    return with_logprobs(steps, request.sampling.logprobs) if request.sampling.logprobs is not None else steps


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with (
        served_in_thread(application(FakeBackend(talk))) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as openai_client,
    ):
        yield openai_client


def request_bytes(path: str, **fields: Any) -> bytes:
    body = json.dumps({"model": "tiny", **fields}).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("after", [0, 2])
async def test_a_client_that_leaves_frees_its_workers_at_once(stream: bool, after: int, n: int) -> None:
    registry = CollectorRegistry()
    backend = FakeBackend(lambda request: [*speak("Hello, world!")[:after], asyncio.Event()])

    all_wait = asyncio.Event()
    backend.on_waiting = lambda: all_wait.set() if backend.waiting == n else None
    async with served(application(backend, registry=registry)) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request_bytes("/v1/completions", prompt="hi", stream=stream, n=n))
        await asyncio.wait_for(all_wait.wait(), 120)
        writer.transport.abort()
        for item in backend.streams:
            await asyncio.wait_for(item.cancelled.wait(), 120)

    assert [item.cancels for item in backend.streams] == [1] * n
    assert registry.get_sample_value("poolgrid_frontend_client_disconnects_total") == 1
    assert registry.get_sample_value("poolgrid_frontend_in_flight_requests", {"endpoint": "completions"}) == 0
    labels = {"endpoint": "completions", "status": "499", "streaming": str(stream).lower()}
    assert registry.get_sample_value("poolgrid_frontend_requests_total", labels) == 1


async def test_a_client_that_leaves_the_admission_queue_gives_up_its_place() -> None:
    backend = FakeBackend()
    backend.admission = asyncio.Event()
    async with served(application(backend)) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request_bytes("/v1/completions", prompt="hi"))
        await backend.submitted.wait()
        writer.transport.abort()
        await asyncio.wait_for(backend.abandoned.wait(), 120)
