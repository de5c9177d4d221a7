"""Settings of a worker's end of tensor transfers; which transport there is, each engine says itself."""

from __future__ import annotations

from pydantic import Field

from poolgrid.workers.settings import WorkerProcessSettings

TIMEOUT_MS_MAX = 3_600_000.0
"""An hour: longer than anybody waits for embeddings."""


class TensorSettings(WorkerProcessSettings):
    """A worker process that keeps tensors for others, or fetches theirs."""

    tensor_port: int = Field(
        0, ge=0, le=65535, description="Port at which tensors are asked for and let go of; 0 = any free one."
    )
    tensor_store_mb: int = Field(
        256,
        ge=1,
        le=1_048_576,
        description="Embeddings kept for other workers, in 2^20 bytes; beyond it encode legs are refused as busy.",
    )
    tensor_lease_ms: float = Field(
        10_000.0,
        ge=10.0,
        le=TIMEOUT_MS_MAX,
        description="How long embeddings are kept that nobody asks for; as long as a silent router keeps its lease.",
    )
    tensor_fetch_timeout_ms: float = Field(
        2000.0,
        ge=10.0,
        le=TIMEOUT_MS_MAX,
        description="Silence of an encode worker after which a fetch of embeddings ends as broken.",
    )
    tensor_chunk_kb: int = Field(
        1024, ge=1, le=4096, description="Piece of a tensor in one message, in 2^10 bytes, without NIXL."
    )
