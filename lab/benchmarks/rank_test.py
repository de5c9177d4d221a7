"""Whether two samples can be told apart: the area under the curve, a rank test, and a classifier that has to guess."""

from __future__ import annotations

import math
from collections.abc import Sequence


def area(seen: Sequence[float], unseen: Sequence[float]) -> tuple[float, float]:
    """Return the area under the curve, and the two-sided p-value of the rank test (normal approximation).

    0.5 is chance; 1 means that every seen value was less than every unseen one. Mann and Whitney's test, with ties and
    the correction for continuity.
    """
    ordered = sorted([(value, 0) for value in seen] + [(value, 1) for value in unseen])
    ranks: dict[int, float] = {0: 0.0, 1: 0.0}
    ties = 0.0
    at = 0
    while at < len(ordered):
        end = at
        while end < len(ordered) and ordered[end][0] == ordered[at][0]:
            end += 1
        for _, side in ordered[at:end]:
            ranks[side] += (at + end + 1) / 2
        ties += (end - at) ** 3 - (end - at)
        at = end
    n, m = len(seen), len(unseen)
    larger = ranks[1] - m * (m + 1) / 2
    total = n + m
    spread = math.sqrt(n * m / 12 * ((total + 1) - ties / (total * (total - 1))))
    if not spread:
        return 0.5, 1.0
    distance = max(0.0, abs(larger - n * m / 2) - 0.5) / spread
    return larger / (n * m), math.erfc(distance / math.sqrt(2))


def accuracy(seen: Sequence[float], unseen: Sequence[float]) -> float:
    """Return the share of right guesses of the best threshold: found on every other value, tried on the rest."""
    learned = sorted([(value, 0) for value in seen[::2]] + [(value, 1) for value in unseen[::2]])
    # Below the threshold is guessed as seen, or the other way round.
    best, threshold, below = 0, float("-inf"), 0
    right = sum(side == 1 for _, side in learned)
    for value, side in learned:
        right += 1 if side == 0 else -1
        for guess, count in ((0, right), (1, len(learned) - right)):
            if count > best:
                best, threshold, below = count, value, guess
    tried = [(value, 0) for value in seen[1::2]] + [(value, 1) for value in unseen[1::2]]
    return sum((below if value <= threshold else 1 - below) == side for value, side in tried) / len(tried)
