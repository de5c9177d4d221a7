"""Loads a model into a TensorRT-LLM engine, and shuts it down."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import zmq
from prometheus_client import CollectorRegistry

from poolgrid.process.clock import Clock
from poolgrid.wire.identifiers import Role
from poolgrid.workers.engines.lifecycle.engine_thread import EngineThread
from poolgrid.workers.engines.lifecycle.health import EngineBrokenError
from poolgrid.workers.engines.lifecycle.loading import end_engine, start_engine
from poolgrid.workers.engines.trtllm.arguments.engine_arguments import EngineArguments
from poolgrid.workers.engines.trtllm.calls import TrtllmCalls
from poolgrid.workers.engines.trtllm.collector import EngineCollector
from poolgrid.workers.engines.trtllm.core.loras import adapters
from poolgrid.workers.engines.trtllm.core.model_abilities import abilities_of, model_problem
from poolgrid.workers.engines.trtllm.core.model_facts import ModelFacts
from poolgrid.workers.engines.trtllm.engine import TrtllmEngine
from poolgrid.workers.engines.trtllm.library import load_library
from poolgrid.workers.engines.trtllm.logits import ProcessorsOfRequests
from poolgrid.workers.engines.trtllm.media import load_media
from poolgrid.workers.engines.trtllm.metrics import TrtllmMetrics
from poolgrid.workers.engines.trtllm.model_files import read_model_facts
from poolgrid.workers.engines.trtllm.requests import TrtllmLimits
from poolgrid.workers.logits.failure_channel import FailureChannel
from poolgrid.workers.logits.registry import LogitsProcessorRegistry
from poolgrid.workers.metrics import WorkerMetrics

if TYPE_CHECKING:
    from poolgrid.workers.tensor_transfer.zmq_transfer import TensorTransfer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """A running engine and what is known of it."""

    engine: TrtllmEngine
    version: str
    facts: ModelFacts
    names_media: bool = False
    """Whether its events say which blocks depend on a picture, by a name that routers know."""
    takes_retention: bool = False
    """Whether it can be told how long the blocks of a request stay."""


@asynccontextmanager
async def load_engine(
    arguments: EngineArguments,
    role: Role,
    limits: TrtllmLimits,
    clock: Clock,
    metrics: WorkerMetrics,
    registry: CollectorRegistry,
    context: zmq.Context[Any],
    served_model_name: str,
    logits_processors: Sequence[str] = (),
    takes_media: bool = False,
    encode_endpoint: str = "",
    tensors: TensorTransfer | None = None,
    warming: Callable[[], None] = lambda: None,
) -> AsyncIterator[LoadedEngine]:
    """Load a model and keep its engine until the end of the block; whatever ends it, the engine is shut down.

    ``tensors``: embeddings travel by it, and not as handles. ``warming`` is called between loading and the first token.

    Takes minutes; cancelling it leaves what is being made to be shut down when it exists. Raises
    ``LibraryMissingError``, ``EngineBrokenError``, and what TensorRT-LLM raises.
    """
    _check_adapters(arguments)
    named = LogitsProcessorRegistry.from_settings(logits_processors)
    started_ms = clock.monotonic_ms()
    if takes_media:
        # Before it is loaded, where its files are here already; what is brought in from elsewhere is known after.
        _check_model(await asyncio.to_thread(read_model_facts, str(arguments.values["model"])), role, takes_media)
    thread = EngineThread()
    try:
        library = await thread.call(load_library)
        log.info("starting TensorRT-LLM %s with %s", library.version, arguments.values.get("model"))
        try:
            llm = await start_engine(
                thread, lambda: library.make_engine(arguments.values, role is Role.ENCODE), _shut_down
            )
        except Exception as error:
            raise EngineBrokenError(f"starting TensorRT-LLM {library.version} failed: {error!r}") from error
        collector: EngineCollector | None = None
        failures = FailureChannel(lambda name: metrics.logits_processor_failures.labels(name).inc())
        try:
            mode = "prefill_and_decode" if role is Role.AGGREGATED else role.name.lower()
            processors = ProcessorsOfRequests(named, failures.reporter, mode, arguments.values)
            trtllm_metrics = TrtllmMetrics(registry)
            collector = EngineCollector(registry, served_model_name)
            facts = await asyncio.to_thread(read_model_facts, str(arguments.values["model"]))
            _check_model(facts, role, takes_media)
            loader = None
            if takes_media:
                abilities = abilities_of(facts.architecture)
                loader = partial(load_media, takes_embeddings=abilities.takes_embeddings, encoded_by=encode_endpoint)
            calls = TrtllmCalls(library, llm, arguments, facts, processors)
            engine = TrtllmEngine(
                thread, calls, role, limits, clock, metrics, trtllm_metrics, collector, context, loader, tensors
            )
            try:
                warming()
                await engine.begin()
                load_s = (clock.monotonic_ms() - started_ms) / 1e3
                metrics.engine_load_seconds.set(load_s)
                metrics.engine_healthy.set(1)
                log.info("the engine is ready after %.1f s", load_s)
                names_media = engine.names_media and (library.names_media or bool(encode_endpoint))
                yield LoadedEngine(engine, library.version, facts, names_media, engine.takes_retention)
            finally:
                await engine.close()
        finally:
            failures.close()
            if collector is not None:
                collector.close()
            await end_engine(thread, llm, _shut_down)
    finally:
        thread.end()


def _check_model(facts: ModelFacts, role: Role, takes_media: bool) -> None:
    problem = model_problem(facts.architecture, role is Role.ENCODE, takes_media)
    if problem:
        raise ValueError(f"starting a worker of the role {role.name.lower()}: {problem}")


def _check_adapters(arguments: EngineArguments) -> None:
    for adapter in adapters(arguments.values).values():
        # LoRARequest would refuse it, request by request.
        if not Path(adapter.path).exists():
            raise ValueError(f"reading lora_config.lora_dir: {adapter.path} does not exist; no engine was started")


def _shut_down(llm: Any) -> None:
    llm.shutdown()
