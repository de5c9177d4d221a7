"""What a worker notices of its server besides cache events: names, keys, block sizes."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from tests.fakes.engine_server.vllm import Options
from tests.workers.fakes import PATIENCE_S
from tests.workers.server.running import engine_server, worker_before


async def test_adapters_and_names_that_come_and_go_are_followed() -> None:
    options = Options()
    async with engine_server(options) as server, worker_before(server) as front:
        options.adapters, options.aliases = ("sql", "x" * 300), ("tiny-latest",)
        await front.consolidator.until(lambda journal: len(journal.cards) > 1)
        assert (front.journal.cards[-1].loras, front.journal.cards[-1].aliases) == (("sql",), ("tiny-latest",))
        options.adapters = ()
        await front.consolidator.until(lambda journal: not journal.cards[-1].loras)


@pytest.mark.parametrize(("key", "said"), [("", "engine_api_key is missing"), ("wrong", "engine_api_key is not the")])
async def test_a_worker_whose_key_is_refused_does_not_start(key: str, said: str) -> None:
    async with engine_server(Options(key="right")) as server:
        with pytest.raises(ValueError, match=said):
            async with worker_before(server, engine_api_key=key):
                pass


async def test_a_worker_whose_key_is_refused_later_leaves_the_pool_until_it_is_taken(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with (
        engine_server(Options(key="right")) as server,
        worker_before(server, engine_api_key="right") as front,
    ):
        server.options.key = "other"
        await front.consolidator.until(lambda journal: journal.goodbyes)
        server.options.key = "right"
        await front.consolidator.until(lambda journal: len(journal.cards) > 1)
    assert "engine_api_key is not the one" in caplog.text


async def test_a_server_that_answers_late_how_it_is_is_not_given_up_while_its_cache_changes() -> None:
    options = Options(step_s=0.02)
    async with engine_server(options) as server, worker_before(server, health_timeout_ms=400) as front:
        asking = asyncio.create_task(front.ask("r", [1, 2, 3], 120))
        async with asyncio.timeout(PATIENCE_S):
            while not server.running:  # noqa: ASYNC110 - the fake counts, and has no event for it
                await asyncio.sleep(0.01)
        options.health_s = 1.0
        await asking
        assert not front.journal.goodbyes
        await front.consolidator.until(lambda journal: journal.goodbyes)  # now nothing shows that it lives


def test_blocks_of_another_size_than_was_given_are_an_error_that_names_the_option(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        async with engine_server() as server, worker_before(server, kv_block_size=16) as front:
            await front.ask("r", list(range(40)), 4)
            async with asyncio.timeout(PATIENCE_S), httpx.AsyncClient() as client:
                while True:
                    health = (await client.get(f"{front.http_url}/health")).json()
                    if "kv_block_size 4" in health["engine_server"]["events"][0]["reason"]:
                        return
                    await asyncio.sleep(0.02)

    asyncio.run(scenario())
    assert "stores blocks of 4 tokens, and its label has 16" in caplog.text
