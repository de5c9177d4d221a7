"""What a worker measures of its tensor transfers, under ``poolgrid_worker_tensor_``."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

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
            "Bytes of embeddings offered and not fetched yet. At `tensor_store_mb` encode legs are refused.",
            registry=registry,
        )
        self.expired = Counter(
            "poolgrid_worker_tensor_lease_expiries",
            "Embeddings that were not fetched within their lease: the request ended, or prefill workers are full.",
            registry=registry,
        )

    def observe_fetch(self, transport: str, size_bytes: int, duration_ms: float) -> None:
        """Count a tensor that was fetched."""
        self.fetched.labels(transport, "fetched").inc()
        self.fetched_bytes.labels(transport).inc(size_bytes)
        self.fetch_seconds.labels(transport).observe(duration_ms / 1e3)
