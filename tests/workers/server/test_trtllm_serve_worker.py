"""A worker in front of trtllm-serve: of ours, which follows the published protocol."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import zmq.asyncio

from poolgrid.kernel.wire.events import BlocksStored, CacheCleared, RequestFinished
from tests.fakes.engine_server.trtllm_serve import TrtllmServe
from tests.fakes.engine_server.vllm import Options, answer_of
from tests.workers.server.running import worker_before


@asynccontextmanager
async def serving(options: Options | None = None, kind: type[TrtllmServe] = TrtllmServe) -> AsyncIterator[TrtllmServe]:
    context = zmq.asyncio.Context()
    server = kind(context, options)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()
        context.destroy(linger=0)


async def test_the_drained_events_are_the_index() -> None:
    async with (
        serving(Options(blocks=32)) as server,
        worker_before(server, "trtllm-serve", kv_block_size=4) as front,
    ):
        assert (front.journal.cards[0].engine, front.journal.cards[0].block_size) == ("trtllm-serve 1.3.0", 4)
        prompt = list(range(10, 31))
        for name in ("cold", "warm"):
            assert await front.ask(name, prompt, 6) == answer_of(prompt, 6)
        await front.consolidator.until(lambda journal: RequestFinished("warm", "length", 20) in journal.events)
        for number in range(12):  # evicts
            await front.ask(f"r{number}", [number] * 20, 9)
        await front.settled()
        # What another reader takes away is a hole: claims are taken back, and learnt again.
        server.events.clear()
        await server.stop()
        await front.consolidator.until(lambda journal: journal.goodbyes)
        await server.start()
        await front.consolidator.until(lambda journal: len(journal.cards) > 1)
        await front.settled()


class FannedOut(TrtllmServe):
    """A server of 1.4: it passes on what is stored and removed, so that its numbers have holes."""

    version = "1.4.0rc4"

    def _say(self, data: dict[str, Any]) -> None:
        super()._say(data)
        self._event_id += 3
        self.events = [event for event in self.events if event["data"]["type"] != "created"]


async def test_the_holes_of_a_fan_out_are_no_losses() -> None:
    async with (
        serving(Options(blocks=32), FannedOut) as server,
        worker_before(server, "trtllm-serve", kv_block_size=4) as front,
    ):
        for number in range(12):  # evicts
            await front.ask(f"r{number}", [number] * 20, 9)
        await front.settled()
        assert CacheCleared() not in front.journal.events


async def test_a_server_that_does_not_say_its_block_size_is_routed_to_without_its_events(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serving() as server, worker_before(server, "trtllm-serve") as front:
        assert front.journal.cards[0].block_size == 16
        prompt = list(range(10, 60))
        await front.ask("r", prompt, 2)
        await front.consolidator.until(lambda journal: RequestFinished in map(type, journal.events))
        assert BlocksStored not in map(type, front.journal.events), "their size is not known"
        assert "it does not report its block size: give kv_block_size" in caplog.text
