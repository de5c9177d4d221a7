"""Opens TensorRT-LLM as the engine of a worker: arguments checked, the model loaded and shut down, the card made."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from poolgrid.kernel.wire.card import MediaSpec, ResizedGrid, WorkerCard, WorkerLimits
from poolgrid.kernel.wire.identifiers import Role
from poolgrid.kernel.wire.limits import PROMPT_TOKENS_MAX
from poolgrid.kernel.wire.multimodal import MediaKind, TensorDescriptor
from poolgrid.plugins.trtllm.arguments.contract import look_up
from poolgrid.plugins.trtllm.arguments.engine_arguments import EngineArguments, resolve_files
from poolgrid.plugins.trtllm.arguments.engine_rules import uses_kvbm
from poolgrid.plugins.trtllm.calls import TrtllmCalls
from poolgrid.plugins.trtllm.core.disaggregated_params import carried_tensors
from poolgrid.plugins.trtllm.core.model_facts import ModelFacts, abilities_of, adapters, model_problem
from poolgrid.plugins.trtllm.core.sampling import sampler_default
from poolgrid.plugins.trtllm.engine import TrtllmEngine
from poolgrid.plugins.trtllm.kvbm import KvbmExchange, claim_ports
from poolgrid.plugins.trtllm.library import load_library, start_library
from poolgrid.plugins.trtllm.logits import ProcessorsOfRequests
from poolgrid.plugins.trtllm.logits_registry import FailureChannel, LogitsProcessorRegistry
from poolgrid.plugins.trtllm.media import load_media
from poolgrid.plugins.trtllm.metrics import EngineCollector, TrtllmMetrics
from poolgrid.plugins.trtllm.model_files import read_model_facts
from poolgrid.plugins.trtllm.requests import TrtllmLimits
from poolgrid.plugins.trtllm.settings import TrtllmSettings, TrtllmWorkerSettings
from poolgrid.server.workers.engines.definition import EngineHost, OpenedEngine
from poolgrid.server.workers.engines.lifecycle.engine_thread import EngineThread, end_engine
from poolgrid.server.workers.start_phases import Phase
from poolgrid.server.workers.tensor_transfer.opening import open_tensor_transfer
from poolgrid.server.workers.transfers import EmbeddingExchange, EmbeddingFetcher

if TYPE_CHECKING:
    from poolgrid.server.workers.tensor_transfer.zmq_transfer import TensorTransfer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """A running engine and what is known of it."""

    engine: TrtllmEngine
    version: str
    facts: ModelFacts
    names_media: bool = False
    """Whether its events say which blocks depend on an image, by a name that routers know."""


@asynccontextmanager
async def open_engine(settings: TrtllmWorkerSettings, host: EngineHost) -> AsyncIterator[OpenedEngine]:
    """Load TensorRT-LLM; takes minutes. Raises ``ContractError`` for arguments that it would not take, before that."""
    arguments = resolve_files(settings)
    for warning in arguments.warnings:
        log.warning("%s", warning)
    limits = TrtllmLimits(
        kept_transfers_max=settings.kept_transfers_max,
        kv_transfer_timeout_ms=look_up(arguments.values, "cache_transceiver_config.kv_transfer_timeout_ms")
        or settings.kv_transfer_timeout_ms,
        max_requests=settings.max_requests,
        health_interval_ms=settings.health_interval_ms,
        health_timeout_ms=settings.health_timeout_ms,
        progress_timeout_ms=settings.progress_timeout_ms,
        answer_timeout_ms=settings.answer_timeout_ms,
    )
    async with (
        _tensor_transfer(settings, host) as tensors,
        load_engine(settings, arguments, limits, host, tensors) as loaded,
    ):
        card = make_card(settings, arguments, loaded, host.request_port, host.http_port)
        if tensors is None or settings.role is Role.ENCODE:
            yield OpenedEngine(loaded.engine, card)
            return
        fetcher = EmbeddingFetcher(tensors, settings.max_requests, read=_described)
        try:
            yield OpenedEngine(loaded.engine, card, embeddings=EmbeddingExchange(loaded.engine, fetcher))
        finally:
            await fetcher.close()


@asynccontextmanager
async def _tensor_transfer(settings: TrtllmWorkerSettings, host: EngineHost) -> AsyncIterator[TensorTransfer | None]:
    """Open this worker's end of tensor transfers, where it has one; raises ``OSError``."""
    transport = settings.tensor_transport
    if transport == "none" or settings.modality != "multimodal" or settings.role is Role.DECODE:
        yield None
        return
    tensors = open_tensor_transfer(settings, transport, host)
    try:
        yield tensors
    finally:
        await tensors.close()


def _described(params: bytes) -> list[TensorDescriptor]:
    return [each.tensor for each in carried_tensors(params)]


@asynccontextmanager
async def load_engine(
    settings: TrtllmSettings,
    arguments: EngineArguments,
    limits: TrtllmLimits,
    host: EngineHost,
    tensors: TensorTransfer | None,
) -> AsyncIterator[LoadedEngine]:
    """Load a model and keep its engine until the end of the block; whatever ends it, the engine is shut down.

    ``tensors``: embeddings travel by it, and not as handles. Cancelling it leaves what is being made to be shut down
    when it exists. Raises ``LibraryMissingError``, ``EngineBrokenError``, and what TensorRT-LLM raises.
    """
    values, role, clock, metrics = arguments.values, settings.role, host.awake, host.metrics
    takes_media = settings.modality == "multimodal"
    _check_adapters(arguments)
    named = LogitsProcessorRegistry.from_settings(settings.logits_processors)
    started_ms = clock.monotonic_ms()
    if takes_media:
        # Before it is loaded, where its files are here already; what is brought in from elsewhere is known after.
        _check_model(await asyncio.to_thread(read_model_facts, str(values["model"])), role, takes_media)
    ports = claim_ports() if uses_kvbm(values) else None
    thread = EngineThread()
    try:
        library = await thread.call(load_library)
        arguments = replace(arguments, values=values | sampler_default(library.version, values))
        values = arguments.values
        log.info("starting TensorRT-LLM %s with %s", library.version, values.get("model"))
        llm = await start_library(
            thread, library.version, lambda: library.make_engine(values, role is Role.ENCODE), _shut_down
        )
        collector: EngineCollector | None = None
        failures = FailureChannel(lambda name: metrics.logits_processor_failures.labels(name).inc())
        try:
            processors = ProcessorsOfRequests(named, failures.reporter, settings.disaggregation_mode, values)
            trtllm_metrics = TrtllmMetrics(host.registry)
            collector = EngineCollector(host.registry, settings.model_name)
            facts = await asyncio.to_thread(read_model_facts, str(values["model"]))
            _check_model(facts, role, takes_media)
            loader = None
            if takes_media:
                takes_embeddings = abilities_of(facts.architecture).takes_embeddings
                loader = partial(load_media, takes_embeddings=takes_embeddings, encoded_by=settings.encode_endpoint)
            calls = TrtllmCalls(library, llm, arguments, facts, processors)
            kvbm = None
            if ports is not None and arguments.publishes_kv_events and arguments.stream is None:
                kvbm = KvbmExchange(ports, arguments.block_size, host.context, clock)
            engine = TrtllmEngine(
                thread,
                calls,
                role,
                limits,
                clock,
                metrics,
                trtllm_metrics,
                collector,
                host.context,
                loader,
                tensors,
                kvbm,
            )
            try:
                host.start.enter(Phase.WARM_UP)
                await engine.begin()
                load_s = (clock.monotonic_ms() - started_ms) / 1e3
                metrics.engine_load_seconds.set(load_s)
                metrics.engine_healthy.set(1)
                log.info("the engine is ready after %.1f s", load_s)
                names_media = engine.names_media and (library.names_media or bool(settings.encode_endpoint))
                yield LoadedEngine(engine, library.version, facts, names_media)
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


def make_card(
    settings: TrtllmWorkerSettings,
    arguments: EngineArguments,
    loaded: LoadedEngine,
    request_port: int,
    http_port: int,
) -> WorkerCard:
    """Return what a worker with TensorRT-LLM says of itself."""
    values = arguments.values
    facts = loaded.facts
    return WorkerCard(
        model=settings.model_name,
        role=settings.role,
        block_size=arguments.block_size,
        limits=WorkerLimits(
            max_batch_size=look_up(values, "max_batch_size") or settings.max_batch_size,
            max_num_tokens=look_up(values, "max_num_tokens") or settings.max_num_tokens,
            total_kv_blocks=loaded.engine.total_blocks,
            # Where no limit is given, the engine itself refuses what is too long for it.
            max_sequence_length=values.get("max_seq_len") or facts.max_sequence_length or PROMPT_TOKENS_MAX,
        ),
        request_endpoint=f"tcp://{settings.advertised_host}:{request_port}",
        http_endpoint=f"{settings.http_scheme}://{settings.advertised_host}:{http_port}",
        loras=loaded.engine.loras,
        dp_size=loaded.engine.dp_size,
        engine=f"TensorRT-LLM {loaded.version}",
        eos_token_ids=facts.eos_token_ids,
        vocabulary_size=facts.vocabulary_size,
        media=_media(settings, loaded),
        endpoint_name=settings.endpoint_name,
        takes_retention=loaded.engine.takes_retention,
        inabilities=() if settings.role is Role.ENCODE else loaded.engine.inabilities,
        step_times=settings.step_times(),
    )


def _media(settings: TrtllmWorkerSettings, loaded: LoadedEngine) -> MediaSpec:
    facts = loaded.facts
    kinds = _media_kinds(settings, facts)
    if not kinds:
        return MediaSpec()
    spec = MediaSpec(kinds, placeholder_token_id=facts.image_token_id, adds_special_tokens=True)
    if not loaded.names_media:
        # Where events do not say which image a block depends on, a router that could count its tokens would look for
        # blocks that no event names.
        return spec
    if settings.tokens_per_image:
        return msgspec.structs.replace(spec, tokens_per_image=settings.tokens_per_image)
    rule = facts.image_rule
    if isinstance(rule, ResizedGrid):
        return msgspec.structs.replace(spec, resized_grid=rule)
    return msgspec.structs.replace(spec, tiled_grid=rule)


def _media_kinds(settings: TrtllmWorkerSettings, facts: ModelFacts) -> tuple[MediaKind, ...]:
    if settings.modality != "multimodal":
        return ()
    takes_embeddings = abilities_of(facts.architecture).takes_embeddings
    return tuple(kind for kind in MediaKind if kind is not MediaKind.EMBEDDINGS or takes_embeddings)
