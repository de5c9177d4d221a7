"""What can be set on a router process of either kind."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from poolgrid.discovery.settings import DiscoverySettings
from poolgrid.http.http_settings import ServerSettings
from poolgrid.process.tracing.settings import TraceSettings


class ServingSettings(ServerSettings, TraceSettings, DiscoverySettings):
    """HTTP, admission and dispatch of one router, of a pool or of pools."""

    panel: ClassVar[str] = "Queue and retries"

    queue_limit: int = Field(
        1024, ge=0, le=1_000_000, description="Requests that may wait for room; one more is answered 429."
    )
    queue_prompt_tokens: int = Field(
        4_194_304,
        ge=0,
        le=2**40,
        description="Prompt tokens that may wait, over all requests; beyond it the lowest priority is answered 429. "
        "The default is 4,096 for each of the requests that may wait, and 16 MiB of memory.",
    )
    queue_timeout_ms: float = Field(
        30_000, gt=0, le=3_600_000, description="Longest wait for room; then the request is answered 429."
    )
    migration_limit: int = Field(
        3, ge=0, le=100, description="How often one request may move to another worker before the client sees an error."
    )
    worker_timeout_ms: float = Field(
        5_000,
        ge=100,
        le=600_000,
        description="Silence on the request plane after which a worker counts as unreachable.",
    )
    share_state: Literal["none", "nats"] = Field(
        "none",
        description="What all routers of a pool (of one namespace and nats_pool), or all global routers of a "
        "namespace, share: the limits of tenants, the bounds of the queue, and responses that are kept. nats = by "
        "buckets of JetStream at nats_url; with names nats, or event_plane nats.",
    )
