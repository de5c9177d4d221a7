"""Picks the real things of a worker process: clock, sockets, engine, HTTP. The only place that does."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from poolgrid.runtime.awake_clock import AwakeClock
from poolgrid.runtime.clock import Clock, SystemClock
from poolgrid.runtime.event_loop import LoopMetrics
from poolgrid.runtime.http_server import HttpServer
from poolgrid.runtime.planes import CurveKeys, PlaneContext, PlaneMetrics, end_security
from poolgrid.runtime.tasks import cancel_all, supervised, unless
from poolgrid.runtime.tls import Tls
from poolgrid.wire.card import MediaSpec, WorkerCard, WorkerLimits
from poolgrid.wire.limits import PROMPT_TOKENS_MAX
from poolgrid.wire.multimodal import MediaKind
from poolgrid.workers.adapters.http_api import HttpApi
from poolgrid.workers.adapters.sockets import RequestSocket
from poolgrid.workers.core.push_stream import PushStream, PushTiming
from poolgrid.workers.embedding_fetcher import EmbeddingFetcher
from poolgrid.workers.engines.engine import Engine
from poolgrid.workers.engines.simulated import RealTimeSimulatedEngine
from poolgrid.workers.engines.simulated_encode import EncodeLimits, SimulatedEncodeEngine
from poolgrid.workers.engines.simulated_guides import LazyGuides
from poolgrid.workers.kv_fetcher import KvFetcher
from poolgrid.workers.metrics import WorkerMetrics
from poolgrid.workers.publisher import EventPublisher
from poolgrid.workers.service import ServiceLimits, WorkerService
from poolgrid.workers.settings import TrtllmWorkerSettings, WorkerSettings
from poolgrid.workers.simulated.kv_transfer import KvSource
from poolgrid.workers.simulated.timing import PolynomialTiming, ScaledTiming, TableTiming, TimingModel
from poolgrid.workers.tensor_transfer.metrics import TensorMetrics
from poolgrid.workers.tensor_transfer.nixl_transfer import NixlTensorTransfer, make_agent
from poolgrid.workers.tensor_transfer.port import TensorTransfer
from poolgrid.workers.tensor_transfer.tensor_store import TensorStore
from poolgrid.workers.tensor_transfer.zmq_transfer import ZmqTensorTransfer
from poolgrid.workers.transfers import EmbeddingExchange, KvExchange
from poolgrid.workers.trtllm.engine_arguments import EngineArguments, resolve_files
from poolgrid.workers.trtllm.engine_rules import look_up

if TYPE_CHECKING:
    from poolgrid.workers.engines.trtllm import OpenedEngine

log = logging.getLogger(__name__)

AnySettings = WorkerSettings | TrtllmWorkerSettings
"""Settings of a worker; the class says which engine it drives."""

ENGINE_NAME = "poolgrid-simulated"


def make_card(settings: WorkerSettings, request_port: int, http_port: int) -> WorkerCard:
    """Return what the worker says of itself, with the ports it got."""
    host = settings.advertised_host
    return WorkerCard(
        model=settings.model,
        role=settings.card_role,
        block_size=settings.block_size,
        limits=settings.card_limits(),
        request_endpoint=f"tcp://{host}:{request_port}",
        http_endpoint=f"{settings.http_scheme}://{host}:{http_port}",
        loras=settings.loras,
        engine=ENGINE_NAME,
        eos_token_ids=(settings.eos_token_id,),
        vocabulary_size=settings.vocabulary_size,
        media=settings.media_spec(),
    )


def make_timing(settings: WorkerSettings) -> TimingModel:
    """Return the step times; raises ``TableError`` when the table cannot be used."""
    model: TimingModel = PolynomialTiming()
    if settings.timing_table is not None:
        model = TableTiming.from_file(settings.timing_table)
    return model if settings.speedup == 1.0 else ScaledTiming(model, settings.speedup)


@dataclass(frozen=True, slots=True)
class Opened:
    """An engine that runs, and what the worker says of it."""

    engine: Engine
    card: WorkerCard
    kv: KvExchange | None = None
    embeddings: EmbeddingExchange | None = None


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What an engine may use of its process."""

    context: PlaneContext
    registry: CollectorRegistry
    metrics: WorkerMetrics
    clock: Clock
    awake: AwakeClock
    """For judging others: it stands still while this process does."""
    epoch: int
    request_port: int
    http_port: int


def make_tensor_transfer(settings: WorkerSettings, around: Surroundings) -> TensorTransfer | None:
    """Return this worker's end of tensor transfers, ``None`` for a text-only one.

    Raises ``OSError`` when the port cannot be bound, ``NixlMissing``.
    """
    if settings.modality == "text":
        return None
    metrics = TensorMetrics(around.registry, settings.tensor_transport)
    # Before the socket: without NIXL nothing has been bound.
    name = f"{settings.worker_id}-{around.epoch}"
    agent = make_agent(name) if settings.tensor_transport == "nixl" else None
    store = TensorStore(f"{around.epoch:x}", settings.tensor_store_mb * 2**20, settings.tensor_lease_ms)
    over_zmq = ZmqTensorTransfer(
        around.context,
        settings.host,
        settings.tensor_port,
        settings.advertise_host,
        store,
        around.awake,
        metrics,
        chunk_bytes=settings.tensor_chunk_kb * 1024,
        timeout_ms=settings.tensor_fetch_timeout_ms,
    )
    if agent is None:
        return over_zmq
    return NixlTensorTransfer(agent, name, over_zmq, around.awake, metrics, settings.tensor_fetch_timeout_ms)


@asynccontextmanager
async def open_simulated_encode(settings: WorkerSettings, around: Surroundings) -> AsyncIterator[Opened]:
    """Open the simulated encode engine; raises what ``make_tensor_transfer`` raises."""
    tensors = make_tensor_transfer(settings, around)
    assert tensors is not None, "an encode worker is multimodal"
    limits = EncodeLimits(
        max_waiting_requests=settings.max_waiting_requests, ms_per_image=settings.encode_ms_per_image / settings.speedup
    )
    try:
        engine = SimulatedEncodeEngine(limits, tensors, around.clock)
        yield Opened(engine, make_card(settings, around.request_port, around.http_port))
    finally:
        await tensors.close()


@asynccontextmanager
async def open_simulated(settings: WorkerSettings, around: Surroundings) -> AsyncIterator[Opened]:
    """Open the simulated engine.

    Raises ``TableError`` when the timing table cannot be used, and what ``make_tensor_transfer`` raises.
    """
    card = make_card(settings, around.request_port, around.http_port)
    engine = RealTimeSimulatedEngine(
        settings.engine_limits(),
        settings.vocabulary(),
        make_timing(settings),
        around.clock,
        settings.transfer_model(),
        KvSource(card.request_endpoint, settings.worker_id, around.epoch),
        settings.modality == "multimodal",
        None if settings.tokenizer_path is None else LazyGuides(settings.tokenizer_path, settings.vocabulary()),
    )
    fetches_max = settings.max_waiting_requests + settings.max_batch_size
    async with AsyncExitStack() as opened:
        tensors = make_tensor_transfer(settings, around)
        embeddings = None
        if tensors is not None:
            opened.push_async_callback(tensors.close)
            embeddings = EmbeddingFetcher(tensors, fetches_max)
            opened.push_async_callback(embeddings.close)
        fetcher = KvFetcher(around.context, settings.kv_fetch_timeout_ms, fetches_max, around.awake, around.metrics)
        _close_in_order(opened, fetcher.close)
        yield Opened(
            engine,
            card,
            KvExchange(engine, fetcher),
            None if embeddings is None else EmbeddingExchange(engine, embeddings),
        )


@asynccontextmanager
async def open_trtllm(settings: TrtllmWorkerSettings, around: Surroundings) -> AsyncIterator[Opened]:
    """Load TensorRT-LLM; takes minutes. Raises ``ContractError`` for arguments that it would not take, before that."""
    from poolgrid.workers.engines.trtllm import EngineLimits, open_engine

    arguments = resolve_files(settings)
    for warning in arguments.warnings:
        log.warning("%s", warning)
    limits = EngineLimits(
        kept_transfers_max=settings.kept_transfers_max,
        kv_transfer_timeout_ms=settings.kv_transfer_timeout_ms,
        max_requests=settings.max_requests,
        health_interval_ms=settings.health_interval_ms,
        health_timeout_ms=settings.health_timeout_ms,
        progress_timeout_ms=settings.progress_timeout_ms,
    )
    async with open_engine(
        arguments,
        settings.role,
        limits,
        around.awake,
        around.metrics,
        around.registry,
        settings.model_name,
        settings.logits_processors,
        takes_media=settings.modality == "multimodal",
    ) as opened:
        yield Opened(opened.engine, trtllm_card(settings, arguments, opened, around.request_port, around.http_port))


def trtllm_card(
    settings: TrtllmWorkerSettings,
    arguments: EngineArguments,
    opened: OpenedEngine,
    request_port: int,
    http_port: int,
) -> WorkerCard:
    """Return what a worker with TensorRT-LLM says of itself."""
    values = arguments.values
    facts = opened.facts
    return WorkerCard(
        model=settings.model_name,
        role=settings.role,
        block_size=arguments.block_size,
        limits=WorkerLimits(
            max_batch_size=look_up(values, "max_batch_size") or settings.max_batch_size,
            max_num_tokens=look_up(values, "max_num_tokens") or settings.max_num_tokens,
            total_kv_blocks=opened.engine.total_blocks,
            # Where nobody says, the engine itself refuses what is too long for it.
            max_sequence_length=values.get("max_seq_len") or facts.max_sequence_length or PROMPT_TOKENS_MAX,
        ),
        request_endpoint=f"tcp://{settings.advertised_host}:{request_port}",
        http_endpoint=f"{settings.http_scheme}://{settings.advertised_host}:{http_port}",
        loras=opened.engine.loras,
        dp_size=opened.engine.dp_size,
        engine=f"TensorRT-LLM {opened.version}",
        eos_token_ids=facts.eos_token_ids,
        vocabulary_size=facts.vocabulary_size,
        media=MediaSpec(
            tuple(MediaKind) if settings.modality == "multimodal" else (), placeholder_token_id=facts.image_token_id
        ),
        endpoint_name=settings.endpoint_name,
    )


def _open_engine(settings: AnySettings, around: Surroundings) -> AbstractAsyncContextManager[Opened]:
    if isinstance(settings, TrtllmWorkerSettings):
        return open_trtllm(settings, around)
    return open_simulated_encode(settings, around) if settings.role == "encode" else open_simulated(settings, around)


async def serve(
    settings: AnySettings,
    stop: asyncio.Event,
    ready: Callable[[str], None],
) -> None:
    """Run a worker until ``stop`` is set and its requests are done.

    ``ready`` is called once, with the URL of the worker's HTTP, when the consolidator has welcomed the worker.
    Raises ``OSError`` when a port cannot be bound, and what opening the engine raises. Whatever ends it, what was
    opened is closed again, in reverse order; on cancellation (a second signal) without waiting.
    """
    async with AsyncExitStack() as opened:
        opened.callback(log.info, "worker %s has ended", settings.worker_id)
        clock = SystemClock()
        awake = _start_clock(opened, settings, clock)
        registry = CollectorRegistry()
        metrics = WorkerMetrics(registry)
        LoopMetrics(registry)
        context = _open_context(opened, settings, registry)
        for warning in settings.exposures(settings.host, http=True, planes="the request plane"):
            log.warning("%s", warning)
        epoch = time.time_ns()
        api = HttpApi(registry)
        http = _open_server(opened, settings, registry, api)
        # Before the engine: loading one takes minutes, and probes ask all the while.
        http.start()
        publishers: list[EventPublisher] = []
        _close_in_order(opened, partial(_close_publishers, publishers))
        requests = _open_requests(opened, settings, context)
        around = Surroundings(context, registry, metrics, clock, awake, epoch, requests.port, http.port)
        engine = await unless(stop, opened.enter_async_context(_open_engine(settings, around)), "start of the engine")
        if engine is None:
            log.info("worker %s was stopped before its engine was ready", settings.worker_id)
            return
        card = engine.card
        service = WorkerService(
            settings.worker_id,
            epoch,
            card,
            engine.engine,
            requests,
            ServiceLimits(settings.peer_lease_ms, settings.drain_timeout_ms),
            awake,
            metrics,
            engine.kv,
            engine.embeddings,
        )
        api.show(service)
        for dp_rank in range(engine.engine.dp_size):
            _open_publisher(publishers, settings, around, service, card, dp_rank)
        _announce_when_registered(opened, publishers, card.http_endpoint, ready)
        log.info("worker %s at %s, health at %s", settings.worker_id, card.request_endpoint, card.http_endpoint)
        await service.run(publishers, stop)


def _close_in_order(opened: AsyncExitStack, close: Callable[[bool], None]) -> None:
    """Have ``close`` called at the end: with ``False`` on cancellation, when nothing is waited for."""

    def end(kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        close(not isinstance(error, asyncio.CancelledError))

    opened.push(end)


def _start_clock(opened: AsyncExitStack, settings: AnySettings, clock: Clock) -> AwakeClock:
    awake = AwakeClock(clock, _shortest_timeout_ms(settings)).start()
    opened.callback(awake.stop)
    return awake


def _open_context(opened: AsyncExitStack, settings: AnySettings, registry: CollectorRegistry) -> PlaneContext:
    context = PlaneContext.make(CurveKeys.load(settings), PlaneMetrics(registry))

    async def end() -> None:
        end_security(context)
        # In a thread: it waits for frames on their way, at most as long as the sockets linger.
        await asyncio.to_thread(context.destroy, linger=0)

    opened.push_async_callback(end)
    return context


def _open_server(
    opened: AsyncExitStack, settings: AnySettings, registry: CollectorRegistry, api: HttpApi
) -> HttpServer:
    tls = Tls.load(settings, registry)
    limits = settings.http_limits()
    http = HttpServer(api, settings.host, settings.http_port, "http_port", tls=tls, registry=registry, limits=limits)
    opened.push_async_callback(http.stop)
    return http


def _open_requests(opened: AsyncExitStack, settings: AnySettings, context: PlaneContext) -> RequestSocket:
    requests = RequestSocket(context, settings.host, settings.request_port)
    _close_in_order(opened, requests.close)
    return requests


def _open_publisher(
    publishers: list[EventPublisher],
    settings: AnySettings,
    around: Surroundings,
    service: WorkerService,
    card: WorkerCard,
    dp_rank: int,
) -> None:
    """Open what carries a rank's events; with the others it is closed after the engine has said its last words."""
    timing = PushTiming(heartbeat_ms=settings.heartbeat_ms)
    stream = PushStream(settings.worker_id, dp_rank, around.epoch, card, timing, settings.outbox_bytes)
    publisher = EventPublisher(
        around.context,
        settings.consolidator,
        stream,
        partial(service.restate, dp_rank),
        around.clock,
        around.metrics,
        settings.load_interval_ms,
    )
    publishers.append(publisher)


def _close_publishers(publishers: Sequence[EventPublisher], orderly: bool) -> None:
    for publisher in publishers:
        publisher.close(orderly)


def _announce_when_registered(
    opened: AsyncExitStack, publishers: Sequence[EventPublisher], url: str, ready: Callable[[str], None]
) -> None:
    async def announce() -> None:
        for publisher in publishers:
            await publisher.until_registered()
        ready(url)

    opened.push_async_callback(cancel_all, [supervised(announce, "announcement")])


def _shortest_timeout_ms(settings: AnySettings) -> float:
    """Return the shortest time after which this process gives somebody up."""
    if isinstance(settings, TrtllmWorkerSettings):
        return min(settings.peer_lease_ms, settings.health_timeout_ms, settings.progress_timeout_ms)
    return min(
        settings.peer_lease_ms, settings.kv_fetch_timeout_ms, settings.tensor_lease_ms, settings.tensor_fetch_timeout_ms
    )
