"""Agents in virtual time: calls follow each other, and a pool that is too small keeps some sessions waiting."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cache
from heapq import heappop, heappush
from typing import Any

import numpy as np
import pytest

from poolgrid.kernel.routing.kv_policy import KvAware
from poolgrid.plugins.simulated.core.engine import SimulatedLimits
from poolgrid.plugins.simulation.agent_workload import AgentArrivals, AgentWorkload, agent_workload
from poolgrid.plugins.simulation.agents import PAUSES, PREFIX_TOKENS, AgentDraws
from poolgrid.plugins.simulation.pool import SimulatedPool
from poolgrid.plugins.simulation.recording import policy_report
from poolgrid.plugins.simulation.session_line import PEERS, line_of
from poolgrid.plugins.simulation.workload import NEVER, RecordedRequest, recorded_workload
from poolgrid.server.router.policy_loading import make_policy
from tests.simulation.builders import limits
from tests.simulation.nameless_agents import NamelessAgents, Sends, twin_of
from tests.simulation.slow_prefill import SCALE, SlowPrefill

BLOCK = 16
AGENTS, WORKERS = 64, 2
OURS = "kv", "sessions", 2.0
SEEDS = range(1, 1 + int(os.environ.get("POOLGRID_AGENT_SEEDS", "1")))  # `make long` plays five
IS_LONG = "POOLGRID_AGENT_SEEDS" in os.environ
LONG = pytest.mark.skipif(not IS_LONG, reason="a minute of simulation: make long")


@cache
def workload(seed: int = 1) -> AgentWorkload:
    return agent_workload(AgentDraws(seed, 4, SCALE).plan(3 * AGENTS, AGENTS), BLOCK)


@cache
def played(policy: str, admission: str, pressure: float, seed: int = 1) -> dict[str, Any]:
    return play(workload(seed), policy, admission, pressure)


def play(load: AgentWorkload, policy: str, admission: str, pressure: float) -> dict[str, Any]:
    needed = AGENTS * load.plan.own_tokens_mean() + 4 * PREFIX_TOKENS * SCALE * WORKERS
    blocks = int(needed / pressure / WORKERS / BLOCK)
    limit = SimulatedLimits(BLOCK, blocks, 0, 256, 8192, load.longest + 1, 10**6)
    chosen = PEERS[policy]() if policy in PEERS else make_policy(policy)
    pool = SimulatedPool(load, chosen, WORKERS, limit, SlowPrefill(), line=line_of(admission, BLOCK))
    report = policy_report(pool.run(), WORKERS)
    assert report["requests"] == len(load.requests), "all calls were served"
    return report


def reuse(report: dict[str, Any], seed: int) -> float:
    """Return the share of what one infinite cache would reuse."""
    return float(report["cached_token_ratio"]) / workload(seed).ideal_cached_token_ratio


def test_sessions_have_the_published_distributions() -> None:
    plan = AgentDraws(7, 4).plan(300, 10)
    calls = [call for session in plan.sessions for call in session.calls]
    pauses = np.array([call.pause_ms for call in calls])
    prompts = [tokens for session in plan.sessions for tokens, _ in session.prompts()]
    outputs = [call.output_tokens for call in calls]

    for quantile, _, most_ms in PAUSES:
        assert (pauses <= most_ms).mean() == pytest.approx(quantile, abs=0.01)
    assert np.mean([len(session.calls) for session in plan.sessions]) == pytest.approx(41, rel=0.1)
    assert np.mean(prompts) == pytest.approx(33_600, rel=0.15)
    assert np.mean(prompts) / np.mean(outputs) == pytest.approx(100, rel=0.2)
    assert AgentDraws(7, 4).plan(300, 10).sessions[5].calls == plan.sessions[5].calls


def test_a_call_comes_a_pause_after_the_one_before_and_after_its_subagents() -> None:
    plan = AgentDraws(1, 4, SCALE).plan(20, 1)
    forking = next(each for each in plan.sessions if any(call.children for call in each.calls))
    arrivals = AgentArrivals(type(plan)((forking,), 1, (0.0,)), BLOCK)
    at = next(place for place, call in enumerate(forking.calls) if call.children)
    now_ms = 0.0
    finished = []
    for _ in range(at + 1):
        request = arrivals.pop()
        now_ms = request.arrival_ms + 10.0
        arrivals.finished(request.request_id, now_ms)
        finished.append(request)
    parent = finished[-1]

    children = [arrivals.pop() for _ in forking.calls[at].children]
    assert {child.path[: len(parent.path)] == parent.path for child in children} == {True}
    assert arrivals.next_ms() == float("inf"), "the parent waits for all of them"
    left = len(children)
    while left:
        request = children.pop()
        now_ms = request.arrival_ms + 10.0
        arrivals.finished(request.request_id, now_ms)
        assert request.session is not None
        if request.turn + 1 == len(request.session.calls):
            left -= 1
        else:
            children.append(arrivals.pop())
    assert arrivals.pop().arrival_ms == now_ms + forking.calls[at].pause_ms


@LONG
@pytest.mark.parametrize("seed", SEEDS)
def test_sessions_that_do_not_fit_evict_each_other_without_admission_and_do_not_with_it(seed: int) -> None:
    kv, sticky, ours = (
        played(policy, admission, 2.0, seed) for policy, admission in (("kv", ""), ("sticky", ""), ("kv", "sessions"))
    )

    assert reuse(kv, seed) < 0.6
    assert reuse(sticky, seed) < 0.6
    assert reuse(ours, seed) >= 0.9
    assert ours["turns_per_minute"] >= 1.5 * kv["turns_per_minute"]
    assert ours["waited_turns"] > 0
    assert ours["ttft_ms"]["mean"] <= 0.7 * kv["ttft_ms"]["mean"]
    for name in ("p50", "max"):
        assert ours["first_turn_ms"][name] <= kv["first_turn_ms"][name], "first turns do not wait"


@LONG
@pytest.mark.parametrize("sends", Sends)
@pytest.mark.parametrize("seed", SEEDS)
def test_without_ids_sessions_have_the_same_gains_by_their_prompts_alone(seed: int, sends: Sends) -> None:
    load = NamelessAgents.of(workload(seed), sends)
    kv, named, nameless = played("kv", "", 2.0, seed), played(*OURS, seed), play(load, *OURS)

    assert load.joins.found == load.joins.later > 8_000
    assert load.joins.wrong == 0
    for name in ("cached_token_ratio", "turns_per_minute"):
        assert nameless[name] - kv[name] >= 0.95 * (named[name] - kv[name])
    assert nameless["first_turn_ms"]["max"] <= 0.2 * kv["first_turn_ms"]["max"]


@pytest.mark.parametrize("sends", Sends)
def test_an_agent_has_one_name_whatever_its_client_sends_as_answers(sends: Sends) -> None:
    load = NamelessAgents.of(agent_workload(workload().plan.first(AGENTS // 2), BLOCK), sends)
    arrivals, ends = load.arrivals(), list[tuple[float, str]]()
    while ends or arrivals.next_ms() < NEVER:
        if ends and ends[0][0] <= arrivals.next_ms():
            now_ms, request_id = heappop(ends)
            arrivals.finished(request_id, now_ms)
        else:
            request = arrivals.pop()
            heappush(ends, (request.arrival_ms + 10.0 * request.osl, request.request_id))

    assert load.joins.wrong == 0
    assert load.joins.found == load.joins.later
    assert load.joins.names_per_agent < 1.25, "a parent keeps its name, and its first child begins with it"


def test_agents_that_say_the_same_are_never_taken_for_each_other() -> None:
    plan = workload().plan
    twins = [each for session in plan.sessions[: AGENTS // 2] for each in (session, twin_of(session))]
    load = NamelessAgents.of(agent_workload(replace(plan.first(AGENTS), sessions=tuple(twins)), BLOCK))
    play(load, *OURS)

    assert load.joins.wrong == 0
    assert load.joins.found >= load.joins.later


def test_admission_changes_nothing_where_all_sessions_fit() -> None:
    load = workload() if IS_LONG else agent_workload(workload().plan.first(AGENTS), BLOCK)
    kv, ours = play(load, "kv", "", 0.5), play(load, "kv", "sessions", 0.5)

    assert ours["waited_turns"] == 0
    for name in ("cached_token_ratio", "turns_per_minute"):
        assert ours[name] == pytest.approx(kv[name], rel=0.02)
    assert ours["ttft_ms"]["mean"] == pytest.approx(kv["ttft_ms"]["mean"], rel=0.02)


def test_recorded_turns_of_a_session_follow_each_other_when_they_are_played_again() -> None:
    recorded = [
        RecordedRequest(0.0, 4 * BLOCK, 1, range(4), "1 s", finished_ms=5.0),
        RecordedRequest(1.0, BLOCK, 1, range(900, 901)),
        RecordedRequest(105.0, 5 * BLOCK, 1, range(5), "1 s"),
    ]
    load = recorded_workload(recorded, BLOCK)
    arrivals = load.arrivals()
    first, other = arrivals.pop(), arrivals.pop()
    assert (first.request_id, other.request_id, arrivals.next_ms()) == ("recorded-0", "recorded-1", float("inf"))
    arrivals.finished("recorded-0", 300.0)
    assert arrivals.pop().arrival_ms == 400.0

    result = SimulatedPool(load, KvAware(), 1, limits(load), line=line_of("sessions", BLOCK)).run()
    assert (result.requests, result.cached_tokens) == (3, 4 * BLOCK)
