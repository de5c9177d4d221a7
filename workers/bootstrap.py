"""Picks the real things of a worker process: clock, sockets, engine, HTTP. The only place that does."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry

from runtime.clock import Clock, SystemClock
from runtime.http_server import HttpServer
from runtime.planes import CurveKeys, PlaneContext, PlaneMetrics, end_security
from runtime.tls import Tls
from wire.card import WorkerCard
from wire.identifiers import Role
from workers.adapters.http_api import HttpApi
from workers.adapters.sockets import RequestSocket
from workers.core.push_stream import PushStream, PushTiming
from workers.embedding_fetcher import EmbeddingFetcher
from workers.engines.engine import Engine
from workers.engines.simulated import RealTimeSimulatedEngine
from workers.engines.simulated_encode import EncodeLimits, SimulatedEncodeEngine
from workers.kv_fetcher import KvFetcher
from workers.metrics import WorkerMetrics
from workers.publisher import EventPublisher
from workers.service import EmbeddingExchange, KvExchange, ServiceLimits, WorkerService
from workers.settings import WorkerSettings
from workers.simulated.kv_transfer import KvSource
from workers.simulated.timing import PolynomialTiming, ScaledTiming, TableTiming, TimingModel
from workers.tensor_transfer.metrics import TensorMetrics
from workers.tensor_transfer.nixl_transfer import NixlTensorTransfer, make_agent
from workers.tensor_transfer.port import TensorTransfer
from workers.tensor_transfer.tensor_store import TensorStore
from workers.tensor_transfer.zmq_transfer import ZmqTensorTransfer

log = logging.getLogger(__name__)

ENGINE_NAME = "poolgrid-simulated"


def make_card(settings: WorkerSettings, request_port: int, http_port: int) -> WorkerCard:
    """Return what the worker says of itself, with the ports it got."""
    host = settings.advertise_host or settings.host
    if ":" in host:
        host = f"[{host}]"
    return WorkerCard(
        model=settings.model,
        role=settings.card_role,
        block_size=settings.block_size,
        limits=settings.card_limits(),
        request_endpoint=f"tcp://{host}:{request_port}",
        http_endpoint=f"{'http' if settings.tls_certificate is None else 'https'}://{host}:{http_port}",
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


def make_tensor_transfer(
    settings: WorkerSettings, context: PlaneContext, epoch: int, clock: Clock, registry: CollectorRegistry
) -> TensorTransfer | None:
    """Return this worker's end of tensor transfers, ``None`` for a text-only one.

    Raises ``OSError`` when the port cannot be bound, ``NixlMissing``.
    """
    if settings.modality == "text":
        return None
    metrics = TensorMetrics(registry, settings.tensor_transport)
    # Before the socket: without NIXL nothing has been bound.
    name = f"{settings.worker_id}-{epoch}"
    agent = make_agent(name) if settings.tensor_transport == "nixl" else None
    store = TensorStore(f"{epoch:x}", settings.tensor_store_mb * 2**20, settings.tensor_lease_ms)
    over_zmq = ZmqTensorTransfer(
        context,
        settings.host,
        settings.tensor_port,
        settings.advertise_host,
        store,
        clock,
        metrics,
        chunk_bytes=settings.tensor_chunk_kb * 1024,
        timeout_ms=settings.tensor_fetch_timeout_ms,
    )
    if agent is None:
        return over_zmq
    return NixlTensorTransfer(agent, name, over_zmq, clock, metrics, settings.tensor_fetch_timeout_ms)


async def serve(
    settings: WorkerSettings,
    stop: asyncio.Event,
    ready: Callable[[str], None],
) -> None:
    """Run a worker until ``stop`` is set and its requests are done.

    ``ready`` is called once, with the URL of the worker's HTTP, when the consolidator has welcomed the worker.
    Raises ``OSError`` when a port cannot be bound, ``TableError`` when the timing table cannot be used.
    """
    clock = SystemClock()
    registry = CollectorRegistry()
    metrics = WorkerMetrics(registry)
    timing = make_timing(settings)
    context = PlaneContext.make(CurveKeys.load(settings), PlaneMetrics(registry))
    for warning in settings.exposures(settings.host, http=True, planes="the request plane"):
        log.warning("%s", warning)
    epoch = time.time_ns()
    requests: RequestSocket | None = None
    publisher: EventPublisher | None = None
    fetcher: KvFetcher | None = None
    tensors: TensorTransfer | None = None
    embedding_fetcher: EmbeddingFetcher | None = None
    http: HttpServer | None = None
    announcement: asyncio.Task[None] | None = None
    orderly = True
    try:
        requests = RequestSocket(context, settings.host, settings.request_port)
        api = HttpApi(registry)
        tls = Tls.load(settings)
        http = HttpServer(api, settings.host, settings.http_port, "http_port", tls=tls)
        card = make_card(settings, requests.port, http.port)
        tensors = make_tensor_transfer(settings, context, epoch, clock, registry)
        engine: Engine
        kv: KvExchange | None = None
        embeddings: EmbeddingExchange | None = None
        if settings.card_role is Role.ENCODE:
            assert tensors is not None, "an encode worker is multimodal"
            limits = EncodeLimits(
                max_waiting_requests=settings.max_waiting_requests,
                ms_per_image=settings.encode_ms_per_image / settings.speedup,
            )
            engine = SimulatedEncodeEngine(limits, tensors, clock)
        else:
            simulated = RealTimeSimulatedEngine(
                settings.engine_limits(),
                settings.vocabulary(),
                timing,
                clock,
                settings.transfer_model(),
                KvSource(card.request_endpoint, settings.worker_id, epoch),
                settings.modality == "multimodal",
            )
            engine = simulated
            fetches_max = settings.max_waiting_requests + settings.max_batch_size
            fetcher = KvFetcher(context, settings.kv_fetch_timeout_ms, fetches_max, clock, metrics)
            kv = KvExchange(simulated, fetcher)
            if tensors is not None:
                embedding_fetcher = EmbeddingFetcher(tensors, fetches_max)
                embeddings = EmbeddingExchange(simulated, embedding_fetcher)
        service = WorkerService(
            settings.worker_id,
            epoch,
            card,
            engine,
            requests,
            ServiceLimits(settings.peer_lease_ms, settings.drain_timeout_ms),
            clock,
            metrics,
            kv,
            embeddings,
        )
        api.show(service)
        publisher = EventPublisher(
            context,
            settings.consolidator,
            PushStream(
                settings.worker_id,
                0,
                epoch,
                card,
                PushTiming(heartbeat_ms=settings.heartbeat_ms),
                settings.outbox_bytes,
            ),
            service.restate,
            clock,
            metrics,
            settings.load_interval_ms,
        )
        http.start()
        announcement = asyncio.get_running_loop().create_task(_announce(publisher, card, ready))
        log.info("worker %s at %s, health at %s", settings.worker_id, card.request_endpoint, card.http_endpoint)
        await service.run(publisher, stop)
    except asyncio.CancelledError:
        # A second signal: nothing is waited for.
        orderly = False
        raise
    finally:
        if announcement is not None:
            announcement.cancel()
        if fetcher is not None:
            fetcher.close(orderly)
        if embedding_fetcher is not None:
            await embedding_fetcher.close()
        if tensors is not None:
            await tensors.close()
        if requests is not None:
            requests.close(orderly)
        if publisher is not None:
            publisher.close(orderly)
        if http is not None:
            await http.stop()
        end_security(context)
        # Waits for frames on their way, at most as long as the sockets linger.
        await asyncio.to_thread(context.term)
        log.info("worker %s has ended", settings.worker_id)


async def _announce(publisher: EventPublisher, card: WorkerCard, ready: Callable[[str], None]) -> None:
    await publisher.until_registered()
    ready(card.http_endpoint)
