"""Prefill and decode on two real vLLM servers, whose NIXL connector moves the KV from one to the other."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
from pathlib import Path
from typing import Any

import httpx

from lab.benchmarks.fleet import free_port
from tests.e2e.processes import Process, eventually, metric
from tests.real_vllm.servers import BLOCK_SIZE, VllmServer, environment, held_at

REQUESTS = 24
TOGETHER = 6
OUTPUT_TOKENS = 24
HANDSHAKES_MAX = 5

TRANSFERS = "vllm:nixl_xfer_time_seconds_count"
FAILURES = "vllm:nixl_num_failed_transfers_total"

CONNECTOR = '{"kv_connector":"NixlConnector","kv_role":"kv_both","kv_buffer_device":"cpu"}'

OWN_ENVIRONMENT = {
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
    "UCX_TLS": "tcp,sm,self",
    "UCX_NET_DEVICES": "lo",
}
"""Everything of it stays on loopback."""

Found = dict[str, Any]


class NoNixl(Exception):
    """vLLM's environment has no NIXL."""


def apart(vllm: Path, model: Path, directory: Path) -> Found:
    """Prefill and decode on servers of their own: NIXL moves the KV, and the answers are those of one server."""
    tried = subprocess.run(
        [str(vllm / "bin" / "python"), "-c", "import nixl._api"],
        env={**os.environ, **environment(vllm)},
        capture_output=True,
        check=False,
        timeout=300,
    )
    if tried.returncode:
        raise NoNixl("the environment has no nixl: pip install --no-deps nixl nixl-cu12")
    servers = []
    for number in range(2, 4):
        own = {**OWN_ENVIRONMENT, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
        servers.append(VllmServer(number, vllm, model, directory, ("--kv-transfer-config", CONNECTOR), own))
    prefill, decode = servers
    try:
        for each in servers:
            each.start()
        for each in servers:
            each.wait()
        fronts = ("--engine-url", f"prefill={prefill.url}", "--engine-url", f"decode={decode.url}", "--port", "0")
        options = ("--model-path", str(model), "--part-option", "router.legs=two")
        with Process("up", *fronts, *options, log=directory / "apart.log") as up:
            return _through(up.wait_ready().url, prefill, decode)
    finally:
        for each in servers:
            each.kill()


def _through(url: str, prefill: VllmServer, decode: VllmServer) -> Found:
    source = random.Random(15)
    shared = [source.randrange(16, 4000) for _ in range(128)]
    # About whole blocks, and others.
    lengths = [blocks * BLOCK_SIZE + off for blocks in (2, 5, 9) for off in (-1, 0, 1)]
    lengths += [source.randrange(100, 300) for _ in range(REQUESTS - len(lengths))]
    prompts = []
    for length in lengths:
        begin = shared[: source.choice((0, 32, 48))]
        prompts.append(begin + [source.randrange(16, 4000) for _ in range(length - len(begin))])
    handshakes = _shake_hands(url, source)
    before = {name: metric(decode.url, name) for name in (TRANSFERS, FAILURES)}
    answers = asyncio.run(_ask(url, prompts, "apart"))
    texts = [each["choices"][0]["text"] for each in answers]
    # One server for the whole of a request, to compare with.
    undisturbed = [each["choices"][0]["text"] for each in asyncio.run(_ask(prefill.url, prompts, "whole"))]
    legs = [_stages(url, f"apart-{number}") for number in range(REQUESTS)]
    names = [each.url.removeprefix("http://").replace(":", "-") for each in (prefill, decode)]
    for worker, server in zip(names, (prefill, decode), strict=True):
        eventually(
            f"the index of {worker} is what its server holds",
            lambda name=worker, of=server: _believed(url, name) == held_at(of.replay_endpoint),  # type: ignore[misc]
        )
    held = [len(_believed(url, name)) for name in names]
    moved = metric(decode.url, TRANSFERS) - before[TRANSFERS]
    prefill.kill()
    eventually("the prefill server's worker has left", lambda: _ready(url) == 1)
    alone = asyncio.run(_ask(url, [[*prompts[0], 5]], "alone"))
    stages = _stages(url, "alone-0")
    found: Found = {
        "requests until the servers had shaken hands": handshakes,
        "requests": REQUESTS,
        "in two legs": legs.count(["prefill", "decode"]),
        "transfers of KV": moved,
        "MB moved": round(metric(decode.url, "vllm:nixl_bytes_transferred_sum") / 1e6, 1),
        "transfers failed": metric(decode.url, FAILURES) - before[FAILURES],
        "text as of one server": f"{sum(map(str.__eq__, texts, undisturbed)) / REQUESTS:.1%}",
        "blocks held by each, exact": held,
        "untrusted workers": metric(url, "poolgrid_router_untrusted_workers"),
        "without the prefill server": stages,
    }
    assert found["in two legs"] == REQUESTS, (found, legs)
    # What a decode server holds already it does not fetch.
    assert 0 < moved <= REQUESTS, found
    assert found["transfers failed"] == found["untrusted workers"] == 0, found
    # Batches of other shapes round in another way.
    assert sum(map(str.__eq__, texts, undisturbed)) >= REQUESTS * 0.8, found
    assert alone[0]["usage"]["completion_tokens"] == OUTPUT_TOKENS, found
    assert stages == ["whole"], found
    return found


def _shake_hands(url: str, source: random.Random) -> int:
    """Ask until a request is done in two legs; return how many it took.

    The decode server's first transfer makes it connect to the prefill server, for which vLLM has 5 s without a further
    try: on a busy machine that fails, and the request begins again. Such requests have their whole answer all the same.
    """
    for number in range(HANDSHAKES_MAX):
        name = f"handshake-{number}"
        answers = asyncio.run(_ask(url, [[source.randrange(16, 4000) for _ in range(100)]], name))
        assert answers[0]["usage"]["completion_tokens"] == OUTPUT_TOKENS, answers
        if _stages(url, f"{name}-0") == ["prefill", "decode"]:
            return number + 1
    raise AssertionError(f"none of {HANDSHAKES_MAX} requests, one after the other, was done in two legs")


def _stages(url: str, request_id: str) -> list[str]:
    answer = httpx.get(f"{url}/v1/decisions/{request_id}", timeout=60)
    return [each["stage"] for each in answer.json()["attempts"]]


async def _ask(url: str, prompts: list[list[int]], name: str) -> list[dict[str, Any]]:
    gate = asyncio.Semaphore(TOGETHER)
    # A connection that a busy machine leaves idle for long may be closed just when the next request is on its way.
    fresh = httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=fresh) as client:

        async def one(number: int, prompt: list[int]) -> dict[str, Any]:
            body = {
                "model": "tiny",
                "prompt": prompt,
                "max_tokens": OUTPUT_TOKENS,
                "temperature": 0,
                "ignore_eos": True,
            }
            async with gate:
                answer = await client.post("/v1/completions", json=body, headers={"x-request-id": f"{name}-{number}"})
            assert answer.status_code == 200, answer.text
            said: dict[str, Any] = answer.json()
            return said

        return list(await asyncio.gather(*(one(number, prompt) for number, prompt in enumerate(prompts))))


def _believed(url: str, worker: str) -> set[int]:
    lines = httpx.get(f"{url}/v1/workers/{worker}/blocks", timeout=30).text.split("\n")
    return {int(line.split()[0], 16) for line in lines if line}


def _ready(url: str) -> int:
    return sum(row["state"] == "ready" for row in httpx.get(f"{url}/v1/workers").json()["data"])
