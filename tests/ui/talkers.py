"""``python -m tests.ui.talkers URL COUNT [targets]``: conversations over HTTP until somebody ends this process."""

from __future__ import annotations

import asyncio
import random
import sys

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
THINK_S = 1.0
TURNS = 9
TTFT_MS = (300, 900, 2500, 6000)
ITL_MS = (12, 30, 60, 90)


def said(draw: random.Random, least: int, most: int) -> str:
    return " ".join(draw.choice(WORDS) for _ in range(draw.randint(least, most)))


async def talk(client: httpx.AsyncClient, number: int, targets: bool) -> None:
    draw = random.Random(number)
    topic = 0
    while True:
        topic += 1
        system = "You are a helpful assistant. " * 20 if number % 3 else said(draw, 40, 40)
        messages = [{"role": "system", "content": system}]
        for turn in range(TURNS):
            messages.append({"role": "user", "content": said(draw, 20, 200)})
            body = {"model": "tiny", "messages": messages, "max_tokens": draw.randint(20, 120)}
            if targets:
                body["nvext"] = {"router": {"ttft_target": draw.choice(TTFT_MS), "itl_target": draw.choice(ITL_MS)}}
            headers = {"x-request-id": f"chat-{number}-{topic}-{turn}"}
            try:
                answer = await client.post("/v1/chat/completions", json=body, headers=headers)
            except httpx.TransportError:
                return  # the pool has ended
            content = answer.json()["choices"][0]["message"]["content"] if answer.is_success else ""
            messages.append({"role": "assistant", "content": content or "Yes."})
            await asyncio.sleep(draw.expovariate(1 / THINK_S))


async def main(url: str, count: int, targets: bool) -> None:
    client = httpx.AsyncClient(base_url=url, timeout=120, trust_env=False)
    async with client, asyncio.TaskGroup() as group:
        for number in range(count):
            group.create_task(talk(client, number, targets))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), "targets" in sys.argv[3:]))
