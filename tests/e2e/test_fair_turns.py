"""A tenant's backlog of long prompts lies in the router, where another tenant's request passes it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random

import httpx
import pytest
from click.testing import CliRunner

from poolgrid.server.cli.main import app
from tests.e2e.processes import Process

pytestmark = pytest.mark.e2e

LONG_TOKENS, LONG_COUNT = 9000, 150
EVERY_S = 0.25

PASSED_MAX = 20
"""Prompts that two engines may have at a time, and more that end before the answer is here."""


async def test_a_short_prompt_passes_the_backlog_of_another_tenant_on_own_workers(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    flood, other = (
        CliRunner().invoke(app, ["keys", "create", str(keys), tenant]).stdout.split()[0]
        for tenant in ("flood", "other")
    )
    random = Random(1)
    answered: list[int] = []
    with Process("up", "--port", "0", "--workers", "2", "--api-keys", str(keys)) as up:
        up.wait_ready()
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=up.url, timeout=300, limits=limits) as client:

            async def complete(key: str, tokens: int) -> int:
                body = {"model": "tiny", "prompt": [random.randrange(16, 255) for _ in range(tokens)], "max_tokens": 4}
                answer = await client.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})
                if tokens == LONG_TOKENS:
                    answered.append(answer.status_code)
                return answer.status_code

            async def passed() -> int:
                """Return how many long prompts are answered while one short prompt waits."""
                before = len(answered)
                assert await complete(other, 40) == 200
                return len(answered) - before

            backlog = [asyncio.ensure_future(complete(flood, LONG_TOKENS)) for _ in range(LONG_COUNT)]
            shorts: list[asyncio.Task[int]] = []
            while not all(each.done() for each in backlog):
                await asyncio.sleep(EVERY_S)
                shorts.append(asyncio.ensure_future(passed()))
            assert set(await asyncio.gather(*backlog)) == {200}
            assert max(await asyncio.gather(*shorts)) <= PASSED_MAX
