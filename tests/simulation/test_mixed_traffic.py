"""Sessions, chats and single requests share pools that are too small for them, and none is slower for the gain."""

from __future__ import annotations

import math
import os
from functools import cache

import pytest

from poolgrid.kernel.decision.policy import Candidates, Choice, RoutingRequest
from poolgrid.kernel.routing import kv_policy
from poolgrid.kernel.routing.kv_policy import KvAware
from poolgrid.plugins.simulated.core.engine import SimulatedLimits
from poolgrid.plugins.simulation import session_line
from poolgrid.plugins.simulation.pool import SimulatedPool
from poolgrid.plugins.simulation.recording import policy_report
from poolgrid.plugins.simulation.session_line import AFFINITY_MS, PEERS, Sticky
from poolgrid.plugins.simulation.workload import RecordedRequest, recorded_workload
from poolgrid.server.workers.timing import timing_model
from tests.simulation.builders import limits
from tests.simulation.mixed_traffic import Outcome, mixed_traffic, play
from tests.simulation.sessions import sessions, workload_of

IS_LONG = "POOLGRID_AGENT_SEEDS" in os.environ  # `make long`


@cache
def played(policy: str, pressure: float, seed: int = 1) -> Outcome:
    return play(mixed_traffic(seed), PEERS[policy]() if policy in PEERS else KvAware(), pressure)


@pytest.mark.parametrize("pressure", [1.0, 2.0, 4.0] if IS_LONG else [4.0])
def test_kv_reuses_and_generates_at_least_as_much_as_session_affinity(pressure: float) -> None:
    kv, affinity = (played(name, pressure) for name in ("kv", "affinity"))

    assert kv.reuse >= affinity.reuse
    assert kv.all_mean <= affinity.all_mean
    assert kv.output_tokens >= affinity.output_tokens


def test_later_turns_that_stay_have_their_first_tokens_sooner_where_caches_are_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    load = workload_of(sessions(1, 5.0, 60.0))
    engines = SimulatedLimits(load.block_size, 3000, 0, 256, 8192, load.longest + 1, 10**6)

    def mean_ms() -> float:
        pool = SimulatedPool(load, KvAware(), 4, engines, timing_model("h200-qwen3-8b"))
        return float(policy_report(pool.run(), 4)["ttft_ms"]["mean"])

    dear = mean_ms()
    monkeypatch.setattr(kv_policy, "LEFT_WORTH", kv_policy.AGAIN_WORTH)
    assert dear < 0.8 * mean_ms()


@pytest.mark.parametrize(("pause_ms", "stays"), [(0.9 * AFFINITY_MS, True), (1.1 * AFFINITY_MS, False)])
def test_affinity_ends_with_a_pause(pause_ms: float, stays: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = [
        RecordedRequest(0.0, 64, 1, range(4), "1 s", finished_ms=0.0),
        RecordedRequest(pause_ms, 64, 1, range(4), "1 s"),
    ]
    load, reasons = recorded_workload(recorded, 16), list[str]()
    choose = Sticky.choose

    def noting(policy: Sticky, request: RoutingRequest, candidates: Candidates) -> Choice:
        choice = choose(policy, request, candidates)
        reasons.append(choice.reason)
        return choice

    monkeypatch.setattr(Sticky, "choose", noting)
    SimulatedPool(load, PEERS["affinity"](), 2, limits(load)).run()
    assert [each == "sticky" for each in reasons] == [False, stays]


def never_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have turns wait also where that shortens no times."""
    monkeypatch.setattr(session_line, "REVIEW_MS", math.inf)


def test_two_routers_admit_by_one_working_set(monkeypatch: pytest.MonkeyPatch) -> None:
    never_rest(monkeypatch)
    kv, ours = played("kv", 4.0), play(mixed_traffic(1), KvAware(), 4.0, "sessions", routers=2)

    assert ours.reuse >= 1.25 * kv.reuse
    assert ours.single_mean <= kv.single_mean
    assert ours.agent_mean <= kv.agent_mean


@pytest.mark.parametrize(("pressure", "gain"), [(1.0, 1.1), (4.0, 0.25)] if IS_LONG else [(4.0, 0.25)])
def test_session_admission_slows_neither_single_requests_nor_agents(
    pressure: float, gain: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    never_rest(monkeypatch)
    kv, ours = played("kv", pressure), play(mixed_traffic(1), KvAware(), pressure, "sessions")

    assert ours.single_mean <= 1.05 * kv.single_mean
    assert ours.agent_mean <= 1.01 * kv.agent_mean
    assert ours.later_p50 <= gain * kv.later_p50
    assert ours.reuse >= kv.reuse


@pytest.mark.skipif(not IS_LONG, reason="half a minute of simulation: make long")
def test_admission_rests_where_people_in_chats_would_pay_for_it() -> None:
    kv, ours = played("kv", 4.0), play(mixed_traffic(1), KvAware(), 4.0, "sessions")

    assert ours.waited > 0, "it works at first"
    assert ours.chat_mean <= 10 * kv.chat_mean, "23 times as long with admission all the time"
    assert ours.all_mean <= 1.1 * kv.all_mean, "with the minutes before it rests"
