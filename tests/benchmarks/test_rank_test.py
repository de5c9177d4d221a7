"""The rank test finds what can be told apart, and nothing in what cannot."""

from __future__ import annotations

import random

import pytest

from lab.benchmarks.rank_test import accuracy, area

SIGNIFICANCE = 0.001


def drawn(seed: int, mean: float) -> list[float]:
    source = random.Random(seed)
    return [source.gauss(mean, 1.0) for _ in range(200)]


def test_equal_distributions_are_chance() -> None:
    chances = [area(drawn(seed, 10), drawn(seed + 1000, 10)) for seed in range(100)]

    assert all(abs(auc - 0.5) < 0.12 for auc, _ in chances)
    assert sum(chance < 0.05 for _, chance in chances) < 15, "one in twenty by chance"


def test_a_shift_of_half_a_deviation_is_found() -> None:
    auc, chance = area(drawn(1, 10.0), drawn(2, 10.5))

    assert auc > 0.55
    assert chance < SIGNIFICANCE


def test_the_ends() -> None:
    assert area([1.0, 2.0], [3.0, 4.0])[0] == 1.0
    assert area([3.0, 4.0], [1.0, 2.0])[0] == 0.0
    assert area([1.0, 1.0], [1.0, 1.0]) == (0.5, 1.0)


def test_the_test_agrees_with_a_worked_example() -> None:
    # Mann and Whitney with ties, normal approximation with continuity correction: U = 4.5 of 25.
    auc, chance = area([1, 2, 3, 4, 5], [4, 5, 6, 7, 8])

    assert auc == pytest.approx(0.92)
    assert chance == pytest.approx(0.0355, abs=0.0005)


def test_a_classifier_guesses_where_there_is_nothing_to_learn_and_is_right_where_there_is() -> None:
    guesses = [accuracy(drawn(seed, 10), drawn(seed + 1000, 10)) for seed in range(40)]

    assert 0.45 < sum(guesses) / len(guesses) < 0.55
    assert accuracy(drawn(1, 10), drawn(2, 20)) > 0.95
    assert accuracy(drawn(1, 20), drawn(2, 10)) > 0.95
