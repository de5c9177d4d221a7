"""Can one tenant tell by timing what another has sent? Each cache by itself, and whole requests to a real pool.

    python -m lab.benchmarks.tenant_timing                        # exits with 1 when anything is told apart
    python -m lab.benchmarks.tenant_timing --caches media --sizes 2000
    python -m lab.benchmarks.tenant_timing --one-tenant           # both are one tenant: what the measurement finds then

A victim sends something, an attacker times something: what the victim has just sent, or something else of the same
size, in an order that is drawn. Half of each text's words are made up for it, so that caches of words would show too.

Rules
    1. ``tokenization``, ``paths`` and ``media`` are timed in this process, where nothing but the cache is in the
       figure; ``requests`` are over HTTP, through a router with API keys to workers that take time for what they have
       not cached, so that the prefix cache shows most.
    2. Victim and attacker go in blocks, so that what was sent last is not what is timed next. Equal texts are never
       one object: its hash would be kept in it.
    3. A row is told apart when the rank test's p is below ``SIGNIFICANCE``.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx
from prometheus_client import CollectorRegistry

from lab.attacks.media import png, serving
from lab.attacks.pool import AttackedPool, Shape
from lab.benchmarks.rank_test import accuracy, area
from lab.benchmarks.soak_requests import WORDS
from poolgrid.kernel.requests.inference import CacheDomain, CacheShares, InferenceRequest
from poolgrid.kernel.wire.hashing import hash_seed
from poolgrid.kernel.wire.requests import Sampling
from poolgrid.server.frontend.media.loader import MediaLoader, MediaMetrics
from poolgrid.server.frontend.media.references import read_reference
from poolgrid.server.frontend.media.settings import MediaSettings
from poolgrid.server.frontend.models import TINY_MODEL_PATH
from poolgrid.server.frontend.prompt_model import PromptModel
from poolgrid.server.process.clock import SystemClock
from poolgrid.server.serving.prompt_paths import TenantPaths

SAMPLES = 200
"""On each side: a difference of a third of a standard deviation is found nine times of ten."""

SIZES_BYTES = (2_000, 23_000, 100_000)
SIGNIFICANCE = 0.001
"""Of one row. With twelve rows a run without any leak fails once in eighty."""

BLOCK = 10
WARM = 40
"""Rounds before the first that counts."""

VICTIM, ATTACKER = "victim", "attacker"
SHARES = CacheShares(2, 1)

Ask = Callable[[str], Awaitable[None]]
"""Asks for one thing, as a tenant."""

Things = Callable[[int], Ask]
"""Makes the thing of a number, always anew and always the same."""


class Row(NamedTuple):
    """What was found of one cache at one size."""

    name: str
    size: int
    samples: int
    seen_ms: float
    """Median of what the victim had sent."""
    unseen_ms: float
    accuracy: float
    """Of a classifier that chooses a threshold; 0.5 is chance."""
    area: float
    p_value: float

    @property
    def told_apart(self) -> bool:
        """Return whether the attacker knows more than chance."""
        return self.p_value < SIGNIFICANCE


async def measure(
    caches: Sequence[str] = (), sizes: Sequence[int] = SIZES_BYTES, samples: int = SAMPLES, one_tenant: bool = False
) -> list[Row]:
    """Return a row for each of ``caches`` (all by default) and sizes."""
    rows = []
    for name in caches or tuple(CACHES):
        for size in sizes:
            source = random.Random(f"{name} {size}")
            async with CACHES[name](size, source) as things:
                rows.append(await _compared(name, size, samples, things, source, VICTIM if one_tenant else ATTACKER))
    return rows


async def _compared(name: str, size: int, samples: int, things: Things, source: random.Random, attacker: str) -> Row:
    took: tuple[list[float], list[float]] = ([], [])
    sides = [0, 1] * (samples // 2) + [0, 1] * (samples - samples // 2)
    source.shuffle(sides)
    number = 0
    for _ in range(WARM):
        await things(number)(attacker)
        number += 1
    with _quiet():
        for at in range(0, len(sides), BLOCK):
            block: list[tuple[int, int]] = []
            for side in sides[at : at + BLOCK]:
                await things(number)(VICTIM)
                block.append((side, number + side))
                number += 2
            for side, wanted in block:
                ask = things(wanted)
                began = time.perf_counter()
                await ask(attacker)
                took[side].append(time.perf_counter() - began)
    seen, unseen = took
    medians = [sorted(side)[len(side) // 2] * 1000 for side in took]
    return Row(name, size, samples, medians[0], medians[1], accuracy(seen, unseen), *area(seen, unseen))


@contextmanager
def _quiet() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _text(source_seed: str, size: int) -> str:
    """Return a text of about ``size`` bytes, in segments as chats have them; the same seed gives the same, anew."""
    source = random.Random(source_seed)
    words: list[str] = []
    length = 0
    while length < size:
        if len(words) % 100 == 0:
            words.append("<|im_start|>user\n")
        made_up = "".join(source.choices("abcdefghijklmnopqrstuvwxyz", k=source.randint(4, 10)))
        words.append(made_up if source.random() < 0.5 else source.choice(WORDS))
        length += len(words[-1]) + 1
    return " ".join(words)


@asynccontextmanager
async def _tokenization(size: int, source: random.Random) -> AsyncIterator[Things]:
    model = PromptModel.load(TINY_MODEL_PATH, word_cache=False)
    seed = source.random()

    def thing(number: int) -> Ask:
        text = _text(f"{seed} {number}", size)

        async def ask(tenant: str) -> None:
            model.encode(text, domain=CacheDomain(tenant, "", SHARES))

        return ask

    yield thing


@asynccontextmanager
async def _paths(size: int, source: random.Random) -> AsyncIterator[Things]:
    paths = TenantPaths()
    seed = source.random()

    def thing(number: int) -> Ask:
        tokens = random.Random(f"{seed} {number}").randbytes(size // 4 * 4)

        async def ask(tenant: str) -> None:
            request = InferenceRequest(
                "r", "m", tokens, Sampling(1), tenant=tenant, cache_salt=tenant, cache_shares=SHARES
            )
            paths.of(request).path(tokens, 32, hash_seed("", tenant))

        return ask

    yield thing


@asynccontextmanager
async def _media(size: int, source: random.Random) -> AsyncIterator[Things]:
    settings = MediaSettings(media_allowed_networks=("127.0.0.0/8",), media_allowed_schemes=("http",))
    loader = MediaLoader(settings, MediaMetrics(CollectorRegistry()), SystemClock())
    picture = png(4, 4, source.randbytes(size))
    try:
        async with serving({"/picture": (picture, "image/png")}) as url:

            def thing(number: int) -> Ask:
                reference = read_reference(f"{url}/picture?{number}", "messages")

                async def ask(tenant: str) -> None:
                    lease = loader.lease()
                    try:
                        await loader.load([reference], lease, CacheDomain(tenant, "", SHARES))
                    finally:
                        lease.close()

                return ask

            yield thing
    finally:
        await loader.close()


@asynccontextmanager
async def _requests(size: int, source: random.Random) -> AsyncIterator[Things]:
    seed = source.random()
    with tempfile.TemporaryDirectory(prefix="poolgrid-timing-") as directory:
        # Ten times as fast as a real worker, which is still slow; room for what a block of requests leaves.
        shape = Shape("embedded", worker=("--total-kv-blocks", "65536"), speedup=10.0)
        pool = AttackedPool(shape, Path(directory))
        try:
            await pool.start()
            tenants = {VICTIM: "neighbour", ATTACKER: "attacker"}
            clients = {
                name: httpx.AsyncClient(base_url=pool.url, headers=pool.tenant(tenant), timeout=60, trust_env=False)
                for name, tenant in tenants.items()
            }

            def thing(number: int) -> Ask:
                body = {"model": pool.model.name, "prompt": _text(f"{seed} {number}", size), "max_tokens": 1}

                async def ask(tenant: str) -> None:
                    (await clients[tenant].post("/v1/completions", json=body)).raise_for_status()

                return ask

            yield thing
            for client in clients.values():
                await client.aclose()
        finally:
            await pool.stop()


CACHES = {"tokenization": _tokenization, "paths": _paths, "media": _media, "requests": _requests}
"""``requests`` are whole ones: the prefix cache with all the others."""


def main() -> None:
    """Measure, print a table, and exit with 1 when something was told apart."""
    parser = argparse.ArgumentParser(description="Whether a tenant can tell by timing what another has sent.")
    parser.add_argument("--caches", default=",".join(CACHES), help="comma-separated (default: %(default)s)")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES_BYTES)), help="bytes (default: %(default)s)")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="on each side (default: %(default)s)")
    parser.add_argument("--one-tenant", action="store_true", help="let both be one tenant: all must be told apart")
    options = parser.parse_args()
    caches = options.caches.split(",")
    sizes = [int(size) for size in options.sizes.split(",")]
    rows = asyncio.run(measure(caches, sizes, options.samples, options.one_tenant))
    sys.stdout.write("cache         bytes    seen ms  unseen ms  accuracy   area        p\n")
    for row in rows:
        sys.stdout.write(
            f"{row.name:<12} {row.size:>6} {row.seen_ms:>10.3f} {row.unseen_ms:>10.3f} {row.accuracy:>9.2f} "
            f"{row.area:>6.3f} {row.p_value:>8.2g}{'  told apart' if row.told_apart else ''}\n"
        )
    sys.exit(any(row.told_apart for row in rows))


if __name__ == "__main__":
    main()
