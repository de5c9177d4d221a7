"""Opens TensorRT-LLM as the engine of a worker: arguments checked, the model loaded, the card made."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from poolgrid.workers.engines.definition import EngineHost, OpenedEngine
from poolgrid.workers.engines.trtllm.arguments.engine_arguments import resolve_files
from poolgrid.workers.engines.trtllm.arguments.engine_rules import look_up
from poolgrid.workers.engines.trtllm.card import make_card
from poolgrid.workers.engines.trtllm.engine import EngineLimits, load_engine
from poolgrid.workers.engines.trtllm.settings import TrtllmWorkerSettings

log = logging.getLogger(__name__)


@asynccontextmanager
async def open_engine(settings: TrtllmWorkerSettings, around: EngineHost) -> AsyncIterator[OpenedEngine]:
    """Load TensorRT-LLM; takes minutes. Raises ``ContractError`` for arguments that it would not take, before that."""
    arguments = resolve_files(settings)
    for warning in arguments.warnings:
        log.warning("%s", warning)
    limits = EngineLimits(
        kept_transfers_max=settings.kept_transfers_max,
        kv_transfer_timeout_ms=look_up(arguments.values, "cache_transceiver_config.kv_transfer_timeout_ms")
        or settings.kv_transfer_timeout_ms,
        max_requests=settings.max_requests,
        health_interval_ms=settings.health_interval_ms,
        health_timeout_ms=settings.health_timeout_ms,
        progress_timeout_ms=settings.progress_timeout_ms,
        answer_timeout_ms=settings.answer_timeout_ms,
    )
    async with load_engine(
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
    ) as opened:
        yield OpenedEngine(opened.engine, make_card(settings, arguments, opened, around.request_port, around.http_port))
