"""Waiting for what is looked at twice a second."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from poolgrid.kernel.wire.addresses import parse_name
from poolgrid.server.discovery.discovery import Discovery

HTTP = parse_name("dyn://blue.router.http")


async def until(holds: Callable[[], bool]) -> None:
    tick = asyncio.Event()
    async with asyncio.timeout(60):
        while not holds():
            asyncio.get_running_loop().call_later(0.02, tick.set)
            await tick.wait()
            tick.clear()


async def until_found(names: Discovery, count: int) -> list[str]:
    await until(lambda: len(names.addresses(HTTP)) == count)
    return names.addresses(HTTP)
