"""Policies on a pool that runs: the same conversations through a router for each policy, one router after the other.

    python -m lab.benchmarks.live_policies --feed-endpoint E --query-endpoint E --model-path DIR [--seeds 11,12]
        [--routers round-robin,kv] [--think heavy=2,full=0.8] [--servers http://HOST:PORT,...] [--json OUT]

The pool is a consolidator, whose ready line says the endpoints, and workers before real engines, or simulated ones.
Each run starts a router of its own, so what a policy learns it learns anew; asks it some things that are not counted;
and then plays conversations: each begins with a system prompt that every fourth has in common, and each turn sends the
turns before again, with other tokens in the place of the answers. Who asks how much and when is drawn from the seed,
the same for each router. Prompts are token ids, drawn anew for each run, for engines may still hold those of the run
before. With ``--servers``, the vLLM servers behind the workers,
their caches are emptied before each run (``POST /reset_prefix_cache``), and two more ways can be compared, without a
router: ``direct`` sends requests to the servers round robin, ``sticky`` each conversation to one server.

TTFTs are wall-clock time, as a client has them. Runs of one seed differ by some hundredths.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import httpx
import msgspec
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from lab.benchmarks.http_load import quantiles
from lab.benchmarks.services import Service, get, plain_client
from poolgrid.plugins.bench.client import BenchExchange
from poolgrid.server.http.http_client import HttpClient, HttpTarget
from poolgrid.server.process.clock import SystemClock

EMPTYING_TIMEOUT_S = 30.0
"""Several times what a server takes to end what the run before left behind; then the run fails."""

ANSWER_TIMEOUT_S = 120.0
"""Many times the slowest answer; then the run fails."""

LEAST_TOKEN_ID = 300
"""Below it are tokens of models' own: begin, end, roles."""

SYSTEM_PROMPTS = 4
UNCOUNTED = 18
"""Requests before those that count: a policy that learns how fast workers are has seen each of a few workers."""
UNCOUNTED_TOKENS = (200, 2000, 4000)
WITHOUT_ROUTER = frozenset(("direct", "sticky"))
PAUSE_MOST = 3.0
"""Times the mean that a user thinks at most, so that the end of a run is no wait for a single one."""


COLUMNS = ("load", "seed", "router", "TTFT", "p50", "p99", "later", "queued", "reused", "error", "by worker")
"""Of the table: TTFT is the mean, later that of later turns."""


class Shape(NamedTuple):
    """What the conversations are like."""

    conversations: int
    turns: int
    system_tokens: int
    first_tokens: int
    turn_tokens: int
    answer_tokens: int
    vocabulary: int


class Said(NamedTuple):
    """One counted request."""

    turn: int
    exchange: BenchExchange
    ttft_s: float
    decision: dict[str, Any]


async def started(policy: str, options: argparse.Namespace, logs: Path) -> Service:
    """Return a router of a policy before the pool, which is ready; raises ``PoolFailed`` when it does not start."""
    command = ["router", "--port", "0", "--log-level", "warning", "--policy", policy]
    command += ["--feed-endpoint", options.feed_endpoint, "--query-endpoint", options.query_endpoint]
    command += ["--model-path", str(options.model_path), "--served-model-name", options.model_name]
    router = await Service.start("router", command, logs)
    try:
        await router.wait_ready()
    except BaseException:
        await router.kill()
        raise
    return router


class Run:
    """One router, one load, one seed."""

    def __init__(
        self, urls: Sequence[str], model: str, shape: Shape, think_s: float, seed: int, number: int, *, sticky: bool
    ) -> None:
        """Draw times and lengths from the seed, and tokens from the seed and the number of the run.

        Several URLs are servers without a router: requests go to them round robin, or by conversation if sticky.
        """
        self._urls = urls
        self._model = model
        self._shape = shape
        self._think_s = think_s
        self._random = random.Random(seed)
        self._tokens_of = random.Random(f"{seed}/{number}")
        self._clock = SystemClock()
        headers = ["Content-Type: application/json"]
        self._clients = [HttpClient(HttpTarget(url), self._clock, headers) for url in urls]
        self._sticky = sticky
        self._numbers = 0
        self._said: list[tuple[int, str, int, BenchExchange, float]] = []

    async def play(self) -> list[Said]:
        """Ask everything, and return what was counted; raises ``RequestFailed`` when a request fails."""
        shape, draw = self._shape, self._random
        try:
            uncounted = [self._ask(self._tokens(draw.choice(UNCOUNTED_TOKENS)), 8, each) for each in range(UNCOUNTED)]
            await asyncio.gather(*uncounted)
            systems = [self._tokens(shape.system_tokens) for _ in range(SYSTEM_PROMPTS)]
            plans = []
            for number in range(shape.conversations):
                first = systems[number % SYSTEM_PROMPTS] + self._tokens(shape.first_tokens)
                # From the second turn on with other tokens in the place of the answer before.
                sizes = [shape.turn_tokens + shape.answer_tokens * (turn > 0) for turn in range(shape.turns)]
                pauses = [min(draw.expovariate(1 / self._think_s), PAUSE_MOST * self._think_s) for _ in sizes]
                plans.append((number, first, [self._tokens(size) for size in sizes], pauses))
            await asyncio.gather(*(self._converse(*plan) for plan in plans))
        finally:
            for client in self._clients:
                client.close()
        if len(self._urls) > 1:
            return [
                Said(turn, exchange, ttft_s, {"worker": f"server-{server}"})
                for turn, _, server, exchange, ttft_s in self._said
            ]
        async with plain_client() as http:
            return [
                Said(turn, exchange, ttft_s, await decision(http, f"{self._urls[0]}/v1/decisions/{request_id}"))
                for turn, request_id, _, exchange, ttft_s in self._said
            ]

    async def _converse(self, number: int, prompt: list[int], turns: list[list[int]], pauses: list[float]) -> None:
        for turn, (added, pause_s) in enumerate(zip(turns, pauses, strict=True)):
            await asyncio.sleep(pause_s)
            prompt = prompt + added
            request_id, server, exchange, ttft_s = await self._ask(prompt, self._shape.answer_tokens, number)
            self._said.append((turn, request_id, server, exchange, ttft_s))

    async def _ask(
        self, prompt: list[int], answer_tokens: int, conversation: int
    ) -> tuple[str, int, BenchExchange, float]:
        server = (conversation if self._sticky else self._numbers) % len(self._clients)
        self._numbers += 1
        request_id = f"live-{self._numbers}"
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": answer_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        started_ms = self._clock.monotonic_ms()
        exchange = BenchExchange()
        named = (f"X-Request-Id: {request_id}",)
        await self._clients[server].send(
            "POST", "/v1/completions", msgspec.json.encode(body), exchange, named, timeout_s=ANSWER_TIMEOUT_S
        )
        first_ms = exchange.finished_ms if exchange.first_ms is None else exchange.first_ms
        return request_id, server, exchange, (first_ms - started_ms) / 1000

    def _tokens(self, count: int) -> list[int]:
        draw = self._tokens_of.randrange
        return [draw(LEAST_TOKEN_ID, self._shape.vocabulary) for _ in range(count)]


def figures(said: Sequence[Said]) -> dict[str, Any]:
    """Return what a run came to: TTFTs in ms, reuse, who computed what, and how far expectations were off."""
    usages = [each.exchange.usage for each in said if each.exchange.usage is not None]
    pairs = [
        (each.decision["expected_ttft_ms"], each.decision["realised_ttft_ms"])
        for each in said
        if each.decision.get("expected_ttft_ms") and each.decision.get("realised_ttft_ms")
    ]
    real_ms = sum(real for _, real in pairs)
    return {
        "requests": len(said),
        "ttft_ms": quantiles([each.ttft_s for each in said]),
        "first_turn_ttft_ms": quantiles([each.ttft_s for each in said if each.turn == 0]),
        "later_turns_ttft_ms": quantiles([each.ttft_s for each in said if each.turn]),
        "reused_share": sum(each.cached_tokens for each in usages) / max(1, sum(each.prompt_tokens for each in usages)),
        "by_worker": dict(sorted(Counter(each.decision["worker"] for each in said).items())),
        "queued_ms": fmean(each.decision.get("queued_ms") or 0.0 for each in said),
        "error": sum(abs(expected - real) for expected, real in pairs) / real_ms if real_ms else None,
        "bias": sum(expected for expected, _ in pairs) / real_ms if real_ms else None,
    }


async def decision(http: httpx.AsyncClient, url: str) -> dict[str, Any]:
    """Return the last decision about a request; raises ``PoolFailed``."""
    attempts: list[dict[str, Any]] = (await get(http, url)).raise_for_status().json()["attempts"]
    return attempts[-1]


async def empty_caches(servers: Sequence[str]) -> None:
    """Have vLLM servers forget what they hold; raises ``TimeoutError`` when one does not, for it computes something."""
    async with plain_client() as http, asyncio.timeout(EMPTYING_TIMEOUT_S):
        for server in servers:
            # ASYNC110: a server of another project, which announces nothing.
            while not (await http.post(f"{server}/reset_prefix_cache")).raise_for_status().json()["success"]:  # noqa: ASYNC110
                await asyncio.sleep(0.1)


async def played(policy: str, options: argparse.Namespace, shape: Shape, think_s: float, seed: int, number: int) -> Any:
    """Return the figures of one run, with a router of its own."""
    servers = [server for server in options.servers.split(",") if server]
    await empty_caches(servers)
    if policy in WITHOUT_ROUTER:
        run = Run(servers, options.model_name, shape, think_s, seed, number, sticky=policy == "sticky")
        return figures(await run.play())
    with TemporaryDirectory(prefix="poolgrid-live-") as logs:
        router = await started(policy, options, Path(logs))
        try:
            run = Run([router.url], options.model_name, shape, think_s, seed, number, sticky=False)
            return figures(await run.play())
        finally:
            await router.stop()


def pairs_of(text: str) -> dict[str, float]:
    """Return what ``name=2,other=0.8`` says."""
    try:
        pairs = {name: float(value) for name, _, value in (word.partition("=") for word in text.split(","))}
    except ValueError:
        pairs = {}
    if not pairs or min(pairs.values()) <= 0.0:
        raise argparse.ArgumentTypeError(f"{text!r} is no list like heavy=2,full=0.8 (names, and seconds above 0)")
    return pairs


def main(arguments: Sequence[str] | None = None) -> None:
    """Play all runs, and print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--feed-endpoint", required=True)
    parser.add_argument("--query-endpoint", required=True)
    parser.add_argument("--model-path", type=Path, required=True)
    parser.add_argument("--model-name", default="m")
    parser.add_argument("--routers", default="round-robin,kv", help="policies")
    parser.add_argument("--think", type=pairs_of, default={"heavy": 2.0, "full": 0.8}, help="seconds that users think")
    parser.add_argument("--seeds", default="11,12,13,14,15")
    parser.add_argument("--conversations", type=int, default=24)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--system-tokens", type=int, default=1000)
    parser.add_argument("--first-tokens", type=int, default=3000)
    parser.add_argument("--turn-tokens", type=int, default=600)
    parser.add_argument("--answer-tokens", type=int, default=64)
    parser.add_argument("--vocabulary", type=int, default=150_000, help="token ids are below it")
    parser.add_argument("--servers", default="", help="vLLM servers: caches emptied before each run; direct, sticky")
    parser.add_argument("--json", type=Path, help="write a line for each run there")
    options = parser.parse_args(arguments)
    shape = Shape(
        options.conversations,
        options.turns,
        options.system_tokens,
        options.first_tokens,
        options.turn_tokens,
        options.answer_tokens,
        options.vocabulary,
    )
    if shape.vocabulary <= LEAST_TOKEN_ID or min(shape[:-1]) < 1:
        parser.error(f"--vocabulary has to be above {LEAST_TOKEN_ID}, and all other numbers of conversations 1 or more")
    policies = options.routers.split(",")
    if WITHOUT_ROUTER.intersection(policies) and "," not in options.servers:
        parser.error("direct and sticky take two servers or more: --servers")
    seeds = [int(seed) for seed in options.seeds.split(",")]
    table = Table(*COLUMNS, box=None, caption="ms, and of each run how many requests each worker computed")
    table.columns[COLUMNS.index("router")].no_wrap = True
    number = 0
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("runs", total=len(seeds) * len(options.think) * len(policies))
        for at, seed in enumerate(seeds):
            for load, think_s in options.think.items():
                # Each policy comes first, in the midst and last.
                for policy in policies[at % len(policies) :] + policies[: at % len(policies)]:
                    number += 1
                    found = asyncio.run(played(policy, options, shape, think_s, seed, number))
                    if options.json is not None:
                        with options.json.open("ab") as file:
                            row = {"load": load, "seed": seed, "router": policy, **found}
                            file.write(msgspec.json.encode(row) + b"\n")
                    table.add_row(load, str(seed), policy, *_cells(found))
                    progress.advance(task)
    Console().print(table)


def _cells(found: dict[str, Any]) -> list[str]:
    ttft_ms = found["ttft_ms"]
    return [
        *(f"{ttft_ms[each]:.0f}" for each in ("mean", "p50", "p99")),
        f"{found['later_turns_ttft_ms'].get('mean', 0.0):.0f}",
        f"{found['queued_ms']:.0f}",
        f"{found['reused_share']:.0%}",
        "" if found["error"] is None else f"{found['error']:.2f}",
        " ".join(f"{worker}:{count}" for worker, count in found["by_worker"].items()),
    ]


if __name__ == "__main__":
    main()
