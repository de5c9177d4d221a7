"""A server whose answers to the follower's questions are too long, malformed or impossible costs itself alone."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec
import pytest

from poolgrid.kernel.kv_events.cache_events import AnyEngineEvent
from poolgrid.kernel.wire.card import WorkerCard
from poolgrid.kernel.wire.errors import DecodeError
from poolgrid.server.process.clock import SystemClock
from poolgrid.server.workers.engines.registry import server_kinds
from poolgrid.server.workers.engines.server.cache_events import DrainedEvents
from poolgrid.server.workers.engines.server.core.server_facts import ModelList
from poolgrid.server.workers.engines.server.kinds import MODELS, learn
from poolgrid.server.workers.engines.server.opening import completed, make_card
from poolgrid.server.workers.engines.server.server_client import (
    FACTS_BYTES_MAX,
    PAGE_BYTES_MAX,
    ServerClient,
    ServerError,
)
from poolgrid.server.workers.engines.server.settings import EngineServerSettings

OK = b"HTTP/1.1 200 OK\r\n"
PIECE = b" " * 65_536


def page(body: bytes) -> bytes:
    return OK + b"content-length: %d\r\n\r\n%b" % (len(body), body)


def said(value: Any) -> bytes:
    return page(json.dumps(value).encode())


@asynccontextmanager
async def scripted(answers: Mapping[str, bytes], endless: bool = False) -> AsyncIterator[ServerClient]:
    """Serve exact bytes by path, after which the connection ends or sends without end."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            writer.write(answers.get(head.split(b" ")[1].decode(), b"HTTP/1.1 404 no\r\ncontent-length: 0\r\n\r\n"))
            while endless:
                writer.write(PIECE)
                await writer.drain()
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        client = ServerClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", SystemClock())
        try:
            yield client
        finally:
            client.close()


@pytest.mark.parametrize(("path", "limit"), [("/health", PAGE_BYTES_MAX), (MODELS, FACTS_BYTES_MAX)])
async def test_an_answer_without_end_is_given_up_at_its_bound(path: str, limit: int) -> None:
    async with scripted({path: OK + b"\r\n"}, endless=True) as client:
        with pytest.raises(ServerError, match=f"the answer exceeds {limit} bytes"):
            await (client.ask(path) if limit == PAGE_BYTES_MAX else client.ask_for(path, ModelList))


REDIRECT = b"HTTP/1.1 302 Found\r\nlocation: /health\r\ncontent-length: 0\r\n\r\n"


async def test_a_redirect_to_itself_is_not_followed() -> None:
    async with scripted({"/health": REDIRECT}) as client:
        with pytest.raises(ServerError, match="status 302"):
            await client.ask("/health")


CARD = {"id": "m", "owned_by": "vllm", "root": "/models/m", "max_model_len": 4096}
LINE = b'vllm:cache_config_info{block_size="%b",num_gpu_blocks="%b",engine="%b"} 1.0\n'
MODELS_OF = {
    "none": [],
    "a long name": [{**CARD, "id": "x" * 5000}],
    "an empty name": [{**CARD, "id": ""}],
    "a name of control characters": [{**CARD, "id": "\n\x1b[2Jready"}],
    "a name that is a number": [{**CARD, "id": 7}],
    "half a surrogate pair": [{**CARD, "id": "\ud800"}],
    "a length of 1000 bits": [{**CARD, "max_model_len": 10**300}],
    "a negative length": [{**CARD, "max_model_len": -1}],
    "a length that is a list": [{**CARD, "max_model_len": [1] * 1000}],
    "a root with a zero byte": [{**CARD, "root": "/a\0b"}],
    "a root of a megabyte": [{**CARD, "root": "/a" * 100_000}],
    "many adapters": [CARD, *({"id": f"a{each}", "parent": "m"} for each in range(9000))],
    "an adapter that is its own parent": [{**CARD, "parent": "m"}],
}
PAGES = {
    "block size 0": LINE % (b"0", b"1", b"0"),
    "a negative block size": LINE % (b"-16", b"1", b"0"),
    "the largest numbers": LINE % (b"4294967295", b"4294967295", b"4294967295"),
    "numbers beyond": LINE % (b"9" * 300, b"9" * 300, b"9" * 300),
    "numbers that are none": LINE % (b"NaN", b"Infinity", b"-0"),
    "many ranks": b"".join(LINE % (b"16", b"100", b"%d" % each) for each in range(1000)),
    "long lines": (LINE % (b"16", b"9" * 3900, b"0")) * 3000,
    "many labels": b"vllm:cache_config_info{%b} 1.0\n" % b",".join(b'a%d="1"' % each for each in range(300)) * 3000,
    "no labels": b"vllm:cache_config_info\n" * 100_000,
    "an open brace": b"vllm:cache_config_info{" * 100_000,
    "no text": bytes(range(256)) * 1000,
}
VERSIONS = {"a long version": "9" * 500_000, "control characters": "\x1b[2J\n", "no text": 7, "é": "é" * 64}


def judged(facts: Any) -> None:
    """Facts must fit the card of a worker, which the consolidator checks."""
    settings = EngineServerSettings(engine_url=("http://127.0.0.1:1",))
    kind = server_kinds()[facts.kind]
    card = make_card(settings, completed(facts, settings, kind), kind, 1, 2)
    assert msgspec.convert(msgspec.to_builtins(card), WorkerCard) == card


@pytest.mark.parametrize("listed", MODELS_OF.values(), ids=MODELS_OF.keys())
@pytest.mark.parametrize("owner", ["vllm", "sglang", "tensorrt_llm", "another"])
async def test_odd_models_are_refused_or_fit_a_card(listed: list[dict[str, Any]], owner: str) -> None:
    models = [{**each, "owned_by": owner} for each in listed]
    info = {"page_size": 16, "version": "0.5.23", "kv_events": {"dp_size": 2**40, "endpoint_port_base": 65_535}}
    answers = {MODELS: said({"data": models}), "/server_info": said(info)}
    async with scripted(answers) as client:
        with suppress(ServerError, DecodeError, ValueError):
            judged(await learn(client, server_kinds()))


@pytest.mark.parametrize("metrics", PAGES.values(), ids=PAGES.keys())
async def test_odd_metrics_are_refused_or_fit_a_card(metrics: bytes) -> None:
    async with scripted({MODELS: said({"data": [CARD]}), "/metrics": page(metrics)}) as client:
        began = time.process_time()
        with suppress(ServerError, DecodeError, ValueError):
            judged(await learn(client, server_kinds()))
        assert time.process_time() - began < 2.0


@pytest.mark.parametrize("version", VERSIONS.values(), ids=VERSIONS.keys())
async def test_odd_versions_fit_a_card(version: Any) -> None:
    async with scripted({MODELS: said({"data": [CARD]}), "/version": said({"version": version})}) as client:
        judged(await learn(client, server_kinds()))


async def test_events_that_cannot_be_read_are_logged_once_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    enough, count = asyncio.Event(), 0

    def parse(item: Any) -> AnyEngineEvent:
        nonlocal count
        count += 1
        if count == 15_000:
            enough.set()
        raise DecodeError("a cache event", "it is a number")

    async with scripted({"/kv_cache_events": page(b"[%b7]" % (b"7," * 5000))}) as client, asyncio.timeout(60):
        events = DrainedEvents(client, "/kv_cache_events", parse, 32)
        with caplog.at_level(logging.WARNING):
            events.open(lambda rank, told: None)
            await enough.wait()
            events.close()

    lines = [each for each in caplog.records if "the gap clears the claims" in each.getMessage()]
    assert len(lines) == 1
