"""Attacks by an engine server: what it answers one request must cost nothing but that request."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

import httpx

from lab.attacks import engine_server
from lab.attacks.attack import Attack, Outcome, Part, Run, Scene
from lab.attacks.engine_server import Trick, seed_of
from lab.attacks.pool import JOIN_TIMEOUT_S, Shape, until
from lab.attacks.requests import client, in_words

SHAPE = Shape("front")
MAX_TOKENS = 12
AT_ONCE = 4
READ_S = 3.0
"""Time that a client reads an answer that does not end."""

ANSWER_S = 45.0
"""Time for an answer that has to end, on cores that others use too."""

PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/embeddings")
"""One of each form of answer."""

TOKEN = b'data: {"choices": [{'


def asking(*tricks: Trick, answered: bool, at_once: int = AT_ONCE, times: int = 200) -> Run:
    """Return the attack that has answers spoilt by these tricks in turns.

    ``answered``: the request itself must get its ``MAX_TOKENS`` tokens, for what is wrong with it is no token.
    """

    async def run(scene: Scene) -> Outcome:
        for engine in scene.pool.engines:
            engine.share = scene.share
        got: Counter[str] = Counter()
        faults: set[str] = set()
        deadline = scene.deadline()
        waiting = list(range(max(len(tricks), scene.count(times))))
        async with client(scene) as http:
            http.timeout = httpx.Timeout(ANSWER_S)

            async def sender() -> None:
                while waiting and asyncio.get_running_loop().time() < deadline:
                    number = waiting.pop(0)
                    path = PATHS[0] if answered else PATHS[number // len(tricks) % len(PATHS)]
                    trick = tricks[number % len(tricks)]
                    what, tokens = await _ask(scene, http, path, trick, number, ANSWER_S if answered else READ_S)
                    got[what] += 1
                    if answered and tokens != MAX_TOKENS:
                        faults.add(f"a client got {tokens} tokens in place of {MAX_TOKENS}: {what}")

            await asyncio.gather(*(sender() for _ in range(at_once)))
        return Outcome(in_words(got), sorted(faults))

    return run


async def _ask(
    scene: Scene, http: httpx.AsyncClient, path: str, trick: Trick, number: int, read_s: float
) -> tuple[str, int]:
    """Return the status, and how many events with a token came; leave an answer that does not end.

    An answer's bytes are passed on as they are, so what a client gets of a spoilt one is not judged.
    """
    text = f"number {number} of {trick}"
    body = {
        "model": scene.pool.model.name,
        "prompt": text,
        "input": text,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": MAX_TOKENS,
        "seed": seed_of(trick),
        "stream": read_s == ANSWER_S or number % 2 == 0,
    }
    tokens, status, came = 0, "no answer", b""
    try:
        async with asyncio.timeout(read_s), http.stream("POST", path, json=body) as answer:
            status = str(answer.status_code)
            async for piece in answer.aiter_raw():
                came += piece
                tokens += came.count(TOKEN)
                came = came[-len(TOKEN) + 1 :]
    except TimeoutError:
        return f"{status}, left", tokens
    except httpx.HTTPError as error:
        return f"{status}, {type(error).__name__}", tokens
    return status, tokens


async def lying(scene: Scene) -> Outcome:
    """Have one of two servers answer what poolgrid asks of it with each trick in turns."""
    liar = scene.pool.engines[1]
    liar.share = scene.share
    deadline = scene.deadline()
    each_s = max(FACT_S, scene.seconds / len(engine_server.FACTS))
    tried = 0
    for facts in engine_server.FACTS:
        if asyncio.get_running_loop().time() > deadline:
            break
        liar.facts = facts
        tried += 1
        await asyncio.sleep(each_s)
    liar.facts = {}

    async def complete() -> bool:
        return await scene.pool.ready_workers(scene.pool.url) >= len(scene.pool.engines)

    faults = []
    try:
        await until("both servers are ready again", complete, JOIN_TIMEOUT_S)
    except TimeoutError as error:
        faults.append(str(error))
    return Outcome(f"{tried} of {len(engine_server.FACTS)} kinds of answers", faults)


FACT_S = 1.5
"""Time of each: load is asked for each second, what a server is every ten seconds, and at once after a failure."""


def attack(
    name: str, does: str, tricks: Sequence[Trick], answered: bool = False, short: bool = False, at_once: int = AT_ONCE
) -> Attack:
    """Return a row. Times are not judged: the engine servers share the harness's loop."""
    run = asking(*tricks, answered=answered, at_once=at_once, times=200 if at_once > 1 else 2)
    return Attack(name, does, run, SHAPE, short=short, judge_latency=False, seconds_min=5.0 if short else 15.0)


PART = Part(
    "engine",
    "Hostile engine servers",
    (
        attack(
            "impossible counts",
            "Ends answers with negative, huge and fractional numbers of tokens.",
            engine_server.NUMBERS,
            answered=True,
            short=True,
        ),
        attack(
            "impossible tokens",
            "Sends invalid token ids, events nested 1,000,000 deep, and ids of a megabyte.",
            (*engine_server.TOKENS, engine_server.nested, engine_server.long_id),
            short=True,
        ),
        attack(
            "more than was asked for",
            "Sends 1,000,000 tokens in one chunk, or events, half events and chunks of a byte without end.",
            (engine_server.together, *engine_server.STREAMS),
        ),
        attack("one big line", "Sends a line of 15 MB in pieces of 1,200 bytes.", (engine_server.big_line,), at_once=1),
        attack(
            "endless headers",
            "Sends an endless header and an endless trailer, in pieces of 1,200 bytes.",
            (engine_server.header, engine_server.trailer),
            at_once=1,
        ),
        attack("an endless error", "Refuses with an endless body.", (engine_server.error_body,), at_once=1),
        attack(
            "huge chunks",
            "Sends a chunk of 4 GB, chunks with long extensions, and sizes that are no hexadecimal numbers.",
            engine_server.CHUNKS,
        ),
        attack(
            "wrong lengths",
            "Sends lengths that are too long, too short, negative, repeated, or next to chunks.",
            engine_server.LENGTHS,
            short=True,
        ),
        attack(
            "compressed bombs",
            "Sends answers and streams of 250 kB that inflate to 256 MB.",
            engine_server.BOMBS,
        ),
        attack(
            "floods of headers",
            "Sends headers and trailers without end, 10,000 headers, and a head of a byte every 50 ms.",
            engine_server.HEADERS,
        ),
        attack(
            "early ends",
            "Ends the connection in each stage of an answer, or the stream within an event.",
            engine_server.ENDS,
            short=True,
        ),
        attack(
            "several answers",
            "Sends interim answers without end, two answers at once, and bodies after 204 and 304.",
            engine_server.TWO,
            short=True,
        ),
        attack(
            "malformed heads",
            "Sends statuses from 0 to 1000, control characters in headers, other protocols, and a redirect to itself.",
            engine_server.MALFORMED,
            short=True,
        ),
        Attack(
            "lies about a server",
            "Answers health, version, models and metrics without end, with redirects, and with impossible values.",
            lying,
            SHAPE,
            short=False,
            judge_latency=False,
            seconds_min=FACT_S * len(engine_server.FACTS),
        ),
    ),
)
