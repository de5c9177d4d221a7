"""The table of axes: whoever adds a row is told what else it takes, and documents of any number of axes work."""

from __future__ import annotations

import json
from itertools import product
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from poolgrid.kernel.pool_grids.axis import (
    AXES,
    AXIS,
    STAGES,
    STAGES_OF_MODE,
    TARGETS,
    AxisKind,
    AxisName,
    StageName,
    axes_of,
)
from poolgrid.kernel.pool_grids.grid import Grid, GridRequest
from poolgrid.kernel.pool_grids.grid_document import GridDocument, GridDocumentError, TargetDefaults
from poolgrid.kernel.pool_grids.request_hints import ExpectedOutput, RequestHints, Target
from poolgrid.kernel.requests.inference import HINT_HEADERS
from poolgrid.plugins.grid_builder.pool_profiles import PoolProfile, WantedGrid
from poolgrid.server.global_router.document.history import document_text
from poolgrid.server.global_router.document.reader import load_document
from poolgrid.server.global_router.heat_map import terminal_map
from tests.global_router.documents import document

MODELS = {stage: get_args(GridDocument.model_fields[stage].annotation)[0] for stage in STAGES}


def test_every_axis_has_one_row() -> None:
    assert [kind.name for kind in AXES] == list(AXIS)
    assert set(AXIS) == set(get_args(AxisName))
    assert {stage for kind in AXES for stage in kind.stages} == set(STAGES)
    assert {stage for stages in STAGES_OF_MODE.values() for stage in stages} == set(STAGES)


@pytest.mark.parametrize("stage", STAGES)
def test_the_grids_of_a_stage_have_the_fields_of_its_axes_and_no_other(stage: StageName) -> None:
    fields = MODELS[stage].model_fields
    measures = {name for name in fields if name.endswith(("_min", "_max", "_resolution", "_min_ms", "_max_ms"))}

    assert measures == {key for kind in axes_of(stage) for key in kind.keys}
    for kind in axes_of(stage):
        for key in kind.keys:
            assert fields[key].is_required() == (kind.stages[stage] == "required"), f"{stage}.{key}"


@pytest.mark.parametrize("kind", AXES, ids=lambda kind: kind.name)
def test_a_grid_to_build_may_have_every_axis(kind: AxisKind) -> None:
    assert set(kind.keys) <= set(WantedGrid.model_fields)


@pytest.mark.parametrize("kind", TARGETS, ids=lambda kind: kind.name)
def test_a_target_has_a_default_a_header_and_latencies_in_profiles(kind: AxisKind) -> None:
    assert kind.default_key in TargetDefaults.model_fields
    assert kind.hint_header in HINT_HEADERS
    assert kind.name in PoolProfile.model_fields
    assert kind.latency_over in AXIS


def nested(resolutions: list[int], pools: list[str], path: tuple[int, ...] = ()) -> Any:
    if len(path) == len(resolutions):
        return pools[sum(path) % len(pools)]
    return [nested(resolutions, pools, (*path, index)) for index in range(resolutions[len(path)])]


@st.composite
def grids(draw: st.DrawFn) -> tuple[dict[str, Any], list[AxisKind], list[int]]:
    """A document with one stage of a random choice of its optional axes."""
    axes = [kind for kind in axes_of("aggregated") if kind.stages["aggregated"] == "required" or draw(st.booleans())]
    resolutions = [draw(st.integers(1, 3)) for _ in axes]
    section: dict[str, Any] = {
        "pools": [{"name": "a"}, {"name": "b"}],
        "mapping": nested(resolutions, ["a", "b"]),
    }
    for kind, resolution in zip(axes, resolutions, strict=True):
        section.update(zip(kind.keys, (0, 100, resolution), strict=True))
    return {"mode": "aggregated", "accept": ["unreachable-pool"], "aggregated": section}, axes, resolutions


@settings(max_examples=60, deadline=None)
@given(grids(), st.data())
def test_a_document_of_any_number_of_axes_is_read_written_and_asked(
    made: tuple[dict[str, Any], list[AxisKind], list[int]], data: st.DataObject
) -> None:
    raw, axes, resolutions = made
    read = document(raw)
    stage = read.aggregated
    assert stage is not None
    assert [axis.kind for axis in stage.axes] == axes
    assert load_document(document_text(read)).document == read

    cell = tuple(data.draw(st.integers(0, resolution - 1)) for resolution in resolutions)
    middles = {axis.name: axis.cell_middle(index) for axis, index in zip(stage.axes, cell, strict=True)}
    isl = int(middles.get("isl", 10))
    request = GridRequest(
        isl,
        RequestHints({kind.name: Target(middles[kind.name], "test") for kind in TARGETS}),
        ExpectedOutput(int(middles.get("context_length", isl)) - isl, "test"),
    )
    selection = Grid(read).select("aggregated", request)

    assert selection.cell == cell
    assert selection.pool == ("a", "b")[sum(cell) % 2]
    Console(quiet=True).print(terminal_map(read))


@settings(max_examples=60, deadline=None)
@given(grids(), st.data())
def test_a_mapping_of_another_shape_names_the_place(
    made: tuple[dict[str, Any], list[AxisKind], list[int]], data: st.DataObject
) -> None:
    raw, axes, resolutions = made
    depth = data.draw(st.integers(0, len(axes) - 1))
    place = raw["aggregated"]["mapping"]
    for resolution in resolutions[:depth]:
        place = place[data.draw(st.integers(0, resolution - 1))]
    place.append(nested(resolutions[depth + 1 :], ["a", "b"]))

    with pytest.raises(GridDocumentError) as caught:
        load_document(json.dumps(raw))

    found = [problem for problem in caught.value.problems if "has" in problem.text]
    assert any(f"{axes[depth].keys[2]} is {resolutions[depth]}" in problem.text for problem in found)
    assert all(problem.path[:2] == ("aggregated", "mapping") for problem in found)


def test_half_an_optional_axis_is_named() -> None:
    raw = {
        "mode": "aggregated",
        "aggregated": {
            "pools": [{"name": "a"}],
            **{key: value for kind in TARGETS for key, value in zip(kind.keys, (0, 100, 1), strict=True)},
            "context_length_max": 9,
            "mapping": [["a"]],
        },
    }

    with pytest.raises(GridDocumentError, match=r"context_length_min: is missing; .* come together, or none of them"):
        load_document(json.dumps(raw))


def test_four_axes_have_distinct_cells() -> None:
    kinds = axes_of("aggregated")
    assert len(kinds) == 4
    names = [f"p{number}" for number in range(16)]
    cells = list(product(range(2), repeat=4))

    def rows(path: tuple[int, ...] = ()) -> Any:
        return names[cells.index(path)] if len(path) == 4 else [rows((*path, index)) for index in range(2)]

    section: dict[str, Any] = {"pools": [{"name": name, "priority": 0} for name in names], "mapping": rows()}
    for kind in kinds:
        section.update(zip(kind.keys, (0, 100, 2), strict=True))

    stage = document({"mode": "aggregated", "aggregated": section}).aggregated

    assert stage is not None
    assert [stage.pool_at(cell) for cell in cells] == names
