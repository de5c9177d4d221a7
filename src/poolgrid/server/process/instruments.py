"""Counters, gauges and histograms for hot paths, exported by ``prometheus_client`` at each scrape.

``prometheus_client``'s own take a lock and several calls per observation: a quarter of a microsecond per bucket that a
router pays two dozen times a request. These are plain numbers, and belong to the event loop that moves them; a scrape
in another thread reads them as they are at that moment. Names, labels and types come out the same.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from time import time
from typing import Final, Self

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar
from prometheus_client.utils import floatToGoString

DEFAULT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
"""Seconds: the defaults of ``prometheus_client``."""


OTHER: Final = "other"
"""The value of a label for all that have no series of their own any more."""


class _Instrument(Collector):
    """What the three kinds share: a name, labels, one child per combination of label values."""

    def __init__(
        self, name: str, documentation: str, labelnames: Sequence[str] = (), *, registry: CollectorRegistry | None
    ) -> None:
        self._name = name
        self._documentation = documentation
        self._labelnames = tuple(labelnames)
        self._children: dict[tuple[str, ...], Self] = {}
        if registry is not None:
            registry.register(self)

    def labels(self, *values: str) -> Self:
        """Return the child with these label values; the same one each time."""
        child = self._children.get(values)
        if child is None:
            if len(values) != len(self._labelnames):
                raise ValueError(f"labelling {self._name}: got {len(values)} values for {self._labelnames}")
            child = self._children[values] = self._child()
        return child

    def retain(self, stays: Callable[[tuple[str, ...]], bool]) -> None:
        """Drop the children whose label values are not to stay: what they stand for is gone."""
        for values in [values for values in self._children if not stays(values)]:
            del self._children[values]

    def _child(self) -> Self:
        raise NotImplementedError

    def _shown(self) -> list[tuple[tuple[str, ...], Self]]:
        # A copy: the loop may add a child while a scrape reads.
        return list(self._children.items()) if self._labelnames else [((), self)]


class _Number(_Instrument):
    """A single value, moved or read at each scrape."""

    value = 0.0
    """What is counted with every request adds to it here: a call costs as much as ten additions."""
    _function: Callable[[], float] | None = None
    _family: type[CounterMetricFamily | GaugeMetricFamily]

    def inc(self, amount: float = 1) -> None:
        self.value += amount

    def set_function(self, function: Callable[[], float]) -> None:
        """Read the value from here at each scrape, instead of moving it."""
        self._function = function

    def read(self) -> float:
        return self.value if self._function is None else self._function()

    def collect(self) -> Iterator[Metric]:
        family = self._family(self._name, self._documentation, labels=self._labelnames)
        for values, child in self._shown():
            family.add_metric(values, child.read())
        yield family

    def _child(self) -> Self:
        return type(self)(self._name, "", registry=None)


class Counter(_Number):
    """A number that only grows."""

    _family = CounterMetricFamily

    def by_label(self) -> dict[str, int]:
        """Return the counts by the value of the first label."""
        counts: dict[str, int] = {}
        for values, child in self._shown():
            counts[values[0]] = counts.get(values[0], 0) + int(child.read())
        return counts


class Gauge(_Number):
    """A number that moves."""

    _family = GaugeMetricFamily

    def dec(self, amount: float = 1) -> None:
        self.value -= amount

    def set(self, value: float) -> None:
        self.value = value


class Histogram(_Instrument):
    """Observations in buckets; ``buckets`` are upper bounds, ascending."""

    def __init__(
        self,
        name: str,
        documentation: str,
        labelnames: Sequence[str] = (),
        *,
        buckets: Sequence[float] = DEFAULT_BUCKETS,
        registry: CollectorRegistry | None,
    ) -> None:
        self._bounds = tuple(float(bound) for bound in buckets)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0
        self._exemplars: dict[int, Exemplar] = {}
        """By bucket, the last observation whose trace is kept."""
        super().__init__(name, documentation, labelnames, registry=registry)

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def totals(self) -> list[int]:
        """Return the observations of all children by bucket, not cumulative; the last bucket has no upper bound."""
        counts = [child._counts for _, child in self._shown()]
        return list(map(sum, zip(*counts, strict=True))) if counts else [0] * len(self._counts)

    def observe_traced(self, value: float, trace_id: str) -> None:
        """Count one observation, of a request whose trace is kept: its bucket names it."""
        self.observe(value)
        self._exemplars[bisect_left(self._bounds, value)] = Exemplar({"trace_id": trace_id}, value, time())

    def collect(self) -> Iterator[Metric]:
        """Yield the family, its buckets cumulative."""
        family = HistogramMetricFamily(self._name, self._documentation, labels=self._labelnames)
        for values, child in self._shown():
            buckets: list[tuple[str, float] | tuple[str, float, Exemplar]] = []
            seen = 0
            counts = list(child._counts)
            for bucket, (bound, count) in enumerate(zip((*self._bounds, float("inf")), counts, strict=True)):
                seen += count
                name = str(floatToGoString(bound))  # type: ignore[no-untyped-call]
                exemplar = child._exemplars.get(bucket)
                buckets.append((name, seen) if exemplar is None else (name, seen, exemplar))
            family.add_metric(values, buckets, child._sum)
        yield family

    def _child(self) -> Self:
        return type(self)(self._name, "", buckets=self._bounds, registry=None)
