"""A mock worker on the real planes: as cheap as a mock HTTP server, so that the router before it saturates.

    python -m benchmarks.http_worker CONSOLIDATOR_ENDPOINT WORKER_ID BLOCK_SIZE [STEP_MS]

The worker service, its request plane and its event stream are the real ones; the engine computes nothing: each step
gives every request one token, as fast as steps can follow each other or every ``STEP_MS``, and its events are those of
a real engine.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import uvloop
import zmq
from prometheus_client import CollectorRegistry

from poolgrid.runtime.clock import SystemClock
from poolgrid.wire.card import WorkerCard, WorkerLimits
from poolgrid.wire.events import (
    AnyEvent,
    BlocksRemoved,
    BlocksStored,
    LoadReported,
    PrefillCompleted,
    RequestFinished,
    RequestProgressed,
    RequestStarted,
)
from poolgrid.wire.hashing import block_hashes, hash_seed, pack_hashes, sequence_hashes
from poolgrid.wire.identifiers import Role
from poolgrid.wire.requests import FinishReason, Generate, TokenDelta
from poolgrid.workers.adapters.sockets import RequestSocket
from poolgrid.workers.core.push_stream import PushStream, PushTiming
from poolgrid.workers.engines.lifecycle.always_well import AlwaysWell
from poolgrid.workers.engines.protocol import EngineReport, RankReport
from poolgrid.workers.metrics import WorkerMetrics
from poolgrid.workers.publisher import EventPublisher
from poolgrid.workers.service import ServiceLimits, WorkerService

TOTAL_BLOCKS = 65_536
TOKEN_IDS = [(1000 + at).to_bytes(4, "little") for at in range(4096)]


@dataclass(slots=True)
class _Running:
    request: Generate
    blocks: int
    produced: int = 0


class MockEngine(AlwaysWell):
    """``poolgrid.workers.engines.protocol.Engine`` that computes nothing."""

    def __init__(self, block_size: int, step_ms: float = 0.0) -> None:
        self._block_size = block_size
        self._step_s = step_ms / 1000
        self._waiting: list[Generate] = []
        self._running: dict[str, _Running] = {}
        self._cancelled: list[str] = []
        self._cache: OrderedDict[int, None] = OrderedDict()
        self._wake = asyncio.Event()

    @property
    def dp_size(self) -> int:
        """One rank."""
        return 1

    def describe(self) -> dict[str, object]:
        """Nothing is special about it."""
        return {}

    def submit(self, request: Generate) -> None:
        """Take a request."""
        self._waiting.append(request)
        self._wake.set()

    def cancel(self, request_id: str) -> None:
        """Stop a request at the next step."""
        self._cancelled.append(request_id)
        self._wake.set()

    def load(self, dp_rank: int = 0) -> LoadReported:
        """Return the statistics now."""
        return LoadReported(len(self._running), len(self._waiting), 0, 0, len(self._cache), TOTAL_BLOCKS)

    def resident_blocks(self, dp_rank: int = 0) -> list[BlocksStored]:
        """Return nothing: nobody compares this engine's cache with an index."""
        return []

    def restate(self, dp_rank: int = 0) -> list[BlocksStored]:
        """Return nothing."""
        return []

    async def run(self, deliver: Callable[[EngineReport], None]) -> None:
        """Step as long as there is something to do."""
        loop = asyncio.get_running_loop()
        due_s = 0.0
        while True:
            if not self._waiting and not self._running:
                self._wake.clear()
                await self._wake.wait()
                due_s = loop.time()
            deliver(self._step())
            # On a clock of its own: a step that came late does not make the next ones late.
            due_s += self._step_s
            await asyncio.sleep(max(0.0, due_s - loop.time()))

    def _step(self) -> EngineReport:
        deltas: list[TokenDelta] = []
        events: list[AnyEvent] = []
        for request_id in self._cancelled:
            if self._running.pop(request_id, None) is not None:
                deltas.append(TokenDelta(request_id, 0, b"", FinishReason.CANCELLED))
                events.append(RequestFinished(request_id, "cancelled"))
        self._cancelled.clear()
        waiting, self._waiting = self._waiting, []
        for request in waiting:
            cached = self._admit(request, events)
            deltas.append(self._token(self._running[request.request_id], events, cached))
        started = {request.request_id for request in waiting}
        for request_id, running in list(self._running.items()):
            if request_id not in started:
                deltas.append(self._token(running, events))
        return EngineReport(deltas, {0: RankReport(events, self.load())})

    def _admit(self, request: Generate, events: list[AnyEvent]) -> int:
        """Take a request into the batch; return how many of its prompt tokens are in the cache."""
        routing = request.routing
        seed = hash_seed(routing.lora_name, routing.cache_salt)
        path = sequence_hashes(block_hashes(request.token_ids, self._block_size, seed))
        cache = self._cache
        known = 0
        while known < len(path) and path[known] in cache:
            known += 1
        # Leaves go first, as they do in real engines: a request's blocks are freed from their end, reused ones too.
        for block in reversed(path):
            cache[block] = None
            cache.move_to_end(block)
        isl = len(request.token_ids) // 4
        blocks = -(-isl // self._block_size)
        events.append(RequestStarted(request.request_id, isl, known * self._block_size, blocks))
        if known < len(path):
            events.append(BlocksStored(path[known - 1] if known else None, pack_hashes(path[known:])))
            if len(cache) > TOTAL_BLOCKS:
                events.append(
                    BlocksRemoved(pack_hashes([cache.popitem(last=False)[0] for _ in range(len(cache) - TOTAL_BLOCKS)]))
                )
        events.append(PrefillCompleted(request.request_id))
        self._running[request.request_id] = _Running(request, blocks)
        return known * self._block_size

    def _token(self, running: _Running, events: list[AnyEvent], cached: int | None = None) -> TokenDelta:
        request = running.request
        position = running.produced
        running.produced += 1
        reason = None
        if running.produced >= request.sampling.max_tokens:
            reason = FinishReason.LENGTH
            del self._running[request.request_id]
            events.append(RequestFinished(request.request_id, reason))
        elif running.produced % self._block_size == 0:
            running.blocks += 1
            events.append(RequestProgressed(request.request_id, running.blocks))
        return TokenDelta(request.request_id, position, TOKEN_IDS[position & 4095], reason, cached)


async def serve(consolidator: str, worker_id: str, block_size: int, step_ms: float) -> None:
    """Run until SIGTERM."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    clock = SystemClock()
    metrics = WorkerMetrics(CollectorRegistry())
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    requests = RequestSocket(context, "127.0.0.1", 0)
    limits = WorkerLimits(
        max_batch_size=256, max_num_tokens=8192, total_kv_blocks=TOTAL_BLOCKS, max_sequence_length=131_072
    )
    card = WorkerCard("bench", Role.AGGREGATED, block_size, limits, f"tcp://127.0.0.1:{requests.port}")
    epoch = time.time_ns()
    service = WorkerService(
        worker_id, epoch, card, MockEngine(block_size, step_ms), requests, ServiceLimits(), clock, metrics
    )
    stream = PushStream(worker_id, 0, epoch, card, PushTiming(), 64 * 1024 * 1024)
    publisher = EventPublisher(context, consolidator, stream, service.restate, clock, metrics, 1000.0)
    try:
        await service.run([publisher], stop)
    finally:
        requests.close(False)
        publisher.close(False)
        context.destroy(linger=0)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(*sys.argv[4:])))
