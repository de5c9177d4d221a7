"""Figures of several rounds, put together."""

from __future__ import annotations

import pytest

from lab.benchmarks.http import medians, with_ratios


def test_rounds_become_medians_and_failures_add_up() -> None:
    rounds = [
        {"us_per_request": figure, "failures": 1, "failure": text, "ttft_ms": {"p50": figure / 10}, "alone": None}
        for figure, text in ((300.0, ""), (100.0, "refused"), (200.0, ""))
    ]
    assert medians(rounds) == {
        "us_per_request": 200.0,
        "failures": 3,
        "failure": "refused",
        "ttft_ms": {"p50": 20.0},
        "alone": None,
    }


def test_ratios_are_of_the_same_round_so_that_a_machine_that_slows_down_for_all_changes_none() -> None:
    ours = [{"us_per_request": figure} for figure in (100.0, 400.0, 200.0)]
    theirs = [{"us_per_request": 2 * each["us_per_request"]} for each in ours]
    figures = with_ratios({"ours": {"short": ours}, "smg": {"short": theirs[:2]}})
    assert figures["smg"]["short"]["to_ours"] == pytest.approx([2.0, 2.0])
    assert figures["ours"]["short"]["to_ours"] == pytest.approx([1.0, 1.0, 1.0])
