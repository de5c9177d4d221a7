"""What ``poolgrid up --engine-url`` promises of the cache and what vLLM reports, while caches are too small."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec

from tests.e2e.processes import Process
from tests.real_vllm.pool import PATIENCE_S
from tests.real_vllm.servers import BLOCK_SIZE, MODEL, START_TIMEOUT_S, VllmServer, frames_of
from tests.real_vllm.sessions import small_servers

REQUESTS = 1000
TOGETHER = 4
LEAST_SHARE = 0.99
GROUPS, TURNS = 24, 6
"""Conversations that are open at a time, and turns of each: together they need several times what both caches hold."""
WORDS = (
    "harbour",
    "island",
    "boat",
    "lamp",
    "river",
    "cloud",
    "stone",
    "garden",
    "letter",
    "window",
    "bridge",
    "winter",
)

Body = dict[str, Any]


def conversations(source: random.Random) -> list[Body]:
    """Return the requests: turns of conversations that take turns, some as chats, some as texts, some as token ids."""
    shared = [_words(source, 60) for _ in range(4)]
    said: list[list[str]] = [[] for _ in range(GROUPS)]
    wanted: list[Body] = []
    while len(wanted) < REQUESTS:
        group = source.randrange(GROUPS)
        if len(said[group]) == TURNS:
            said[group] = []
        said[group].append(_words(source, source.randrange(5, 60)))
        fields: Body = {"model": MODEL, "max_tokens": source.choice((1, 4)), "temperature": 0}
        system = f"{shared[group % len(shared)]} {group}"
        if group % 3 == 0:
            fields["prompt"] = " ".join((system, *said[group]))
        elif group % 3 == 1:
            text = [system, *said[group]]
            fields["prompt"] = [16 + sum(word.encode()) % 3900 for each in text for word in each.split()]
        else:
            turns = [{"role": "user", "content": each} for each in said[group]]
            fields["messages"] = [{"role": "system", "content": system}, *turns]
        wanted.append(fields)
    return wanted


def _words(source: random.Random, count: int) -> str:
    return " ".join(f"{source.choice(WORDS)}{source.randrange(100)}" for _ in range(count))


async def _ask_all(url: str, wanted: Sequence[Body]) -> list[tuple[Body, Body]]:
    """Return the usage of each answer, and the last decision about its request."""
    gate = asyncio.Semaphore(TOGETHER)
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:

        async def one(number: int, body: Body) -> tuple[Body, Body]:
            path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
            async with gate:
                answer = await client.post(path, json=body, headers={"x-request-id": f"exact-{number}"})
                assert answer.status_code == 200, answer.text
                known = await client.get(f"/v1/decisions/exact-{number}")
                assert known.status_code == 200, known.text
            return answer.json()["usage"], known.json()["attempts"][-1]

        return list(await asyncio.gather(*(one(number, body) for number, body in enumerate(wanted))))


def expected_tokens(overlap_blocks: int, prompt_tokens: int) -> int:
    """Return what vLLM reports if it holds so many blocks: it computes the last token of a prompt in any case."""
    return min(overlap_blocks * BLOCK_SIZE, (prompt_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE)


def evicted(server: VllmServer) -> int:
    """Return how many blocks a server has removed, by its events."""
    removed = 0
    for payload in frames_of(server.replay_endpoint):
        _, events, *_ = msgspec.msgpack.decode(payload)
        removed += sum(len(event["block_hashes"]) for event in events if event["type"] == "BlockRemoved")
    return removed


def exactness(vllm: Path, model: Path, directory: Path) -> dict[str, Any]:
    """the decision's overlap is what vLLM reports as cached, for 99 % of 1,000 requests, while blocks are evicted"""
    with small_servers(vllm, model, directory) as servers:
        front = [word for server in servers for word in ("--engine-url", server.url)]
        with Process("up", *front, "--port", "0") as pool:
            url = pool.wait_ready(START_TIMEOUT_S).url
            answered = asyncio.run(_ask_all(url, conversations(random.Random(52))))
        removed = [evicted(server) for server in servers]
    exact, reused, wrong = 0, 0, Counter[int]()
    for usage, decision in answered:
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        promised = expected_tokens(decision["overlap_blocks"], usage["prompt_tokens"])
        exact += promised == cached
        reused += cached
        if promised != cached:
            wrong[(cached - promised) // BLOCK_SIZE] += 1
    found: dict[str, Any] = {
        "requests": len(answered),
        "promised = reported": f"{exact / len(answered):.1%}",
        "reported - promised, in blocks": dict(sorted(wrong.items())),
        "cached tokens": reused,
        "prompt tokens": sum(usage["prompt_tokens"] for usage, _ in answered),
        "blocks evicted": removed,
    }
    assert all(removed), f"nothing was evicted: {found}"
    assert reused, found
    assert exact >= LEAST_SHARE * len(answered), found
    return found
