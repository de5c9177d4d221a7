"""What the leader of an engine that spans nodes measures of its ranks, under ``poolgrid_worker_ranks_``."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Gauge


class RankMetrics:
    """The collectors of one group; only a worker whose engine spans nodes has them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.expected = Gauge(
            "poolgrid_worker_ranks_expected",
            "Ranks of the engine, one for each GPU; only where it spans nodes.",
            registry=registry,
        )
        self.alive = Gauge(
            "poolgrid_worker_ranks_alive",
            "Ranks of the engine that are there. One that is lost ends the worker; below `expected` at the start, "
            "ranks have not come yet.",
            registry=registry,
        )
