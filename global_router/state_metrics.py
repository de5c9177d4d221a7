"""What a global router's state is at the moment of a scrape."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from poolgrid.global_router.core.choice.fallback import PoolStanding
from poolgrid.global_router.service import GlobalRouterService
from poolgrid.serving.admission_queue import queue_metrics


class StateCollector(Collector):
    """Reads the global router's state at a scrape."""

    def __init__(self, service: GlobalRouterService) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        """Yield what the state is now."""
        service = self._service
        pools = GaugeMetricFamily(
            "poolgrid_global_router_pools",
            "1 for the state that a pool is in.",
            labels=["pool", "state"],
        )
        for name, state in service.view.pool_states().items():
            for each in PoolStanding:
                pools.add_metric([name, each.value], 1.0 if each is state else 0.0)
        dispatched = GaugeMetricFamily(
            "poolgrid_global_router_in_flight",
            "Dispatches in flight, by pool.",
            labels=["pool"],
        )
        for name, count in service.in_flight().items():
            dispatched.add_metric([name], count)
        yield from (pools, dispatched)
        yield from queue_metrics("poolgrid_global_router", service.counts()[0], service.queue)
        yield GaugeMetricFamily(
            "poolgrid_global_router_revision",
            "Revision of the document in force. If it differs between replicas, one has not reloaded.",
            value=service.configuration.active.revision,
        )


def register_views(registry: CollectorRegistry, service: GlobalRouterService) -> None:
    """Have the state read at every scrape."""
    registry.register(StateCollector(service))
