"""A mock worker on the real planes: as cheap as a mock HTTP server, so that the router before it saturates.

    python -m lab.benchmarks.http_worker CONSOLIDATOR_ENDPOINT WORKER_ID BLOCK_SIZE [STEP_MS]

The worker service, its request plane and its event stream are the real ones; the engine computes nothing: each step
gives every request one token, as fast as steps can follow each other or every ``STEP_MS``, and its events are those of
a real engine. Without ``STEP_MS`` an answer that is no stream has its first token in one step and the rest in the next,
as a mock HTTP server writes all of it at once. A line on standard output says where requests are taken.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import uvloop
import zmq
from prometheus_client import CollectorRegistry

from poolgrid.kernel.wire.card import WorkerCard, WorkerLimits
from poolgrid.kernel.wire.events import (
    AnyEvent,
    BlocksRemoved,
    BlocksStored,
    LoadReported,
    PrefillCompleted,
    RequestFinished,
    RequestProgressed,
    RequestStarted,
)
from poolgrid.kernel.wire.hashing import hash_seed, pack_hashes
from poolgrid.kernel.wire.identifiers import Role
from poolgrid.kernel.wire.requests import FinishReason, Generate, TokenDelta
from poolgrid.kernel.worker_protocol.engine import AlwaysWell, EngineReport, RankReport
from poolgrid.kernel.worker_protocol.push_stream import PushStream, PushTiming
from poolgrid.server.process.clock import SystemClock
from poolgrid.server.serving.prompt_paths import PromptPaths
from poolgrid.server.workers.adapters.sockets import CONSOLIDATOR, DealerSocket, RequestSocket
from poolgrid.server.workers.metrics import WorkerMetrics
from poolgrid.server.workers.publisher import EventPublisher
from poolgrid.server.workers.service import ServiceLimits, WorkerService

TOTAL_BLOCKS = 65_536
TOKEN_IDS = [(1000 + at).to_bytes(4, "little") for at in range(4096)]


class MockCache:
    """Blocks by the conversations that they are of, within a bound; a step of work for each prompt, not each block.

    Rules
        1. A prompt's blocks are kept under the first of them. A prompt that begins with the same block and does not go
           on from what is kept takes its place: what the two do not share is evicted.
        2. What was used longest ago goes first, and of that the end: engines evict leaves.
    """

    def __init__(self, blocks_max: int) -> None:
        self._blocks_max = blocks_max
        self._paths: OrderedDict[int, list[int]] = OrderedDict()
        self.blocks = 0

    def take(self, path: Sequence[int]) -> tuple[int, list[int]]:
        """Keep a prompt; return how many of its leading blocks were there, and what was evicted, ends first."""
        if not path:
            return 0, []
        kept = self._paths.get(path[0], [])
        known = min(len(kept), len(path))
        if known and kept[known - 1] != path[known - 1]:
            known = next(at for at in range(known) if kept[at] != path[at])
        evicted: list[int] = []
        if known < len(path):
            evicted = kept[known:][::-1]
            self._paths[path[0]] = list(path)
            self.blocks += len(path) - len(kept)
        self._paths.move_to_end(path[0])
        while self.blocks > self._blocks_max and len(self._paths) > 1:
            first, oldest = next(iter(self._paths.items()))
            count = min(self.blocks - self._blocks_max, len(oldest))
            evicted += oldest[: -count - 1 : -1]
            self.blocks -= count
            del oldest[-count:]
            if not oldest:
                del self._paths[first]
        return known, evicted


@dataclass(slots=True)
class _Running:
    request: Generate
    blocks: int
    produced: int = 0


class MockEngine(AlwaysWell):
    """``poolgrid.kernel.worker_protocol.engine.Engine`` that computes nothing."""

    def __init__(self, block_size: int, step_ms: float = 0.0) -> None:
        self._block_size = block_size
        self._step_s = step_ms / 1000
        self._waiting: list[Generate] = []
        self._running: dict[str, _Running] = {}
        self._cancelled: list[str] = []
        self._cache = MockCache(TOTAL_BLOCKS)
        self._prompts = PromptPaths()
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
        return LoadReported(len(self._running), len(self._waiting), 0, 0, self._cache.blocks, TOTAL_BLOCKS)

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
        path = self._prompts.path(request.token_ids, self._block_size, seed)
        known, evicted = self._cache.take(path)
        isl = len(request.token_ids) // 4
        blocks = -(-isl // self._block_size)
        events.append(RequestStarted(request.request_id, isl, known * self._block_size, blocks))
        if known < len(path):
            events.append(BlocksStored(path[known - 1] if known else None, pack_hashes(path[known:])))
        if evicted:
            events.append(BlocksRemoved(pack_hashes(evicted)))
        events.append(PrefillCompleted(request.request_id))
        self._running[request.request_id] = _Running(request, blocks)
        return known * self._block_size

    def _token(self, running: _Running, events: list[AnyEvent], cached: int | None = None) -> TokenDelta:
        request = running.request
        position = running.produced
        wanted = request.sampling.max_tokens
        # One that is read at its end, where no time is to pass: the first token, then all others.
        rest = position > 0 and not self._step_s and request.routing.tokens_together > 1
        running.produced = produced = wanted if rest else position + 1
        # A token that ends the answer begins no block.
        begun = (produced - (produced >= wanted)) // self._block_size
        for _ in range(begun - position // self._block_size):
            running.blocks += 1
            events.append(RequestProgressed(request.request_id, running.blocks))
        reason = None
        if produced >= wanted:
            reason = FinishReason.LENGTH
            del self._running[request.request_id]
            events.append(RequestFinished(request.request_id, reason))
        if rest:
            tokens = b"".join([TOKEN_IDS[at & 4095] for at in range(position, produced)])
        else:
            tokens = TOKEN_IDS[position & 4095]
        return TokenDelta(request.request_id, position, tokens, reason, cached)


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
    publisher = EventPublisher(
        partial(DealerSocket, context, CONSOLIDATOR), consolidator, stream, service.restate, clock, metrics, 1000.0
    )
    print(f"ready requests={card.request_endpoint}", flush=True)
    try:
        await service.run([publisher], stop)
    finally:
        requests.close(False)
        publisher.close(False)
        context.destroy(linger=0)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(*sys.argv[4:])))
