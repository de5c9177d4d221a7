"""What the leader of an engine that spans nodes measures of its ranks, under ``poolgrid_worker_ranks_``."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Gauge


class RankMetrics:
    """The collectors of one group; only a worker whose engine spans nodes has them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.expected = Gauge(
            "poolgrid_worker_ranks_expected",
            "Ranks of an engine on several nodes, one per GPU.",
            registry=registry,
        )
        self.alive = Gauge(
            "poolgrid_worker_ranks_alive",
            "Live ranks of the engine. A lost rank ends the worker; at start, ranks may still be missing.",
            registry=registry,
        )
