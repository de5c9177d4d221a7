"""Attacks by an engine server: what it answers one request must cost nothing but that request."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

import httpx

from lab.attacks import engine_server
from lab.attacks.attack import Attack, Outcome, Part, Run, Scene
from lab.attacks.engine_server import Trick, seed_of
from lab.attacks.pool import Shape
from lab.attacks.requests import client, in_words

SHAPE = Shape("front")
MAX_TOKENS = 12
AT_ONCE = 4
READ_S = 3.0
"""Time that a client reads an answer that does not end."""


def asking(*tricks: Trick, answered: bool, at_once: int = AT_ONCE, times: int = 200) -> Run:
    """Return the attack that has answers spoilt by these tricks in turns.

    ``answered``: the request itself must get its ``MAX_TOKENS`` tokens, for what is wrong with it is no token.
    """

    async def run(scene: Scene) -> Outcome:
        for engine in scene.pool.engines:
            engine.share = scene.share
        said: Counter[str] = Counter()
        faults: set[str] = set()
        deadline = scene.deadline()
        waiting = list(range(max(len(tricks), scene.count(times))))
        async with client(scene) as http:

            async def sender() -> None:
                while waiting and asyncio.get_running_loop().time() < deadline:
                    number = waiting.pop(0)
                    what, tokens = await _ask(scene, http, tricks[number % len(tricks)], number)
                    said[what] += 1
                    if answered and tokens != MAX_TOKENS:
                        faults.add(f"a client got {tokens} tokens in place of {MAX_TOKENS}: {what}")

            await asyncio.gather(*(sender() for _ in range(at_once)))
        return Outcome(in_words(said), sorted(faults))

    return run


async def _ask(scene: Scene, http: httpx.AsyncClient, trick: Trick, number: int) -> tuple[str, int]:
    """Return the status, and how many events with a token came; leave an answer that does not end.

    An answer's bytes are passed on as they are, so what a client gets of a spoilt one is not judged.
    """
    body = {
        "model": scene.pool.model.name,
        "prompt": f"number {number} of {trick}",
        "max_tokens": MAX_TOKENS,
        "seed": seed_of(trick),
        "stream": True,
    }
    tokens, status = 0, "no answer"
    try:
        async with asyncio.timeout(READ_S), http.stream("POST", "/v1/completions", json=body) as answer:
            status = str(answer.status_code)
            async for line in answer.aiter_lines():
                tokens += line.startswith('data: {"choices": [{')
    except TimeoutError:
        return f"{status}, left", tokens
    except httpx.HTTPError as error:
        return f"{status}, {type(error).__name__}", tokens
    return status, tokens


def attack(
    name: str, does: str, tricks: Sequence[Trick], answered: bool = False, short: bool = False, at_once: int = AT_ONCE
) -> Attack:
    """Return a row. Times are not judged: the engine servers share the harness's loop."""
    run = asking(*tricks, answered=answered, at_once=at_once, times=200 if at_once > 1 else 2)
    return Attack(name, does, run, SHAPE, short=short, judge_latency=False, seconds_min=1.0 if short else 15.0)


PART = Part(
    "engine",
    "Hostile engine servers",
    (
        attack(
            "impossible counts",
            "Ends answers with negative, huge and fractional numbers of cached tokens.",
            engine_server.NUMBERS,
            answered=True,
            short=True,
        ),
        attack(
            "impossible tokens",
            "Sends invalid token ids, and events nested 1,000,000 deep.",
            (*engine_server.TOKENS, engine_server.nested),
            short=True,
        ),
        attack(
            "more than was asked for",
            "Sends 1,000,000 tokens in one chunk, or tokens without end, for 12.",
            (engine_server.together, engine_server.endless),
            short=True,
        ),
        attack("one big line", "Sends a line of 15 MB in pieces of 1,200 bytes.", (engine_server.big_line,), at_once=1),
        attack(
            "endless headers",
            "Sends an endless header and an endless trailer, in pieces of 1,200 bytes.",
            (engine_server.header, engine_server.trailer),
            at_once=1,
        ),
        attack("an endless error", "Refuses with an endless body.", (engine_server.error_body,), at_once=1),
    ),
)
