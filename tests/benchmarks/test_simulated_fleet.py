"""A fleet in one virtual time: equal costs, every request ends once, and what is cached decides where a prompt goes."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from lab.benchmarks.simulated_fleet import (
    FleetPool,
    FleetResult,
    GridPools,
    MakeChooser,
    SimulatedFleet,
    TargetClass,
    Targets,
    WorkerClass,
    assert_equal_cost,
    by_grid,
    fleet_report,
    round_robin,
)
from poolgrid.kernel.pool_grids.grid_document import GridDocument
from poolgrid.plugins.bench.trace import TraceRow, read_trace
from poolgrid.plugins.simulation.workload import Workload, build_workload
from poolgrid.server.global_router.document.reader import load_document
from poolgrid.server.workers.timing import TableTiming
from tests.simulation.builders import CONVERSATION, limits, row

FAST, CHEAP = WorkerClass(2.0, 3.0), WorkerClass(1.0, 1.0)
FLEET = (FleetPool("fast", (FAST,)), FleetPool("cheap", (CHEAP, CHEAP)))
HURRIED = TargetClass("hurried", 0.3, Targets(300.0, 15.0))
RELAXED = TargetClass("relaxed", 0.7, Targets(2000.0, 60.0))
MIX = (HURRIED, RELAXED)


@pytest.fixture(scope="module")
def conversations() -> Workload:
    """200 requests, fast enough that workers have queues."""
    return build_workload(read_trace(CONVERSATION, 200), 4.0, 64)


def grid(isl_basis: str = "total", adapt: bool = False, **closed_loop: object) -> GridDocument:
    """Prompts below 4,000 tokens are cheap's, longer ones fast's, whatever the targets."""
    stage = {
        "pools": [{"name": "fast", "priority": 0}, {"name": "cheap", "priority": 1}],
        "isl_min": 0,
        "isl_max": 8000,
        "isl_resolution": 2,
        "ttft_min_ms": 0,
        "ttft_max_ms": 600,
        "ttft_resolution": 1,
        "itl_min_ms": 0,
        "itl_max_ms": 60,
        "itl_resolution": 1,
        "mapping": [[["cheap"]], [["fast"]]],
    }
    data = {"mode": "aggregated", "aggregated": stage, "isl_basis": isl_basis, "adapt": adapt}
    return load_document(json.dumps({**data, "closed_loop": closed_loop})).document


def play(
    workload: Workload,
    make_chooser: MakeChooser,
    fleet: Sequence[FleetPool] = FLEET,
    mix: Sequence[TargetClass] = MIX,
    timing: TableTiming | None = None,
) -> tuple[SimulatedFleet, FleetResult]:
    simulated = SimulatedFleet(workload, fleet, make_chooser, mix, limits(workload), timing)
    return simulated, simulated.run()


@pytest.mark.parametrize(
    "make_chooser",
    [
        round_robin,
        by_grid(grid()),
        by_grid(grid("uncached")),
        by_grid(grid("uncached", adapt=True, samples_min=5, spill_after_ms=2000)),
    ],
    ids=["round robin", "static grid", "uncached", "closed loop"],
)
def test_every_request_ends_once_and_a_run_repeats_itself(conversations: Workload, make_chooser: MakeChooser) -> None:
    simulated, result = play(conversations, make_chooser)

    assert sorted(o.request_id for o in result.outcomes) == sorted(r.request_id for r in conversations.requests)
    assert result.prompt_tokens == sum(request.isl for request in conversations.requests)
    assert sum(pool.result.requests for pool in simulated.pools) == len(conversations.requests)
    assert all(engine.active_requests == 0 for pool in simulated.pools for engine in pool.engines)
    assert all(len(pool.projection.ledger) == 0 for pool in simulated.pools)
    _, again = play(conversations, make_chooser)
    assert again == result


def test_a_long_prompt_that_is_mostly_cached_goes_where_a_short_one_goes() -> None:
    """A conversation grows from 3,072 tokens to 4,096: nearly all of it is cached by then, in the cheap pool."""
    beginning = tuple(range(6))
    rows = [row(*beginning), row(*beginning, 6, 7, at=5000.0), row(*range(20, 28), at=10_000.0)]
    workload = build_workload(rows, 1.0, 64)

    def pools(isl_basis: str) -> dict[str, str]:
        _, result = play(workload, by_grid(grid(isl_basis)))
        return {outcome.request_id: outcome.pool for outcome in result.outcomes}

    assert pools("total") == {"trace-0": "cheap", "trace-1": "fast", "trace-2": "fast"}
    assert pools("uncached") == {"trace-0": "cheap", "trace-1": "cheap", "trace-2": "fast"}


def test_the_closed_loop_spills_what_its_pool_is_too_slow_for() -> None:
    """A cheap pool that takes 400 ms for a prompt, against a cell whose middle is 300 ms; the fast one takes 200."""
    rows: list[TraceRow] = [row(number, at=1000.0 * number, osl=1) for number in range(200)]
    workload = build_workload(rows, 1.0, 64)
    timing = TableTiming([(1, 400.0)], [(0.0, 5.0)])

    adapting, adapted = play(
        workload, by_grid(grid(adapt=True, samples_min=5, window_ms=10_000, spill_after_ms=5000)), timing=timing
    )
    _, static = play(workload, by_grid(grid()), timing=timing)

    chooser = adapting.chooser
    assert isinstance(chooser, GridPools)
    assert [step.share_after for step in chooser.steps][:3] == [0.25, 0.5, 0.75]
    assert {outcome.pool for outcome in static.outcomes} == {"cheap"}
    assert chooser.spilled == sum(outcome.pool == "fast" for outcome in adapted.outcomes) > 50
    assert {(outcome.pool, round(outcome.ttft_ms)) for outcome in adapted.outcomes} == {("cheap", 400), ("fast", 200)}


def test_attainment_and_costs_of_a_run_worked_out_by_hand() -> None:
    """Prefill takes 100 ms and decode 20 ms a step: an answer of 11 tokens is there after 100 + 10 x 20 ms."""
    rows = [row(0, at=0.0, osl=11), row(1, at=0.0, osl=1), row(2, at=3000.0, osl=11)]
    workload = build_workload(rows, 1.0, 64)
    one_worker = [FleetPool("all", (WorkerClass(1.0, 36.0),))]
    timing = TableTiming([(1, 100.0), (512, 100.0), (1024, 200.0)], [(0.0, 20.0)])

    def report(ttft_ms: float, itl_ms: float) -> tuple[list[float], float]:
        mix = [TargetClass("all", 1.0, Targets(ttft_ms, itl_ms))]
        _, result = play(workload, round_robin, one_worker, mix, timing)
        found = fleet_report(result)
        assert [outcome.itl_ms for outcome in result.outcomes] == [None, pytest.approx(20.0), pytest.approx(20.0)]
        # 400 ms for the first two, whose prompts are computed together, 300 ms for the third, at 36 an hour.
        assert found["span_ms"] == pytest.approx(3300.0)
        assert found["cost_per_million_tokens"] == pytest.approx(36 * 3.3 / 3600 * 1e6 / 23)
        assert found["busy_cost_per_million_tokens"] == pytest.approx(36 * 0.7 / 3600 * 1e6 / 23)
        return [outcome.ttft_ms for outcome in result.outcomes], found["attainment"]

    assert report(200.0, 21.0) == ([200.0, 200.0, 100.0], 1.0)
    assert report(150.0, 21.0)[1] == pytest.approx(1 / 3), "only the last one had its first token in time"
    assert report(200.0, 19.0)[1] == pytest.approx(1 / 3), "only the one of a single token has no ITL to miss"
    assert report(99.0, 19.0)[1] == 0.0


def test_only_fleets_of_equal_cost_are_compared() -> None:
    assert assert_equal_cost([FLEET, [FleetPool("all", (CHEAP,) * 5)]]) == 5.0
    with pytest.raises(ValueError, match=r"costs per hour are \[5.0, 4.0\], they must be equal"):
        assert_equal_cost([FLEET, [FleetPool("all", (CHEAP,) * 4)]])


def test_what_cannot_be_simulated_is_refused(conversations: Workload) -> None:
    with pytest.raises(ValueError, match="the fleet has no pool 'cheap', it has fast"):
        play(conversations, by_grid(grid()), FLEET[:1])
    with pytest.raises(ValueError, match="they must add up to 1"):
        play(conversations, round_robin, mix=[HURRIED])
