"""A simulated pool serves every request once, its books balance, and a run is a function of its arguments."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poolgrid.kernel.wire.hashing import unpack_hashes
from poolgrid.kernel.wire.identifiers import Tier
from poolgrid.plugins.bench.trace import TraceRow, read_trace
from poolgrid.plugins.simulation.pool import RouterFleet, RunResult, SimulatedPool
from poolgrid.plugins.simulation.recording import latency_summary, policy_report
from poolgrid.plugins.simulation.workload import Workload, build_workload
from poolgrid.server.process.plugins import policy_names
from poolgrid.server.router.policy_loading import make_policy
from poolgrid.server.workers.timing import PolynomialTiming, TableTiming
from tests.examples import examples
from tests.router.index_structure import holdings
from tests.simulation.builders import CONVERSATION, limits, row, traces

POLICIES = [name for name in policy_names() if name != "approximate"]


@pytest.fixture(scope="module")
def conversations() -> Workload:
    """300 requests, fast enough that workers have queues."""
    return build_workload(read_trace(CONVERSATION, 300), 2.0, 64)


def play(
    workload: Workload, policy: str, workers: int = 4, blocks: int | None = None
) -> tuple[SimulatedPool, RunResult]:
    pool = SimulatedPool(workload, make_policy(policy), workers, limits(workload, blocks))
    return pool, pool.run()


def assert_books_balance(workload: Workload, pool: SimulatedPool, result: RunResult) -> None:
    requests = workload.requests
    assert result.requests == len(result.ttft_ms) == sum(result.worker_requests) == len(requests)
    assert result.prompt_tokens == sum(result.worker_tokens) == sum(request.isl for request in requests)
    assert result.output_tokens == sum(request.osl for request in requests)
    # A preempted request computes its prompt again; the token that this brings is neither a first nor a decoded one.
    gaps = sum(count for _, count in result.itl_ms)
    assert 0 <= result.output_tokens - result.requests - gaps <= result.preemptions
    assert min(result.ttft_ms) > 0.0
    assert 0.0 < result.busy_ms <= len(pool.engines) * result.span_ms
    assert result.span_ms >= requests[-1].arrival_ms
    # The router's view after the last event: nobody is busy, and every block is where the engines have it.
    assert len(pool.projection.ledger) == 0
    for key, engine in zip(sorted(pool.projection.fleet.workers), pool.engines, strict=True):
        held: dict[Tier, set[int]] = {tier: set() for tier in Tier}
        for chain in engine.resident_blocks():
            held[chain.tier].update(unpack_hashes(chain.sequence_hashes))
        assert holdings(pool.projection.index, key) == held
        assert engine.active_requests == 0


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("blocks", [None, 2500], ids=["roomy", "evicting"])
def test_every_request_is_served_once_and_the_books_balance(
    conversations: Workload, policy: str, blocks: int | None
) -> None:
    pool, result = play(conversations, policy, blocks=blocks)

    assert_books_balance(conversations, pool, result)
    if blocks is None:
        ideal = conversations.ideal_cached_token_ratio * result.prompt_tokens
        assert result.cached_tokens <= ideal, "more was reused than an infinite shared cache could"
        assert result.preemptions == 0


@given(
    traces(),
    st.sampled_from(POLICIES),
    st.integers(1, 3),
    st.sampled_from([0, 8]),
    st.sampled_from([64, 512, 8192]),
    st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_the_books_balance_for_any_trace(
    rows: list[TraceRow], policy: str, workers: int, host_blocks: int, max_num_tokens: int, tight: bool
) -> None:
    workload = build_workload(rows, 1.0, 64)
    blocks = -(-workload.longest // 64) if tight else None
    pool = SimulatedPool(workload, make_policy(policy), workers, limits(workload, blocks, host_blocks, max_num_tokens))

    assert_books_balance(workload, pool, pool.run())


def test_kv_reuses_most_of_the_ideal_and_far_more_than_the_others(conversations: Workload) -> None:
    blind = ("round-robin", "random", "least-loaded")
    reused = {policy: play(conversations, policy, workers=8)[1].cached_tokens for policy in ("kv", *blind)}
    ideal = conversations.ideal_cached_token_ratio * sum(request.isl for request in conversations.requests)

    assert reused["kv"] > 0.85 * ideal
    for other in blind:
        assert reused["kv"] > 1.5 * reused[other]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_second_run_is_the_same(policy: str) -> None:
    first, second = (play(build_workload(read_trace(CONVERSATION, 100), 2.0, 64), policy)[1] for _ in range(2))
    assert first == second


def test_with_one_worker_every_policy_does_the_same(conversations: Workload) -> None:
    def one_worker(policy: str) -> RunResult:
        nobody_waits = RouterFleet(
            hold_limit_ms=0.0, waits_for_engines=False
        )  # as with kv, which has a better order for those who come at once
        result = SimulatedPool(conversations, make_policy(policy), 1, limits(conversations), routers=nobody_waits).run()
        result.policy = ""
        result.overlap_found_tokens, result.predicted = 0, []  # only kv looks, and predicts
        return result

    assert one_worker("round-robin") == one_worker("least-loaded") == one_worker("random") == one_worker("kv")


def test_round_robin_gives_every_worker_the_same_number_of_requests(conversations: Workload) -> None:
    nobody_waits = RouterFleet(waits_for_engines=False)  # each time that one has to wait the next worker has the turn
    policy = make_policy("round-robin")
    pool = SimulatedPool(conversations, policy, 4, limits(conversations), routers=nobody_waits)

    assert pool.run().worker_requests == [75, 75, 75, 75]


def test_a_lone_request_takes_what_the_timing_says() -> None:
    workload = build_workload([row(1, 2, osl=3)], 1.0, 64)
    timing = TableTiming([(1, 10.0), (1024, 40.0)], [(0.0, 5.0)])

    result = SimulatedPool(workload, make_policy("kv"), 1, limits(workload), timing).run()

    assert result.ttft_ms == [40.0]
    assert [(gap, count) for gap, count in result.itl_ms if count] == [(5.0, 2)]
    assert (result.span_ms, result.busy_ms) == (50.0, 50.0)


def test_the_same_prompt_again_computes_its_last_block_only() -> None:
    again = 10_000.0
    workload = build_workload([row(1, 2, osl=2), row(1, 2, osl=2, at=again)], 1.0, 64)

    result = SimulatedPool(workload, make_policy("kv"), 2, limits(workload)).run()

    assert result.worker_requests in ([2, 0], [0, 2])
    assert result.cached_tokens == 1024 - 64
    assert result.overlap_found_tokens == 1024
    assert result.ttft_ms == pytest.approx([PolynomialTiming().prefill_ms(1024), PolynomialTiming().prefill_ms(64)])


def test_requests_of_the_same_moment_do_not_see_the_same_idle_worker() -> None:
    workload = build_workload([row(number) for number in range(8)], 1.0, 64)

    assert play(workload, "kv", workers=8)[1].worker_requests == [1] * 8


def test_progress_is_told_and_ends_with_all_requests(conversations: Workload) -> None:
    told: list[int] = []
    pool = SimulatedPool(conversations, make_policy("round-robin"), 4, limits(conversations))
    on_progress: Callable[[int], None] = told.append

    pool.run(on_progress)

    assert told == sorted(told)
    assert told[-1] == 300


@given(st.lists(st.tuples(st.floats(0.0, 1e6), st.integers(1, 40)), min_size=1, max_size=30))
@settings(max_examples=examples(20))
def test_a_weighted_summary_is_that_of_the_values_written_out(pairs: list[tuple[float, int]]) -> None:
    written_out = sorted(value for value, count in pairs for _ in range(count))

    summary = latency_summary([value for value, _ in pairs], [count for _, count in pairs])

    assert summary["mean"] == pytest.approx(math.fsum(written_out) / len(written_out))
    for name, percent in (("p50", 50), ("p90", 90), ("p99", 99)):
        nearest_rank = -(-percent * len(written_out) // 100)
        assert summary[name] == written_out[nearest_rank - 1], name


def result(**changes: object) -> RunResult:
    made = RunResult("kv", worker_tokens=[0, 0], worker_requests=[0, 0])
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def test_shares_are_over_prompt_tokens_time_and_workers() -> None:
    report = policy_report(
        result(
            requests=3,
            prompt_tokens=400,
            cached_tokens=100,
            overlap_found_tokens=120,
            busy_ms=150.0,
            span_ms=100.0,
            worker_tokens=[300, 100],
            itl_ms=[(10.0, 3), (20.0, 1)],
        ),
        workers=2,
    )

    assert report["cached_token_ratio"] == 0.25
    assert report["overlap_found_token_ratio"] == 0.3
    assert report["busy_ratio"] == 0.75
    assert report["worker_tokens_max_over_mean"] == 1.5
    assert report["itl_ms"]["mean"] == 12.5


def test_a_run_of_nothing_divides_by_nothing() -> None:
    report = policy_report(result(), workers=2)

    assert report["cached_token_ratio"] == report["busy_ratio"] == report["worker_tokens_max_over_mean"] == 0.0
