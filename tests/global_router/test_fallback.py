"""The order in which pools are tried."""

from __future__ import annotations

from typing import Any

import pytest

from poolgrid.global_router.core.choice.grid import PoolStanding, choose_available, fallback_order
from poolgrid.global_router.core.document.grid_document import GridStage
from tests.global_router.documents import document

UP = PoolStanding.AVAILABLE


def stage(ranks: dict[str, int], fallback: dict[str, Any] | None = None) -> GridStage:
    raw = {
        "mode": "aggregated",
        "accept": ["unreachable-pool"],
        "aggregated": {
            "pools": [{"name": name, "priority": rank} for name, rank in ranks.items()],
            "ttft_min_ms": 0,
            "ttft_max_ms": 1,
            "ttft_resolution": 1,
            "itl_min_ms": 0,
            "itl_max_ms": 1,
            "itl_resolution": 1,
            "mapping": [[0]],
            "fallback": fallback or {},
        },
    }
    made = document(raw).aggregated
    assert made is not None
    return made


RANKS = {"slow": 3, "fast": 0, "mid": 1, "also-mid": 1, "slowest": 9}


@pytest.mark.parametrize(
    ("chosen", "rule", "expected"),
    [
        ("mid", "faster-then-slower", ["mid", "also-mid", "fast", "slow", "slowest"]),
        ("slowest", "faster-then-slower", ["slowest", "slow", "mid", "also-mid", "fast"]),
        ("fast", "faster-then-slower", ["fast", "mid", "also-mid", "slow", "slowest"]),
        ("mid", "faster-only", ["mid", "also-mid", "fast"]),
        ("mid", "none", ["mid"]),
    ],
)
def test_pools_follow_the_rule(chosen: str, rule: str, expected: list[str]) -> None:
    order = fallback_order(stage(RANKS, {"rule": rule}), chosen)

    assert [candidate.pool for candidate in order] == expected


def test_the_first_available_pool_is_taken_and_the_others_are_explained() -> None:
    order = fallback_order(stage(RANKS), "mid")
    states = {
        "mid": PoolStanding.BREAKER_OPEN,
        "also-mid": PoolStanding.DRAINING,
        "fast": PoolStanding.SATURATED,
        "slow": UP,
    }

    choice = choose_available(order, states)

    assert (choice.chosen, choice.pool, choice.reason) == ("mid", "slow", "slower")
    assert choice.explanation()["passed_over"] == [
        {"pool": "mid", "state": "breaker-open"},
        {"pool": "also-mid", "state": "draining"},
        {"pool": "fast", "state": "saturated"},
    ]


@pytest.mark.parametrize(
    ("state", "later"), [(PoolStanding.SATURATED, True), (PoolStanding.CONNECTING, True), (PoolStanding.DOWN, False)]
)
def test_without_any_pool_it_is_said_whether_waiting_helps(state: PoolStanding, later: bool) -> None:
    choice = choose_available(fallback_order(stage(RANKS), "mid"), {"fast": state})

    assert choice.pool is None
    assert choice.may_have_room_later is later
    assert len(choice.passed_over) == 5
