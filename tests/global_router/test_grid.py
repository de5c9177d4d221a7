"""From a request to a cell to a pool."""

from __future__ import annotations

from math import inf, nextafter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poolgrid.kernel.pool_grids.axis import AXIS, STEP_MIN, Axis, AxisName, cell_index
from poolgrid.kernel.pool_grids.grid import DEFAULT_SOURCE, MIDDLE_SOURCE, Grid, GridRequest
from poolgrid.kernel.pool_grids.request_hints import ExpectedOutput, RequestHints, Target
from tests.global_router.documents import aggregated, disagg, document


def naive_index(x: float, low: float, high: float, resolution: int) -> int:
    """The formula of the issue, word by word; a quotient beyond every integer is the last cell."""
    quotient = (x - low) / ((high - low) / resolution)
    if quotient in (inf, -inf):
        return resolution - 1 if quotient > 0 else 0
    return min(max(int(quotient), 0), resolution - 1)


@given(
    x=st.floats(allow_nan=False, allow_infinity=False),
    low=st.floats(0, 1e9),
    width=st.floats(1e-2, 1e9),
    resolution=st.integers(1, 1024),
)
def test_the_index_is_the_formulas(x: float, low: float, width: float, resolution: int) -> None:
    high = low + width
    if not (high - low) / resolution >= STEP_MIN:
        return
    assert cell_index(x, low, high, resolution) == naive_index(x, low, high, resolution)


@given(low=st.integers(0, 10_000), step=st.integers(1, 1000), resolution=st.integers(1, 50), x=st.integers(-5, 200_000))
def test_with_whole_steps_a_value_lies_in_its_cell(low: int, step: int, resolution: int, x: int) -> None:
    axis = Axis(AXIS["isl"], low, low + step * resolution, resolution)
    index = axis.index(x)
    begins, ends = axis.bounds(index)

    assert begins <= x or index == 0
    assert x < ends or index == resolution - 1
    assert axis.index(axis.cell_middle(index)) == index


@pytest.mark.parametrize(
    ("x", "cell"),
    [(0, 0), (249.9, 0), (250, 1), (500, 2), (999.9, 3), (1000, 3), (5000, 3), (-1, 0), (nextafter(250, 0), 0)],
)
def test_cells_begin_at_their_lower_edge(x: float, cell: int) -> None:
    assert cell_index(x, 0, 1000, 4) == cell


def request(isl: int = 100, ttft: float | None = None, itl: float | None = None, **more: object) -> GridRequest:
    asked: dict[AxisName, float | None] = {"ttft": ttft, "itl": itl}
    hints = RequestHints(
        {name: Target(value, AXIS[name].hint_field) for name, value in asked.items() if value is not None},
        more.get("priority"),  # type: ignore[arg-type]
    )
    cached = more.get("cached", {})
    return GridRequest(isl, hints, ExpectedOutput(int(more.get("osl", 0)), "test"), cached)  # type: ignore[call-overload,arg-type]


@pytest.mark.parametrize(
    ("isl", "ttft", "cell", "pool"),
    [
        (100, 100.0, (0, 0), "p-fast"),
        (100, 900.0, (0, 1), "p-cheap"),
        (1500, 900.0, (1, 1), "p-fast"),
        (100, 0.0, (0, 0), "p-fast"),
        (100, 1e12, (0, 1), "p-cheap"),
        (10**9, None, (1, 1), "p-fast"),
    ],
)
def test_a_prefill_pool_is_chosen_by_isl_and_ttft(
    isl: int, ttft: float | None, cell: tuple[int, ...], pool: str
) -> None:
    selection = Grid(document(disagg())).select("prefill", request(isl, ttft))

    assert (selection.cell, selection.pool) == (cell, pool)


def test_a_target_is_the_requests_else_the_default_else_the_middle() -> None:
    without = Grid(document(disagg()))
    with_default = Grid(document({**disagg(), "defaults": {"ttft_target_ms": 0}}))

    middle = without.select("prefill", request()).readings[1]
    default = with_default.select("prefill", request()).readings[1]
    own = with_default.select("prefill", request(ttft=700.0)).readings[1]

    assert (middle.value, middle.source, middle.index) == (500, MIDDLE_SOURCE, 1)
    assert (default.value, default.source, default.index) == (0, DEFAULT_SOURCE, 0)
    assert (own.value, own.source, own.index) == (700, "nvext.router.ttft_target", 1)


def test_the_expected_output_enters_the_context_length() -> None:
    grid = Grid(document(disagg()))

    short = grid.select("decode", request(1500, itl=15.0, osl=499))
    long = grid.select("decode", request(1500, itl=15.0, osl=500))

    assert (short.cell, short.pool) == ((0, 1), "d-cheap")
    assert (long.cell, long.pool) == ((1, 1), "d-fast")
    assert long.readings[0].value == 2000


def test_an_aggregated_grid_may_have_three_axes() -> None:
    grid = Grid(document(aggregated()))

    assert grid.select("aggregated", request(1, 900, 15)).pool == "c"
    assert grid.select("aggregated", request(1999, 900, 15)).pool == "b"
    assert grid.select("aggregated", request(1999, 100, 15)).cell == (1, 0, 1)


@pytest.mark.parametrize(
    ("priority", "index", "pool"),
    [(None, None, "p-cheap"), (9, None, "p-cheap"), (10, 0, "p-fast"), (20, 0, "p-fast"), (21, 1, "p-cheap")],
)
def test_the_first_override_that_matches_replaces_the_cells_pool(
    priority: int | None, index: int | None, pool: str
) -> None:
    raw = disagg()
    raw["accept"] = ["overlapping-overrides"]
    raw["prefill"]["priority_overrides"] = [
        {"min_priority": 10, "max_priority": 20, "target_pool": "p-fast"},
        {"min_priority": 15, "max_priority": 30, "target_pool": "p-cheap"},
    ]

    selection = Grid(document(raw)).select("prefill", request(1, 900, priority=priority))

    assert (selection.override_index, selection.pool, selection.grid_pool) == (index, pool, "p-cheap")


@pytest.mark.parametrize(
    ("isl", "cached", "pool", "cell", "why"),
    [
        (1900, {}, "p-fast", (1, 1), "nobody has anything: the cell of the whole prompt"),
        (1900, {"p-cheap": 1800}, "p-cheap", (0, 1), "for the cheap pool it is a short prompt"),
        (1900, {"p-fast": 1800}, "p-fast", (0, 1), "short for the fast pool, too long for the cheap one"),
        (1900, {"p-fast": 1800, "p-cheap": 1000}, "p-cheap", (0, 1), "short for both: the cheap one"),
        (900, {"p-fast": 900}, "p-cheap", (0, 1), "short for everybody: the cheap one is fast enough"),
        (1900, {"p-cheap": 10**9}, "p-cheap", (0, 1), "a claim beyond the prompt counts as all of it"),
        (1900, {"p-cheap": -5}, "p-fast", (1, 1), "a negative claim counts as nothing"),
    ],
)
def test_uncached_selection_looks_at_what_each_pool_has_left_to_do(
    isl: int, cached: dict[str, int], pool: str, cell: tuple[int, ...], why: str
) -> None:
    grid = Grid(document({**disagg(), "isl_basis": "uncached"}))

    selection = grid.select("prefill", request(isl, 900, cached=cached))

    assert (selection.pool, selection.cell) == (pool, cell), why


@given(
    isl=st.integers(0, 4000),
    ttft=st.floats(0, 2000),
    itl=st.floats(0, 40),
    cached=st.dictionaries(st.sampled_from("abc"), st.integers(0, 4000)),
)
def test_uncached_selection_never_takes_a_slower_pool_than_its_own_cell_asks_for(
    isl: int, ttft: float, itl: float, cached: dict[str, int]
) -> None:
    raw = aggregated()
    total = Grid(document(raw))
    uncached = Grid(document({**raw, "isl_basis": "uncached"}))
    ranks = uncached.stages["aggregated"].ranks

    selection = uncached.select("aggregated", request(isl, ttft, itl, cached=cached))

    work = isl - min(isl, cached.get(selection.pool, 0))
    asked = total.select("aggregated", request(work, ttft, itl)).pool
    assert ranks[selection.pool] <= ranks[asked]
    whole = total.select("aggregated", request(isl, ttft, itl)).pool
    if not cached:
        assert selection.pool == whole


def test_a_selection_explains_itself() -> None:
    raw = disagg()
    raw["prefill"]["priority_overrides"] = [{"min_priority": 1, "max_priority": 9, "target_pool": "p-fast"}]

    selection = Grid(document(raw)).select("prefill", request(100, 5000, priority=3))

    assert selection.reason() == (
        "isl 100 tokens, ttft 5000 ms: cell [0][1] is p-cheap; override 0 (priorities 1 to 9) sends it to p-fast"
    )
    made = selection.explanation()
    assert made["axes"][1] == {
        "axis": "ttft",
        "unit": "ms",
        "value": 5000,
        "source": "nvext.router.ttft_target",
        "index": 1,
        "cell_from": 500.0,
        "cell_to": 1000.0,
        "clamped": True,
    }
    assert made["override"]["target_pool"] == "p-fast"
