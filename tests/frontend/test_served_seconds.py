"""Latencies, tokens and errors by second: differences of the instruments' totals."""

from __future__ import annotations

from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from poolgrid.plugins.fleet_page.router_watch import ServedSeconds
from poolgrid.server.frontend.metrics import SERVED_COLUMNS, FrontendMetrics
from tests.clock import BEGAN_MS, HandClock


@given(st.lists(st.integers(0, 50), max_size=50), st.integers(0, 100))
def test_each_second_has_what_came_in_it(increments: list[int], before: int) -> None:
    totals = [before]
    clock = HandClock()
    served = ServedSeconds(totals.copy, clock)
    for total in accumulate(increments):
        totals[0] = before + total
        clock.now_ms += 1000
        served.sample()

    expected = {str(BEGAN_MS // 1000 + at): (each,) for at, each in enumerate(increments) if each}
    assert served.rows() == expected
    assert served.since_ms == BEGAN_MS


def test_a_total_that_becomes_smaller_counts_as_nothing_and_not_as_less() -> None:
    totals = [10, 0]
    served = ServedSeconds(totals.copy, HandClock())
    totals[:] = [7, 1]
    served.sample()
    totals[:] = [9, 1]
    served.sample()
    assert served.rows() == {str(BEGAN_MS // 1000 - 1): (2, 1)}


def test_totals_are_those_of_all_models_and_statuses_from_500() -> None:
    metrics = FrontendMetrics(CollectorRegistry())
    for model, ttft_s, itl_s in (("a", 0.03, 0.0055), ("b", 0.03, 7.0)):
        metrics.of_model(model).ttft.observe(ttft_s)
        metrics.of_model(model).itl.observe(itl_s)
    for status in (200, 400, 429, 499, 500, 502, 503):
        metrics.answered("chat", status, streaming=False)

    found = dict(zip(SERVED_COLUMNS[1:], metrics.served(), strict=True))

    assert {name: count for name, count in found.items() if count} == {
        "errors": 3,
        "ttft 0.04": 2,
        "itl 0.006": 1,
        "itl Infinity": 1,
    }
