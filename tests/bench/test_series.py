"""Ratios are those of two runs of one round; what is reported is their median."""

from __future__ import annotations

import pytest
from rich.console import Console

from poolgrid.tools.bench.statistics import Measurements, Outcome, Point, Report, report, with_ratios
from poolgrid.tools.bench.table import series_table


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
