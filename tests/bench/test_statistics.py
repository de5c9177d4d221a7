"""Statistics: percentiles within their stated error, merging as if measured together, counts that add up."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from poolgrid.plugins.bench.statistics import (
    ERROR_KINDS_MAX,
    ERROR_SAMPLES_MAX,
    GROWTH,
    Distribution,
    Measurements,
    Outcome,
    Point,
    Report,
    max_over_mean,
    report,
    with_ratios,
)
from poolgrid.plugins.bench.table import series_table

values = st.lists(st.floats(0, 1e7), min_size=1, max_size=100)


def distribution(items: list[float]) -> Distribution:
    found = Distribution()
    for item in items:
        found.add(item)
    return found


def outcome(worker: str | None = "w0", prompt: int = 100, cached: int = 40) -> Outcome:
    return Outcome(10.0, 30.0, [(5.0, 3), (1.0, 1)], prompt, cached, 5, worker=worker)


class TestDistribution:
    @given(items=values, percent=st.floats(0, 100))
    def test_a_percentile_is_within_half_a_bucket_of_the_nearest_rank(self, items: list[float], percent: float) -> None:
        rank = max(1, math.ceil(percent / 100 * len(items)))
        exact = sorted(items)[rank - 1]

        found = distribution(items).percentile(percent)

        assert found == pytest.approx(exact, rel=(GROWTH - 1) / 2 * 1.01, abs=1e-6)

    @given(one=values, other=values, percent=st.floats(0, 100))
    def test_merging_equals_measuring_together(self, one: list[float], other: list[float], percent: float) -> None:
        merged = distribution(one)
        merged.merge(distribution(other))
        together = distribution(one + other)

        assert merged.percentile(percent) == together.percentile(percent)
        assert (merged.count, merged.smallest, merged.largest) == (together.count, together.smallest, together.largest)
        assert merged.total == pytest.approx(together.total)

    def test_memory_does_not_grow_with_the_number_of_values(self) -> None:
        found = distribution([1.0 + number % 1000 / 100 for number in range(100_000)])

        assert len(found._buckets) < 600

    @pytest.mark.parametrize("percent", [-1, 100.1, math.nan])
    def test_percentiles_that_do_not_exist_are_refused(self, percent: float) -> None:
        with pytest.raises(ValueError, match="allowed are values from 0 to 100"):
            distribution([1.0]).percentile(percent)


class TestMeasurements:
    def test_a_report_adds_up(self) -> None:
        measured = Measurements()
        measured.add(outcome("w1", 100, 50))
        measured.add(outcome("w0", 300, 0))
        measured.add(outcome(None, 100, 0))
        measured.add_error("http-429", "full")

        found = report(
            measured, mode="closed", url="u", model="m", duration_s=2.0, ideal_cached_token_ratio=0.2, interrupted=False
        )

        assert (found.requests, found.errors) == (4, 1)
        assert (found.prompt_tokens, found.cached_tokens, found.cached_token_ratio) == (500, 50, 0.1)
        assert (found.output_tokens, found.output_tokens_per_s, found.requests_per_s) == (15, 7.5, 1.5)
        assert list(found.per_worker) == ["w0", "w1"]
        assert found.per_worker["w0"].prompt_tokens == 300
        assert found.worker_tokens_max_over_mean == 1.5
        assert found.worker_requests_max_over_mean == 1.0
        assert found.itl_ms.mean == 4.0

    def test_an_empty_run_reports_nothing_instead_of_dividing_by_it(self) -> None:
        found = report(
            Measurements(),
            mode="closed",
            url="",
            model="",
            duration_s=0.0,
            ideal_cached_token_ratio=None,
            interrupted=True,
        )

        assert (found.cached_token_ratio, found.worker_tokens_max_over_mean) == (None, None)
        assert found.output_tokens_per_s == 0

    def test_a_few_different_samples_are_kept_per_kind(self) -> None:
        measured = Measurements()
        for number in range(10):
            measured.add_error("timeout", f"after {number // 2} s")

        assert measured.errors == measured.errors_by_kind["timeout"].count == 10
        assert measured.errors_by_kind["timeout"].samples == [f"after {n} s" for n in range(ERROR_SAMPLES_MAX)]

    def test_kinds_are_bounded(self) -> None:
        measured = Measurements()
        for number in range(ERROR_KINDS_MAX + 10):
            measured.add_error(f"http-{number}", "?")

        assert measured.errors_by_kind["other"].count == 10

    def test_merging_adds_every_count(self) -> None:
        one, other, together = Measurements(), Measurements(), Measurements()
        for measured in (one, together):
            measured.add(outcome("w0"))
            measured.add_error("timeout", "a")
            measured.wrong_texts += 1
            measured.delayed += 2
        for measured in (other, together):
            measured.add(outcome("w0"))
            measured.add(outcome("w1"))
            measured.add_error("timeout", "b")
            measured.cancelled += 3

        one.merge(other)

        assert vars(one).keys() == vars(together).keys()
        for name, value in vars(together).items():
            if not isinstance(value, Distribution):
                assert getattr(one, name) == value, name
        assert one.ttft_ms.summary() == together.ttft_ms.summary()


@pytest.mark.parametrize(
    ("numbers", "ratio"), [([], None), ([0, 0], None), ([5], 1), ([1, 1, 1], 1), ([4, 0], 2), ([3, 1], 1.5)]
)
def test_max_over_mean(numbers: list[float], ratio: float | None) -> None:
    assert max_over_mean(numbers) == ratio


def measured(ttft_ms: float, tokens: int = 10, cached: int = 0) -> Report:
    found = Measurements()
    found.add(Outcome(ttft_ms, ttft_ms + 1, [(2.0, 3)], 100, cached, tokens))
    return report(
        found,
        mode="closed",
        url="http://h",
        model="m",
        duration_s=1.0,
        ideal_cached_token_ratio=None,
        interrupted=False,
    )


def point(name: str, level: int, *rounds: Report) -> Point:
    return Point(name, level, rounds[0], list(rounds))


def test_a_ratio_is_taken_round_by_round_and_level_by_level() -> None:
    base, other = [measured(10), measured(20), measured(40)], [measured(20), measured(80), measured(120)]

    found = with_ratios(
        [
            point("kv", 1, *base),
            point("random", 1, *other),
            point("kv", 4, measured(5, cached=50)),
            point("random", 4, measured(15, 30)),
        ]
    )

    assert [each.ratios is None for each in found] == [True, False, True, False]
    assert found[1].ratios is not None
    ratio = found[1].ratios["ttft_ms.mean"]
    assert (ratio.median, ratio.low, ratio.high) == (3.0, 2.0, 4.0)
    assert found[3].ratios is not None
    assert found[3].ratios["ttft_ms.mean"].median == pytest.approx(3.0)
    assert found[3].ratios["output_tokens_per_s"].median == 3.0
    assert found[3].ratios["cached_token_ratio"].median == 0.0
    assert "cached_token_ratio" not in found[1].ratios, "nothing over nothing is no ratio"


def test_the_table_keeps_names_and_figures_whole_at_80_columns() -> None:
    name = "https://a-rather-long-name.example.org:8443"
    console = Console(width=80, record=True, file=None, force_terminal=False)
    with console.capture() as capture:
        base = [measured(12345.6, cached=1), measured(10)]
        points = with_ratios([point("kv", 1024, *base), point(name, 1024, measured(98765.4, 999, 99), measured(90))])
        console.print(series_table(points))
    text = capture.get()

    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
    assert "12,345.6" in text
    assert "98,765.4" in text
    assert name in text
    assert "× 8.50" in text
    assert "8.00–9.00" in text
