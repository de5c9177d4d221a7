"""Which documents are accepted, and what each fault is called."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from poolgrid.kernel.pool_grids.grid_document import (
    CELLS_MAX,
    DOCUMENT_BYTES_MAX,
    PROBLEMS_MAX,
    GridDocumentError,
)
from poolgrid.server.global_router.document.history import document_text
from poolgrid.server.global_router.document.reader import load_document
from tests.global_router.documents import (
    POOL_CONFIGS,
    ROOT,
    aggregated,
    changed,
    disagg,
    document,
    load,
    problems,
    warnings,
)

NAN = float("nan")
INFINITY = float("inf")
OVERRIDE = {"min_priority": 1, "max_priority": 5, "target_pool": "p-fast"}

REJECTED: list[tuple[str, tuple[str | int, ...], Any, str]] = [
    ("NaN as a bound", ("prefill", "ttft_min_ms"), NAN, "$.prefill.ttft_min_ms: is NaN, must be a finite number"),
    ("infinity", ("decode", "itl_max_ms"), INFINITY, "$.decode.itl_max_ms: is Infinity, must be a finite number"),
    ("a float as infinity", ("prefill", "isl_max"), 1e400, "$.prefill.isl_max: is Infinity, must be"),
    ("pool number true", ("prefill", "mapping", 0, 1), True, "$.prefill.mapping[0][1]: is true, must be a pool's"),
    ("pool number 0.5", ("prefill", "mapping", 1, 0), 0.5, "$.prefill.mapping[1][0]: is 0.5, must be a pool's"),
    ("pool number 1.0", ("prefill", "mapping", 1, 0), 1.0, "$.prefill.mapping[1][0]: is 1.0, must be a pool's"),
    ("pool null", ("prefill", "mapping", 1, 0), None, "$.prefill.mapping[1][0]: is null, must be a pool's"),
    ("pool number too large", ("prefill", "mapping", 1, 1), 2, "$.prefill.mapping[1][1]: is 2, pools of this stage"),
    ("pool number negative", ("prefill", "mapping", 1, 1), -1, "$.prefill.mapping[1][1]: is -1, pools of this"),
    (
        "a pool's name misspelt",
        ("prefill", "mapping", 1, 1),
        "p-fats",
        '$.prefill.mapping[1][1]: is "p-fats", which names no pool of this stage; did you mean "p-fast"?',
    ),
    ("a pool of another stage", ("prefill", "mapping", 1, 1), "d-fast", '$.prefill.mapping[1][1]: is "d-fast", which'),
    ("float resolution", ("prefill", "isl_resolution"), 2.0, "$.prefill.isl_resolution: is 2.0, must be a valid int"),
    ("resolution as text", ("prefill", "isl_resolution"), "2", '$.prefill.isl_resolution: is "2", must be a valid'),
    ("resolution 0", ("prefill", "ttft_resolution"), 0, "$.prefill.ttft_resolution: is 0, must be greater"),
    ("negative resolution", ("prefill", "ttft_resolution"), -2, "$.prefill.ttft_resolution: is -2, must be"),
    ("resolution too large", ("prefill", "ttft_resolution"), 5000, "$.prefill.ttft_resolution: is 5000, must be"),
    ("min above max", ("prefill", "isl_min"), 3000, "$.prefill.isl_min: is 3000, must be less than isl_max, 2000"),
    ("min equal to max", ("decode", "itl_min_ms"), 30, "$.decode.itl_min_ms: is 30, must be less than itl_max_ms"),
    ("negative bound", ("prefill", "isl_min"), -1, "$.prefill.isl_min: is -1, must be greater than or equal to 0"),
    ("float tokens", ("prefill", "isl_max"), 2000.5, "$.prefill.isl_max: is 2000.5, must be a valid integer"),
    ("bound as text", ("prefill", "ttft_max_ms"), "1000", '$.prefill.ttft_max_ms: is "1000", must be a valid number'),
    ("bound true", ("prefill", "ttft_max_ms"), True, "$.prefill.ttft_max_ms: is true, must be a valid number"),
    ("cells too narrow", ("prefill", "ttft_max_ms"), 1e-9, "$.prefill.ttft_max_ms: leaves cells narrower than"),
    ("missing key", ("prefill", "isl_max"), ..., "$.prefill.isl_max: is missing"),
    ("missing stage", ("decode",), ..., '$.decode: is missing; mode "disagg" needs it'),
    ("missing mapping", ("decode", "mapping"), ..., "$.decode.mapping: is missing"),
    ("stage of another mode", ("aggregated",), {}, '$.aggregated: is not used in mode "disagg"'),
    ("stage no object", ("prefill",), [], "$.prefill: is an array of 0, must be an object"),
    ("unknown mode", ("mode",), "aggregate", '$.mode: is "aggregate", must be "disagg" or "aggregated"; did you'),
    ("mode as a number", ("mode",), 1, '$.mode: is 1, must be "disagg" or "aggregated"'),
    ("unknown version", ("version",), 2, "$.version: is 2, must be 1"),
    (
        "unknown key",
        ("enable_priority_retires",),
        True,
        '$.enable_priority_retires: is not a known key; did you mean "enable_priority_retry"?',
    ),
    ("unknown key in a stage", ("prefill", "ttft_min"), 1, "$.prefill.ttft_min: is not a known key; did you mean"),
    (
        "unknown key in a pool",
        ("prefill", "pools", 0, "urll"),
        1,
        '$.prefill.pools[0].urll: is not a known key; did you mean "url"?',
    ),
    ("unknown key, odd name", ("a b",), 1, '$["a b"]: is not a known key'),
    (
        "too few rows",
        ("prefill", "mapping"),
        [["p-fast", "p-cheap"]],
        "$.prefill.mapping: has 1 rows, isl_resolution is 2",
    ),
    ("row too long", ("prefill", "mapping", 1), [0, 0, 0], "$.prefill.mapping[1]: has 3 columns, ttft_resolution is 2"),
    ("row no array", ("prefill", "mapping", 1), "p-fast", '$.prefill.mapping[1]: is "p-fast", must be an array of 2'),
    ("cell an array", ("prefill", "mapping", 1, 0), [0], "$.prefill.mapping[1][0]: is an array of 1, must be a pool's"),
    (
        "mapping no array",
        ("prefill", "mapping"),
        {"0": 1},
        "$.prefill.mapping: is an object of 1 keys, must be an array",
    ),
    ("no pools", ("prefill", "pools"), [], "$.prefill.pools: has 0 items, allowed are at least 1"),
    ("pools no array", ("prefill", "pools"), "p", '$.prefill.pools: is "p", must be an array'),
    ("pool no object", ("prefill", "pools", 0), "p", '$.prefill.pools[0]: is "p", must be an object'),
    (
        "duplicate name",
        ("prefill", "pools", 1, "name"),
        "p-fast",
        '$.prefill.pools[1].name: is "p-fast" as in $.prefill.pools[0].name',
    ),
    (
        "duplicate url",
        ("prefill", "pools", 1, "url"),
        "http://localhost:1/",
        '$.prefill.pools[1].url: is "http://localhost:1" as in',
    ),
    (
        "name in two stages",
        ("decode", "pools", 1, "name"),
        "p-fast",
        '$.decode.pools[1].name: is "p-fast", which names a pool of $.prefill',
    ),
    (
        "name of digits",
        ("prefill", "pools", 1, "name"),
        "12",
        '$.prefill.pools[1].name: is "12", must be of letters, digits',
    ),
    (
        "name with a space",
        ("prefill", "pools", 1, "name"),
        "a b",
        '$.prefill.pools[1].name: is "a b", must be of letters',
    ),
    (
        "empty name",
        ("prefill", "pools", 1, "name"),
        "",
        '$.prefill.pools[1].name: is "", must have at least 1 character',
    ),
    (
        "url without scheme",
        ("prefill", "pools", 1, "url"),
        "localhost:1",
        '$.prefill.pools[1].url: is "localhost:1", must be http://HOST:PORT',
    ),
    (
        "port that is none",
        ("prefill", "pools", 1, "url"),
        "http://pool:70000",
        "$.prefill.pools[1].url: is \"http://pool:70000\", which has the port '70000', allowed are 1 to 65535",
    ),
    (
        "name that is none",
        ("prefill", "pools", 1, "url"),
        "dyn://blue.router",
        "$.prefill.pools[1].url: is \"dyn://blue.router\", which is no name: 'dyn://blue.router' is not of the form "
        "dyn://namespace.component.endpoint",
    ),
    (
        "some priorities only",
        ("prefill", "pools", 1, "priority"),
        ...,
        "$.prefill.pools[1].priority: is missing; all pools",
    ),
    (
        "priority as a float",
        ("prefill", "pools", 1, "priority"),
        1.5,
        "$.prefill.pools[1].priority: is 1.5, must be a valid integer",
    ),
    (
        "two costs",
        ("prefill", "pools", 1, "cost_per_million_tokens"),
        1.0,
        "$.prefill.pools[1].cost_per_million_tokens: cannot be combined with cost_per_hour",
    ),
    ("negative cost", ("prefill", "pools", 1, "cost_per_hour"), -1, "$.prefill.pools[1].cost_per_hour: is -1, must be"),
    (
        "unreachable pool",
        ("prefill", "mapping"),
        [[0, 0], [0, 0]],
        '$.prefill.pools[1]: "p-cheap" is in no cell, no priority override',
    ),
    (
        "faster target, slower pool",
        ("prefill", "mapping", 0),
        ["p-cheap", "p-fast"],
        '$.prefill.mapping[0][0]: sends a tighter ttft target to "p-cheap" (speed rank 1) than '
        '$.prefill.mapping[0][1], which goes to the faster "p-fast" (speed rank 0)',
    ),
    (
        "overlapping overrides",
        ("prefill", "priority_overrides"),
        [OVERRIDE, {**OVERRIDE, "min_priority": 5, "max_priority": 9}],
        "$.prefill.priority_overrides[1]: overlaps $.prefill.priority_overrides[0] in priorities 5 to 5",
    ),
    (
        "override upside down",
        ("prefill", "priority_overrides"),
        [{**OVERRIDE, "min_priority": 6}],
        "$.prefill.priority_overrides[0].min_priority: is 6, must be at most max_priority, 5",
    ),
    (
        "override without target",
        ("prefill", "priority_overrides"),
        [{"min_priority": 1, "max_priority": 2}],
        "$.prefill.priority_overrides[0].target_pool: is missing",
    ),
    (
        "override to nowhere",
        ("prefill", "priority_overrides"),
        [{**OVERRIDE, "target_pool": 7}],
        "$.prefill.priority_overrides[0].target_pool: is 7, pools of this stage are 0 to 1",
    ),
    (
        "override to true",
        ("prefill", "priority_overrides"),
        [{**OVERRIDE, "target_pool": True}],
        "$.prefill.priority_overrides[0].target_pool: is true, must be a pool's",
    ),
    (
        "override beyond i32",
        ("prefill", "priority_overrides"),
        [{**OVERRIDE, "max_priority": 2**31}],
        "$.prefill.priority_overrides[0].max_priority: is 2147483648, must be",
    ),
    (
        "overrides no array",
        ("prefill", "priority_overrides"),
        {},
        "$.prefill.priority_overrides: is an object of 0 keys, must be an array",
    ),
    (
        "fallback to itself",
        ("prefill", "fallback"),
        {"order": {"p-fast": ["p-fast"]}},
        '$.prefill.fallback.order["p-fast"][0]: is "p-fast", the pool itself',
    ),
    (
        "fallback twice the same",
        ("prefill", "fallback"),
        {"order": {"p-fast": [1, "p-cheap"]}},
        '$.prefill.fallback.order["p-fast"][1]: is "p-cheap", which is in the list already',
    ),
    (
        "fallback of an unknown pool",
        ("prefill", "fallback"),
        {"order": {"x": [0]}},
        '$.prefill.fallback.order.x: is "x", which names no pool',
    ),
    ("fallback rule", ("prefill", "fallback"), {"rule": "faster"}, '$.prefill.fallback.rule: is "faster", must be'),
    (
        "isl basis",
        ("isl_basis",),
        "uncachd",
        '$.isl_basis: is "uncachd", must be "total" or "uncached"; did you mean "uncached"?',
    ),
    ("adapt as a number", ("adapt",), 1, "$.adapt: is 1, must be a valid boolean"),
    (
        "default target NaN",
        ("defaults",),
        {"ttft_target_ms": NAN},
        "$.defaults.ttft_target_ms: is NaN, must be a finite",
    ),
    (
        "breaker times",
        ("circuit_breaker",),
        {"open_ms": 10, "open_max_ms": 5},
        "$.circuit_breaker.open_ms: is 10, must be at most open_max_ms, 5",
    ),
    (
        "everything spills",
        ("closed_loop",),
        {"share_max": 1.0},
        "$.closed_loop.share_max: is 1.0, must be less than or equal to 0.95",
    ),
    (
        "step above share",
        ("closed_loop",),
        {"share_max": 0.2},
        "$.closed_loop.step_share: is 0.25, must be at most share_max, 0.2",
    ),
    ("accepting an unknown rule", ("accept",), ["all"], '$.accept[0]: is "all", must be'),
    (
        "simulated workers",
        ("prefill", "pools", 0, "simulate"),
        {"workers": 0},
        "$.prefill.pools[0].simulate.workers: is 0, must be",
    ),
]


@pytest.mark.parametrize(("path", "value", "expected"), [case[1:] for case in REJECTED], ids=[c[0] for c in REJECTED])
def test_a_fault_is_named_with_its_place(path: tuple[str | int, ...], value: Any, expected: str) -> None:
    found = problems(changed(disagg(), path, value))

    assert any(problem.startswith(expected) for problem in found), "\n".join(found)


def test_every_problem_is_found_at_once() -> None:
    raw = disagg()
    raw["isl_basi"] = "total"
    raw["prefill"]["mapping"] = [[True, 5], ["p-fast"]]
    raw["prefill"]["isl_min"] = NAN
    raw["prefill"]["pools"][1]["url"] = 3
    raw["decode"]["itl_resolution"] = 3.0
    raw["decode"]["mapping"][0][0] = "nobody"
    raw["decode"]["priority_overrides"] = [{"min_priority": 3, "max_priority": 1, "target_pool": 9}]
    raw["defaults"] = {"ttft_target": 5}

    places = {problem.split(": ")[0] for problem in problems(raw)}

    assert places >= {
        "$.isl_basi",
        "$.prefill.mapping[0][0]",
        "$.prefill.mapping[0][1]",
        "$.prefill.mapping[1]",
        "$.prefill.isl_min",
        "$.prefill.pools[1].url",
        "$.decode.itl_resolution",
        "$.decode.mapping[0][0]",
        "$.decode.priority_overrides[0].min_priority",
        "$.decode.priority_overrides[0].target_pool",
        "$.defaults.ttft_target",
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "$: is not JSON: Expecting value in line 1, column 1"),
        ("[]", "$: is an array of 0, must be an object"),
        ("null", "$: is null, must be an object"),
        ('{"a": 1,}', "$: is not JSON: "),
        (b"\xff\xfe", "$: is not UTF-8: byte 0 is 0xff"),
        ("[" * 100_000, "$: is nested too deeply"),
        ('{"description": ' + "[" * 30 + "]" * 30 + "}", "$.description[0][0]"),
        ('{"version": ' + "9" * 5000 + "}", "$: has an integer of thousands of digits"),
        ('{"version": 1, "mode": "disagg", "version": 1}', "$.version: is there more than once"),
        ('{"prefill": {"pools": [{"name": "a", "name": "b"}]}}', "$.prefill.pools[0].name: is there more than once"),
        (" " * (DOCUMENT_BYTES_MAX + 1), f"$: has {DOCUMENT_BYTES_MAX + 1} bytes"),
        ('{"mode": "\\ud800"}', '$.mode: is "\\ud800", must be'),
    ],
)
def test_text_that_is_no_document_is_refused(text: str | bytes, expected: str) -> None:
    found = problems(text)

    assert any(problem.startswith(expected) for problem in found), found


def test_slower_pools_in_the_order_of_the_document_are_only_a_warning() -> None:
    raw = disagg()
    for pool in raw["prefill"]["pools"]:
        del pool["priority"]
    raw["prefill"]["mapping"][0] = ["p-cheap", "p-fast"]

    assert len(warnings(raw)) == 1
    assert warnings(raw)[0].startswith('$.prefill.mapping[0][0]: warning: sends a tighter ttft target to "p-cheap"')


@pytest.mark.parametrize("rule", ["unreachable-pool", "overlapping-overrides", "slower-pool-for-faster-target"])
def test_a_document_may_accept_what_it_breaks_knowingly(rule: str) -> None:
    raw = disagg()
    if rule == "unreachable-pool":
        raw["prefill"]["mapping"] = [["p-fast", "p-fast"], ["p-fast", "p-fast"]]
    elif rule == "overlapping-overrides":
        raw["prefill"]["priority_overrides"] = [OVERRIDE, OVERRIDE]
    else:
        raw["prefill"]["mapping"][0] = ["p-cheap", "p-fast"]

    assert len(problems(raw)) == 1
    raw["accept"] = [rule]
    assert problems(raw) == []
    assert len(warnings(raw)) == 1


@pytest.mark.parametrize("how", ["override", "fallback", "retry", "adapt"])
def test_a_pool_that_is_no_cell_can_be_reached_otherwise(how: str) -> None:
    raw = disagg()
    raw["prefill"]["mapping"] = [["p-cheap", "p-cheap"], ["p-cheap", "p-cheap"]]
    assert len(problems(raw)) == 1
    if how == "override":
        raw["prefill"]["priority_overrides"] = [OVERRIDE]
    elif how == "fallback":
        raw["prefill"]["fallback"] = {"order": {"p-cheap": ["p-fast"]}}
    elif how == "retry":
        raw["enable_priority_retry"] = True
    else:
        raw["adapt"] = True

    assert problems(raw) == []


def test_the_isl_axis_of_an_aggregated_grid_comes_whole_or_not_at_all() -> None:
    raw = aggregated()
    del raw["aggregated"]["isl_min"]
    assert (
        "$.aggregated.isl_min: is missing; isl_min, isl_max, isl_resolution come together, or none of them"
        in problems(raw)
    )

    del raw["aggregated"]["isl_max"], raw["aggregated"]["isl_resolution"]
    raw["aggregated"]["mapping"] = [["a", "b"], ["b", "c"]]
    assert problems(raw) == []


def test_layers_of_a_mapping_are_checked_too() -> None:
    raw = aggregated()
    raw["aggregated"]["mapping"] = [[["a", "b"], ["b"]], [["a", "a"], ["b", "b"]], []]

    found = problems(raw)

    assert "$.aggregated.mapping: has 3 layers, isl_resolution is 2" in found
    assert "$.aggregated.mapping[0][1]: has 1 columns, itl_resolution is 2" in found
    assert "$.aggregated.mapping[2]: has 0 rows, ttft_resolution is 2" in found


def test_block_sizes_of_simulated_pools_are_equal() -> None:
    raw = disagg()
    raw["prefill"]["pools"][0]["simulate"] = {"workers": 1}
    raw["decode"]["pools"][1]["simulate"] = {"block_size": 64}

    assert problems(raw) == [
        "$.decode.pools[1].simulate.block_size: is 64, $.prefill.pools[0].simulate.block_size is 32; they must be equal"
    ]


def test_a_default_outside_the_grid_is_a_warning() -> None:
    raw = disagg()
    raw["defaults"] = {"itl_target_ms": 100}

    assert warnings(raw) == [
        "$.defaults.itl_target_ms: warning: is 100, outside 0 to 30 of $.decode: the outermost cells take it"
    ]


def test_a_grid_has_a_bounded_number_of_cells_and_an_error_a_bounded_number_of_problems() -> None:
    raw = disagg()
    raw["prefill"].update(isl_resolution=1024, ttft_resolution=1024, mapping=[["x"] * 1024] * 100)

    with pytest.raises(GridDocumentError) as caught:
        load(raw)

    assert f"allowed are at most {CELLS_MAX}" in str(caught.value)
    assert len(caught.value.problems) == PROBLEMS_MAX
    assert caught.value.left_off > 0


@pytest.mark.parametrize("raw", [disagg(), aggregated()], ids=["disagg", "aggregated"])
def test_the_canonical_text_reads_back_as_the_same_document(raw: dict[str, Any]) -> None:
    made = document(raw)

    assert load_document(document_text(made)).document == made
    assert document_text(load_document(document_text(made)).document) == document_text(made)


def test_the_isl_basis_needs_an_isl_axis() -> None:
    raw = {**aggregated(), "isl_basis": "uncached"}
    assert warnings(raw) == []

    for key in ("isl_min", "isl_max", "isl_resolution"):
        del raw["aggregated"][key]
    raw["aggregated"]["mapping"] = [["a", "b"], ["b", "c"]]

    assert warnings(raw) == ["$.isl_basis: warning: has no effect, the aggregated grid has no isl axis"]


def test_names_in_messages_cannot_break_a_line() -> None:
    raw = changed(disagg(), ("prefill", "pools", 0, "name"), "p\nfast")
    raw["prefill"]["mapping"] = [["p-cheap", "p\nfast"], ["p\nfas", "p-cheap"]]

    found = problems(raw)

    assert len(found) == 3
    assert all("\n" not in problem for problem in found)


@pytest.mark.parametrize("path", POOL_CONFIGS, ids=lambda path: path.stem)
def test_an_example_is_valid_without_a_warning(path: Path) -> None:
    loaded = load_document(path.read_bytes(), path.name)

    assert loaded.warnings == ()
    assert load_document(document_text(loaded.document)).document == loaded.document


@pytest.mark.parametrize("path", POOL_CONFIGS, ids=lambda path: path.stem)
def test_an_example_can_be_started_on_one_machine(path: Path) -> None:
    document = load_document(path.read_bytes()).document
    pools = [pool for stage in document.stages.values() for pool in stage.pools]

    assert all(pool.simulate is not None and pool.url is not None and pool.cost_per_hour for pool in pools)
    speeds = {pool.simulate.speedup for pool in pools if pool.simulate is not None}
    assert len(speeds) > 1


def test_every_example_is_described_in_the_readme() -> None:
    readme = (ROOT / "pool_configs" / "README.md").read_text()

    assert len(POOL_CONFIGS) >= 4
    assert [path.name for path in POOL_CONFIGS if path.name not in readme] == []


def test_every_key_of_the_format_is_documented() -> None:
    schema = json.loads((ROOT / "docs" / "schemas" / "pool_grid.schema.json").read_text())
    objects = [schema, *schema["$defs"].values()]
    keys = {key for part in objects for key in part.get("properties", {})}
    text = (ROOT / "docs" / "global_router.md").read_text()

    assert sorted(key for key in keys if f"`{key}`" not in text) == []
