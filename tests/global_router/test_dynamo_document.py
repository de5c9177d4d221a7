"""Dynamo's own configurations are read unchanged, and their faults named in their own terms."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poolgrid.kernel.pool_grids.grid import Grid, GridRequest
from poolgrid.kernel.pool_grids.grid_document import GridDocumentError
from poolgrid.kernel.pool_grids.request_hints import ExpectedOutput, RequestHints, Target
from poolgrid.server.global_router.document.history import document_text
from poolgrid.server.global_router.document.reader import load_document
from tests.global_router.documents import (
    DYNAMO_DOCUMENTS,
    changed,
    document,
    dynamo_agg,
    dynamo_disagg,
    dynamo_retry,
    load,
    problems,
    warnings,
)
from tests.global_router.pool_selector import SELECTOR

STRATEGY = "prefill_pool_selection_strategy"
NAN = float("nan")


@pytest.mark.parametrize("name", DYNAMO_DOCUMENTS)
def test_a_configuration_of_dynamo_is_read_unchanged(name: str) -> None:
    loaded = load(DYNAMO_DOCUMENTS[name]())

    assert loaded.form == "dynamo"


@pytest.mark.parametrize("name", DYNAMO_DOCUMENTS)
def test_the_converted_document_is_valid_in_our_form_and_equal(name: str) -> None:
    loaded = load(DYNAMO_DOCUMENTS[name]())

    again = load_document(document_text(loaded.document))

    assert again.form == "poolgrid"
    assert again.document == loaded.document


def test_pools_ranks_and_mapping_become_ours() -> None:
    made = document(dynamo_retry())

    assert made.prefill is not None
    assert made.enable_priority_retry
    assert made.prefill.speed_ranks() == {"prefill-fast": 0, "prefill-mid": 1, "prefill-slow": 2}
    assert made.prefill.mapping == (("prefill-slow",),)
    assert made.prefill.priority_overrides[0].target_pool == "prefill-fast"
    assert made.prefill.ttft_min_ms == 10


def test_pools_of_dynamo_have_no_url_and_rank_by_order() -> None:
    made = document(dynamo_disagg())

    assert made.prefill is not None
    assert [pool.url for pool in made.prefill.pools] == [None, None]
    assert list(made.prefill.speed_ranks().values()) == [0, 1]


def test_what_dynamo_defines_but_we_refuse_is_a_warning_and_kept() -> None:
    loaded = load(dynamo_agg())

    assert loaded.document.accept == (
        "overlapping-overrides",
        "slower-pool-for-faster-target",
        "unreachable-pool",
    )
    places = [str(warning).split(": ")[0] for warning in loaded.warnings]
    assert places == [
        "$.agg_pool_selection_strategy.agg_pool_mapping[0][0][0]",
        "$.agg_pool_selection_strategy.agg_pool_mapping[0][0][0]",
        "$.agg_pool_selection_strategy.priority_overrides[1]",
        "$.agg_pool_dynamo_namespaces[2]",
    ]


def test_the_newer_name_wins_over_its_alias() -> None:
    raw = changed(dynamo_disagg(), (STRATEGY, "ttft_min_ms"), 500)

    made = document(raw)

    assert made.prefill is not None
    assert made.prefill.ttft_min_ms == 500
    assert warnings(raw) == [f"$.{STRATEGY}.ttft_min: warning: is not used, $.{STRATEGY}.ttft_min_ms is the newer name"]


def test_comments_and_keys_of_the_other_mode_are_only_noted() -> None:
    raw = {**dynamo_agg(), "_comment": "ours", "num_prefill_pools": 3}

    assert any(warning.startswith("$._comment: warning: is taken as a comment") for warning in warnings(raw))
    assert any(
        warning.startswith('$.num_prefill_pools: warning: is not used in mode "agg"') for warning in warnings(raw)
    )


REJECTED: list[tuple[str, tuple[str | int, ...], Any, str]] = [
    (
        "typo at the top",
        ("num_prefil_pools",),
        2,
        '$.num_prefil_pools: is not a key of Dynamo\'s form; did you mean "num_prefill_pools"?',
    ),
    (
        "typo in a strategy",
        (STRATEGY, "isl_resolutoin"),
        2,
        f'$.{STRATEGY}.isl_resolutoin: is not a key of Dynamo\'s form; did you mean "isl_resolution"?',
    ),
    (
        "typo in an override",
        (STRATEGY, "priority_overrides"),
        [{"min_priority": 0, "max_priority": 1, "target_pol": 1}],
        f"$.{STRATEGY}.priority_overrides[0].target_pol: is not a key",
    ),
    ("NaN", (STRATEGY, "ttft_min"), NAN, f"$.{STRATEGY}.ttft_min: is NaN, must be a finite number"),
    ("infinity", (STRATEGY, "ttft_max"), float("inf"), f"$.{STRATEGY}.ttft_max: is Infinity"),
    ("bound as text", (STRATEGY, "ttft_max"), "1000", f'$.{STRATEGY}.ttft_max: is "1000", must be a valid number'),
    ("missing key", (STRATEGY, "ttft_min"), ..., f"$.{STRATEGY}.ttft_min_ms: is missing"),
    ("negative isl", (STRATEGY, "isl_min"), -5, f"$.{STRATEGY}.isl_min: is -5, must be greater"),
    (
        "float resolution",
        (STRATEGY, "isl_resolution"),
        2.0,
        f"$.{STRATEGY}.isl_resolution: is 2.0, must be a valid integer",
    ),
    (
        "pool 0.5",
        (STRATEGY, "prefill_pool_mapping", 0, 1),
        0.5,
        f"$.{STRATEGY}.prefill_pool_mapping[0][1]: is 0.5, must be",
    ),
    (
        "pool true",
        (STRATEGY, "prefill_pool_mapping", 0, 1),
        True,
        f"$.{STRATEGY}.prefill_pool_mapping[0][1]: is true, must be",
    ),
    (
        "pool out of range",
        (STRATEGY, "prefill_pool_mapping", 1, 1),
        2,
        f"$.{STRATEGY}.prefill_pool_mapping[1][1]: is 2, pools",
    ),
    (
        "pool by name",
        (STRATEGY, "prefill_pool_mapping", 1, 1),
        "x",
        f'$.{STRATEGY}.prefill_pool_mapping[1][1]: is "x", must be a pool\'s index',
    ),
    (
        "too few rows",
        (STRATEGY, "prefill_pool_mapping"),
        [[0, 1]],
        f"$.{STRATEGY}.prefill_pool_mapping: has 1 rows, isl_resolution is 2",
    ),
    ("count", ("num_prefill_pools",), 3, "$.num_prefill_pools: is 3, prefill_pool_dynamo_namespaces has 2"),
    ("count missing", ("num_prefill_pools",), ..., "$.num_prefill_pools: is missing"),
    ("count as a float", ("num_prefill_pools",), 2.0, "$.num_prefill_pools: is 2.0, must be an integer"),
    (
        "duplicate namespace",
        ("prefill_pool_dynamo_namespaces",),
        ["a", "a"],
        '$.prefill_pool_dynamo_namespaces[1]: is "a" as in',
    ),
    (
        "namespace a number",
        ("prefill_pool_dynamo_namespaces", 1),
        4,
        "$.prefill_pool_dynamo_namespaces[1]: is 4, must be a valid string",
    ),
    ("namespaces missing", ("prefill_pool_dynamo_namespaces",), ..., "$.prefill_pool_dynamo_namespaces: is missing"),
    ("priorities too short", ("prefill_pool_priorities",), [0], "$.prefill_pool_priorities: has 1 priorities"),
    (
        "priority a float",
        ("prefill_pool_priorities",),
        [0, 1.5],
        "$.prefill_pool_priorities[1]: is 1.5, must be an integer",
    ),
    ("priorities no array", ("prefill_pool_priorities",), 1, "$.prefill_pool_priorities: is 1, must be an array"),
    ("strategy missing", (STRATEGY,), ..., f"$.{STRATEGY}: is missing"),
    ("strategy no object", (STRATEGY,), 5, f"$.{STRATEGY}: is 5, must be an object"),
    ("mode", ("mode",), "both", '$.mode: is "both", must be "disagg" or "agg"'),
    ("retry as text", ("enable_priority_retry",), "yes", '$.enable_priority_retry: is "yes", must be a valid boolean'),
    (
        "override upside down",
        (STRATEGY, "priority_overrides"),
        [{"min_priority": 5, "max_priority": 1, "target_pool": 0}],
        f"$.{STRATEGY}.priority_overrides[0].min_priority: is 5, must be at most",
    ),
]


@pytest.mark.parametrize(("path", "value", "expected"), [case[1:] for case in REJECTED], ids=[c[0] for c in REJECTED])
def test_a_fault_is_named_by_its_place_in_dynamos_form(path: tuple[str | int, ...], value: Any, expected: str) -> None:
    found = problems(changed(dynamo_disagg(), path, value))

    assert any(problem.startswith(expected) for problem in found), "\n".join(found)


def test_grid_of_a_pool_selector_is_read_with_faster_pools_for_tighter_targets() -> None:
    loaded = load_document(json.dumps(SELECTOR))

    assert (loaded.form, loaded.warnings) == ("dynamo", ())
    assert loaded.document.stages["aggregated"].speed_ranks() == {"tp1": 2, "tp2": 1, "tp4": 0}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"mapping": None}, "$.mapping: is null, must be an array of rows, one per size"),
        ({"mapping": [[0, 0, 0], [2, "tp2", 0], [2, 2, 1]]}, '$.mapping[1][1]: is "tp2", must be a pool\'s index'),
        ({"sizeMax": 0}, "$.sizeMin: is 0, must be less than"),
        ({"poolLabels": "tp1"}, '$.poolLabels: is "tp1", must be an array of labels'),
        ({"sizemin": 1}, '$.sizemin: is not a key of Dynamo\'s form; did you mean "sizeMin"?'),
        ({"priorityOverrides": [{"minPrio": 1}]}, "$.priorityOverrides[0].minPrio: is not a key of Dynamo's form"),
        ({"priorityOverrides": 3}, "$.priorityOverrides: is 3, must be an array of objects"),
    ],
)
def test_fault_in_a_pool_selector_is_named_by_its_place(change: dict[str, Any], expected: str) -> None:
    with pytest.raises(GridDocumentError) as refused:
        load_document(json.dumps({**SELECTOR, **change}))
    found = [str(each) for each in refused.value.problems]
    assert [each for each in found if each.startswith(expected)], found


def test_a_missing_strategy_is_one_problem() -> None:
    assert problems(changed(dynamo_disagg(), (STRATEGY,), ...)) == [f"$.{STRATEGY}: is missing"]


def test_isl_of_an_aggregated_strategy_comes_whole() -> None:
    raw = changed(dynamo_agg(), ("agg_pool_selection_strategy", "isl_min"), ...)

    assert any(
        problem.startswith("$.agg_pool_selection_strategy.isl_min: is missing; isl_min") for problem in problems(raw)
    )


def dynamo_index(x: float, low: float, high: float, resolution: int) -> int:
    """The rule as Dynamo documents it."""
    return max(0, min(int((x - low) / ((high - low) / resolution)), resolution - 1))


def test_selection_is_the_one_that_dynamo_documents() -> None:
    raw = dynamo_disagg()
    raw[STRATEGY].update(isl_resolution=4, ttft_resolution=3, prefill_pool_mapping=[[0, 1, 1]] * 3 + [[0, 0, 1]])
    grid = Grid(load_document(json.dumps(raw)).document)
    names = raw["prefill_pool_dynamo_namespaces"]

    for isl in (0, 7999, 8000, 23_999, 24_000, 32_000, 10**6):
        for ttft in (0.0, 9.9, 10.0, 1006.6, 1006.7, 2500.0, 1e9, None):
            target = 1505.0 if ttft is None else ttft
            row, column = dynamo_index(isl, 0, 32000, 4), dynamo_index(target, 10, 3000, 3)
            hints = RequestHints({} if ttft is None else {"ttft": Target(ttft, "test")})
            selection = grid.select("prefill", GridRequest(isl, hints, ExpectedOutput(0, "none")))
            assert selection.cell == (row, column)
            assert selection.pool == names[raw[STRATEGY]["prefill_pool_mapping"][row][column]]


@st.composite
def dynamo_documents(draw: st.DrawFn) -> dict[str, Any]:
    """Aggregated configurations with an isl axis, as Dynamo would take them."""
    count = draw(st.integers(1, 4))
    isl, ttft, itl = (draw(st.integers(1, 4)) for _ in range(3))
    pools = st.integers(0, count - 1)
    cells = st.lists(pools, min_size=itl, max_size=itl)
    rows = st.lists(cells, min_size=ttft, max_size=ttft)
    priorities = st.integers(-20, 20)
    overrides = [
        {"min_priority": min(pair), "max_priority": max(pair), "target_pool": target}
        for pair, target in draw(st.lists(st.tuples(st.tuples(priorities, priorities), pools), max_size=4))
    ]
    suffix = draw(st.sampled_from(["", "_ms"]))
    raw = {
        "mode": "agg",
        "enable_priority_retry": draw(st.booleans()),
        "num_agg_pools": count,
        "agg_pool_dynamo_namespaces": [f"ns-{index}" for index in range(count)],
        "agg_pool_selection_strategy": {
            f"ttft_min{suffix}": draw(st.integers(0, 100)),
            f"ttft_max{suffix}": draw(st.integers(101, 5000)),
            "ttft_resolution": ttft,
            f"itl_min{suffix}": draw(st.floats(0, 10)),
            f"itl_max{suffix}": draw(st.floats(11, 500)),
            "itl_resolution": itl,
            "isl_min": 0,
            "isl_max": draw(st.integers(1, 100_000)),
            "isl_resolution": isl,
            "agg_pool_mapping": draw(st.lists(rows, min_size=isl, max_size=isl)),
            "priority_overrides": overrides,
        },
    }
    if draw(st.booleans()):
        raw["agg_pool_priorities"] = draw(st.lists(st.integers(-5, 5), min_size=count, max_size=count))
    return raw


@given(
    raw=dynamo_documents(),
    isl=st.integers(0, 120_000),
    ttft=st.floats(0, 6000),
    itl=st.floats(0, 600),
    priority=st.none() | st.integers(-25, 25),
)
def test_a_converted_document_selects_what_dynamo_would(
    raw: dict[str, Any], isl: int, ttft: float, itl: float, priority: int | None
) -> None:
    strategy = raw["agg_pool_selection_strategy"]
    suffix = "_ms" if "ttft_min_ms" in strategy else ""
    value: Any = strategy["agg_pool_mapping"]
    for axis, x, unit in (("isl", isl, ""), ("ttft", ttft, suffix), ("itl", itl, suffix)):
        low, high = strategy[f"{axis}_min{unit}"], strategy[f"{axis}_max{unit}"]
        value = value[dynamo_index(x, low, high, strategy[f"{axis}_resolution"])]
    if priority is not None:
        for override in strategy["priority_overrides"]:
            if override["min_priority"] <= priority <= override["max_priority"]:
                value = override["target_pool"]
                break

    converted = load_document(document_text(document(raw)))

    assert converted.form == "poolgrid"
    hints = RequestHints({"ttft": Target(ttft, "test"), "itl": Target(itl, "test")}, priority)
    selection = Grid(converted.document).select("aggregated", GridRequest(isl, hints))
    assert selection.pool == f"ns-{value}"
