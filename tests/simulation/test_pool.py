"""A simulated pool serves every request once, its books balance, and a run is a function of its arguments."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poolgrid.process.plugins import policy_names
from poolgrid.router.policy_loading import make_policy
from poolgrid.tools.bench.trace import TraceRow, read_trace
from poolgrid.tools.simulation.pool import Retention, RouterFleet, RunResult, SimulatedPool
from poolgrid.tools.simulation.variants import Variant, run_variant
from poolgrid.tools.simulation.workload import Workload, build_workload
from poolgrid.wire.hashing import unpack_hashes
from poolgrid.wire.identifiers import Tier
from poolgrid.workers.core.timing import PolynomialTiming
from tests.examples import examples
from tests.retained_prompts import piece
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


FirstRun = Callable[[str], tuple[SimulatedPool, RunResult]]


@pytest.fixture(scope="module")
def first_run(conversations: Workload) -> FirstRun:
    """Each policy plays the conversations once, and what came of it is looked at by several tests."""
    return cache(lambda policy: play(conversations, policy))


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
    conversations: Workload, first_run: FirstRun, policy: str, blocks: int | None
) -> None:
    pool, result = first_run(policy) if blocks is None else play(conversations, policy, blocks=blocks)

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
@settings(max_examples=examples(20))
def test_the_books_balance_for_any_trace(
    rows: list[TraceRow], policy: str, workers: int, host_blocks: int, max_num_tokens: int, tight: bool
) -> None:
    workload = build_workload(rows, 1.0, 64)
    blocks = -(-workload.longest // 64) if tight else None
    pool = SimulatedPool(workload, make_policy(policy), workers, limits(workload, blocks, host_blocks, max_num_tokens))

    assert_books_balance(workload, pool, pool.run())


def test_kv_reuses_most_of_the_ideal_and_far_more_than_the_others(conversations: Workload) -> None:
    reused = {policy: play(conversations, policy, workers=8)[1].cached_tokens for policy in POLICIES}
    ideal = conversations.ideal_cached_token_ratio * sum(request.isl for request in conversations.requests)

    assert reused["kv"] > 0.85 * ideal
    for other in ("round-robin", "random", "least-loaded"):
        assert reused["kv"] > 1.5 * reused[other]


def test_with_one_worker_every_policy_does_the_same(conversations: Workload) -> None:
    def one_worker(policy: str) -> RunResult:
        result = play(conversations, policy, workers=1)[1]
        result.policy = ""
        result.overlap_found_tokens = 0  # only kv looks
        return result

    assert one_worker("round-robin") == one_worker("least-loaded") == one_worker("random") == one_worker("kv")


def test_retention_that_is_learnt_reuses_what_lru_loses_and_changes_nothing_where_all_fits() -> None:
    # Six prompts of 8 x 512 tokens in turn, and after each one that never comes again, over a cache for eight.
    names = [at // 2 % 6 if at % 2 == 0 else 6 + at for at in range(600)]
    rows = [row(*range(8 * name, 8 * name + 8), at=1000.0 * at) for at, name in enumerate(names)]
    workload = build_workload(rows, 1.0, 64)

    def reused(blocks: int | None, retention: Retention) -> int:
        fleet = RouterFleet(retention=retention)
        pool = SimulatedPool(workload, make_policy("kv"), 1, limits(workload, blocks), routers=fleet)
        result = pool.run()
        assert_books_balance(workload, pool, result)
        return result.cached_tokens

    assert reused(520, "off") == 0
    assert reused(520, "learned") > 0.2 * 300 * 8 * 512
    assert reused(None, "learned") == reused(None, "off")
    told = run_variant(workload, Variant("told", retention="learned"), 1, limits(workload, 520), PolynomialTiming())
    assert told.report["cached_token_ratio"] > 0.1


@pytest.mark.parametrize(("prompts", "blocks"), [(6, 390), (10, 650), (24, 1536)])
def test_retention_that_is_learnt_costs_nothing_where_room_is_nearly_enough(prompts: int, blocks: int) -> None:
    # One cache of all that room loses everything that comes in turn; two of half as much lose a part of it, by chance.
    workload = build_workload(piece(prompts, 260_000.0), 1.0, 32)

    def reused(retention: Retention) -> int:
        fleet = RouterFleet(retention=retention)
        pool = SimulatedPool(workload, make_policy("kv"), 2, limits(workload, blocks), routers=fleet)
        return pool.run().cached_tokens

    assert reused("learned") >= 0.99 * reused("off") > 0


def test_retention_that_is_learnt_gains_where_room_is_too_small_by_a_sixth() -> None:
    workload = build_workload(piece(24, 260_000.0), 1.0, 32)

    def reused(retention: Retention) -> int:
        fleet = RouterFleet(retention=retention)
        pool = SimulatedPool(workload, make_policy("kv"), 2, limits(workload, 1296), routers=fleet)
        return pool.run().cached_tokens

    assert reused("learned") > 1.5 * reused("off")
