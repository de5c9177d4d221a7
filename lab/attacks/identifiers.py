"""Request ids of a client's choice that look like the names by which another client's request goes inside."""

from __future__ import annotations

import asyncio
from collections import Counter

import httpx

from lab.attacks.attack import Outcome, Scene
from lab.attacks.bystanders import BLOCK_TOKENS, TOKENS
from lab.attacks.requests import client, in_words, post
from poolgrid.kernel.wire.hashing import pack_tokens
from poolgrid.plugins.bench.client import BenchExchange
from poolgrid.plugins.bench.prompt import PlannedRequest
from tests.e2e.expectation import expected_text

ROUNDS = 20
OSL = 60
VICTIM_BLOCKS = 20
"""Enough to be prefilled elsewhere."""

VARIANTS = ("{}~1", "{}~2", "{}~3", "{}", "others~{}", "{}~1~1", "~{}", "{}~", "{}~01", "{}~-1")
"""``~`` stood between a request's id and the number of its leg (bug C)."""


async def crossing(scene: Scene) -> Outcome:
    """A neighbour's requests under known ids, and at the same time the attacker's under ids made from them."""
    said: Counter[str] = Counter()
    faults: list[str] = []
    deadline = scene.deadline()
    shape = {"model": scene.pool.model.name, "max_tokens": OSL, "ignore_eos": True, "stream": True}
    async with client(scene, "neighbour") as neighbour, client(scene) as attacker:
        for number in range(scene.count(ROUNDS, 4)):
            if asyncio.get_running_loop().time() > deadline:
                break
            name = f"victim-{scene.random.randrange(10**9)}"
            blocks = tuple(range(number * 32, number * 32 + VICTIM_BLOCKS))
            request = PlannedRequest(number, None, blocks, BLOCK_TOKENS, VICTIM_BLOCKS * BLOCK_TOKENS, OSL)
            tokens = TOKENS.token_ids(request)
            # Short, so that a decode worker does the whole of it: there the second leg of the victim's is going.
            mine = {**shape, "prompt": f"mine {number}"}
            attacks = [
                post(attacker, "/v1/completions", mine, {"x-request-id": variant.format(name)}) for variant in VARIANTS
            ]
            text, *answers = await asyncio.gather(
                _stream(neighbour, {**shape, "prompt": tokens}, name), *attacks, return_exceptions=True
            )
            said.update(map(str, answers))
            wanted = expected_text(pack_tokens(tokens), OSL)
            if text != wanted:
                faults.append(f"{name} was answered {str(text)[:80]!r}, not {wanted[:80]!r}")
    return Outcome(in_words(said), faults[:3])


async def _stream(http: httpx.AsyncClient, body: dict[str, object], name: str) -> str:
    """Return the text that a request under this id is answered with."""
    exchange = BenchExchange()
    async with http.stream("POST", "/v1/completions", json=body, headers={"x-request-id": name}) as answer:
        exchange.status = answer.status_code
        async for data in answer.aiter_bytes():
            exchange.take_body(data)
    return exchange.text if exchange.status == 200 else f"status {exchange.status}"
