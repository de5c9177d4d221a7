"""What nobody can pass is found as by trying everything, and who knows everything does better than who does not."""

from __future__ import annotations

from argparse import Namespace
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.benchmarks.clairvoyant import Clairvoyant, ClairvoyantPool, least_assignment, least_ttfts
from lab.benchmarks.policy_times import CLAIRVOYANT, LEAST, TABLES
from poolgrid.plugins.bench.trace import read_trace
from poolgrid.plugins.simulation.pool import RouterFleet, SimulatedPool
from poolgrid.plugins.simulation.workload import SpeedChange, WorkerSpeeds, Workload, build_workload
from poolgrid.server.router.policy_loading import make_policy
from poolgrid.server.workers.timing import PolynomialTiming
from tests.simulation.builders import CONVERSATION, limits, row

UNLIKE = WorkerSpeeds((*[1.0] * 4, *[1 / 3] * 4), (SpeedChange(0, 20_000.0, 40_000.0, 0.25),))


@pytest.fixture(scope="module")
def conversations() -> Workload:
    return build_workload(read_trace(CONVERSATION, 200), 1.0, 64)


@given(
    st.integers(1, 4).flatmap(
        lambda rows: st.lists(st.lists(st.integers(0, 9), min_size=5, max_size=5), min_size=rows, max_size=rows)
    )
)
def test_the_least_assignment_is_that_of_trying_all(costs: list[list[int]]) -> None:
    tried = min(
        sum(costs[at][column] for at, column in enumerate(columns)) for columns in permutations(range(5), len(costs))
    )

    assert least_assignment(np.array(costs, np.float64)) == pytest.approx(tried)


def test_a_lone_request_takes_as_long_as_alone_on_the_fastest_worker() -> None:
    workload = build_workload([row(0, at=0.0, osl=1)], 1.0, 64)
    [request] = workload.requests

    alone, mean_ms = least_ttfts(workload, PolynomialTiming(), 8192, [0.5, 2.0])

    assert alone == [pytest.approx(PolynomialTiming().prefill_ms(request.isl) / 2)]
    assert mean_ms == pytest.approx(alone[0])


@pytest.mark.parametrize("together", [False, True])
def test_who_knows_everything_is_faster_and_still_above_what_nobody_can_pass(
    conversations: Workload, together: bool
) -> None:
    timing = PolynomialTiming()

    known = ClairvoyantPool(conversations, Clairvoyant(together), 8, limits(conversations), timing, UNLIKE).run()
    predicted = SimulatedPool(
        conversations,
        make_policy("kv"),
        8,
        limits(conversations),
        timing,
        routers=RouterFleet(hold_limit_ms=0.0),
        speeds=UNLIKE,
    ).run()

    assert known.requests == predicted.requests == 200
    assert sum(known.ttft_ms) < sum(predicted.ttft_ms)
    alone, mean_ms = least_ttfts(conversations, timing, 8192, UNLIKE.pattern)
    assert sum(alone) / 200 <= mean_ms < sum(known.ttft_ms) / 200
    assert all(least <= real + 1e-6 for least, real in zip(alone, sorted(known.ttft_ms), strict=True))


def test_who_knows_all_requests_of_a_moment_is_faster_yet(conversations: Workload) -> None:
    one_by_one, together = (
        ClairvoyantPool(conversations, Clairvoyant(both), 8, limits(conversations), PolynomialTiming(), UNLIKE).run()
        for both in (False, True)
    )

    assert sum(together.ttft_ms) < sum(one_by_one.ttft_ms)


@pytest.mark.parametrize("table", TABLES)
def test_the_tables_have_policies_that_there_are(table: str) -> None:
    options = Namespace(trace=CONVERSATION, rows=20, loads=(), policies=(), timing="published")
    for policy in {run.policy for run in TABLES[table](options)} - {LEAST, *CLAIRVOYANT}:
        assert make_policy(policy).name == policy
