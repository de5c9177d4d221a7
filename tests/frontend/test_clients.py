"""The official client and raw sockets against a real server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from prometheus_client import CollectorRegistry

from poolgrid.inference.inference_request import InferenceRequest
from poolgrid.inference.ports import Refused
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


def test_the_openai_client_raises_its_own_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt-9", prompt="hi")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.completions.create(model="tiny", prompt="hi", temperature=5)
    assert wrong.value.param == "temperature"
    with (
        served_in_thread(application(FakeBackend(refusal=Refused(429, "busy", "busy", 3)))) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as busy_client,
        pytest.raises(openai.RateLimitError) as busy,
    ):
        busy_client.completions.create(model="tiny", prompt="hi")
    assert busy.value.response.headers["retry-after"] == "3"


def request_bytes(path: str, **fields: Any) -> bytes:
    body = json.dumps({"model": "tiny", **fields}).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("after", [0, 2])
def test_a_client_that_leaves_frees_its_workers_at_once(stream: bool, after: int, n: int) -> None:
    registry = CollectorRegistry()
    backend = FakeBackend(lambda request: [*speak("Hello, world!")[:after], asyncio.Event()])

    async def go() -> None:
        all_wait = asyncio.Event()
        backend.on_waiting = lambda: all_wait.set() if backend.waiting == n else None
        async with served(application(backend, registry=registry)) as port:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request_bytes("/v1/completions", prompt="hi", stream=stream, n=n))
            await asyncio.wait_for(all_wait.wait(), 5)
            writer.transport.abort()
            for item in backend.streams:
                await asyncio.wait_for(item.cancelled.wait(), 5)

    asyncio.run(go())

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
        await asyncio.wait_for(backend.abandoned.wait(), 5)


def test_a_client_that_leaves_before_its_body_is_complete_starts_nothing() -> None:
    async def go() -> FakeBackend:
        backend = FakeBackend()
        registry = CollectorRegistry()
        async with served(application(backend, registry=registry)) as port:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request_bytes("/v1/completions", prompt="hi")[:-3])
            await writer.drain()
            writer.close()
            await writer.wait_closed()
            # A second client is answered: the server has handled what came before on this loop.
            reader, other = await asyncio.open_connection("127.0.0.1", port)
            other.write(request_bytes("/v1/completions", prompt="hi"))
            assert b"200 OK" in await reader.readline()
            other.close()
            await other.wait_closed()
        return backend

    assert len(asyncio.run(go()).requests) == 1


def test_one_connection_carries_one_request_after_another() -> None:
    async def go() -> list[bytes]:
        statuses = []
        async with served(application(FakeBackend())) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            for stream in (False, True, False):
                writer.write(request_bytes("/v1/completions", prompt="hi", stream=stream))
                statuses.append(await reader.readline())
                head = await reader.readuntil(b"\r\n\r\n")
                if stream:
                    await reader.readuntil(b"0\r\n\r\n")
                else:
                    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                    await reader.readexactly(length)
            writer.close()
            await writer.wait_closed()
        return statuses

    assert asyncio.run(go()) == [b"HTTP/1.1 200 OK\r\n"] * 3
