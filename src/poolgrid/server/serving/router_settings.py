"""What can be set on a router process of either kind."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from poolgrid.server.discovery.settings import DiscoverySettings
from poolgrid.server.http.http_settings import ServerSettings
from poolgrid.server.process.tracing.settings import TraceSettings


class ServingSettings(ServerSettings, TraceSettings, DiscoverySettings):
    """HTTP, admission and dispatch of one router, of a pool or of pools."""

    panel: ClassVar[str] = "Queue and retries"

    max_queue_requests: int = Field(
        4096, ge=0, le=1_000_000, description="Limit the requests that wait for a worker; more get 429."
    )
    max_queue_prompt_tokens: int = Field(
        33_554_432,
        ge=0,
        le=2**40,
        description="Limit the prompt tokens of all waiting requests; beyond it the lowest priority gets 429.",
    )
    queue_timeout_ms: float = Field(
        60_000, gt=0, le=3_600_000, description="Answer 429 when a request has waited for a worker for this time."
    )
    migration_limit: int = Field(
        3,
        ge=0,
        le=100,
        description="Retry a request on another worker at most this often before the client gets an error.",
    )
    worker_timeout_ms: float = Field(
        5_000,
        ge=100,
        le=600_000,
        description="Treat a worker as unreachable after this time without a message.",
    )
