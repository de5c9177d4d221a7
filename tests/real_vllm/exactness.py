"""What ``poolgrid up --engine-url`` promises of the cache and what vLLM reports, while caches are too small."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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

PATHS = {
    "text": "/v1/completions",
    "token ids": "/v1/completions",
    "chat": "/v1/chat/completions",
    "messages": "/v1/messages",
    "responses": "/v1/responses",
}
"""By form of a prompt."""
FORMS = tuple(PATHS)

Body = dict[str, Any]


def questions(agent: int) -> Iterator[tuple[str, Body]]:
    """Yield an agent's requests by form: turns of conversations, each in one form, half of them streamed."""
    shared = [_words(random.Random(number), 60) for number in range(4)]
    source = random.Random(52 + agent)
    said: list[list[str]] = [[] for _ in range(CONVERSATIONS)]
    for _ in range(REQUESTS // AGENTS):
        number = source.randrange(CONVERSATIONS)
        if len(said[number]) == TURNS:
            said[number] = []
        said[number].append(_words(source, source.randrange(5, 60)))
        form = FORMS[number % len(FORMS)]
        system, limit = f"{shared[number % len(shared)]} {agent} {number}", source.choice((1, 4))
        fields: Body = {"model": MODEL, "temperature": 0, "stream": source.random() < 0.5}
        fields["max_output_tokens" if form == "responses" else "max_tokens"] = limit
        turns = [{"role": "user", "content": each} for each in said[number]]
        if form == "text":
            fields["prompt"] = " ".join((system, *said[number]))
        elif form == "token ids":
            text = [system, *said[number]]
            fields["prompt"] = [16 + sum(word.encode()) % 3900 for each in text for word in each.split()]
        elif form == "chat":
            fields["messages"] = [{"role": "system", "content": system}, *turns]
        elif form == "messages":
            fields |= {"system": system, "messages": turns}
        else:
            fields |= {"instructions": system, "input": turns}
        yield form, fields


def _words(source: random.Random, count: int) -> str:
    return " ".join(f"{source.choice(WORDS)}{source.randrange(100)}" for _ in range(count))


@dataclass(frozen=True, slots=True)
class AskedOnce:
    """A request that was answered: what was promised of its prompt, and what vLLM reported, in tokens."""

    form: str
    worker: str
    began_s: float
    ended_s: float
    prompt_tokens: int
    promised: int
    reported: int

    def met(self, other: AskedOnce) -> bool:
        """Whether another one ran at the same server meanwhile, or its events may not have arrived before."""
        is_meanwhile = other.began_s < self.ended_s and self.began_s < other.ended_s + PAUSE_S
        return other is not self and other.worker == self.worker and is_meanwhile


async def _ask_all(url: str) -> list[AskedOnce]:
    """Ask, one question of each agent at a time, with and without a stream. Streams do not ask for counts."""
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:

        async def one(name: str, form: str, body: Body) -> AskedOnce:
            began_s = time.monotonic()
            answer = await client.post(PATHS[form], json=body, headers={"x-request-id": name})
            ended_s = time.monotonic()
            assert answer.status_code == 200, answer.text
            known = await client.get(f"/v1/decisions/{name}")
            assert known.status_code == 200, known.text
            decision = known.json()["attempts"][-1]
            reported, isl = decision["realised_cached_tokens"], decision["isl"]
            if not body["stream"]:
                counts = counts_of(answer.json()["usage"])
                assert counts == (isl, reported), f"of {name} vLLM reports {counts}, the router {decision}"
            promised = expected_tokens(decision["overlap_blocks"], isl)
            return AskedOnce(form, decision["worker"], began_s, ended_s, isl, promised, reported)

        async def all_of(agent: int) -> list[AskedOnce]:
            found = []
            for number, (form, body) in enumerate(questions(agent)):
                found.append(await one(f"exact-{agent}-{number}", form, body))
                await asyncio.sleep(PAUSE_S)
            return found

        return [each for of_agent in await asyncio.gather(*map(all_of, range(AGENTS))) for each in of_agent]


def counts_of(usage: Body) -> tuple[int, int]:
    """Return the prompt tokens and the cached ones among them, as vLLM reports them in any of its APIs."""
    if "cache_read_input_tokens" in usage:  # in Messages, input is what was neither cached before nor is now
        cached = usage["cache_read_input_tokens"] or 0
        return usage["input_tokens"] + (usage["cache_creation_input_tokens"] or 0) + cached, cached
    name = "input" if "input_tokens" in usage else "prompt"
    return usage[f"{name}_tokens"], usage[f"{name}_tokens_details"]["cached_tokens"]


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
            asked = asyncio.run(_ask_all(url))
        removed = [evicted(server) for server in servers]
    wrong = [each for each in asked if each.promised != each.reported]
    alone = [each for each in wrong if not any(map(each.met, asked))]
    found: dict[str, Any] = {
        "requests": len(asked),
        "by form": dict(sorted(Counter(each.form for each in asked).items())),
        "promised = reported": f"{1 - len(wrong) / len(asked):.1%}",
        "reported - promised, in blocks": _blocks_off(wrong),
        "of these with no other request at the server": _blocks_off(alone),
        "cached tokens": sum(each.reported for each in asked),
        "prompt tokens": sum(each.prompt_tokens for each in asked),
        "blocks evicted": removed,
    }
    assert all(removed), f"nothing was evicted: {found}"
    assert found["cached tokens"], found
    assert len(wrong) <= (1 - LEAST_SHARE) * len(asked), found
    return found


def _blocks_off(wrong: Sequence[AskedOnce]) -> dict[int, int]:
    return dict(sorted(Counter((each.reported - each.promised) // BLOCK_SIZE for each in wrong).items()))
