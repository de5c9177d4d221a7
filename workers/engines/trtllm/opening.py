"""Opens TensorRT-LLM as the engine of a worker: arguments checked, the model loaded, the card made."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

from poolgrid.wire.identifiers import Role
from poolgrid.wire.tensors import TensorDescriptor
from poolgrid.workers.embedding_fetcher import EmbeddingFetcher
from poolgrid.workers.engines.definition import EngineHost, OpenedEngine
from poolgrid.workers.engines.trtllm.arguments.contract import look_up
from poolgrid.workers.engines.trtllm.arguments.engine_arguments import resolve_files
from poolgrid.workers.engines.trtllm.card import make_card
from poolgrid.workers.engines.trtllm.core.disaggregated_params import carried_tensors
from poolgrid.workers.engines.trtllm.loading import load_engine
from poolgrid.workers.engines.trtllm.requests import TrtllmLimits
from poolgrid.workers.engines.trtllm.settings import TrtllmWorkerSettings
from poolgrid.workers.start_phases import Phase
from poolgrid.workers.tensor_transfer.opening import open_tensor_transfer
from poolgrid.workers.transfers import EmbeddingExchange

if TYPE_CHECKING:
    from poolgrid.workers.tensor_transfer.zmq_transfer import TensorTransfer

log = logging.getLogger(__name__)


@asynccontextmanager
async def open_engine(settings: TrtllmWorkerSettings, around: EngineHost) -> AsyncIterator[OpenedEngine]:
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
        _tensor_transfer(settings, around) as tensors,
        load_engine(
            arguments,
            settings.role,
            limits,
            around.awake,
            around.metrics,
            around.registry,
            around.context,
            settings.model_name,
            settings.logits_processors,
            takes_media=settings.modality == "multimodal",
            encode_endpoint=settings.encode_endpoint,
            tensors=tensors,
            warming=partial(around.start.enter, Phase.WARM_UP),
        ) as opened,
    ):
        card = make_card(settings, arguments, opened, around.request_port, around.http_port)
        if tensors is None or settings.role is Role.ENCODE:
            yield OpenedEngine(opened.engine, card)
            return
        fetcher = EmbeddingFetcher(tensors, settings.max_requests, read=_described)
        try:
            yield OpenedEngine(opened.engine, card, embeddings=EmbeddingExchange(opened.engine, fetcher))
        finally:
            await fetcher.close()


@asynccontextmanager
async def _tensor_transfer(settings: TrtllmWorkerSettings, around: EngineHost) -> AsyncIterator[TensorTransfer | None]:
    """Open this worker's end of tensor transfers, where it has one; raises ``OSError``."""
    transport = settings.tensor_transport
    if transport == "none" or settings.modality != "multimodal" or settings.role is Role.DECODE:
        yield None
        return
    tensors = open_tensor_transfer(settings, transport, around)
    try:
        yield tensors
    finally:
        await tensors.close()


def _described(params: bytes) -> list[TensorDescriptor]:
    return [each.tensor for each in carried_tensors(params)]
