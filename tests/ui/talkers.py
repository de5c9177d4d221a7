"""``python -m tests.ui.talkers URL COUNT [MANNER]``: streamed conversations over HTTP until it is killed.

Each stream that ends without its last event is a line ``broken ID`` on standard output.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from dataclasses import dataclass
from typing import Any

import httpx

WORDS = (
    "pool",
    "grid",
    "cache",
    "block",
    "router",
    "worker",
    "prefix",
    "stream",
    "journal",
    "offset",
    "queue",
    "token",
)
TURNS = 9
TTFT_MS = (300, 900, 2500, 6000)
ITL_MS = (12, 30, 60, 90)
STREAM_END = "data: [DONE]"


@dataclass(frozen=True)
class Manner:
    """How people talk: with which pauses, how long the answers are, and what they ask for."""

    think_s: float = 1.0
    start_s: float = 1.0
    output_tokens: tuple[int, int] = (20, 120)
    targets: bool = False
    ttft_weights: tuple[int, ...] = (1, 1, 1, 1)
    itl_weights: tuple[int, ...] = (1, 1, 1, 1)


MANNERS = {
    "chat": Manner(),
    "busy": Manner(think_s=1.7, start_s=8.0, output_tokens=(60, 260)),
    "targets": Manner(targets=True),
    "busy-targets": Manner(0.6, 5.0, (40, 160), True, (5, 3, 2, 1), (1, 5, 2, 1)),
}


def said(draw: random.Random, least: int, most: int) -> str:
    return " ".join(draw.choice(WORDS) for _ in range(draw.randint(least, most)))


async def ask(client: httpx.AsyncClient, body: dict[str, Any], headers: dict[str, str]) -> str | None:
    """Return the answer that is streamed; ``None`` when the stream ends early or is refused."""
    content: list[str] = []
    ended = False
    request = client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}, headers=headers)
    async with request as answer:
        async for line in answer.aiter_lines():
            ended = ended or line == STREAM_END
            if line.startswith("data: {") and '"choices"' in line:
                content.extend(choice["delta"].get("content") or "" for choice in json.loads(line[6:])["choices"])
    return "".join(content) if ended else None


async def talk(client: httpx.AsyncClient, number: int, manner: Manner) -> None:
    draw = random.Random(number)
    topic = 0
    await asyncio.sleep(draw.random() * manner.start_s)
    while True:
        topic += 1
        system = "You are a helpful assistant. " * 20 if number % 3 else said(draw, 40, 40)
        messages = [{"role": "system", "content": system}]
        for turn in range(TURNS):
            messages.append({"role": "user", "content": said(draw, 20, 200)})
            body: dict[str, Any] = {"model": "tiny", "messages": messages}
            body["max_tokens"] = draw.randint(*manner.output_tokens)
            if manner.targets:
                [ttft], [itl] = draw.choices(TTFT_MS, manner.ttft_weights), draw.choices(ITL_MS, manner.itl_weights)
                body["nvext"] = {"router": {"ttft_target": ttft, "itl_target": itl}}
            name = f"chat-{number}-{topic}-{turn}"
            try:
                answer = await ask(client, body, {"x-request-id": name})
            except httpx.TransportError:
                answer = None
            if answer is None:
                sys.stdout.write(f"broken {name}\n")
                sys.stdout.flush()
            messages.append({"role": "assistant", "content": answer or "Yes."})
            await asyncio.sleep(draw.expovariate(1 / manner.think_s))


async def main(url: str, count: int, manner: Manner) -> None:
    client = httpx.AsyncClient(base_url=url, timeout=120, trust_env=False, limits=httpx.Limits(max_connections=count))
    async with client, asyncio.TaskGroup() as group:
        for number in range(count):
            group.create_task(talk(client, number, manner))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), MANNERS[sys.argv[3] if len(sys.argv) > 3 else "chat"]))
