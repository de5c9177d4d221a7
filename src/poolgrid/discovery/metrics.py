"""What processes count of names."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from poolgrid.discovery.registry import Registry
from poolgrid.process.instruments import Counter


class _RegistryCollector(Collector):
    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        known = GaugeMetricFamily(
            "poolgrid_names_instances",
            "Processes that this one follows and that have a name now.",
            labels=["component"],
        )
        counts: dict[str, int] = {}
        for each in self._registry.instances():
            counts[each.component] = counts.get(each.component, 0) + 1
        for component in sorted(counts):
            known.add_metric([component], counts[component])
        yield known
        refused = GaugeMetricFamily(
            "poolgrid_names_refused_entries",
            "Registrations that are there and cannot be used; the log names them.",
        )
        refused.add_metric([], self._registry.refused_count)
        yield refused


class DiscoveryMetrics:
    """Failures to write and read, and what is known."""

    def __init__(self, registry: CollectorRegistry | None, known: Registry) -> None:
        self.failures = Counter(
            "poolgrid_names_failures",
            "Attempts to register (write), or to look who is there (read), that failed.",
            ["operation"],
            registry=registry,
        )
        if registry is not None:
            registry.register(_RegistryCollector(known))
