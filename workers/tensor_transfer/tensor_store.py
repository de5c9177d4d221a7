"""What a source keeps of tensors. Pure: time comes in, ids of what is gone go out.

Rules
    1. A tensor is kept for ``lease_ms`` from its offer or the last question for it, then it is gone.
    2. All of them together have at most ``bytes_max`` bytes; one more is refused as busy, and nothing is thrown
       out for it: a taker was promised each of them.
    3. A tensor does not change while it is kept: the store holds a read-only view of contiguous memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from poolgrid.kernel.wire.limits import TENSOR_BYTES_MAX, TENSOR_DIMENSIONS_MAX
from poolgrid.kernel.worker_protocol.refusal import BusyError, RefusedError
from poolgrid.kernel.worker_protocol.tensor_transfer import Tensor


@dataclass(slots=True)
class _Kept:
    tensor: Tensor
    view: memoryview
    expires_ms: float


class TensorStore:
    """The tensors that one source offers."""

    def __init__(self, prefix: str, bytes_max: int, lease_ms: float) -> None:
        """``prefix`` makes ids unique among the lives of workers, for instance the epoch."""
        self._prefix = prefix
        self._bytes_max = bytes_max
        self._lease_ms = lease_ms
        self._kept: dict[str, _Kept] = {}
        self._next = 0
        self.held_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, tensor: Tensor, now_ms: float) -> tuple[str, Tensor]:
        """Keep a tensor and return its id and the memory that is kept; raises ``RefusedError`` and keeps nothing."""
        if tensor.nbytes > TENSOR_BYTES_MAX or tensor.ndim > TENSOR_DIMENSIONS_MAX:
            raise RefusedError(
                f"a tensor has {tensor.nbytes} bytes in {tensor.ndim} dimensions, allowed are at most "
                f"{TENSOR_BYTES_MAX} in {TENSOR_DIMENSIONS_MAX}"
            )
        if tensor.dtype.hasobject or tensor.dtype.names is not None:
            raise RefusedError(f"a tensor has the dtype {tensor.dtype}, allowed are plain numbers")
        if self.held_bytes + tensor.nbytes > self._bytes_max:
            raise BusyError(
                f"tensors with {self.held_bytes} bytes are kept for other workers, {tensor.nbytes} more would exceed "
                f"{self._bytes_max}"
            )
        # Its own memory in C order, little-endian: the caller may continue to use the original.
        kept = np.array(tensor, dtype=tensor.dtype.newbyteorder("<"), order="C", copy=True)
        kept.flags.writeable = False
        tensor_id = f"{self._prefix}-{self._next}"
        self._next += 1
        view = memoryview(kept.reshape(-1).view(np.uint8).data) if kept.nbytes else memoryview(b"")
        self._kept[tensor_id] = _Kept(kept, view, now_ms + self._lease_ms)
        self.held_bytes += kept.nbytes
        return tensor_id, kept

    def chunk(self, tensor_id: str, offset: int, size: int, now_ms: float) -> memoryview | None:
        """Return bytes of a tensor and renew its lease, or ``None`` when it is not kept or has no such bytes."""
        kept = self._kept.get(tensor_id)
        if kept is None or offset + size > len(kept.view):
            return None
        kept.expires_ms = now_ms + self._lease_ms
        return kept.view[offset : offset + size]

    def release(self, tensor_id: str) -> bool:
        kept = self._kept.pop(tensor_id, None)
        if kept is None:
            return False
        self.held_bytes -= kept.tensor.nbytes
        return True

    def expire(self, now_ms: float) -> list[str]:
        """Release every tensor whose lease has ended; return their ids."""
        gone = [tensor_id for tensor_id, kept in self._kept.items() if kept.expires_ms <= now_ms]
        for tensor_id in gone:
            self.release(tensor_id)
        return gone

    def next_expiry_ms(self) -> float | None:
        return min((kept.expires_ms for kept in self._kept.values()), default=None)


FETCH_SECONDS_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


class TensorMetrics:
    """The collectors of one end; ``transport`` is ``zmq`` or ``nixl``."""

    def __init__(self, registry: CollectorRegistry, transport: str = "zmq") -> None:
        self.transport = Gauge(
            "poolgrid_worker_tensor_transport",
            "1 for the transport of embeddings in use: `zmq` or `nixl`.",
            ["transport"],
            registry=registry,
        )
        self.transport.labels(transport).set(1)
        self.fetched = Counter(
            "poolgrid_worker_tensor_fetches",
            "Tensor fetches, by transport and outcome (`fetched`, `failed`). They fail when encode workers die "
            "or are unreachable, or when the lease is shorter than the queues.",
            ["transport", "outcome"],
            registry=registry,
        )
        self.fetched_bytes = Counter(
            "poolgrid_worker_tensor_fetched_bytes", "Bytes of tensors fetched.", ["transport"], registry=registry
        )
        self.fetch_seconds = Histogram(
            "poolgrid_worker_tensor_fetch_seconds",
            "Duration of one tensor fetch. Part of TTFT.",
            ["transport"],
            buckets=FETCH_SECONDS_BUCKETS,
            registry=registry,
        )
        self.kept = Gauge("poolgrid_worker_tensors_kept", "Embeddings offered and not fetched yet.", registry=registry)
        self.kept_bytes = Gauge(
            "poolgrid_worker_tensor_kept_bytes",
            "Bytes of embeddings offered and not fetched yet. At 256 MiB encode legs are refused.",
            registry=registry,
        )
        self.expired = Counter(
            "poolgrid_worker_tensor_lease_expiries",
            "Embeddings that were not fetched within their lease: the request ended, or prefill workers are full.",
            registry=registry,
        )

    def observe_fetch(self, transport: str, size_bytes: int, duration_ms: float) -> None:
        self.fetched.labels(transport, "fetched").inc()
        self.fetched_bytes.labels(transport).inc(size_bytes)
        self.fetch_seconds.labels(transport).observe(duration_ms / 1e3)
