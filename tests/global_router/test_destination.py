"""Where a request wants to go, and where it may go instead."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poolgrid.kernel.pool_grids.closed_loop import ClosedLoop, Spill
from poolgrid.kernel.pool_grids.destination import Destination, destination
from poolgrid.kernel.pool_grids.grid import PASSING, Candidate, Grid, GridRequest, PoolStanding, fallback_order
from poolgrid.kernel.pool_grids.grid_document import GridStage
from poolgrid.kernel.pool_grids.request_hints import RequestHints, Target
from tests.global_router.documents import aggregated, document

UP = PoolStanding.AVAILABLE
TO_C = GridRequest(10, RequestHints({"ttft": Target(900, "test"), "itl": Target(15, "test")}))
"""The slowest of three pools."""


def made(raw: dict[str, Any] | None = None, spill: str | None = None) -> Destination:
    grid = Grid(document(raw or aggregated())).stages["aggregated"]
    there = destination(grid, ClosedLoop(document(aggregated())), TO_C, 0.0)
    return there if spill is None else Destination(grid.stage, there.selection, Spill(spill, 0.5))


def with_fallback(fallback: dict[str, Any]) -> dict[str, Any]:
    raw = aggregated()
    raw["aggregated"]["fallback"] = fallback
    return raw


def test_without_a_spill_the_cells_pool_is_wanted_and_its_fallbacks_follow() -> None:
    there = made()

    assert there.wanted == "c"
    assert there.pools == ("c", "b", "a")
    assert [there.how(pool) for pool in there.pools] == ["grid", "fallback", "fallback"]


def test_a_spilled_request_wants_the_pool_that_it_is_spilled_to_although_its_cells_pool_is_free() -> None:
    there = made(spill="b")

    assert there.wanted == "b"
    assert there.choose({"b": UP, "c": UP}).pool == "b"
    assert there.how("b") == "spill"


def test_a_spilled_request_does_not_wait_for_the_pool_that_it_was_spilled_from() -> None:
    choice = made(spill="b").choose({"a": PoolStanding.DOWN, "b": UP, "c": PoolStanding.SATURATED})

    assert (choice.pool, choice.passed_over) == ("b", ())


@pytest.mark.parametrize("fallback", [{"rule": "none"}, {"rule": "faster-only"}, {"order": {"b": [], "c": []}}])
def test_a_spill_takes_no_pool_away_when_the_one_it_goes_to_is_down(fallback: dict[str, Any]) -> None:
    there = made(with_fallback(fallback), spill="b")

    choice = there.choose({"c": UP})

    assert (choice.chosen, choice.pool, choice.reason) == ("b", "c", "spilled from")
    assert there.how("c") == "fallback"


@st.composite
def destinations(draw: st.DrawFn) -> Destination:
    names = [f"p{number}" for number in range(draw(st.integers(1, 6)))]
    pool = st.sampled_from(names)
    explicit = {
        name: [other for other in draw(st.lists(pool, unique=True)) if other != name]
        for name in draw(st.lists(pool, unique=True))
    }
    cell = draw(pool)
    raw = {
        "mode": "aggregated",
        "accept": ["unreachable-pool"],
        "aggregated": {
            "pools": [{"name": name, "priority": draw(st.integers(0, 3))} for name in names],
            "ttft_min_ms": 0,
            "ttft_max_ms": 1,
            "ttft_resolution": 1,
            "itl_min_ms": 0,
            "itl_max_ms": 1,
            "itl_resolution": 1,
            "mapping": [[cell]],
            "fallback": {
                "rule": draw(st.sampled_from(["faster-then-slower", "faster-only", "none"])),
                "order": explicit,
            },
        },
    }
    grid = Grid(document(raw)).stages["aggregated"]
    spill = draw(st.none() | pool.filter(lambda name: name != cell).map(lambda name: Spill(name, 0.5)))
    there = Destination(grid.stage, grid.select(GridRequest(1)), spill)
    return there.after_loss(draw(pool), draw(st.booleans())) if draw(st.booleans()) else there


STATES = st.dictionaries(st.sampled_from([f"p{number}" for number in range(6)]), st.sampled_from(PoolStanding))


def _pools(order: tuple[Candidate, ...]) -> set[str]:
    return {candidate.pool for candidate in order}


def _after_first(there: Destination) -> list[str]:
    ahead = _pools(there.first)
    return [pool for pool in there.pools if pool not in ahead]


@given(destinations(), STATES)
def test_every_pool_stands_once_the_wanted_one_before_its_fallbacks(
    there: Destination, states: dict[str, PoolStanding]
) -> None:
    stage: GridStage = there.stage

    assert len(set(there.pools)) == len(there.pools)
    assert there.pools[: len(there.first)] == tuple(candidate.pool for candidate in there.first)
    ahead = _pools(there.first)
    wanted = [candidate.pool for candidate in fallback_order(stage, there.wanted) if candidate.pool not in ahead]
    assert _after_first(there)[: len(wanted)] == wanted
    # with a spill a request may go to every pool that it may go to without
    assert _pools(fallback_order(stage, there.selection.pool)) <= set(there.pools)

    choice = there.choose(states)
    open_pools = [pool for pool in there.pools if states.get(pool) is UP]
    assert choice.pool == (open_pools[0] if open_pools else None)
    assert choice.may_have_room_later == (not open_pools and any(states.get(pool) in PASSING for pool in there.pools))
    if choice.pool is not None:
        assert (there.how(choice.pool) == "fallback") == (choice.pool not in ahead and choice.pool != there.wanted)
