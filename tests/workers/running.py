"""A whole worker on real sockets, in this process, for tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import httpx
import zmq
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from poolgrid.kernel.wire.card import WorkerCard
from poolgrid.kernel.wire.hashing import pack_tokens
from poolgrid.kernel.wire.requests import Generate
from poolgrid.kernel.worker_protocol.engine import Engine
from poolgrid.kernel.worker_protocol.push_stream import PushStream, PushTiming
from poolgrid.plugins.simulated.core.next_token import expected_output
from poolgrid.plugins.simulated.opening import make_card
from poolgrid.plugins.simulated.settings import SimulatedWorkerSettings
from poolgrid.server.process.clock import SystemClock
from poolgrid.server.process.settings import with_constants
from poolgrid.server.workers import bootstrap
from poolgrid.server.workers.adapters.sockets import CONSOLIDATOR, DealerSocket, RequestSocket
from poolgrid.server.workers.metrics import WorkerMetrics
from poolgrid.server.workers.publisher import EventPublisher
from poolgrid.server.workers.service import ServiceLimits, WorkerService
from poolgrid.server.workers.settings import WorkerProcessSettings
from tests.workers.builders import VOCABULARY
from tests.workers.fakes import PATIENCE_S, FakeConsolidator, FakeRouter, Journal, fake_router

S = TypeVar("S", bound=WorkerProcessSettings)


def expected(request: Generate) -> bytes:
    return pack_tokens(expected_output(request.token_ids, request.sampling, VOCABULARY))


@dataclass
class RunningWorker:
    """A worker under test, with its consolidator and one router connection."""

    journal: Journal
    consolidator: FakeConsolidator
    router: FakeRouter
    stop: asyncio.Event
    task: asyncio.Task[None]
    http_url: str

    @property
    def request_endpoint(self) -> str:
        return self.journal.cards[0].request_endpoint

    async def get(self, path: str) -> httpx.Response:
        async with httpx.AsyncClient() as client:
            return await client.get(self.http_url + path)

    async def post(self, path: str) -> httpx.Response:
        async with httpx.AsyncClient() as client:
            return await client.post(self.http_url + path)

    async def metric(self, name: str, **labels: str) -> float:
        text = (await self.get("/metrics")).text
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == name and sample.labels == labels:
                    return sample.value
        raise AssertionError(f"no sample {name}{labels} in\n{text}")

    async def ended(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await self.task


def make_settings(endpoint: str, **changes: object) -> SimulatedWorkerSettings:
    fields: dict[str, object] = {
        "worker_id": "w0",
        "served_model_name": "m",
        "consolidator": endpoint,
        "kv_block_size": 4,
        "total_kv_blocks": 256,
        "max_batch_size": 8,
        "max_num_tokens": 64,
        "max_seq_len": 4096,
        "vocabulary_size": VOCABULARY.size,
        "output_tokens_mean": 0,
        "first_token_id": VOCABULARY.first_token_id,
        "speedup": 50.0,
        "heartbeat_ms": 50,
    }
    return with_constants(SimulatedWorkerSettings, fields | changes)


@asynccontextmanager
async def running_worker(**changes: object) -> AsyncIterator[RunningWorker]:
    journal = Journal()
    async with FakeConsolidator(journal) as consolidator:
        stop = asyncio.Event()
        ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(
            bootstrap.serve(make_settings(consolidator.endpoint, **changes), stop, ready.set_result)
        )
        try:
            async with asyncio.timeout(PATIENCE_S):
                either: set[asyncio.Future[Any]] = {task, ready}
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
            async with fake_router(journal.cards[0].request_endpoint) as router:
                yield RunningWorker(journal, consolidator, router, stop, task, ready.result())
        finally:
            task.cancel()
            await asyncio.wait({task})


class Assembled(NamedTuple):
    """A worker around an engine of a test, that the test runs."""

    consolidator: FakeConsolidator
    card: WorkerCard
    service: WorkerService
    socket: RequestSocket
    publisher: EventPublisher
    registry: CollectorRegistry

    def run(self, stop: asyncio.Event) -> asyncio.Task[None]:
        return asyncio.create_task(self.service.run([self.publisher], stop))


@asynccontextmanager
async def assembled(
    engine: Engine, limits: ServiceLimits | None = None, timing: PushTiming | None = None
) -> AsyncIterator[Assembled]:
    clock, registry = SystemClock(), CollectorRegistry()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    metrics = WorkerMetrics(registry)
    async with FakeConsolidator(Journal()) as consolidator:
        socket = RequestSocket(context, "127.0.0.1", 0)
        card = make_card(make_settings(consolidator.endpoint), socket.port, 0)
        service = WorkerService("w0", 5, card, engine, socket, limits or ServiceLimits(), clock, metrics)
        stream = PushStream("w0", 0, 5, card, timing)
        publisher = EventPublisher(
            partial(DealerSocket, context, CONSOLIDATOR),
            consolidator.endpoint,
            stream,
            service.restate,
            clock,
            metrics,
            100,
        )
        yield Assembled(consolidator, card, service, socket, publisher, registry)
        socket.close(orderly=False)
        publisher.close(orderly=False)
    context.term()
