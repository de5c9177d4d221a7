"""What admission of sessions gains in front of two vLLM servers that cannot hold all agents: vLLM's own counts."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.processes import metric
from tests.real_vllm.pool import Pool
from tests.real_vllm.servers import BLOCK_SIZE, MODEL, VllmServer

BLOCKS = 161
"""Of each server, one of which vLLM keeps for itself."""
AGENTS = 18
"""At a time. A session holds 36 blocks in its middle: all of them need twice what both servers have."""
SESSIONS_PER_AGENT = 2
TURNS = 8
FIRST_BLOCKS, TURN_BLOCKS, SHARED_BLOCKS = 20, 4, 2
ANSWER_TOKENS = 8
PAUSES_S = (0.1, 0.8)
"""Of tools."""
ROUNDS = ("plain", "sessions", "sessions", "plain")
"""Both come first once and last once: the machine has other work."""
GAIN_MIN = 1.5
"""Least hit rate with sessions, as a multiple of the plain one; two runs had 2.8 and 3.6."""
FIRST_TOKEN, LAST_TOKEN = 16, 4000

Found = dict[str, Any]


@dataclass
class Run:
    """One round."""

    hits: float = 0.0
    queries: float = 0.0
    seconds: float = 0.0
    waited: float = 0.0
    first_s: list[float] = field(default_factory=list)
    """How long first turns took."""

    @property
    def hit_rate(self) -> float:
        return self.hits / self.queries


def conversation(seed: int) -> Iterator[list[int]]:
    """Yield the prompts of one session: each repeats the one before, and has the result of a tool behind it."""
    shared, own = random.Random(5), random.Random(seed)
    prompt = [shared.randrange(FIRST_TOKEN, LAST_TOKEN) for _ in range(SHARED_BLOCKS * BLOCK_SIZE)]
    for turn in range(TURNS):
        blocks = TURN_BLOCKS if turn else FIRST_BLOCKS - SHARED_BLOCKS
        prompt = prompt + [own.randrange(FIRST_TOKEN, LAST_TOKEN) for _ in range(blocks * BLOCK_SIZE)]
        yield prompt


def achievable() -> float:
    """Return the hit rate of caches without an end; a prompt's last block is computed again where all of it is held."""
    first, lengths = SHARED_BLOCKS, [FIRST_BLOCKS + TURN_BLOCKS * turn for turn in range(TURNS)]
    return (first + sum(lengths[:-1])) / sum(lengths)


def counted(servers: Sequence[VllmServer], name: str) -> float:
    return sum(metric(server.url, f"vllm:{name}_total", model_name=MODEL) for server in servers)


async def agents(url: str, label: str, run: Run) -> None:
    """Have all agents run their sessions against a router."""

    async def one(client: httpx.AsyncClient, number: int) -> None:
        pauses = random.Random(number)
        for count in range(SESSIONS_PER_AGENT):
            headers = {"x-session-id": f"{label}-{number}-{count}"}
            for turn, prompt in enumerate(conversation(1000 * number + count)):
                body = {"model": MODEL, "prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0}
                began = time.monotonic()
                answer = await client.post("/v1/completions", json={**body, "ignore_eos": True}, headers=headers)
                assert answer.status_code == 200, answer.text
                if not turn:
                    run.first_s.append(time.monotonic() - began)
                await asyncio.sleep(pauses.uniform(*PAUSES_S))

    limits = httpx.Limits(max_connections=AGENTS, keepalive_expiry=2.0)  # our servers close idle ones after 5 s
    async with httpx.AsyncClient(base_url=url, timeout=900, limits=limits) as client:
        await asyncio.gather(*(one(client, number) for number in range(AGENTS)))


@contextmanager
def small_servers(vllm: Path, model: Path, directory: Path, blocks: int = BLOCKS) -> Iterator[list[VllmServer]]:
    servers = [
        VllmServer(number, vllm, model, directory, ("--num-gpu-blocks-override", str(blocks))) for number in (50, 51)
    ]
    try:
        for server in servers:
            server.start()
        for server in servers:
            server.wait()
        yield servers
    finally:
        for server in servers:
            server.kill()


def sessions(vllm: Path, model: Path, directory: Path) -> Found:
    """Agents need twice the blocks that two servers have: vLLM's hit rate with admission of sessions, and without."""
    runs: dict[str, list[Run]] = {"plain": [], "sessions": []}
    options, admission = ("--queue-timeout-ms", "600000"), ("--session-admission",)
    with (
        small_servers(vllm, model, directory) as servers,
        Pool(servers, model, vllm, ("kv", "kv"), options, admission, lost_share=0.0) as pool,
    ):
        urls = {"sessions": pool.router, "plain": pool.turns}
        for number, kind in enumerate(ROUNDS):
            for server in servers:
                server.reset()
            run = Run(-counted(servers, "prefix_cache_hits"), -counted(servers, "prefix_cache_queries"))
            run.waited = -_waits(urls[kind])
            began = time.monotonic()
            asyncio.run(agents(urls[kind], f"round-{number}", run))
            run.seconds = time.monotonic() - began
            run.hits += counted(servers, "prefix_cache_hits")
            run.queries += counted(servers, "prefix_cache_queries")
            run.waited += _waits(urls[kind])
            runs[kind].append(run)
    rates = {kind: sum(each.hits for each in of) / sum(each.queries for each in of) for kind, of in runs.items()}
    seconds = {kind: sum(each.seconds for each in of) for kind, of in runs.items()}
    found: Found = {
        "turns a round": AGENTS * SESSIONS_PER_AGENT * TURNS,
        "achievable hit rate": round(achievable(), 3),
        "hit rates": {kind: [round(each.hit_rate, 3) for each in of] for kind, of in runs.items()},
        "hit rate with sessions / plain": round(rates["sessions"] / rates["plain"], 2),
        "seconds": {kind: [round(each.seconds, 1) for each in of] for kind, of in runs.items()},
        "turns a minute with sessions / plain": round(seconds["plain"] / seconds["sessions"], 2),
        "turns that waited for a place": {kind: [each.waited for each in of] for kind, of in runs.items()},
        "first turns, median and longest s": {
            kind: [(round(statistics.median(each.first_s), 1), round(max(each.first_s), 1)) for each in of]
            for kind, of in runs.items()
        },
    }
    assert not any(each.waited for each in runs["plain"]), found
    assert rates["sessions"] >= GAIN_MIN * rates["plain"], found
    return found


def _waits(url: str) -> float:
    return metric(url, "poolgrid_router_queue_seconds_count", cause="working_set")
