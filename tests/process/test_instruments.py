from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import prometheus_client
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics_text

from poolgrid.server.process import instruments


def counters(kind: Any, registry: CollectorRegistry) -> None:
    kind.Counter("plain", "A counter.", registry=registry).inc()
    labelled = kind.Counter("labelled_total", "With labels.", ["a", "b"], registry=registry)
    labelled.labels("x", "y").inc(2)
    labelled.labels("x", "z").inc()
    labelled.labels("x", "y").inc()


def _gauge(kind: Any, *names: Any, registry: CollectorRegistry) -> Any:
    if kind is instruments:
        return instruments.Gauge(*names, registry=registry)
    return kind.Gauge(*names, registry=registry)


def gauges(kind: Any, registry: CollectorRegistry) -> None:
    gauge = _gauge(kind, "level", "A gauge.", ["place"], registry=registry)
    gauge.labels("here").inc(3)
    gauge.labels("here").dec()
    gauge.labels("there").set(7.5)
    _gauge(kind, "asked", "Asked for.", registry=registry).set_function(lambda: 4.0)


def histograms(kind: Any, registry: CollectorRegistry) -> None:
    histogram = kind.Histogram("seconds", "A histogram.", buckets=(0.00005, 0.1, 1, 16_384), registry=registry)
    for value in (0.0, 0.00005, 0.05, 0.1, 0.2, 1, 2, 99_999):
        histogram.observe(value)
    labelled = kind.Histogram("by_stage", "With labels.", ["stage"], registry=registry)
    labelled.labels("one").observe(0.3)


def lines(kind: Any, fill: Callable[[Any, CollectorRegistry], None]) -> set[str]:
    registry = CollectorRegistry()
    fill(kind, registry)
    text = generate_latest(registry).decode()
    return {line for line in text.splitlines() if "_created" not in line}


@pytest.mark.parametrize("fill", [counters, gauges, histograms])
def test_instruments_are_exported_as_those_of_prometheus_client(
    fill: Callable[[Any, CollectorRegistry], None],
) -> None:
    assert lines(instruments, fill) == lines(prometheus_client, fill)


def test_a_wrong_number_of_label_values_is_refused() -> None:
    counter = instruments.Counter("labelled", "With labels.", ["a", "b"], registry=None)
    with pytest.raises(ValueError, match="got 1 values for"):
        counter.labels("x")


@given(
    st.lists(st.floats(allow_nan=False), max_size=30), st.lists(st.floats(-5, 5), min_size=1, max_size=5, unique=True)
)
def test_an_observation_is_in_the_first_bucket_that_it_does_not_exceed(
    values: list[float], buckets: list[float]
) -> None:
    bounds = sorted(buckets)
    histogram = instruments.Histogram("x", "X.", buckets=bounds, registry=None)
    for value in values:
        histogram.observe(value)

    expected = [0] * (len(bounds) + 1)
    for value in values:
        expected[next((place for place, bound in enumerate(bounds) if value <= bound), len(bounds))] += 1
    assert histogram._counts == expected


def test_a_bucket_names_the_last_trace_that_fell_into_it_to_who_asks_for_openmetrics() -> None:
    registry = CollectorRegistry()
    histogram = instruments.Histogram("poolgrid_x_seconds", "Times.", buckets=(1.0, 2.0), registry=registry)
    histogram.observe(0.5)
    for value, trace_id in ((0.25, "aa"), (0.75, "bb"), (9.0, "cc")):
        histogram.observe_traced(value, trace_id)

    text = openmetrics_text(registry).decode()  # type: ignore[no-untyped-call]
    found = re.findall(r'_bucket\{le="(\S+)"\} (\S+) # \{trace_id="(\w+)"\} (\S+)', text)
    assert found == [("1.0", "3.0", "bb", "0.75"), ("+Inf", "4.0", "cc", "9.0")]
    assert "trace_id" not in generate_latest(registry).decode()
