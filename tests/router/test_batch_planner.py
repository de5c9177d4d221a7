"""Who of those that wait at a router goes to a worker now."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from poolgrid.kernel.decision.policy import RoutingRequest
from poolgrid.kernel.routing.batch_planner import BatchedRequest, WaitingPrompts, divide, plan
from poolgrid.kernel.routing.engine_times import StepCurve

STEP_TOKENS = 8192


STEPS = StepCurve(((0.0, 16.0), (100.0, 17.0)), ((0.0, 5.0),))
"""A step of 16 ms, and one more for each hundred tokens."""


def own_ms(tokens: float) -> float:
    full, rest = divmod(tokens, STEP_TOKENS)
    return full * STEPS.one_step_ms(STEP_TOKENS) + STEPS.one_step_ms(rest)


def waiting(
    tokens: Sequence[Sequence[float]],
    busy_ms: Sequence[float] | None = None,
    priorities: Sequence[int] | None = None,
    speeds: Sequence[float] | None = None,
) -> tuple[list[RoutingRequest], WaitingPrompts]:
    """Prompts by row; a column for each worker, which is busy for so long and so fast."""
    workers = range(len(tokens[0]))
    own = [[own_ms(row[each]) / (speeds[each] if speeds else 1.0) for each in workers] for row in tokens]
    costs = [[row[each] + (busy_ms[each] if busy_ms else 0.0) for each in workers] for row in own]
    requests = [
        RoutingRequest(f"r{row}", "m", 1, 1, 1, priorities[row] if priorities else 0) for row in range(len(tokens))
    ]
    return requests, WaitingPrompts(costs, own, tokens)


def placed(waits: tuple[list[RoutingRequest], WaitingPrompts], queued: Sequence[float]) -> list[tuple[int, int]]:
    found = plan(*waits, queued, lambda _: (float(STEP_TOKENS), STEPS))
    return [(each.request, each.worker) for each in found]


def test_a_lone_request_goes_to_the_free_worker_where_it_costs_least() -> None:
    assert placed(waiting([[5000, 1000]]), [0, 0]) == [(0, 1)]


def test_a_request_waits_for_a_worker_that_is_soon_free_and_holds_its_prompt() -> None:
    waits = waiting([[20_000, 2000]], busy_ms=[0.0, 50.0])

    assert placed(waits, [0, 5000]) == []
    assert placed(waits, [0, 0]) == [(0, 1)]


def test_the_longest_is_given_a_worker_of_its_own() -> None:
    waits = waiting([[30_000, 30_000], [9000, 9000], [9000, 9000]])

    goes = dict(placed(waits, [0, 0]))

    assert set(goes) == {0, 1} or set(goes) == {0, 2}
    assert len(set(goes.values())) == 2


def test_a_fast_worker_gets_several_before_a_slow_one_gets_any() -> None:
    waits = waiting([[8000, 8000], [8000, 8000]], speeds=[1.0, 0.25])

    assert [worker for _, worker in placed(waits, [0, 0])] == [0]


def test_prompts_whose_step_is_mostly_overhead_share_it() -> None:
    assert len(placed(waiting([[100]] * 8), [0])) == 8


def test_a_long_prompt_does_not_join_a_short_ones_step() -> None:
    assert placed(waiting([[100], [6000]]), [0]) == [(0, 0)]


def test_a_higher_priority_goes_first_and_keeps_the_worker_that_it_waits_for() -> None:
    first = waiting([[9000], [12_000]], priorities=[0, 1])
    assert placed(first, [0]) == [(1, 0)]

    waits = waiting([[20_000, 9000], [9000, 9000]], busy_ms=[0.0, 60.0], priorities=[1, 0])
    assert placed(waits, [0, 9000]) == [(1, 0)], "the first waits for the other worker"


def test_whoever_can_go_nowhere_keeps_nobody_else() -> None:
    requests, prompts = waiting([[9000], [500]])

    assert placed((requests, replace(prompts, costs=[prompts.costs[0], [inf]])), [0]) == [(0, 0)]


@pytest.mark.parametrize(
    ("tokens", "waited_ms", "first"),
    [
        ((9000, 4000), (0.0, 0.0), 1),
        ((9000, 4000), (1000.0, 0.0), 1),
        ((9000, 4000), (1500.0, 0.0), 0),
        ((9000, 4000), (1500.0, 1500.0), 1),
        ((9000, 100), (4000.0, 0.0), 1),
    ],
    ids=[
        "the shorter one",
        "before it has waited",
        "who has waited",
        "the shorter one, after both have",
        "a small one",
    ],
)
def test_who_goes_first_to_a_free_worker(tokens: Sequence[int], waited_ms: Sequence[float], first: int) -> None:
    requests, prompts = waiting([[each] for each in tokens])

    [(goes, _), *_] = placed((requests, replace(prompts, waited_ms=waited_ms)), [0])

    assert goes == first


def test_what_is_planned_behind_is_said_for_each_worker() -> None:
    waits = waiting([[30_000], [20_000], [9000]])

    [goes] = plan(*waits, [0.0], lambda _: (float(STEP_TOKENS), STEPS))

    assert goes == BatchedRequest(2, 0, {0: 2})


def sum_of_ttfts(times: Sequence[Sequence[float]]) -> float:
    """Of the requests of each worker, one after the other, the shortest first."""
    return sum(sum(sorted(each)[: end + 1]) for each in times for end in range(len(each)))


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=6),
    st.lists(st.sampled_from((1.0, 2.0, 0.5, 1 / 3)), min_size=1, max_size=3),
)
def test_no_division_over_free_workers_has_a_smaller_sum_of_times_to_the_first_token(
    thousands: list[int], speeds: list[float]
) -> None:
    tokens = [[1000.0 * each] * len(speeds) for each in thousands]
    requests, prompts = waiting(tokens, speeds=speeds)

    given_ = divide(requests, prompts, range(len(tokens)), [0.0] * len(speeds))

    ours = sum_of_ttfts([[prompts.own_ms[each.request][worker] for each in those] for worker, those in given_.items()])
    best = min(
        sum_of_ttfts(
            [
                [prompts.own_ms[row][worker] for row, at in enumerate(choice) if at == worker]
                for worker in range(len(speeds))
            ]
        )
        for choice in product(range(len(speeds)), repeat=len(tokens))
    )
    assert ours == pytest.approx(best)


@given(
    st.lists(st.lists(st.integers(1, 30_000), min_size=3, max_size=3), min_size=1, max_size=12),
    st.lists(st.sampled_from((0, 100, 5000, 9000)), min_size=3, max_size=3),
    st.data(),
)
def test_nobody_goes_twice_and_a_busy_worker_gets_small_prompts_only(
    tokens: list[list[int]], queued: list[int], data: st.DataObject
) -> None:
    priorities = data.draw(st.lists(st.integers(0, 2), min_size=len(tokens), max_size=len(tokens)))
    waits = waiting(tokens, priorities=priorities)

    goes = placed(waits, queued)

    assert len({request for request, _ in goes}) == len(goes)
    for worker, before in enumerate(queued):
        mine = [tokens[request][worker] for request, at in goes if at == worker]
        if before:
            assert before + sum(mine) <= STEP_TOKENS or not mine
            assert all(STEPS.one_step_ms(each) <= 2 * STEPS.one_token_ms for each in mine)
        else:
            assert sum(mine) <= STEP_TOKENS or len(mine) == 1
    if 0 in queued and len(set(priorities)) == 1 and len(queued) == queued.count(0):
        assert goes, "where all are free somebody goes"
