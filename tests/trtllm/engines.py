"""TensorRT-LLM adapters on the contract fake, and what a worker would get of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import zmq
from prometheus_client import CollectorRegistry
from xxhash import xxh3_64_intdigest

from poolgrid.kernel.wire.events import AnyEvent
from poolgrid.kernel.wire.hashing import pack_tokens
from poolgrid.kernel.wire.identifiers import Role, Stage
from poolgrid.kernel.wire.requests import Generate, Routing, Sampling, TokenDelta
from poolgrid.kernel.worker_protocol.engine import EngineReport
from poolgrid.plugins.simulated.core.next_token import Vocabulary, expected_output
from poolgrid.plugins.trtllm.arguments.engine_arguments import resolve_files
from poolgrid.plugins.trtllm.engine import TrtllmEngine
from poolgrid.plugins.trtllm.library import load_library
from poolgrid.plugins.trtllm.opening import load_engine
from poolgrid.plugins.trtllm.requests import TrtllmLimits
from poolgrid.plugins.trtllm.settings import TrtllmSettings
from poolgrid.server.process.clock import SystemClock
from poolgrid.server.workers.engines.definition import EngineHost
from poolgrid.server.workers.metrics import WorkerMetrics
from poolgrid.server.workers.start_phases import StartPhases
from tests.fakes import install_tensorrt_llm
from tests.fakes.tensorrt_llm._fake.executor import Executor
from tests.fakes.tensorrt_llm.llmapi.llm import media_hash

if TYPE_CHECKING:
    from poolgrid.server.transport.planes import PlaneContext
    from poolgrid.server.workers.tensor_transfer.zmq_transfer import TensorTransfer

PATIENCE_S = 120.0
"""How long a test waits for what must come; only a failing test waits that long."""

BLOCK = 4
HONEST_SAMPLER = '{"sampler_type": "TRTLLMSampler"}'
"""The sampler of 1.2 that honours the seeds by which answers are told right from wrong here."""
SEED = 7
MODES = {
    Role.AGGREGATED: "prefill_and_decode",
    Role.PREFILL: "prefill",
    Role.DECODE: "decode",
    Role.ENCODE: "encode",
}


@dataclass
class RunningEngine:
    """Everything an engine has told its worker."""

    engine: TrtllmEngine
    llm: Any
    metrics: WorkerMetrics
    reports: list[EngineReport] = field(default_factory=list)
    deltas: dict[str, list[TokenDelta]] = field(default_factory=dict)
    events: dict[int, list[AnyEvent]] = field(default_factory=dict)
    released: list[str] = field(default_factory=list)
    running: asyncio.Task[None] | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def executor(self) -> Executor:
        found: Executor = self.llm._executor
        return found

    def deliver(self, report: EngineReport) -> None:
        self.reports.append(report)
        for delta in report.deltas:
            self.deltas.setdefault(delta.request_id, []).append(delta)
        for rank, made in report.ranks.items():
            self.events.setdefault(rank, []).extend(made.events)
        self.released += report.released
        self.changed.set()

    async def until(self, holds: Callable[[], Any]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not holds():
                self.changed.clear()
                await self.changed.wait()

    async def turned(self, holds: Callable[[], Any]) -> None:
        """Wait for something that no report tells."""
        async with asyncio.timeout(PATIENCE_S):
            while not holds():  # noqa: ASYNC110 - other threads bring it about, and tell nobody
                await asyncio.sleep(0.001)

    def last(self, request_id: str) -> TokenDelta | None:
        deltas = self.deltas.get(request_id)
        return deltas[-1] if deltas else None

    def finished(self, request_id: str) -> bool:
        last = self.last(request_id)
        return last is not None and last.finish_reason is not None

    async def finish(self, request: Generate) -> TokenDelta:
        """Submit a request, wait for its last delta, return it."""
        self.engine.submit(request)
        await self.until(lambda: self.finished(request.request_id))
        last = self.last(request.request_id)
        assert last is not None
        return last

    def output(self, request_id: str) -> bytes:
        joined = b""
        for delta in self.deltas[request_id]:
            assert delta.position == len(joined) // 4, f"{request_id}: a hole or an overlap"
            joined += delta.token_ids
        return joined

    def events_of(self, request_id: str, rank: int = 0) -> list[AnyEvent]:
        return [event for event in self.events.get(rank, []) if getattr(event, "request_id", None) == request_id]

    def sample(self, metric: str, /, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(f"poolgrid_worker_{metric}", labels)


@asynccontextmanager
async def running_engine(
    role: Role = Role.AGGREGATED,
    limits: TrtllmLimits | None = None,
    runs: bool = True,
    tensors: TensorTransfer | None = None,
    **settings: Any,
) -> AsyncIterator[RunningEngine]:
    install_tensorrt_llm()
    given = {
        "model_path": "m",
        "served_model_name": "served",
        "kv_block_size": BLOCK,
        "disaggregation_mode": MODES[role],
        "override_engine_args": HONEST_SAMPLER,
        **settings,
    }
    if role is Role.ENCODE:
        given.setdefault("modality", "multimodal")
    chosen = TrtllmSettings.model_validate(given)
    registry = CollectorRegistry()
    metrics = WorkerMetrics(registry)
    context: zmq.Context[Any] = zmq.Context()
    clock: Any = SystemClock()
    start = StartPhases(metrics, clock, lambda said: None)
    host = EngineHost(cast("PlaneContext", context), registry, metrics, clock, clock, 0, 0, 0, lambda said: None, start)
    async with load_engine(chosen, resolve_files(chosen), limits or TrtllmLimits(), host, tensors) as opened:
        told = RunningEngine(opened.engine, opened.engine._calls.llm, metrics)
        if runs:
            told.running = asyncio.create_task(opened.engine.run(told.deliver))
        try:
            yield told
        finally:
            if told.running is not None:
                told.running.cancel()
                await asyncio.wait({told.running})
    context.term()


def make_request(
    request_id: str = "r",
    prompt: Sequence[int] = range(10),
    max_tokens: int = 8,
    stage: Stage = Stage.WHOLE,
    stop_token_ids: tuple[int, ...] = (),
    routing: Routing | None = None,
    disaggregated_params: bytes | None = None,
    multimodal: bytes | None = None,
    **sampling: Any,
) -> Generate:
    return Generate(
        request_id,
        pack_tokens(prompt),
        Sampling(max_tokens, **{"seed": SEED, **sampling}),
        stop_token_ids,
        routing or Routing(),
        disaggregated_params,
        multimodal,
        stage,
    )


def expected(request: Generate, *media: Any) -> bytes:
    """What the fake answers; ``media`` are the pictures or tensors that it must have seen, in order."""
    seed = SEED ^ (xxh3_64_intdigest(b"".join(media_hash(each) for each in media)) >> 1 if media else 0)
    sampling = Sampling(request.sampling.max_tokens, seed=seed)
    return pack_tokens(expected_output(request.token_ids, sampling, Vocabulary(), request.stop_token_ids))


def fake_library() -> Any:
    install_tensorrt_llm()
    return load_library()
