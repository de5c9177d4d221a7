"""Slopes of sampled memory: true growth is found, noise is not taken for growth."""

from __future__ import annotations

import random

import pytest

from lab.benchmarks.growth import BATCHES, slope, student_quantile


def series(per_unit: float, seed: int, count: int = 400) -> list[tuple[float, float]]:
    """Return a line with the noise of an allocator: steps up and down that last for a while."""
    noise, level, points = random.Random(seed), 0.0, []
    for at in range(count):
        if noise.random() < 0.1:
            level = noise.uniform(-2, 2)
        points.append((at / 40, 100 + per_unit * at / 40 + level))
    return points


@pytest.mark.parametrize("seed", range(20))
def test_growth_is_told_from_noise(seed: int) -> None:
    growing, level = slope(series(2.0, seed)), slope(series(0.0, seed))
    assert growing is not None
    assert level is not None
    assert 1 < growing.low < growing.value < growing.high < 3
    assert level.low < 0.5
    assert level.high > -0.5


def test_a_line_has_its_slope_and_no_doubt() -> None:
    found = slope([(float(x), 3.0 * x + 1) for x in range(2 * BATCHES)])
    assert found is not None
    assert found.value == pytest.approx(3)
    assert found.low == pytest.approx(found.high)


@pytest.mark.parametrize("points", [[], [(0.0, 1.0)] * 100, [(float(x), 1.0) for x in range(2 * BATCHES - 1)]])
def test_too_little_says_nothing(points: list[tuple[float, float]]) -> None:
    assert slope(points) is None


@pytest.mark.parametrize(("free", "quantile"), [(5, 2.571), (18, 2.101), (60, 2.000)])
def test_quantiles_are_students(free: int, quantile: float) -> None:
    assert student_quantile(0.975, free) == pytest.approx(quantile, rel=0.01)
