"""A search for cost weights: seeded, budgeted, and judged on traffic that it never saw.

Rules
    1. The defaults are tried first; then half of the budget goes to draws from the whole space, the rest to steps
       around the best so far, which get smaller when they do not help.
    2. Everything follows from the seed and the workload: the same command finds the same weights.
    3. ``prefill_weight`` stays 1: only ratios of weights matter.
    4. What was found counts only if it beats the defaults on the held-back part by ``WORTHWHILE``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

from poolgrid.router.core.cost import CostWeights
from poolgrid.tools.simulation.variants import Variant, VariantResult

WORTHWHILE = 0.01
"""Gain over the defaults on held-back traffic below which nothing is recommended: less is noise of one trace."""

DRAWN_SHARE = 0.5
"""Share of the budget that looks everywhere before steps begin."""

FIRST_STEP = 2.0
"""Factor by which a step changes a weight at first."""

SMALLEST_STEP = 1.05

QUEUE_RANGE = (0.01, 4.0)
DECODE_RANGE = (0.001, 2.0)
OVERLAP_RANGE = (0.25, 1.5)
TEMPERATURES = (0.0, 0.0, 0.0, 0.02, 0.1)
"""What is drawn from: sampling seldom helps, so most draws take the cheapest."""


@dataclass(frozen=True, slots=True)
class Objective:
    """What is to be made better."""

    name: str
    """``ttft-p99`` (lower is better) or ``goodput`` (higher is better)."""
    ttft_target_ms: float = 0.0
    itl_target_ms: float = 0.0

    def value(self, result: VariantResult) -> float:
        """Return the figure in its own unit: milliseconds, or requests per second within both targets."""
        if self.name == "ttft-p99":
            return float(result.report["ttft_ms"]["p99"])
        return result.goodput_per_s(self.ttft_target_ms, self.itl_target_ms)

    def better(self, one: VariantResult, other: VariantResult) -> bool:
        """Tell whether ``one`` is better; among equals the lower mean TTFT is."""
        return self._key(one) < self._key(other)

    def gain(self, result: VariantResult, over: VariantResult) -> float:
        """Return by which share of the other's figure a result is better; below 0 it is worse."""
        base, value = self.value(over), self.value(result)
        if base == 0:
            return 0.0 if value == 0 or self.name == "ttft-p99" else float("inf")
        return (base - value) / base if self.name == "ttft-p99" else (value - base) / base

    def _key(self, result: VariantResult) -> tuple[float, float]:
        value = self.value(result)
        return (value if self.name == "ttft-p99" else -value, float(result.report["ttft_ms"]["mean"]))


@dataclass(frozen=True, slots=True)
class Trial:
    """One try of the search."""

    variant: Variant
    result: VariantResult


def search(
    evaluate: Callable[[Variant], VariantResult],
    objective: Objective,
    budget: int,
    seed: int,
    on_trial: Callable[[int, Trial], None] = lambda _number, _best: None,
) -> list[Trial]:
    """Return all trials, the defaults first; ``on_trial`` is told how many are done, and the best so far."""
    if budget < 1:
        raise ValueError(f"searching weights: the budget is {budget}, allowed are integers from 1")
    draw = Random(seed)
    default = Variant("default")
    trials = [Trial(default, evaluate(default))]
    best = trials[0]
    on_trial(1, best)
    step = FIRST_STEP
    drawn = 1 + int((budget - 1) * DRAWN_SHARE)
    for number in range(1, budget):
        variant = _draw(draw, number) if number < drawn else _near(draw, best.variant, step, number)
        trial = Trial(variant, evaluate(variant))
        trials.append(trial)
        if objective.better(trial.result, best.result):
            best = trial
        elif number >= drawn:
            step = max(SMALLEST_STEP, step**0.9)
        on_trial(number + 1, best)
    return trials


def best_of(trials: list[Trial], objective: Objective) -> Trial:
    """Return the best trial; of equals the first."""
    best = trials[0]
    for trial in trials[1:]:
        if objective.better(trial.result, best.result):
            best = trial
    return best


def _draw(draw: Random, number: int) -> Variant:
    overlap = draw.uniform(*OVERLAP_RANGE)
    weights = CostWeights(
        queue_weight=_log_uniform(draw, *QUEUE_RANGE), decode_weight=_log_uniform(draw, *DECODE_RANGE)
    )
    return Variant(f"draw {number}", "kv", _with_overlap(weights, overlap), draw.choice(TEMPERATURES))


def _near(draw: Random, variant: Variant, step: float, number: int) -> Variant:
    weights = variant.weights
    moved = replace(
        weights,
        queue_weight=_within(weights.queue_weight * step ** draw.uniform(-1, 1), QUEUE_RANGE),
        decode_weight=_within(weights.decode_weight * step ** draw.uniform(-1, 1), DECODE_RANGE),
    )
    overlap = _within(weights.device_weight * step ** draw.uniform(-0.5, 0.5), OVERLAP_RANGE)
    return Variant(f"step {number}", "kv", _with_overlap(moved, overlap), variant.temperature)


def _with_overlap(weights: CostWeights, overlap: float) -> CostWeights:
    """Return weights with the credit of every tier scaled alike."""
    default = CostWeights()
    return replace(
        weights,
        device_weight=_rounded(overlap * default.device_weight),
        host_weight=_rounded(overlap * default.host_weight),
        disk_weight=_rounded(overlap * default.disk_weight),
        queue_weight=_rounded(weights.queue_weight),
        decode_weight=_rounded(weights.decode_weight),
    )


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


def _within(value: float, bounds: tuple[float, float]) -> float:
    return min(max(value, bounds[0]), bounds[1])


def _log_uniform(draw: Random, low: float, high: float) -> float:
    return float(low * (high / low) ** draw.random())
