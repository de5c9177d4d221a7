"""Prefill and decode on engine servers of their own, behind a router: the legs that each engine's protocol has.

All of it is real but the servers: ours, which follow the published protocols. It runs in one loop.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import zmq.asyncio

from poolgrid.server.consolidator.settings import ConsolidatorSettings
from poolgrid.server.frontend.settings import FrontendSettings
from poolgrid.server.process.settings import with_constants
from poolgrid.server.router import bootstrap as router
from poolgrid.server.router.settings import RouterSettings
from poolgrid.server.workers import bootstrap as worker
from poolgrid.server.workers.engines.registry import engine_definition
from tests.fakes.engine_server.http import Cut, Reply
from tests.fakes.engine_server.sglang import SglangServer
from tests.fakes.engine_server.trtllm_serve import TrtllmServe
from tests.fakes.engine_server.vllm import Options, VllmServer, answer_of
from tests.workers.fakes import PATIENCE_S

BLOCK = 16
LENGTHS = (60, 63, 64, 65, 17, 60)
"""About whole blocks: a decode server of vLLM has no place for the first token after one that is full."""
PROMPTS = [list(range(1000 + 100 * number, 1000 + 100 * number + length)) for number, length in enumerate(LENGTHS)]
OUTPUT_TOKENS = 7

Servers = Callable[[zmq.asyncio.Context], tuple[VllmServer, VllmServer]]


def of_vllm(context: zmq.asyncio.Context) -> tuple[VllmServer, VllmServer]:
    return VllmServer(context, Options(BLOCK, kv_connector=True)), VllmServer(context, Options(BLOCK))


def of_sglang(context: zmq.asyncio.Context) -> tuple[VllmServer, VllmServer]:
    return SglangServer(context, Options(BLOCK), "prefill"), SglangServer(context, Options(BLOCK), "decode")


def of_trtllm_serve(context: zmq.asyncio.Context) -> tuple[VllmServer, VllmServer]:
    return TrtllmServe(context, Options(BLOCK)), TrtllmServe(context, Options(BLOCK))


@dataclass
class Pool:
    """A router in front of a server that computes prompts and one that goes on."""

    url: str
    prefill: VllmServer
    decode: VllmServer
    client: httpx.AsyncClient

    async def ask(self, number: int, tokens: int = OUTPUT_TOKENS) -> list[str]:
        """Ask for one answer, which must be the undisturbed one; return what was done, by whom."""
        body = {"model": "tiny", "prompt": PROMPTS[number], "max_tokens": tokens, "return_token_ids": True}
        name = {"x-request-id": f"legs-{number}"}
        answer = await self.client.post(f"{self.url}/v1/completions", json=body, headers=name, timeout=PATIENCE_S)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["token_ids"] == answer_of(PROMPTS[number], tokens)
        assert answer.json()["usage"]["completion_tokens"] == tokens
        decision = (await self.client.get(f"{self.url}/v1/decisions/legs-{number}")).json()
        return [f"{each['stage']} on {each['worker'].partition('/')[0]}" for each in decision["attempts"]]


@asynccontextmanager
async def started(serve: Callable[[asyncio.Event, Callable[[Any], None]], Any]) -> AsyncIterator[Any]:
    """Run a part of the pool; what it says when it is ready."""
    stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
    task = asyncio.ensure_future(serve(stop, ready.set_result))
    try:
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.wait({task, ready}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
        yield ready.result()
    finally:
        task.cancel()
        await asyncio.wait({task})


@asynccontextmanager
async def pool_of(engine: str, servers: Servers, **routing: Any) -> AsyncIterator[Pool]:
    context = zmq.asyncio.Context()
    async with AsyncExitStack() as opened:
        opened.callback(context.destroy, linger=0)
        prefill, decode = servers(context)
        for each in (prefill, decode):
            await each.start()
        opened.push_async_callback(decode.stop)
        at = await opened.enter_async_context(
            started(
                lambda stop, ready: router.serve(
                    RouterSettings(port=0, select_port=0, legs="two", shutdown_timeout_ms=100, **routing),
                    FrontendSettings(),
                    ConsolidatorSettings(ingest_port=0),
                    stop,
                    ready,
                )
            )
        )
        for role, server in (("prefill", prefill), ("decode", decode)):
            settings = with_constants(
                engine_definition(engine).settings,
                {
                    "worker_id": role,
                    "engine_url": (server.url,),
                    "role": role,
                    "kv_block_size": BLOCK,
                    "consolidator": at.ingest,
                    "health_interval_ms": 50,
                },
            )
            await opened.enter_async_context(started(lambda stop, ready, of=settings: worker.serve(of, stop, ready)))  # type: ignore[misc]
        client = await opened.enter_async_context(httpx.AsyncClient())
        pool = Pool(at.http, prefill, decode, client)
        await until_ready(pool, len(prefill.caches) + len(decode.caches))
        yield pool


async def until_ready(pool: Pool, workers: int) -> None:
    """Wait until so many workers take requests."""
    async with asyncio.timeout(PATIENCE_S):
        ready = -1
        while ready != workers:
            await asyncio.sleep(0.02)
            rows = (await pool.client.get(f"{pool.url}/v1/workers")).json()["data"]
            ready = sum(row["state"] == "ready" for row in rows)


ENGINES = pytest.mark.parametrize(
    ("engine", "servers"), [("vllm", of_vllm), ("sglang", of_sglang), ("trtllm-serve", of_trtllm_serve)]
)


@ENGINES
async def test_a_prompt_is_computed_on_one_server_and_answered_on_another(engine: str, servers: Servers) -> None:
    async with pool_of(engine, servers) as pool:
        done = await asyncio.gather(*(pool.ask(number) for number in range(5)))
        assert done == [["prefill on prefill", "decode on decode"]] * 5
        assert len(pool.prefill.bodies) == len(pool.decode.bodies) == 5
        for first, then in zip(by_prompt(pool.prefill), by_prompt(pool.decode), strict=True):
            agrees(engine, first, then, pool.prefill)
        # Without anybody who computes prompts for it, the other server does that too.
        await pool.prefill.stop()
        await until_ready(pool, 1)
        if engine != "sglang":
            assert await pool.ask(5) == ["whole on decode"]
            return
        # A server of SGLang that decodes takes no whole request: the request waits for a prefill worker.
        assert (await pool.client.get(f"{pool.url}/ready")).status_code == 503
        waiting = asyncio.ensure_future(pool.ask(5))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        await pool.prefill.start()
        assert await waiting == LEGS
        await until_ready(pool, 2)
        assert (await pool.client.get(f"{pool.url}/ready")).status_code == 200
        assert [len(each.bodies) for each in (pool.prefill, pool.decode)] == [6, 6]


async def test_requests_to_sglang_of_one_token_have_two_legs_and_those_without_partner_end_as_503() -> None:
    async with pool_of("sglang", of_sglang, queue_timeout_ms=300) as pool:
        assert await pool.ask(0, 1) == LEGS
        await pool.prefill.stop()
        await until_ready(pool, 1)
        body = {"model": "tiny", "prompt": PROMPTS[0], "max_tokens": 2}
        refused = await pool.client.post(f"{pool.url}/v1/completions", json=body, timeout=PATIENCE_S)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_worker")
        assert "has no prefill worker, and no other can serve a whole request" in refused.text
        assert "retry-after" in refused.headers


LEGS = ["prefill on prefill", "decode on decode"]


async def stream_of(pool: Pool, number: int) -> list[int]:
    """Ask for a stream; return the tokens of its events, which must end as a whole stream does."""
    body = {"model": "tiny", "prompt": PROMPTS[number], "max_tokens": OUTPUT_TOKENS, "return_token_ids": True}
    asked = json.dumps({**body, "stream": True}, indent=1)
    headers = {"x-request-id": f"legs-{number}", "content-type": "application/json"}
    answer = await pool.client.post(f"{pool.url}/v1/completions", content=asked, headers=headers, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    events = [each.removeprefix("data: ") for each in answer.text.split("\n\n") if each]
    assert events[-1] == "[DONE]", events
    chunks = [json.loads(each) for each in events[:-1]]
    assert all(each["choices"] for each in chunks), "the client did not ask for the chunk with usage"
    return [token for each in chunks for token in each["choices"][0]["token_ids"]]


async def stages_of(pool: Pool, number: int) -> list[str]:
    decision = (await pool.client.get(f"{pool.url}/v1/decisions/legs-{number}")).json()
    return [f"{each['stage']} on {each['worker'].partition('/')[0]}" for each in decision["attempts"]]


@ENGINES
async def test_a_stream_comes_from_the_decode_server_alone(engine: str, servers: Servers) -> None:
    async with pool_of(engine, servers) as pool:
        assert await stream_of(pool, 0) == answer_of(PROMPTS[0], OUTPUT_TOKENS)
        assert await stages_of(pool, 0) == LEGS


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("fault", ["status", "no transfer", "cut"])
async def test_a_decode_server_of_vllm_that_fails_before_its_first_token_costs_nothing(
    fault: str, streamed: bool
) -> None:
    async with pool_of("vllm", of_vllm) as pool:
        faults = pool.decode.faults
        if fault == "cut":
            faults.scripts.append(cut)
        elif fault == "status" or not streamed:
            faults.statuses.append((500, {"error": {"message": "Internal server error", "code": 500}}))
        else:
            faults.scripts.append(failed_transfer)
        if streamed:
            assert await stream_of(pool, 0) == answer_of(PROMPTS[0], OUTPUT_TOKENS)
            assert await stages_of(pool, 0) == LEGS * 2
        else:
            assert await pool.ask(0) == LEGS * 2
        if fault == "cut":
            # No other request would free the KV of the first prompt.
            freeing = [body for body in pool.decode.bodies if body["max_tokens"] == 1]
            assert [each["kv_transfer_params"]["do_remote_prefill"] for each in freeing] == [True]


async def cut(reply: Reply) -> None:
    raise Cut


async def failed_transfer(reply: Reply) -> None:
    """Answer as vLLM 0.32 does when NIXL could not fetch the KV."""
    await reply.begin()
    await reply.event({"error": {"message": "Internal server error", "type": "InternalServerError", "code": 500}})
    await reply.event(b"[DONE]")
    await reply.end()


@ENGINES
async def test_what_a_prefill_server_refuses_is_the_clients_answer(engine: str, servers: Servers) -> None:
    refusal = {"error": {"message": "the prompt is too long", "type": "BadRequestError", "code": 400}}
    async with pool_of(engine, servers) as pool:
        for each in (pool.prefill, pool.decode):
            each.faults.statuses.append((400, refusal))
        body = {"model": "tiny", "prompt": PROMPTS[0], "max_tokens": 2}
        answer = await pool.client.post(f"{pool.url}/v1/completions", json=body, timeout=PATIENCE_S)
        assert (answer.status_code, answer.json()) == (400, refusal)
        pool.decode.faults.statuses.clear()
        assert await pool.ask(1) == LEGS


@ENGINES
async def test_a_prefill_server_that_fails_costs_nothing(engine: str, servers: Servers) -> None:
    async with pool_of(engine, servers) as pool:
        pool.prefill.faults.scripts.append(cut)  # once
        assert (await pool.ask(0))[-2:] in (LEGS, ["prefill on prefill", "whole on decode"])


async def test_a_request_that_two_servers_cannot_share_is_served_by_one() -> None:
    async with pool_of("vllm", of_vllm) as pool:
        for more in ({"n": 2}, {"best_of": 2}):
            body = {"model": "tiny", "prompt": PROMPTS[0], "max_tokens": 2, **more}
            headers = {"x-request-id": "legs-0"}
            answer = await pool.client.post(f"{pool.url}/v1/completions", json=body, headers=headers)
            assert answer.status_code == 200, answer.text
            assert await stages_of(pool, 0) == ["whole on decode"]
        assert not pool.prefill.bodies


async def test_a_client_that_leaves_ends_the_prefill_leg() -> None:
    async with pool_of("vllm", of_vllm) as pool:
        pool.prefill.faults.holds.append(asyncio.Event())
        asking = asyncio.ensure_future(pool.ask(0))
        async with asyncio.timeout(PATIENCE_S):
            while not pool.prefill.running:  # noqa: ASYNC110 - the fake counts, and has no event for it
                await asyncio.sleep(0.01)
            asking.cancel()
            await pool.prefill.aborted.wait()
        assert not pool.decode.bodies


async def test_ranks_that_begin_above_0_are_asked_by_their_numbers() -> None:
    def of_second_machine(context: zmq.asyncio.Context) -> tuple[VllmServer, VllmServer]:
        options = Options(BLOCK, kv_connector=True, ranks=2, first_rank=4)
        return VllmServer(context, options), VllmServer(context, Options(BLOCK))

    async with pool_of("vllm", of_second_machine) as pool:
        for number in range(4):
            assert await pool.ask(number) == LEGS
        assert {each["x-data-parallel-rank"] for each in pool.prefill.headers} <= {"4", "5"}
        assert not any("x-data-parallel-rank" in each for each in pool.decode.headers)


def by_prompt(server: VllmServer) -> list[dict[str, Any]]:
    """What a server was asked, in the order of the prompts."""
    return sorted(server.bodies, key=lambda body: (body.get("prompt") or body["input_ids"])[0])


def agrees(engine: str, first: dict[str, Any], then: dict[str, Any], prefill: VllmServer) -> None:
    """Check what both servers of a request were told, by the published protocol of each."""
    if engine == "vllm":
        assert first["max_tokens"] == 1
        assert first["kv_transfer_params"]["do_remote_decode"]
        given = then["kv_transfer_params"]
        assert given["do_remote_prefill"]
        assert given["remote_engine_id"] == f"engine-{prefill.url[-5:]}"
        assert (then["prompt"], then["max_tokens"]) == (first["prompt"], OUTPUT_TOKENS)
    elif engine == "sglang":
        assert first["bootstrap_room"] == then["bootstrap_room"]
        assert (first["bootstrap_host"], first["bootstrap_port"]) == (then["bootstrap_host"], then["bootstrap_port"])
    else:
        asked, given = first["disaggregated_params"], then["disaggregated_params"]
        assert (asked["request_type"], given["request_type"]) == ("context_only", "generation_only")
        assert asked["disagg_request_id"] == given["ctx_request_id"] >= 1 << 42
        assert given["encoded_opaque_state"] == "b3BhcXVl"
