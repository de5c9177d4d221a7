"""Settings of a worker's end of tensor transfers; which transport there is, each engine defines."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from poolgrid.server.workers.settings import WorkerProcessSettings


class TensorSettings(WorkerProcessSettings):
    """A worker process that keeps tensors for others, or fetches theirs."""

    panel: ClassVar[str] = "Tensor transfer"

    tensor_port: int = Field(
        0, ge=0, le=65535, description="Serve embeddings to other workers at this port; 0 = any free port."
    )
    tensor_store_mb: ClassVar[int] = 256
    """Embeddings kept for other workers, in 2^20 bytes: of hundreds of images. One more leg is refused as busy."""
    tensor_lease_ms: ClassVar[float] = 10_000.0
    """How long embeddings are kept that no worker asks for: as long as a silent router keeps its lease."""
    tensor_fetch_timeout_ms: ClassVar[float] = 2000.0
    """Silence of an encode worker after which a fetch of embeddings ends as broken."""
    tensor_chunk_kb: ClassVar[int] = 1024
    """Piece of a tensor in one message, in 2^10 bytes, without NIXL."""
