"""Arrival schedules: reproducible, at the wanted rate."""

from __future__ import annotations

from itertools import count, islice

import pytest

from poolgrid.tools.bench.conversations import poisson, synthetic, until


def test_poisson_arrivals_are_reproducible_and_depend_on_the_seed() -> None:
    assert list(islice(poisson(10, 1), 100)) == list(islice(poisson(10, 1), 100))
    assert list(islice(poisson(10, 1), 100)) != list(islice(poisson(10, 2), 100))


@pytest.mark.parametrize("rate", [0.5, 20, 3000])
def test_poisson_arrivals_have_the_rate_and_its_spread(rate: float) -> None:
    times = list(islice(poisson(rate, 7), 20_000))
    gaps = [later - earlier for earlier, later in zip([0.0, *times], times, strict=False)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5

    assert min(gaps) >= 0
    assert mean == pytest.approx(1000 / rate, rel=0.03)
    assert deviation == pytest.approx(mean, rel=0.05)


def test_until_ends_the_schedule() -> None:
    assert list(until(map(float, count(0, 100)), 300)) == [0, 100, 200]


def test_synthetic_requests_share_nothing_and_repeat_with_their_seed() -> None:
    one = list(synthetic([None, None, 5.0], isl=100, osl=7, seed=1))
    again = list(synthetic([None, None, 5.0], isl=100, osl=7, seed=1))
    other = list(synthetic([None, None, 5.0], isl=100, osl=7, seed=2))

    assert one == again
    assert [request.at_ms for request in one] == [None, None, 5.0]
    assert len({request.block_ids for request in one + other}) == 6
    assert {(request.isl, request.osl, request.block_tokens) for request in one} == {(100, 7, 100)}
