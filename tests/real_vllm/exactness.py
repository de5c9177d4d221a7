"""What ``poolgrid up --engine-url`` promises of the cache and what vLLM reports, while caches are too small."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec

from tests.e2e.processes import Process
from tests.real_vllm.pool import PATIENCE_S
from tests.real_vllm.servers import BLOCK_SIZE, MODEL, START_TIMEOUT_S, VllmServer, frames_of
from tests.real_vllm.sessions import small_servers

BLOCKS = 401
"""Of each server, one of which vLLM keeps for itself."""
REQUESTS = 1000
AGENTS = 2
"""Each has conversations of its own and asks one question at a time: a promise is of what is held when it is made."""
CONVERSATIONS, TURNS = 20, 6
"""Of an agent at a time, and turns of each: what ended is evicted, and now and then what lasts."""
PAUSE_S = 0.05
"""Of an agent between two questions, in which events arrive: a tool or a person takes longer."""
LEAST_SHARE = 0.99
WORDS = ("harbour", "island", "boat", "lamp", "river", "cloud", "stone", "garden", "letter", "window", "bridge")

Body = dict[str, Any]


def questions(agent: int) -> Iterator[Body]:
    """Yield an agent's requests: turns of conversations, some as chats, some as texts, some as token ids."""
    shared = [_words(random.Random(number), 60) for number in range(4)]
    source = random.Random(52 + agent)
    said: list[list[str]] = [[] for _ in range(CONVERSATIONS)]
    for _ in range(REQUESTS // AGENTS):
        number = source.randrange(CONVERSATIONS)
        if len(said[number]) == TURNS:
            said[number] = []
        said[number].append(_words(source, source.randrange(5, 60)))
        fields: Body = {"model": MODEL, "max_tokens": source.choice((1, 4)), "temperature": 0}
        system = f"{shared[number % len(shared)]} {agent} {number}"
        if number % 3 == 0:
            fields["prompt"] = " ".join((system, *said[number]))
        elif number % 3 == 1:
            text = [system, *said[number]]
            fields["prompt"] = [16 + sum(word.encode()) % 3900 for each in text for word in each.split()]
        else:
            turns = [{"role": "user", "content": each} for each in said[number]]
            fields["messages"] = [{"role": "system", "content": system}, *turns]
        yield fields


def _words(source: random.Random, count: int) -> str:
    return " ".join(f"{source.choice(WORDS)}{source.randrange(100)}" for _ in range(count))


async def _ask_all(url: str) -> list[tuple[Body, Body]]:
    """Return the usage of each answer, and the last decision about its request."""
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:

        async def one(agent: int) -> list[tuple[Body, Body]]:
            found = []
            for number, body in enumerate(questions(agent)):
                request_id = f"exact-{agent}-{number}"
                path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
                answer = await client.post(path, json=body, headers={"x-request-id": request_id})
                assert answer.status_code == 200, answer.text
                known = await client.get(f"/v1/decisions/{request_id}")
                assert known.status_code == 200, known.text
                found.append((answer.json()["usage"], known.json()["attempts"][-1]))
                await asyncio.sleep(PAUSE_S)
            return found

        return [pair for each in await asyncio.gather(*map(one, range(AGENTS))) for pair in each]


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
    with small_servers(vllm, model, directory, BLOCKS) as servers:
        front = [word for server in servers for word in ("--engine-url", server.url)]
        with Process("up", *front, "--port", "0") as pool:
            url = pool.wait_ready(START_TIMEOUT_S).url
            answered = asyncio.run(_ask_all(url))
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
