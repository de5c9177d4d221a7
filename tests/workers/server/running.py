"""A worker in front of an engine server of ours, with its consolidator and one router connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import zmq.asyncio

from poolgrid.kernel.wire.events import (
    FOLLOWED_GROUP,
    AnyEvent,
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    SnapshotBegan,
)
from poolgrid.kernel.wire.hashing import unpack_hashes
from poolgrid.kernel.wire.requests import ForwardBegan, Forwarded, ForwardEnded
from poolgrid.server.process.settings import with_constants
from poolgrid.server.workers import bootstrap
from poolgrid.server.workers.engines.registry import engine_definition
from tests.fakes.engine_server.vllm import Options, VllmServer
from tests.workers.fakes import PATIENCE_S, FakeConsolidator, FakeRouter, Journal, fake_router


def index_of(events: Iterable[AnyEvent]) -> set[int]:
    """What a router holds of a worker after its events, blocks named with the tokens behind them left out."""
    held: set[int] = set()
    for event in events:
        if isinstance(event, BlocksStored | BlocksRemoved) and event.group == FOLLOWED_GROUP:
            continue
        if isinstance(event, BlocksStored):
            held.update(unpack_hashes(event.sequence_hashes))
        elif isinstance(event, BlocksRemoved):
            held.difference_update(unpack_hashes(event.sequence_hashes))
        elif isinstance(event, CacheCleared | SnapshotBegan):
            held.clear()
    return held


@dataclass
class Running:
    """A worker, however it came to its server."""

    journal: Journal
    consolidator: FakeConsolidator
    router: FakeRouter
    http_url: str
    task: asyncio.Task[None]
    stop: asyncio.Event


@dataclass
class Front(Running):
    """A worker in front of a server."""

    server: VllmServer

    async def ask(
        self, name: str, prompt: Sequence[int], max_tokens: int = 1, reports_end: bool = True, **more: Any
    ) -> list[int]:
        """Send a request to the server and report it to the worker, as a router does; return the tokens."""
        await self.router.send(Forwarded(began=(ForwardBegan(name, 0, len(prompt), 0),)))
        body = {"model": "tiny", "prompt": list(prompt), "max_tokens": max_tokens, "return_token_ids": True, **more}
        async with httpx.AsyncClient(base_url=self.server.url, timeout=PATIENCE_S) as client:
            answer = await client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        said = answer.json()
        cached = said["usage"]["prompt_tokens_details"]["cached_tokens"]
        await self.router.send(Forwarded(computed=(name,)))
        if reports_end:
            await self.router.send(Forwarded(ended=(ForwardEnded(name, 0, "length", cached),)))
        tokens: list[int] = said["choices"][0]["token_ids"]
        return tokens

    async def settled(self) -> None:
        """Wait until the worker has told exactly what the server holds."""
        await self.consolidator.until(lambda journal: index_of(journal.events) == self.server.caches[0].names())


@asynccontextmanager
async def engine_server(options: Options | None = None) -> AsyncIterator[VllmServer]:
    context = zmq.asyncio.Context()
    server = VllmServer(context, options)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()
        context.destroy(linger=0)


@asynccontextmanager
async def worker_before(server: VllmServer, engine: str = "vllm", **changes: Any) -> AsyncIterator[Front]:
    async with worker_with(engine, engine_url=(server.url,), **changes) as running:
        yield Front(**vars(running), server=server)


@asynccontextmanager
async def worker_with(engine: str = "vllm", **changes: Any) -> AsyncIterator[Running]:
    journal = Journal()
    async with FakeConsolidator(journal) as consolidator:
        settings = with_constants(
            engine_definition(engine).settings,
            {
                "consolidator": consolidator.endpoint,
                "heartbeat_ms": 50,
                "health_interval_ms": 50,
                **changes,
            },
        )
        stop = asyncio.Event()
        ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(bootstrap.serve(settings, stop, ready.set_result))
        try:
            async with asyncio.timeout(PATIENCE_S):
                either: set[asyncio.Future[Any]] = {task, ready}
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
            async with fake_router(journal.cards[0].request_endpoint) as router:
                yield Running(journal, consolidator, router, ready.result(), task, stop)
        finally:
            task.cancel()
            await asyncio.wait({task})
