"""Grids built from profiles: interpolation, the choice per cell, the evidence, the faults."""

from __future__ import annotations

import json
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from poolgrid.kernel.pool_grids.grid_document import GridDocumentError
from poolgrid.plugins.grid_builder.grid_builder import build_grid
from poolgrid.plugins.grid_builder.pool_profiles import LatencyTable, load_profiles
from poolgrid.server.global_router.document.reader import load_document
from poolgrid.server.global_router.metrics import GlobalRouterMetrics
from poolgrid.server.workers.timing import PolynomialTiming
from tests.global_router.documents import ROOT, changed

EXAMPLE = ROOT / "pool_configs" / "profiles" / "two_by_two.profiles.json"


def table(*ms: float, tokens: tuple[float, ...] = (0, 1000)) -> dict[str, Any]:
    return {"tokens": list(tokens), "load": [0, 10], "ms": [[value, 2 * value] for value in ms]}


def profiles() -> dict[str, Any]:
    axes = {
        "isl_min": 0,
        "isl_max": 1000,
        "isl_resolution": 2,
        "ttft_min_ms": 0,
        "ttft_max_ms": 400,
        "ttft_resolution": 2,
    }
    return {
        "mode": "disagg",
        "load": 0,
        "prefill": axes,
        "decode": {
            "context_length_min": 0,
            "context_length_max": 1000,
            "context_length_resolution": 1,
            "itl_min_ms": 0,
            "itl_max_ms": 10,
            "itl_resolution": 1,
        },
        "pools": [
            {"stage": "prefill", "name": "cheap", "cost_per_hour": 1, "ttft": table(80, 400)},
            {"stage": "prefill", "name": "fast", "cost_per_hour": 5, "ttft": table(20, 100)},
            {"stage": "decode", "name": "only", "cost_per_hour": 1, "itl": table(30, 30)},
        ],
    }


def problems(raw: Any) -> list[str]:
    with pytest.raises(GridDocumentError) as caught:
        load_profiles(json.dumps(raw))
    return [str(problem) for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("tokens", "load", "ms", "beyond"),
    [
        (0, 0, 80, False),
        (1000, 10, 800, False),
        (500, 5, 360, False),
        (2000, 0, 720, True),
        (-5, 0, 80, False),
    ],
)
def test_tables_are_interpolated_on_straight_lines(tokens: float, load: float, ms: float, beyond: bool) -> None:
    made = LatencyTable(tokens=(0, 1000), load=(0, 10), ms=((80, 160), (400, 800)))

    latency_ms, is_beyond = made.at(tokens, load)
    assert latency_ms == pytest.approx(ms)
    assert is_beyond is beyond


def test_each_cell_gets_the_cheapest_pool_that_meets_its_target_else_the_fastest() -> None:
    built = build_grid(load_profiles(json.dumps(profiles())))

    document = built.loaded.document
    assert document.prefill is not None
    # middles: ISL 250 and 750, TTFT 100 and 300; cheap takes 160 and 320 ms, fast 40 and 80
    assert document.prefill.mapping == (("fast", "cheap"), ("fast", "fast"))
    assert document.prefill.speed_ranks() == {"cheap": 1, "fast": 0}
    assert (built.cells, built.missed) == (5, 1)
    cell = built.evidence["prefill"]["cells"][1]
    assert (cell["cell"], cell["pool"], cell["at"]) == ([0, 1], "cheap", {"isl": 250.0, "ttft": 300.0})
    assert cell["predictions"][0] == {"pool": "cheap", "ttft_ms": 160.0, "cost": 1.0, "meets": True}
    assert built.evidence["decode"]["cells"][0]["why"] == "none meets the target; fastest, at 6.00 of it"
    assert load_document(built.text).document == document


def test_strict_cells_stand_for_their_hardest_request() -> None:
    built = build_grid(load_profiles(json.dumps(profiles())), strict=True)

    assert built.evidence["prefill"]["cells"][0]["at"] == {"isl": 500.0, "ttft": 0.0}
    assert built.loaded.document.prefill is not None
    assert built.loaded.document.prefill.mapping == (("fast", "fast"), ("fast", "fast"))


def test_curves_that_cross_are_accepted_knowingly() -> None:
    raw = profiles()
    # "cheap" is the faster one on average, and the slower one on long prompts
    raw["pools"][0]["ttft"] = table(10, 30, 370, tokens=(0, 500, 1000))
    raw["pools"][1]["ttft"] = table(1700, 100, 80, tokens=(0, 500, 1000))

    built = build_grid(load_profiles(json.dumps(raw)))

    assert built.loaded.document.accept == ("slower-pool-for-faster-target",)


def test_an_aggregated_grid_needs_both_targets_met() -> None:
    axes = {
        "ttft_min_ms": 0,
        "ttft_max_ms": 200,
        "ttft_resolution": 1,
        "itl_min_ms": 0,
        "itl_max_ms": 20,
        "itl_resolution": 1,
    }
    raw = {
        "mode": "aggregated",
        "load": 0,
        "aggregated": {**axes, "typical_isl": 500, "typical_osl": 100},
        "pools": [
            {"stage": "aggregated", "name": "a", "cost_per_hour": 1, "ttft": table(50, 50), "itl": table(5, 25)},
            {"stage": "aggregated", "name": "b", "cost_per_hour": 2, "ttft": table(50, 50), "itl": table(5, 5)},
        ],
    }

    built = build_grid(load_profiles(json.dumps(raw)))

    assert built.loaded.document.aggregated is not None
    assert built.loaded.document.aggregated.mapping == (("b",),)
    assert built.evidence["aggregated"]["cells"][0]["predictions"][0]["itl_ms"] == 17.0


REJECTED: list[tuple[tuple[str | int, ...], Any, str]] = [
    (("load",), ..., "$.load: is missing"),
    (("load",), 11, "$.pools[0].ttft.load: ends at load 10, the grid is wanted at 11: measure up to there"),
    (("prefill",), ..., '$.prefill: is missing; mode "disagg" needs it'),
    (("prefill", "isl_max"), ..., "$.prefill.isl_max: is missing"),
    (("prefill", "isl_max"), 0, "$.prefill.isl_min: is 0, must be less than 0"),
    (("prefill", "itl_max_ms"), 5, "$.prefill.itl_max_ms: is no axis of a grid of stage prefill"),
    (("prefill", "isl_maximum"), 5, '$.prefill.isl_maximum: is not a known key; did you mean "isl_max"?'),
    (("pools", 0, "ttft"), ..., "$.pools[0].ttft: is missing; a pool of stage prefill needs it"),
    (("pools", 0, "ttft", "tokens"), [5, 5], "$.pools[0].ttft.tokens[1]: is 5 after 5, they must increase"),
    (("pools", 0, "ttft", "ms"), [[1, 2]], "$.pools[0].ttft.ms: has 1 rows, tokens has 2 values"),
    (("pools", 0, "ttft", "ms", 1), [1], "$.pools[0].ttft.ms[1]: has 1 columns, load has 2 values"),
    (("pools", 0, "ttft", "ms", 1, 0), float("nan"), "$.pools[0].ttft.ms[1][0]: is NaN, must be a finite number"),
    (("pools", 0, "cost_per_hour"), ..., "$.pools[0].cost_per_hour: is missing; a pool needs a cost"),
    (("pools", 1, "name"), "cheap", '$.pools[1].name: is "cheap" as in $.pools[0]'),
    (("pools", 2, "stage"), "prefill", "$.pools: has no pool of stage decode"),
    (("pools", 2, "stage"), "aggregated", '$.pools[2].stage: is "aggregated", which the mode does not have'),
    (("mode",), [], "$.mode: is an array of 0, must be"),
]


@pytest.mark.parametrize(("path", "value", "expected"), REJECTED)
def test_a_fault_of_a_profile_is_named_with_its_place(path: tuple[str | int, ...], value: Any, expected: str) -> None:
    found = problems(changed(profiles(), path, value))

    assert any(problem.startswith(expected) for problem in found), found


def test_the_example_says_truly_where_its_numbers_come_from() -> None:
    example = load_profiles(EXAMPLE.read_bytes())
    timing = PolynomialTiming()

    for pool in example.pools:
        assert pool.simulate is not None
        if pool.ttft is not None:
            for tokens, row in zip(pool.ttft.tokens, pool.ttft.ms, strict=True):
                service_ms = timing.prefill_ms(int(tokens)) / pool.simulate.speedup
                for load, ms in zip(pool.ttft.load, row, strict=True):
                    busy = load / pool.simulate.workers * service_ms / 1000
                    assert ms == pytest.approx(service_ms * (1 + busy / (2 * (1 - busy))), abs=0.06)


def pools_of(registry: CollectorRegistry, name: str) -> dict[str, float]:
    return {
        sample.labels["pool"]: sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name == name and sample.labels.get("state", "open") == "open"
    }


def test_a_breakers_first_step_is_an_increase_and_pools_that_left_have_no_series() -> None:
    registry = CollectorRegistry()
    metrics = GlobalRouterMetrics(registry)
    metrics.use_pools({"a", "b"})
    metrics.dispatches.labels("a", "decode", "grid").inc()
    assert pools_of(registry, "poolgrid_global_router_breaker_steps_total") == {"a": 0, "b": 0}

    metrics.breaker_steps.labels("b", "open").inc()
    metrics.use_pools({"b", "c"})

    assert pools_of(registry, "poolgrid_global_router_breaker_steps_total") == {"b": 1, "c": 0}
    assert pools_of(registry, "poolgrid_global_router_dispatches_total") == {}
