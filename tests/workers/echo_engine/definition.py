"""The echo engine, as ``--engine echo``."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import ClassVar

from pydantic import Field

from poolgrid.kernel.wire.card import WorkerCard, WorkerLimits
from poolgrid.kernel.wire.identifiers import Role
from poolgrid.server.workers.engines.definition import EngineDefinition, EngineHost, OpenedEngine
from poolgrid.server.workers.settings import WorkerProcessSettings
from tests.workers.echo_engine.engine import EchoEngine


class EchoSettings(WorkerProcessSettings):
    """A worker process with the echo engine."""

    engine_name: ClassVar[str] = "echo"

    model: str = Field("echo", description="Served model name, as clients write it.")
    max_requests: int = Field(64, ge=1, le=4096, description="Requests at a time; one more is refused as busy.")


@asynccontextmanager
async def open_engine(settings: EchoSettings, around: EngineHost) -> AsyncIterator[OpenedEngine]:
    """Open the engine; there is nothing to load."""
    host = settings.advertised_host
    card = WorkerCard(
        model=settings.model,
        role=Role.AGGREGATED,
        block_size=32,
        limits=WorkerLimits(settings.max_requests, max_num_tokens=8192, total_kv_blocks=1, max_sequence_length=8192),
        request_endpoint=f"tcp://{host}:{around.request_port}",
        http_endpoint=f"{settings.http_scheme}://{host}:{around.http_port}",
        engine="echo 1.0",
    )
    yield OpenedEngine(EchoEngine(settings.max_requests), card)


ENGINE = EngineDefinition(
    title="the echo engine",
    settings=EchoSettings,
    open=open_engine,
    shortest_timeout_ms=lambda settings: settings.peer_lease_ms,
)
