"""Opens a worker's end of tensor transfers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from poolgrid.server.workers.engines.definition import EngineHost
    from poolgrid.server.workers.tensor_transfer.settings import TensorSettings
    from poolgrid.server.workers.tensor_transfer.zmq_transfer import TensorTransfer


def open_tensor_transfer(
    settings: TensorSettings, transport: Literal["zmq", "nixl"], around: EngineHost
) -> TensorTransfer:
    """Return this worker's end of tensor transfers.

    Raises ``OSError`` when the port cannot be bound, ``NixlMissing``.
    """
    # Imported where there are tensors: NumPy is a fifth of what a worker takes to start.
    from poolgrid.server.workers.tensor_transfer.nixl_transfer import NixlTensorTransfer, make_agent
    from poolgrid.server.workers.tensor_transfer.tensor_store import TensorMetrics, TensorStore
    from poolgrid.server.workers.tensor_transfer.zmq_transfer import TensorTransfer

    metrics = TensorMetrics(around.registry, transport)
    # Before the socket: without NIXL nothing has been bound.
    name = f"{settings.worker_id}-{around.epoch}"
    agent = make_agent(name) if transport == "nixl" else None
    store = TensorStore(f"{around.epoch:x}", settings.tensor_store_mb * 2**20, settings.tensor_lease_ms)
    common: dict[str, Any] = {
        "context": around.context,
        "host": settings.host,
        "port": settings.tensor_port,
        "advertise_host": settings.advertise_host,
        "store": store,
        "clock": around.awake,
        "metrics": metrics,
        "chunk_bytes": settings.tensor_chunk_kb * 1024,
        "timeout_ms": settings.tensor_fetch_timeout_ms,
    }
    return TensorTransfer(**common) if agent is None else NixlTensorTransfer(agent, name, **common)
