"""The search for weights: seeded, budgeted, and no better than what it can show."""

from __future__ import annotations

from math import log
from typing import Any

import pytest

from poolgrid.router.core.cost import CostWeights
from poolgrid.tools.simulation.tuning import Objective, Trial, best_of, search
from poolgrid.tools.simulation.variants import Served, Variant, VariantResult, roomy_limits, run_variant
from poolgrid.tools.simulation.workload import RecordedRequest, part_of, recorded_workload
from poolgrid.workers.core.timing import PolynomialTiming

P99 = Objective("ttft-p99")
GOODPUT = Objective("goodput", ttft_target_ms=100, itl_target_ms=10)


def result(p99_ms: float, mean_ms: float = 0.0, served: list[Served] | None = None) -> VariantResult:
    report: dict[str, Any] = {"ttft_ms": {"p99": p99_ms, "mean": mean_ms}}
    return VariantResult(report, served or [], 1000.0)


def valley(variant: Variant) -> VariantResult:
    """Lowest where the queue weighs 1.5 and decode load 0.3."""
    weights = variant.weights
    return result(100 + 50 * (log(weights.queue_weight / 1.5) ** 2 + log(weights.decode_weight / 0.3) ** 2))


def test_the_search_tries_the_defaults_first_and_comes_near_the_best() -> None:
    seen: list[tuple[int, float]] = []
    trials = search(valley, P99, 60, seed=1, on_trial=lambda n, best: seen.append((n, P99.value(best.result))))
    best = best_of(trials, P99)

    assert trials[0].variant.weights == CostWeights()
    assert len(trials) == 60
    assert P99.value(best.result) < 105 < P99.value(trials[0].result)
    assert [number for number, _ in seen] == list(range(1, 61))
    assert [value for _, value in seen] == sorted((value for _, value in seen), reverse=True)


def test_the_same_seed_finds_the_same_and_another_one_tries_others() -> None:
    def tried(seed: int) -> list[Variant]:
        return [trial.variant for trial in search(valley, P99, 20, seed)]

    assert tried(3) == tried(3) != tried(4)


@pytest.mark.parametrize(("objective", "better", "worse", "gain"), [
    (P99, result(80), result(100), 0.2),
    (GOODPUT, result(0, served=[Served(50, 5)] * 4), result(0, served=[Served(50, 5)] * 2 + [Served(500, 5)]), 1.0),
])  # fmt: skip
def test_gain_is_positive_when_better(
    objective: Objective, better: VariantResult, worse: VariantResult, gain: float
) -> None:
    assert objective.better(better, worse)
    assert not objective.better(worse, better)
    assert objective.gain(better, worse) == pytest.approx(gain)
    assert objective.gain(worse, better) < 0


def test_goodput_counts_requests_within_both_targets_and_one_token_has_no_itl_to_miss() -> None:
    served = [Served(100, 10), Served(100, None), Served(101, 1), Served(1, 11)]

    assert result(0, served=served).attained(100, 10) == 0.5
    assert result(0, served=served).goodput_per_s(100, 10) == 2.0


def test_a_budget_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="the budget is 0"):
        search(valley, P99, 0, 0)


# -- recorded traffic --------------------------------------------------------------------------------------------------


def recorded(count: int) -> list[RecordedRequest]:
    """Two conversations that grow by a block with each request."""
    requests = []
    for number in range(count):
        conversation, turn = number % 2, number // 2 + 1
        path = [1000 * conversation + at for at in range(turn)]
        requests.append(RecordedRequest(100.0 * number, 16 * turn + 3, 5, path))
    return requests


def test_recorded_requests_share_what_their_hashes_share_and_nothing_else() -> None:
    workload = recorded_workload(recorded(10), 16)
    done = run_variant(workload, Variant("default"), 2, roomy_limits(workload), PolynomialTiming())

    assert done.report["requests"] == 10
    assert done.report["cached_token_ratio"] == pytest.approx(workload.ideal_cached_token_ratio)
    assert done.report["settings"]["queue_weight"] == 0.25
    assert len(done.served) == 10
    assert all(each.itl_ms is not None for each in done.served)


def test_a_speed_brings_arrivals_together_and_a_part_begins_at_zero() -> None:
    workload = recorded_workload(recorded(10), 16, speed=2.0)
    later = part_of(workload, 4, 10)

    assert workload.requests[9].arrival_ms == 450.0
    assert [each.arrival_ms for each in later.requests] == [0.0, 50.0, 100.0, 150.0, 200.0, 250.0]
    assert later.ideal_cached_token_ratio < workload.ideal_cached_token_ratio
    assert later.longest == workload.longest


def test_hashes_that_do_not_fit_the_prompt_are_refused() -> None:
    with pytest.raises(ValueError, match="request 0 has 1 hashes"):
        recorded_workload([RecordedRequest(0.0, 40, 1, [1])], 16)


def test_trials_are_compared_by_value_then_by_mean() -> None:
    one, other = Trial(Variant("a"), result(10, 5)), Trial(Variant("b"), result(10, 4))

    assert best_of([one, other], P99) is other
