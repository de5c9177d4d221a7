"""The closed loop, step by step in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poolgrid.kernel.pool_grids.closed_loop import CellKey, ClosedLoop, LoopStep, Spill, Verdict
from poolgrid.kernel.pool_grids.grid import Grid, GridRequest
from poolgrid.kernel.pool_grids.request_hints import RequestHints, Target
from tests.examples import examples
from tests.global_router.documents import disagg, document

KEY = CellKey("prefill", (0, 1), "p-cheap")
"""Its target is the middle of 500 to 1000 ms."""
LOOP = {
    "window_ms": 1000,
    "samples_min": 5,
    "spill_after_ms": 300,
    "return_after_ms": 600,
    "return_below": 0.8,
    "step_share": 0.25,
    "share_max": 0.6,
}


def loop(raw: dict[str, Any] | None = None, **more: Any) -> ClosedLoop:
    return ClosedLoop(document({**(raw or disagg()), "adapt": True, "closed_loop": {**LOOP, **more}}), cells_max=4)


def run(
    made: ClosedLoop, from_ms: int, until_ms: int, value_ms: float | None, key: CellKey = KEY, metric: str = "ttft"
) -> list[LoopStep]:
    """Observe a latency every 10 ms and evaluate every 50 ms."""
    steps = []
    for now in range(from_ms, until_ms, 10):
        if value_ms is not None:
            made.observe(key, metric, value_ms, now)
        if now % 50 == 0:
            steps += made.evaluate(now)
    return steps


def test_a_missed_target_spills_step_by_step_up_to_the_limit() -> None:
    made = loop()

    steps = run(made, 0, 3000, 751)

    assert [step.share_after for step in steps] == [0.25, 0.5, 0.6]
    assert made.share(KEY) == 0.6
    first = steps[0]
    assert (first.key, first.spill_pool, first.verdict) == (KEY, "p-fast", Verdict.MISSED)
    assert (first.measured[0].metric, first.measured[0].p95_ms, first.measured[0].target_ms) == ("ttft", 751, 750)
    assert first.reason == "missed for 300 ms"


def test_each_step_waits_its_time_after_new_measurements() -> None:
    steps = run(loop(), 0, 3000, 800)

    gaps = [after.time_ms - before.time_ms for before, after in pairwise(steps)]
    assert all(gap >= 300 for gap in gaps)


def test_a_met_target_returns_more_slowly_than_a_missed_one_spills() -> None:
    made = loop()
    run(made, 0, 3000, 800)

    steps = run(made, 3000, 8000, 500)

    assert [step.share_after for step in steps] == [0.35, 0.09999999999999998, 0]
    assert all(step.verdict is Verdict.MET for step in steps)
    assert made.share(KEY) == 0


def test_a_cell_without_traffic_returns_too() -> None:
    made = loop()
    run(made, 0, 500, 800)
    assert made.share(KEY) == 0.25

    steps = run(made, 2000, 4000, None)

    assert [(step.verdict, step.share_after) for step in steps] == [(Verdict.QUIET, 0)]


def test_the_fastest_pool_says_once_that_nothing_is_faster() -> None:
    key = CellKey("prefill", (0, 0), "p-fast")
    made = loop()

    steps = run(made, 0, 3000, 9999, key)

    assert [(step.reason, step.share_after) for step in steps] == [("missed, and no pool is faster", 0)]
    assert made.spill(key, 0.0) is None


def test_a_draw_below_the_share_spills() -> None:
    made = loop()
    assert made.spill(KEY, 0.0) is None
    run(made, 0, 400, 800)

    assert made.spill(KEY, 0.2499) == Spill("p-fast", 0.25)
    assert made.spill(KEY, 0.25) is None


def test_an_aggregated_cell_is_judged_by_both_targets() -> None:
    raw = {
        "mode": "aggregated",
        "aggregated": {
            "pools": [{"name": "fast"}, {"name": "slow"}],
            "ttft_min_ms": 0,
            "ttft_max_ms": 1000,
            "ttft_resolution": 1,
            "itl_min_ms": 0,
            "itl_max_ms": 20,
            "itl_resolution": 1,
            "mapping": [["slow"]],
        },
    }
    key = CellKey("aggregated", (0, 0), "slow")
    made = loop(raw)
    for now in range(0, 1000, 10):
        made.observe(key, "ttft", 100, now)
        made.observe(key, "itl", 11, now)
    made.evaluate(1000)

    steps = run(made, 1000, 1400, 11, key, "itl")

    assert [m.metric for m in steps[0].measured] == ["ttft", "itl"]
    assert made.share(key) == 0.25


def test_the_number_of_cells_is_bounded_and_forgetting_a_spilling_one_is_a_step() -> None:
    made = loop()
    run(made, 0, 400, 800)

    steps = []
    for cell in [(0, 0), (1, 0), (1, 1)]:
        steps += made.observe(CellKey("prefill", cell, "p-fast"), "ttft", 1, 500)
    steps += made.observe(CellKey("decode", (0, 1), "d-cheap"), "itl", 1, 500)

    assert len(made) == 4
    assert [(step.key, step.share_after, step.reason) for step in steps] == [(KEY, 0, "more than 4 cells are watched")]


@settings(max_examples=examples(20))
@given(
    phases=st.lists(
        st.tuples(st.sampled_from([None, 100.0, 600.0, 700.0, 751.0, 5000.0]), st.integers(1, 20)), max_size=12
    ),
    draw=st.floats(0, 1, exclude_max=True),
)
def test_shares_stay_in_their_bounds_and_follow_from_the_steps(
    phases: list[tuple[float | None, int]], draw: float
) -> None:
    made, share = loop(), 0.0
    now = 0
    steps: list[LoopStep] = []
    for value, length in phases:
        new = run(made, now, now + 100 * length, value)
        now += 100 * length
        for step in new:
            assert abs(step.share_after - step.share_before) <= LOOP["step_share"] + 1e-12
            assert (step.share_after > step.share_before) == (step.verdict is Verdict.MISSED)
            share = step.share_after
        steps += new
        assert 0 <= made.share(KEY) <= LOOP["share_max"]
        assert share == made.share(KEY)
        assert (made.spill(KEY, draw) is not None) == (draw < made.share(KEY))
    for before, after in pairwise(steps):
        assert after.share_before == before.share_after
        waited = LOOP["spill_after_ms"] if after.verdict is Verdict.MISSED else LOOP["return_after_ms"]
        assert after.time_ms - before.time_ms >= waited


def test_a_selection_that_an_override_changed_is_not_watched() -> None:
    raw = disagg()
    raw["prefill"]["priority_overrides"] = [{"min_priority": 1, "max_priority": 9, "target_pool": "p-fast"}]
    grid = Grid(document(raw))
    late = Target(900, "test")

    assert CellKey.of(grid.select("prefill", GridRequest(1, RequestHints({"ttft": late})))) == KEY
    assert CellKey.of(grid.select("prefill", GridRequest(1, RequestHints({"ttft": late}, priority=5)))) is None


SPILLED_TO = "p-fast"
MID = {"name": "p-mid", "priority": 1}


def spilled(made: ClosedLoop, from_ms: int, until_ms: int, own_ms: float, spilled_ms: float) -> list[LoopStep]:
    """Observe every 10 ms one request on the cell's pool and one that was spilled, and evaluate every 50 ms."""
    steps = []
    for now in range(from_ms, until_ms, 10):
        made.observe(KEY, "ttft", own_ms, now, "p-cheap")
        made.observe(KEY, "ttft", spilled_ms, now, SPILLED_TO)
        if now % 50 == 0:
            steps += made.evaluate(now)
    return steps


class TestTheBrake:
    """What spills is measured too: a pool that others spill to must not drown unseen."""

    def test_while_spilled_requests_meet_the_target_more_may_spill(self) -> None:
        made = loop()
        run(made, 0, 400, 800)

        spilled(made, 400, 3000, 800, 700)

        assert made.share(KEY) == 0.6

    def test_spilled_requests_that_miss_the_target_take_the_share_back(self) -> None:
        made = loop()
        run(made, 0, 400, 800)
        assert made.share(KEY) == 0.25

        [step, *_] = spilled(made, 400, 900, 800, 5000)

        assert (step.verdict, step.share_before, step.share_after) == (Verdict.CROWDED, 0.25, 0)
        assert step.reason == "what spills to p-fast misses the target too, for 300 ms"
        assert [(m.pool, m.metric, m.p95_ms) for m in step.measured] == [("p-fast", "ttft", 5000)]

    def test_a_pool_without_cells_of_its_own_is_seen_to_drown(self) -> None:
        raw = disagg()
        raw["prefill"]["mapping"] = [["p-cheap", "p-cheap"], ["p-cheap", "p-cheap"]]
        made = loop(raw)
        run(made, 0, 400, 800)

        steps = spilled(made, 400, 900, 800, 5000)

        assert [step.verdict for step in steps] == [Verdict.CROWDED]

    def test_after_the_brake_it_takes_as_long_as_a_return_until_more_spills_again(self) -> None:
        made = loop()
        run(made, 0, 400, 800)
        [brake] = spilled(made, 400, 900, 800, 5000)

        steps = run(made, 900, 2500, 800)

        assert steps[0].share_after == 0.25
        assert steps[0].time_ms - brake.time_ms >= LOOP["return_after_ms"]

    def test_a_cell_of_the_faster_pool_that_begins_to_miss_after_a_step_takes_the_share_back(self) -> None:
        made, victim = loop(), CellKey("prefill", (0, 0), "p-fast")
        steps: list[LoopStep] = []
        for now in range(0, 1200, 10):
            made.observe(KEY, "ttft", 800, now)
            made.observe(victim, "ttft", 100 if now < 400 else 9999, now)
            if now % 50 == 0:
                steps += made.evaluate(now)

        braked = [step for step in steps if step.key == KEY and step.verdict is Verdict.CROWDED]
        assert braked[0].share_after < braked[0].share_before
        assert braked[0].reason == "since the last step a cell of p-fast misses its target, for 300 ms"

    def test_a_target_that_was_missed_before_anything_spilled_does_not_forbid_it(self) -> None:
        made, victim = loop(), CellKey("prefill", (0, 0), "p-fast")
        for now in range(0, 3000, 10):
            made.observe(victim, "ttft", 9999, now)
            if now >= 500:
                made.observe(KEY, "ttft", 800, now)
            if now % 50 == 0:
                made.evaluate(now)

        assert made.share(KEY) == 0.6


class TestANewDocument:
    """A reload keeps what was learned of cells that it does not change."""

    @staticmethod
    def spilling(raw: dict[str, Any] | None = None) -> ClosedLoop:
        made = loop(raw)
        run(made, 0, 400, 800)
        assert made.share(KEY) == 0.25
        return made

    @staticmethod
    def after(change: Callable[[dict[str, Any]], None], before: ClosedLoop) -> ClosedLoop:
        raw = {**disagg(), "adapt": True, "closed_loop": dict(LOOP)}
        change(raw)
        return ClosedLoop(document(raw), before=before)

    def test_what_was_measured_goes_on(self) -> None:
        after = self.after(lambda raw: raw.update(description="x"), self.spilling())

        run(after, 400, 800, 800)

        assert after.share(KEY) == 0.5

    @pytest.mark.parametrize(
        "change",
        [
            lambda raw: raw["prefill"]["mapping"].__setitem__(0, ["p-fast", "p-fast"]),
            lambda raw: raw["prefill"].update(ttft_max_ms=2000),
            lambda raw: raw["prefill"]["pools"][1].update(url="http://localhost:99"),
            lambda raw: raw["prefill"]["pools"][0].update(url="http://localhost:99"),
            lambda raw: raw["prefill"]["pools"].extend([{**raw["prefill"]["pools"].pop(), "priority": 2}, MID]),
            lambda raw: raw.update(adapt=False),
        ],
        ids=["its pool", "its target", "its pool's address", "the faster pool's address", "the next faster", "adapt"],
    )
    def test_a_cell_that_changed_begins_anew(self, change: Callable[[dict[str, Any]], None]) -> None:
        def accepted(raw: dict[str, Any]) -> None:
            change(raw)
            raw["accept"] = ["unreachable-pool", "slower-pool-for-faster-target"]

        assert self.after(accepted, self.spilling()).share(KEY) == 0

    def test_a_share_stays_below_a_lower_limit(self) -> None:
        after = self.after(lambda raw: raw["closed_loop"].update(share_max=0.1, step_share=0.1), self.spilling())

        assert after.share(KEY) == 0.1
