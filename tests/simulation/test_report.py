"""Figures of a run: weighted like the occurrences they stand for."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poolgrid.tools.simulation.pool import RunResult
from poolgrid.tools.simulation.recording import latency_summary, policy_report
from tests.examples import examples


@given(st.lists(st.tuples(st.floats(0.0, 1e6), st.integers(1, 40)), min_size=1, max_size=30))
@settings(max_examples=examples(20))
def test_a_weighted_summary_is_that_of_the_values_written_out(pairs: list[tuple[float, int]]) -> None:
    written_out = sorted(value for value, count in pairs for _ in range(count))

    summary = latency_summary([value for value, _ in pairs], [count for _, count in pairs])

    assert summary["mean"] == pytest.approx(math.fsum(written_out) / len(written_out))
    for name, percent in (("p50", 50), ("p90", 90), ("p99", 99)):
        nearest_rank = -(-percent * len(written_out) // 100)
        assert summary[name] == written_out[nearest_rank - 1], name


def result(**changes: object) -> RunResult:
    made = RunResult("kv", worker_tokens=[0, 0], worker_requests=[0, 0])
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def test_shares_are_over_prompt_tokens_time_and_workers() -> None:
    report = policy_report(
        result(
            requests=3,
            prompt_tokens=400,
            cached_tokens=100,
            overlap_found_tokens=120,
            busy_ms=150.0,
            span_ms=100.0,
            worker_tokens=[300, 100],
            itl_ms=[(10.0, 3), (20.0, 1)],
        ),
        workers=2,
    )

    assert report["cached_token_ratio"] == 0.25
    assert report["overlap_found_token_ratio"] == 0.3
    assert report["busy_ratio"] == 0.75
    assert report["worker_tokens_max_over_mean"] == 1.5
    assert report["itl_ms"]["mean"] == 12.5


def test_a_run_of_nothing_divides_by_nothing() -> None:
    report = policy_report(result(), workers=2)

    assert report["cached_token_ratio"] == report["busy_ratio"] == report["worker_tokens_max_over_mean"] == 0.0
