"""A server that repeats its request puts the API key in it into no error, and so into no log and no answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import httpx
import pytest

from poolgrid.plugins.engine_check.core.evidence import CheckProbe, ServerStatement
from poolgrid.plugins.engine_check.server import EngineServer
from poolgrid.server.global_router.bootstrap import discovery
from poolgrid.server.process.clock import SystemClock
from poolgrid.server.workers.engines.server.server_client import ServerClient, ServerError

KEY = "sk-engine/0815-" + "x" * 40

Answer = Callable[[bytes], bytes]
"""Returns the bytes of an answer to the bytes of a request."""


def _with_body(status: int, body: bytes) -> bytes:
    return b"HTTP/1.1 %d Said\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body)


def mirrored(request: bytes) -> bytes:
    return request


def key_first(request: bytes) -> bytes:
    return request[request.index(KEY.encode()) :]


def key_over_the_end_of_an_excerpt(request: bytes) -> bytes:
    return b"-" * 280 + key_first(request)


def as_text(request: bytes) -> bytes:
    return _with_body(500, request)


def as_text_behind_much(request: bytes) -> bytes:
    return _with_body(500, key_over_the_end_of_an_excerpt(request))


def as_json(request: bytes) -> bytes:
    return _with_body(500, json.dumps({"error": {"message": request.decode()}}).encode())


def as_json_with_escapes(request: bytes) -> bytes:
    return _with_body(400, json.dumps({"message": request.decode()}).replace("/", "\\/").encode())


def cut_off(request: bytes) -> bytes:
    return b"HTTP/1.1 502 Said\r\n\r\n" + request


ANSWERS = (
    mirrored,
    key_first,
    key_over_the_end_of_an_excerpt,
    as_text,
    as_text_behind_much,
    as_json,
    as_json_with_escapes,
    cut_off,
)


@asynccontextmanager
async def server_that_answers(answer: Answer) -> AsyncIterator[str]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer(await reader.readuntil(b"\r\n\r\n")))
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def assert_is_hidden(text: str) -> None:
    parts = [KEY[at : at + 8] for at in range(len(KEY) - 7)]
    assert not [part for part in parts if part in text.replace("\\/", "/")]


@pytest.mark.parametrize("answer", ANSWERS)
async def test_a_failed_question_shows_no_part_of_the_key(answer: Answer) -> None:
    async with server_that_answers(answer) as url:
        client = ServerClient(url, SystemClock(), KEY)
        with pytest.raises(ServerError) as failed:
            await client.ask("/v1/models")
        client.close()

    assert_is_hidden(str(failed.value))


@pytest.mark.parametrize("answer", ANSWERS)
async def test_a_failed_probe_shows_no_part_of_the_key(answer: Answer) -> None:
    async with server_that_answers(answer) as url, httpx.AsyncClient(headers={"authorization": KEY}) as client:
        server = EngineServer(client, url, SystemClock(), KEY)
        statement = ServerStatement("vllm", model="m")
        found = await server.probe(CheckProbe("p", (1, 2, 3), 1), statement)
        server.close()

    assert found.failure
    assert_is_hidden(found.failure)


@pytest.mark.parametrize("answer", ANSWERS)
async def test_a_pool_that_is_not_found_shows_no_part_of_the_key(answer: Answer) -> None:
    headers = {"authorization": f"Bearer {KEY}"}
    async with server_that_answers(answer) as url, httpx.AsyncClient(headers=headers) as client:
        with pytest.raises(OSError, match=url) as failed:
            await discovery(client)(url)

    assert_is_hidden(str(failed.value))
