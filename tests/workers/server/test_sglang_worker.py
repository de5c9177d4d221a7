"""A worker in front of SGLang's server: of ours, which follows the published protocol."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import zmq.asyncio

from poolgrid.kernel.wire.events import RequestFinished
from tests.fakes.engine_server.sglang import SglangServer
from tests.fakes.engine_server.vllm import answer_of
from tests.workers.server.running import worker_before


@asynccontextmanager
async def sglang_server(**how: Any) -> AsyncIterator[SglangServer]:
    context = zmq.asyncio.Context()
    server = SglangServer(context, **how)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()
        context.destroy(linger=0)


@pytest.mark.parametrize("version", ["0.5.9", "0.5.23"])
async def test_a_worker_learns_its_server_and_the_index_is_what_it_holds(version: str) -> None:
    async with sglang_server(version=version) as server, worker_before(server, "sglang") as front:
        card = front.journal.cards[0]
        assert (card.engine, card.block_size, card.limits.total_kv_blocks) == (f"SGLang {version}", 4, 512)
        assert (card.limits.max_batch_size, card.limits.max_num_tokens) == (64, 2048)
        assert (card.server_url, card.server_kind, card.kv_bootstrap_port) == (server.url, "sglang", 0)
        prompt = list(range(10, 31))
        for name in ("cold", "warm"):
            assert await front.ask(name, prompt, 6) == answer_of(prompt, 6)
        await front.settled()
        await front.consolidator.until(lambda journal: RequestFinished("warm", "length", 20) in journal.events)


async def test_a_server_that_was_started_for_a_leg_says_so_on_its_card() -> None:
    async with sglang_server(role="decode") as server:
        async with worker_before(server, "sglang", role="decode") as front:
            card = front.journal.cards[0]
            assert (card.decodes_only, card.kv_bootstrap_port) == (True, 0)
        with pytest.raises(ValueError, match=r"role is 'aggregated', and SGLang at .* was started for 'decode'"):
            async with worker_before(server, "sglang"):
                pass
    async with sglang_server(role="prefill") as server, worker_before(server, "sglang", role="prefill") as front:
        assert front.journal.cards[0].kv_bootstrap_port == 8998
