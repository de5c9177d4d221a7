"""Stock servers of TensorRT-LLM 1.4 behind a router: salt, priority and conversation reach them, and their blocks the
index.

All of it is real but the server: ours, which refuses what upstream's refuses. It runs in one loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import zmq.asyncio

from poolgrid.server.consolidator.settings import ConsolidatorSettings
from poolgrid.server.frontend.models import TINY_MODEL_PATH
from poolgrid.server.frontend.settings import FrontendSettings
from poolgrid.server.process.settings import with_constants
from poolgrid.server.router import bootstrap as router
from poolgrid.server.router.settings import RouterSettings
from poolgrid.server.workers import bootstrap as worker
from poolgrid.server.workers.engines.registry import engine_definition
from tests.fakes.engine_server.trtllm_serve import StreamingServe
from tests.fakes.engine_server.vllm import Options
from tests.workers.fakes import PATIENCE_S
from tests.workers.server.test_legs_apart import started

QUESTION = [{"role": "user", "content": "a question that is long enough for some whole blocks of its prompt"}]


@dataclass
class Pool:
    """One server behind a router."""

    server: StreamingServe
    client: httpx.AsyncClient

    async def post(self, path: str, headers: Mapping[str, str] | None = None, **body: Any) -> httpx.Response:
        return await self.client.post(path, json={"model": "tiny", **body}, headers=dict(headers or {}))

    async def chat(self, headers: Mapping[str, str] | None = None, **body: Any) -> tuple[int, int]:
        """Send the question; return how many tokens the router promised to be cached, and how many were."""
        given = {"x-request-id": f"r-{len(self.server.bodies)}", **(headers or {})}
        answer = await self.post("/v1/chat/completions", given, messages=QUESTION, max_tokens=2, **body)
        assert answer.status_code == 200, answer.text
        decision = (await self.client.get(f"/v1/decisions/{given['x-request-id']}")).json()
        cached: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        return 4 * decision["attempts"][0]["overlap_blocks"], cached


@asynccontextmanager
async def pool_before(directory: Path) -> AsyncIterator[Pool]:
    context = zmq.asyncio.Context()
    async with AsyncExitStack() as opened:
        opened.callback(context.destroy, linger=0)
        server = StreamingServe(context, Options(block_size=4, blocks=256))
        endpoint, replay = f"ipc://{directory}/events", f"ipc://{directory}/replay"
        server.publish_at(endpoint, replay)
        await server.start()
        opened.push_async_callback(server.stop)
        at = await opened.enter_async_context(
            started(
                lambda stop, ready: router.serve(
                    RouterSettings(port=0, select_port=0, shutdown_timeout_ms=100),
                    FrontendSettings(model_path=TINY_MODEL_PATH),
                    ConsolidatorSettings(ingest_port=0),
                    stop,
                    ready,
                )
            )
        )
        settings = with_constants(
            engine_definition("trtllm-serve").settings,
            {
                "engine_url": (server.url,),
                "kv_events_endpoint": (endpoint,),
                "kv_events_replay_endpoint": (replay,),
                "consolidator": at.ingest,
                "health_interval_ms": 50,
            },
        )
        await opened.enter_async_context(started(lambda stop, ready: worker.serve(settings, stop, ready)))
        client = await opened.enter_async_context(httpx.AsyncClient(base_url=at.http, timeout=PATIENCE_S))
        async with asyncio.timeout(PATIENCE_S):
            while not (await client.get("/v1/workers")).json()["data"]:  # noqa: ASYNC110 - it tells nobody
                await asyncio.sleep(0.02)
        yield Pool(server, client)


async def test_salt_priority_and_conversation_reach_a_stock_server_and_its_blocks_the_index(tmp_path: Path) -> None:
    async with pool_before(tmp_path) as pool:
        headers = {"x-claude-code-session-id": "talk", "x-dynamo-request-priority": "3"}
        for salt in ("one", "two"):
            promised, cached = await pool.chat(headers, cache_salt=salt)
            assert (promised, cached) == (0, 0), "it is the first request of its salt"
            assert (pool.server.bodies[-1]["cache_salt"], pool.server.bodies[-1]["priority"]) == (salt, 0.875)
            assert pool.server.headers[-1]["x-session-id"].endswith("-talk")
        async with asyncio.timeout(PATIENCE_S):
            for salt in ("one", "two"):
                while (await pool.chat(cache_salt=salt))[0] == 0:  # noqa: ASYNC110 - its events are under way
                    await asyncio.sleep(0.02)
        promised, cached = await pool.chat({"x-correlation-id": "own"}, cache_salt="two", priority=0.2)
        assert promised == cached > 16
        assert pool.server.bodies[-1]["priority"] == 0.2, "as the client wrote it"
        assert "x-session-id" not in pool.server.headers[-1]


async def test_a_request_for_caches_of_its_own_is_refused_where_the_server_has_none(tmp_path: Path) -> None:
    async with pool_before(tmp_path) as pool:
        for path, body in (
            ("/v1/responses", {"input": "a question"}),
            ("/v1/messages", {"messages": QUESTION, "max_tokens": 2}),
            ("/v1/completions", {"prompt": "a question"}),
        ):
            answer = await pool.post(path, cache_salt="one", **body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "cache_salt"), answer.text
            assert "/v1/chat/completions alone" in answer.json()["error"]["message"]
        assert not pool.server.bodies
