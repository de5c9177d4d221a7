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
from tokenizers import Tokenizer

from poolgrid.consolidator.settings import ConsolidatorSettings
from poolgrid.frontend.models import TINY_MODEL_PATH
from poolgrid.frontend.settings import FrontendSettings
from poolgrid.process.settings import with_constants
from poolgrid.router import bootstrap as router
from poolgrid.router.settings import RouterSettings
from poolgrid.workers import bootstrap as worker
from poolgrid.workers.engines.registry import engine_definition
from tests.fakes.engine_server.http import Reply
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
        body = {"model": "tiny", "prompt": PROMPTS[number], "max_tokens": tokens, "ignore_eos": True}
        name = {"x-request-id": f"legs-{number}"}
        answer = await self.client.post(f"{self.url}/v1/completions", json=body, headers=name, timeout=PATIENCE_S)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["text"] == undisturbed(number, tokens)
        assert answer.json()["usage"]["completion_tokens"] == tokens
        decision = (await self.client.get(f"{self.url}/v1/decisions/legs-{number}")).json()
        return [f"{each['stage']} on {each['worker'].partition('/')[0]}" for each in decision["attempts"]]


def undisturbed(number: int, tokens: int = OUTPUT_TOKENS) -> str:
    """Return the text of an answer that one server gives alone."""
    tokenizer = Tokenizer.from_file(str(TINY_MODEL_PATH / "tokenizer.json"))
    text: str = tokenizer.decode(answer_of(PROMPTS[number], tokens))
    return text


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
        await until_ready(pool, 2)
        yield pool


async def until_ready(pool: Pool, workers: int) -> None:
    """Wait until so many workers take requests."""
    async with asyncio.timeout(PATIENCE_S):
        ready = -1
        while ready != workers:
            await asyncio.sleep(0.02)
            rows = (await pool.client.get(f"{pool.url}/v1/workers")).json()["data"]
            ready = sum(row["state"] == "ready" for row in rows)


@pytest.mark.parametrize(
    ("engine", "servers"), [("vllm", of_vllm), ("sglang", of_sglang), ("trtllm-serve", of_trtllm_serve)]
)
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


async def test_a_client_of_vllm_has_the_first_token_before_the_decode_server_has_the_prompt() -> None:
    async with pool_of("vllm", of_vllm) as pool:
        transferred = asyncio.Event()
        pool.decode.faults.holds.append(transferred)
        body = {"model": "tiny", "prompt": PROMPTS[0], "max_tokens": OUTPUT_TOKENS, "ignore_eos": True}
        body.update(stream=True, logprobs=1)
        came: list[dict[str, Any]] = []
        asking = pool.client.stream("POST", f"{pool.url}/v1/completions", json=body, timeout=PATIENCE_S)
        async with asking as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    came += json.loads(line.removeprefix("data: "))["choices"]
                    if came and not transferred.is_set():
                        transferred.set()
        assert not pool.decode.faults.holds
        texts = [token for each in came if each["logprobs"] for token in each["logprobs"]["tokens"]]
        values = [value for each in came if each["logprobs"] for value in each["logprobs"]["token_logprobs"]]
        assert (len(texts), values) == (OUTPUT_TOKENS, [-0.25] * OUTPUT_TOKENS)
        assert "".join(each["text"] for each in came) == undisturbed(0)


LEGS = ["prefill on prefill", "decode on decode"]


@pytest.mark.parametrize("number", [0, 1, 2], ids=["within a block", "up to its last place", "a full block"])
@pytest.mark.parametrize("fault", ["no room for the KV", "no transfer", "error at once", "cut", "cut later"])
async def test_a_decode_server_of_vllm_that_fails_after_the_first_token_costs_no_token(fault: str, number: int) -> None:
    async with pool_of("vllm", of_vllm) as pool:
        faults = pool.decode.faults
        if fault == "no room for the KV":
            faults.statuses.append((500, {"error": {"message": "Internal server error", "code": 500}}))
        elif fault == "no transfer":
            faults.scripts.append(failed_transfer)
        elif fault == "error at once":
            faults.errors_after.append(1)
        else:
            faults.cuts_after.append(1 if fault == "cut" else 4)
        assert await pool.ask(number) == LEGS * 2
        first, then = (list(each["prompt"]) for each in pool.prefill.bodies)
        # What is out is prompt to the legs that follow.
        out = len(then) - len(first)
        assert then == first + answer_of(first, out)
        assert out >= (len(first) % BLOCK > 0)


async def failed_transfer(reply: Reply) -> None:
    """Answer as vLLM 0.32 does when NIXL could not fetch the KV."""
    await reply.begin()
    await reply.event({"error": {"message": "Internal server error", "type": "InternalServerError", "code": 500}})
    await reply.event(b"[DONE]")
    await reply.end()


async def test_the_last_token_after_a_failed_decode_leg_needs_none() -> None:
    async with pool_of("vllm", of_vllm) as pool:
        pool.decode.faults.scripts.append(failed_transfer)
        assert await pool.ask(0, 2) == [*LEGS, "prefill on prefill"]
        assert "kv_transfer_params" not in pool.prefill.bodies[1]


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
        out = answer_of(first["prompt"], 1) if len(first["prompt"]) % BLOCK else []
        assert (then["prompt"], then["max_tokens"]) == (first["prompt"] + out, OUTPUT_TOKENS - len(out))
    elif engine == "sglang":
        assert first["bootstrap_room"] == then["bootstrap_room"]
        assert (first["bootstrap_host"], first["bootstrap_port"]) == (then["bootstrap_host"], then["bootstrap_port"])
    else:
        asked, given = first["disaggregated_params"], then["disaggregated_params"]
        assert (asked["request_type"], given["request_type"]) == ("context_only", "generation_only")
        assert asked["disagg_request_id"] == given["ctx_request_id"] >= 1 << 42
        assert given["encoded_opaque_state"] == "b3BhcXVl"
