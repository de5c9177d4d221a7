"""What a simulation found, as numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from poolgrid.tools.simulation.pool import RunResult


def latency_summary(values: Sequence[float], weights: Sequence[int] | None = None) -> dict[str, float]:
    """Return mean, p50, p90 and p99 of values that occurred ``weights`` times each (once when not given)."""
    if not values:
        return {"mean": 0.0, "p50": 0.0, "p90": 0.0, "p99": 0.0}
    array = np.asarray(values, np.float64)
    counts = np.ones(len(array)) if weights is None else np.asarray(weights, np.float64)
    order = np.argsort(array, kind="stable")
    array, counts = array[order], counts[order]
    cumulative = np.cumsum(counts)

    def percentile(share: float) -> float:
        # Nearest rank: the smallest value that at least this share of all occurrences does not exceed.
        return float(array[min(int(np.searchsorted(cumulative, share * cumulative[-1])), len(array) - 1)])

    return {
        "mean": float((array * counts).sum() / cumulative[-1]),
        "p50": percentile(0.5),
        "p90": percentile(0.9),
        "p99": percentile(0.99),
    }


def prediction_summary(predicted: Sequence[tuple[float, int, float, float]]) -> dict[str, float] | None:
    """Return how far expected TTFTs were from what they became; ``None`` for a policy that expects none.

    ``error`` is the sum of all distances over the sum of what was; ``bias`` is above 1 when too much was expected;
    ``p50`` and ``p90`` are of each request's distance as a share of its TTFT.
    """
    if not predicted:
        return None
    table = np.asarray(predicted, np.float64)
    expected, real = table[:, 2], table[:, 3]
    distances = np.abs(expected - real)
    shares = latency_summary((distances / real).tolist())
    return {
        "requests": len(predicted),
        "error": float(distances.sum() / real.sum()),
        "bias": float(expected.sum() / real.sum()),
        "p50": shares["p50"],
        "p90": shares["p90"],
    }


def policy_report(result: RunResult, workers: int) -> dict[str, Any]:
    """Return the figures of one policy."""
    tokens = result.worker_tokens
    return {
        "requests": result.requests,
        "cached_token_ratio": result.cached_tokens / result.prompt_tokens if result.prompt_tokens else 0.0,
        "overlap_found_token_ratio": result.overlap_found_tokens / result.prompt_tokens
        if result.prompt_tokens
        else 0.0,
        "ttft_ms": latency_summary(result.ttft_ms),
        "short_prompt_ttft_ms": latency_summary(result.short_ttft_ms),
        "ttft_targets_met_ratio": result.targets_met / result.requests if result.requests else 0.0,
        "predicted_ttft": prediction_summary(result.predicted),
        "itl_ms": latency_summary([gap for gap, _ in result.itl_ms], [count for _, count in result.itl_ms]),
        "busy_ratio": result.busy_ms / (workers * result.span_ms) if result.span_ms else 0.0,
        "worker_tokens_max_over_mean": max(tokens) / (sum(tokens) / len(tokens)) if sum(tokens) else 0.0,
        "turns_per_minute": 60_000 * result.requests / result.span_ms if result.span_ms else 0.0,
        "first_turn_ms": {**latency_summary(result.first_turn_ms), "max": max(result.first_turn_ms, default=0.0)},
        "waited_turns": result.waited,
        "preemptions": result.preemptions,
        "crowded": result.crowded,
        "output_tokens": result.output_tokens,
        "engine_steps": result.steps,
    }
