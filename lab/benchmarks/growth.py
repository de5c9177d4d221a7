"""How fast a sampled quantity grows, and how sure that is.

Rules
    1. Neighbouring samples of a process's memory are not independent (an allocator takes and returns whole arenas), so
       a line through all of them claims far too much. Samples are averaged in ``BATCHES`` equal stretches of time
       first, and the line goes through the averages.
    2. The interval is Student's for ``BATCHES - 2`` degrees of freedom, with the quantile from the normal one
       (Abramowitz and Stegun, 26.7.5; its error is below 1 % here).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean

BATCHES = 20
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Slope:
    """A slope per unit of x, with the ends of its confidence interval."""

    value: float
    low: float
    high: float


def slope(points: Sequence[tuple[float, float]]) -> Slope | None:
    """Return the slope through ``points`` (x, y), x ascending; ``None`` with fewer than two points per stretch."""
    if len(points) < 2 * BATCHES or points[-1][0] <= points[0][0]:
        return None
    first, span = points[0][0], points[-1][0] - points[0][0]
    batches: list[list[tuple[float, float]]] = [[] for _ in range(BATCHES)]
    for x, y in points:
        batches[min(BATCHES - 1, int((x - first) / span * BATCHES))].append((x, y))
    averages = [(fmean(x for x, _ in batch), fmean(y for _, y in batch)) for batch in batches if batch]
    if len(averages) < 3:
        return None
    mean_x, mean_y = fmean(x for x, _ in averages), fmean(y for _, y in averages)
    squares = sum((x - mean_x) ** 2 for x, _ in averages)
    value = sum((x - mean_x) * (y - mean_y) for x, y in averages) / squares
    free = len(averages) - 2
    residual = sum((y - mean_y - value * (x - mean_x)) ** 2 for x, y in averages)
    error = student_quantile((1 + CONFIDENCE) / 2, free) * math.sqrt(residual / free / squares)
    return Slope(value, value - error, value + error)


def student_quantile(probability: float, free: int) -> float:
    """Return the quantile of Student's t with ``free`` degrees of freedom."""
    z = NormalDist().inv_cdf(probability)
    return z + (z**3 + z) / (4 * free) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * free**2)
