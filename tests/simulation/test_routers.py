"""Several routers on one pool: what they share makes them nearly as good as one, and herds are bounded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import pytest

from poolgrid.plugins.bench.trace import read_trace
from poolgrid.plugins.simulation.pool import RouterFleet, RunResult, SimulatedPool
from poolgrid.plugins.simulation.workload import Workload, build_workload
from poolgrid.server.router.policy_loading import make_policy
from tests.router.index_structure import holdings
from tests.simulation.builders import CONVERSATION, limits
from tests.simulation.test_pool import assert_books_balance


@pytest.fixture(scope="module")
def conversations() -> Workload:
    """300 requests that arrive in bursts of ten in the same millisecond: the hardest case for many routers."""
    return build_workload(read_trace(CONVERSATION, 300), 1.0, 64)


Play = Callable[[RouterFleet], RunResult]


@pytest.fixture(scope="module")
def play(conversations: Workload) -> Play:
    """Each fleet plays once, and what came of it is looked at by several tests."""

    @cache
    def played(fleet: RouterFleet) -> RunResult:
        pool = SimulatedPool(conversations, make_policy("kv"), 8, limits(conversations), routers=fleet)
        result = pool.run()
        if not fleet.separate:  # which know nothing of what engines hold
            assert_books_balance(conversations, pool, result)
        return result

    return played


def mean_ttft_ms(result: RunResult) -> float:
    return sum(result.ttft_ms) / len(result.ttft_ms)


def mean_cached_tokens(results: Sequence[RunResult]) -> float:
    return sum(result.cached_tokens for result in results) / len(results)


def test_eight_routers_on_one_stream_reuse_as_much_as_one_and_far_more_than_separate_ones(play: Play) -> None:
    # Reuse differs by up to 7 % between delays, so this is the mean of several. Several routers hold no request, so
    # they are compared with one that holds none either.
    delays = (1.0, 5.0, 9.0)
    one = mean_cached_tokens([play(RouterFleet(1, delay, hold_limit_ms=0.0)) for delay in delays])
    eight = [play(RouterFleet(8, delay)) for delay in delays]
    separate = play(RouterFleet(8, 5.0, separate=True))

    assert mean_cached_tokens(eight) > 0.97 * one
    assert min(result.cached_tokens for result in eight) > 1.3 * separate.cached_tokens


def test_a_burst_over_eight_routers_is_not_sent_to_the_same_idle_workers(play: Play) -> None:
    delays = (1.0, 3.0, 5.0, 8.0)  # the share differs by half between them
    one = [play(RouterFleet(1, delay)) for delay in delays]
    herd = [play(RouterFleet(8, delay, crowding_retries=0)) for delay in delays]
    bounded = [play(RouterFleet(8, delay)) for delay in delays]

    alone_ms, herd_ms, bounded_ms = (sum(map(mean_ttft_ms, results)) for results in (one, herd, bounded))
    assert herd_ms > 1.3 * alone_ms, "without the mechanism there are herds to speak of"
    assert bounded_ms < alone_ms + 0.4 * (herd_ms - alone_ms)
    assert all(each.crowded <= 4 * each.requests for each in bounded)


def test_all_routers_end_with_the_same_index(conversations: Workload) -> None:
    pool = SimulatedPool(
        conversations, make_policy("kv"), 4, limits(conversations, blocks=2500), routers=RouterFleet(3, 7.0)
    )
    pool.run()
    first, *others = pool.projections
    for projection in others:
        assert projection.next_offset == first.next_offset
        for key in first.fleet.workers:
            assert holdings(projection.index, key) == holdings(first.index, key)
