"""Two global routers that share their state by a real NATS server: limits of tenants, and the bounds of the queue."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import pytest
from pydantic import ValidationError

from poolgrid.frontend.access import key_file
from poolgrid.frontend.access.key_file import KeyDocument, Tenant
from poolgrid.frontend.settings import FrontendSettings
from poolgrid.global_router.bootstrap import serve
from poolgrid.global_router.settings import GlobalRouterSettings
from tests.global_router.documents import disagg
from tests.nats.servers import BINARY, MISSING, one_server

OPERATOR = {"authorization": "Bearer pg-ops"}
ACME = {"authorization": "Bearer pg-acme"}
BODY = {"model": "tiny", "prompt": "some words", "max_tokens": 1}
TIMEOUT_S = 60.0


def written(directory: Path) -> tuple[Path, Path]:
    """Write a document of pools that are not there, and a file of keys; return where they are."""
    document, keys = directory / "pools.json", directory / "keys.json"
    document.write_text(json.dumps(disagg()))
    acme = Tenant(keys=(key_file.Key(key_file.hash_key("pg-acme")),), requests_per_minute=6000)
    ops = Tenant(keys=(key_file.Key(key_file.hash_key("pg-ops")),), operator=True)
    key_file.write(keys, KeyDocument(1, "5" * 64, {"acme": acme, "ops": ops}))
    return document, keys


async def limits_at(client: httpx.AsyncClient, url: str) -> tuple[int, int]:
    """Return what a global router lets wait, and what it lets a tenant ask in a minute."""
    queue = (await client.get(f"{url}/v1/pools", headers=OPERATOR)).json()["queue"]
    answer = await client.post(f"{url}/v1/completions", headers=ACME, json=BODY)
    return queue["requests_max"], int(answer.headers["x-ratelimit-limit-requests"])


async def until_limits(client: httpx.AsyncClient, url: str, wanted: tuple[int, int]) -> None:
    while await limits_at(client, url) != wanted:  # noqa: ASYNC110 - what the other one does announces nothing
        await asyncio.sleep(0.1)


@pytest.mark.e2e
@pytest.mark.skipif(not BINARY, reason=MISSING)
def test_two_global_routers_divide_the_limits_and_the_queue_and_one_that_is_left_has_all(tmp_path: Path) -> None:
    document, keys = written(tmp_path)

    async def scenario(url: str) -> None:
        settings = GlobalRouterSettings(
            config=document, port=0, names="nats", nats_url=(url,), share_state="nats", max_queue_requests=100
        )
        stops = [asyncio.Event() for _ in range(2)]
        urls: list[asyncio.Future[str]] = [asyncio.get_running_loop().create_future() for _ in stops]
        frontend = FrontendSettings(api_keys=keys)
        async with AsyncExitStack() as opened, asyncio.timeout(2 * TIMEOUT_S):
            client = await opened.enter_async_context(httpx.AsyncClient(trust_env=False, timeout=TIMEOUT_S))
            async with asyncio.TaskGroup() as group:
                for stop, there in zip(stops, urls, strict=True):
                    group.create_task(serve(settings, frontend, stop, there.set_result))
                first, second = [await there for there in urls]
                for each in (first, second):
                    await until_limits(client, each, (50, 3000))

                stops[1].set()

                await until_limits(client, first, (100, 6000))
                stops[0].set()

    with one_server() as server:
        asyncio.run(scenario(server.url))


def test_state_of_global_routers_is_shared_on_nats_only() -> None:
    with pytest.raises(ValidationError, match="share_state is nats and names is none"):
        GlobalRouterSettings.model_validate({"config": "x", "share_state": "nats"})
