"""Engines that publish themselves, followed for long: dropped frames, replays, and not a block too many or too few.

20,000 blocks by default; for the million, of which a quarter is held at any time:

    POOLGRID_PUB_BLOCKS=1000000 python -m pytest -s tests/consolidator/test_pub_at_length.py
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import zmq.asyncio

from poolgrid.kernel.wire.identifiers import Tier
from tests.consolidator.pub_engine import BLOCK, Cache, PubEngine
from tests.consolidator.test_service import Reader, sources_file, started

BLOCKS = int(os.environ.get("POOLGRID_PUB_BLOCKS", "20000"))
CHAINS_PER_FRAME = 4
BLOCKS_PER_CHAIN_MAX = 64
FRAMES_PER_ROUND = 25
LOST_FRAMES = 0.2
PREFIXES = 16


@pytest.mark.parametrize("dialect", ["vllm", "trtllm"])
async def test_a_pub_engine_is_followed_at_length_without_loss(tmp_path: Path, dialect: str) -> None:
    async def scenario(context: zmq.asyncio.Context) -> None:
        source = random.Random(f"{dialect} {BLOCKS}")
        engine, cache = PubEngine(context), Cache(dialect)
        prefixes = [[source.randrange(32_000) for _ in range(8 * BLOCK)] for _ in range(PREFIXES)]
        replays = asyncio.create_task(engine.answer_replays(dialect))
        service = await started(pub_sources=sources_file(tmp_path, engine), lease_ms=60_000)
        reader = Reader()
        service.subscribe(reader)
        (shell,) = service.sources()
        await engine.subscribed()
        device = cache.truth[Tier.DEVICE]
        stored = frames = lost = 0

        def events() -> list[Any]:
            nonlocal stored
            made = []
            for _ in range(CHAINS_PER_FRAME):
                before = len(device)
                tail = BLOCK * source.randrange(1, BLOCKS_PER_CHAIN_MAX)
                made += cache.store_missing(
                    [*source.choice(prefixes), *(source.randrange(32_000) for _ in range(tail))]
                )
                stored += len(device) - before
            if len(device) > max(BLOCKS // 4, 1000):
                made.append(cache.evict(len(device) // 8))
            return made

        began = time.monotonic()
        while stored < BLOCKS:
            for _ in range(FRAMES_PER_ROUND):
                is_lost = source.random() < LOST_FRAMES
                await engine.publish(events(), lose=is_lost)
                await asyncio.sleep(0)  # an engine does other things too
                frames += 1
                lost += is_lost
            # The last of a round always arrives, so that a hole before it is seen.
            await engine.publish([cache.store([source.randrange(32_000) for _ in range(BLOCK)])])
            newest = next(reversed(device.values()))
            await reader.until(lambda newest=newest: newest in reader.view.get("e", {}).get(Tier.DEVICE, ()))  # type: ignore[misc]
        elapsed_s = time.monotonic() - began
        sys.stdout.write(
            f"\n{dialect}: {stored} blocks in {frames} frames, {lost} of them lost on the way and replayed, "
            f"{shell.counts['source_replays']} replays, {len(device)} blocks held at the end, {elapsed_s:.1f} s\n"
        )

        assert reader.view == {"e": cache.held()}
        assert lost > 0
        assert shell.counts["source_gaps"] > 0
        assert shell.counts["source_losses"] == 0
        assert shell.counts["source_ignored_blocks"] == 0
        assert not shell.degraded
        replays.cancel()
        with suppress(asyncio.CancelledError):
            await replays
        engine.close()
        await service.stop()

    context = zmq.asyncio.Context()
    try:
        async with asyncio.timeout(30 + BLOCKS / 1000):
            await scenario(context)
    finally:
        context.destroy(linger=0)
