"""A tenant's backlog of long prompts lies in the router, where another tenant's request passes it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random

import httpx
import pytest
from click.testing import CliRunner

from poolgrid.cli.main import app
from tests.e2e.processes import Process

pytestmark = pytest.mark.e2e

LONG_TOKENS, LONG_COUNT = 9000, 120
HELD_S = 5.0
"""Longer than a request is held for a plan: what was held then went to the engines, all of it."""

PASSED_MAX = 16
"""Prompts that two engines may have at a time, and as many again that end before the answer is here."""


async def test_a_short_prompt_passes_the_backlog_of_another_tenant_on_own_workers(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    flood, other = (
        CliRunner().invoke(app, ["keys", "create", str(keys), tenant]).stdout.split()[0]
        for tenant in ("flood", "other")
    )
    random = Random(1)
    answered = 0
    with Process("up", "--port", "0", "--workers", "2", "--api-keys", str(keys)) as up:
        up.wait_ready()
        limits = httpx.Limits(max_connections=LONG_COUNT + 1)
        async with httpx.AsyncClient(base_url=up.url, timeout=300, limits=limits) as client:

            async def complete(key: str, tokens: int) -> int:
                nonlocal answered
                body = {"model": "tiny", "prompt": [random.randrange(16, 255) for _ in range(tokens)], "max_tokens": 4}
                answer = await client.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})
                answered += 1
                return answer.status_code

            backlog = [asyncio.ensure_future(complete(flood, LONG_TOKENS)) for _ in range(LONG_COUNT)]
            await asyncio.sleep(HELD_S)
            before = answered
            assert before < LONG_COUNT / 2, "most of them wait"
            assert await complete(other, 40) == 200
            passed = answered - 1 - before
            assert set(await asyncio.gather(*backlog)) == {200}

    assert passed <= PASSED_MAX, f"of {LONG_COUNT - before} long prompts {passed} were answered first"
