"""A worker whose engine is silent leaves the pool, and comes back in another life with all that its cache holds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from poolgrid.kernel.wire.events import BlocksStored, LoadReported, RequestFinished, RequestStarted, SnapshotBegan
from poolgrid.kernel.wire.hashing import pack_hashes
from poolgrid.kernel.wire.requests import FinishReason, Generate, Ping, RefusalKind, TokenDelta
from poolgrid.kernel.worker_protocol.engine import EngineReport, RankReport
from poolgrid.kernel.worker_protocol.push_stream import PushTiming
from poolgrid.server.workers.service import ServiceLimits, WorkerService
from tests.workers.builders import make_request
from tests.workers.fakes import FakeConsolidator, FakeRouter, Journal, QuietEngine, fake_router
from tests.workers.running import assembled

HELD = BlocksStored(None, pack_hashes([7, 8]))


class FallingSilent(QuietEngine):
    """An engine that takes requests and, when told to, says nothing more until it wakes."""

    def __init__(self) -> None:
        self._requests: list[str] = []
        self._deliver: Callable[[EngineReport], None] = lambda report: None

    async def run(self, deliver: Callable[[EngineReport], None]) -> None:
        self._deliver = deliver
        await asyncio.Event().wait()

    def submit(self, request: Generate) -> None:
        self._requests.append(request.request_id)
        started = RequestStarted(request.request_id, 3, 0, 1)
        token = TokenDelta(request.request_id, 0, b"\x01\x00\x00\x00")
        report = EngineReport([token], {0: RankReport([started], self.load(0))})
        asyncio.get_running_loop().call_soon(self._deliver, report)

    def fall_silent(self) -> None:
        self.unhealthy_reason, self.is_silent = "nothing comes back", True
        deltas = [
            TokenDelta(name, 1, b"", FinishReason.ERROR, error="silent", refusal=RefusalKind.BROKEN)
            for name in self._requests
        ]
        ends = [RequestFinished(name, "error") for name in self._requests]
        self._requests = []
        self._deliver(EngineReport(deltas, {0: RankReport([*ends], self.load(0))}))
        self.changed()

    def wake(self) -> None:
        self.unhealthy_reason, self.is_silent = "", False
        self.changed()

    def load(self, dp_rank: int) -> LoadReported:
        return LoadReported(len(self._requests), 0, 0, 0, 2, 9)

    def resident_blocks(self, dp_rank: int) -> list[BlocksStored]:
        return [HELD]


@dataclass
class Scene:
    engine: FallingSilent
    service: WorkerService
    consolidator: FakeConsolidator
    journal: Journal
    router: FakeRouter
    stop: asyncio.Event
    running: asyncio.Task[None]


@asynccontextmanager
async def scene(drain_timeout_ms: float = 30_000.0) -> AsyncIterator[Scene]:
    engine, stop = FallingSilent(), asyncio.Event()
    async with assembled(
        engine, ServiceLimits(drain_timeout_ms=drain_timeout_ms), PushTiming(heartbeat_ms=50)
    ) as worker:
        running, consolidator = worker.run(stop), worker.consolidator
        try:
            async with fake_router(worker.card.request_endpoint) as router:
                await worker.publisher.until_registered()
                yield Scene(engine, worker.service, consolidator, consolidator.journal, router, stop, running)
        finally:
            running.cancel()
            await asyncio.wait({running})


async def test_a_worker_leaves_while_its_engine_is_silent_and_comes_back_in_another_life() -> None:
    async with scene() as at:
        await at.router.send(make_request("r"))
        await at.router.until_started("r")
        at.engine.fall_silent()
        await at.router.until_finished("r")
        assert at.router.last("r").refusal is RefusalKind.BROKEN
        await at.consolidator.until(lambda journal: journal.goodbyes)
        assert at.journal.goodbyes == ["the engine of w0 does not answer: nothing comes back"]
        assert at.journal.events[-2] == RequestFinished("r", "error"), "what ended is told before"
        assert not at.service.is_ready
        await at.router.send(make_request("s"))
        await at.router.until_finished("s")
        assert "is not well" in (at.router.last("s").error or "")
        at.engine.wake()
        await at.consolidator.until(lambda journal: journal.epoch == 6 and journal.next_seq > 0)
        restated = [event for batch in at.journal.batches if batch.epoch == 6 for event in batch.events]
        assert isinstance(restated[0], SnapshotBegan)
        assert HELD in restated
        await at.router.send(make_request("t"))
        await at.router.until_started("t")
        await at.router.send(Ping(1))
        assert (await at.router.pong()).epoch == 6
        assert at.service.is_ready


async def test_a_drain_ends_while_the_engine_is_silent() -> None:
    async with scene() as at:
        at.engine.fall_silent()
        await at.consolidator.until(lambda journal: journal.goodbyes)
        at.stop.set()
        await at.running
        assert len(at.journal.goodbyes) == 1, "it has left already"


async def test_a_drain_hands_over_what_the_engine_does_not_end() -> None:
    async with scene(drain_timeout_ms=10.0) as at:
        await at.router.send(make_request("r"))
        await at.router.until_started("r")
        at.stop.set()
        await at.router.until_finished("r")
        assert at.router.last("r").refusal is RefusalKind.DRAINING
        await at.running


async def test_one_that_wakes_while_it_drains_does_not_rejoin() -> None:
    async with scene(drain_timeout_ms=200.0) as at:
        await at.router.send(make_request("r"))
        await at.router.until_started("r")
        at.engine._requests.clear()  # it keeps the request for itself
        at.stop.set()
        await at.router.send(Ping(1))
        while not (await at.router.pong()).draining:
            await at.router.send(Ping(1))
        at.engine.fall_silent()
        at.engine.wake()
        await at.running
        assert at.journal.epoch == 5
