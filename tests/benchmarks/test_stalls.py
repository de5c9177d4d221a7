"""What is said of the gaps between a stream's frames."""

from __future__ import annotations

import random

from lab.benchmarks.stalls import figures_of


def test_the_longest_thousandth_of_the_gaps_is_what_is_above_the_percentile() -> None:
    gaps = [2.0] * 9_980 + [7.0] * 15 + [90.0] * 5
    random.Random(1).shuffle(gaps)

    found = figures_of(gaps)

    assert found == {"frames": 10_000, "p50": 2.0, "p99": 2.0, "p99.9": 7.0, "max": 90.0}
    assert figures_of([*gaps, *[90.0] * 10])["p99.9"] == 90.0
