"""Workers are as fast as they are said to be, and the router finds out."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from poolgrid.kernel.wire.hashing import stable_u64
from poolgrid.plugins.bench.trace import read_trace
from poolgrid.plugins.simulated.core.engine import SimulatedLimits
from poolgrid.plugins.simulation.pool import RouterFleet, RunResult, SimulatedPool
from poolgrid.plugins.simulation.recording import policy_report
from poolgrid.plugins.simulation.workload import (
    RecordedRequest,
    SpeedChange,
    SpeedError,
    TtftTargets,
    WorkerSpeeds,
    Workload,
    build_workload,
    recorded_workload,
)
from poolgrid.server.router.policy_loading import make_policy
from poolgrid.server.workers.timing import timing_model
from tests.simulation.builders import CONVERSATION, limits, row


@pytest.fixture(scope="module")
def conversations() -> Workload:
    return build_workload(read_trace(CONVERSATION, 300), 2.0, 64)


def play(workload: Workload, policy: str, speeds: WorkerSpeeds | None, targets: TtftTargets | None = None) -> RunResult:
    return SimulatedPool(
        workload, make_policy(policy), 4, limits(workload), speeds=speeds, targets=targets
    ).run()  # fmt: skip


def test_a_pattern_begins_again_and_a_change_holds_for_its_time() -> None:
    changes = (SpeedChange(2, 1000.0, 3000.0, 0.25), SpeedChange(2, 2000.0, 4000.0, 0.1))
    speeds = WorkerSpeeds(WorkerSpeeds.parse("1,0.5").pattern, changes)

    assert [speeds.at(worker, 0.0) for worker in range(4)] == [1.0, 0.5, 1.0, 0.5]
    assert [speeds.at(2, now_ms) for now_ms in (999.0, 1000.0, 2000.0, 3999.0, 4000.0)] == [1.0, 0.25, 0.1, 0.1, 1.0]
    assert [speeds.next_change_ms(2, now_ms) for now_ms in (0.0, 1000.0, 4000.0)] == [1000.0, 2000.0, float("inf")]
    assert speeds.next_change_ms(1, 0.0) == float("inf")


@pytest.mark.parametrize(("pattern", "place"), [("1,fast", 1), ("0", 0), ("-1", 0), ("", 0)])
def test_speeds_that_are_none_are_named(pattern: str, place: int) -> None:
    with pytest.raises(SpeedError, match=rf"worker_speeds\[{place}\] is .*, allowed are numbers above 0"):
        WorkerSpeeds.parse(pattern)


def test_a_slowdown_is_felt_from_then_to_then() -> None:
    workload = build_workload([row(number, at=10_000.0 * number, osl=1) for number in range(3)], 1.0, 64)
    slow = WorkerSpeeds(changes=(SpeedChange(0, 9_000.0, 15_000.0, 0.5),))

    result = SimulatedPool(workload, make_policy("kv"), 1, limits(workload), speeds=slow).run()

    first, second, third = result.ttft_ms
    assert first == pytest.approx(third)
    assert second == pytest.approx(2 * first)


def test_kv_finds_slow_workers_out_and_who_learns_nothing_does_not(conversations: Workload) -> None:
    slow = WorkerSpeeds((1.0, 1.0, 1.0, 0.25))

    others, kv = (play(conversations, policy, slow) for policy in ("lmetric", "kv"))

    assert kv.worker_tokens[3] < 0.6 * others.worker_tokens[3]
    assert sum(kv.ttft_ms) < 0.85 * sum(others.ttft_ms)
    report = policy_report(kv, 4)["predicted_ttft"]
    assert report["requests"] == 300
    assert report["error"] < 0.4
    assert policy_report(others, 4)["predicted_ttft"] is None


def test_idle_workers_share_light_traffic_after_an_overload() -> None:
    draw, at_ms, light_ms = Random(1), 0.0, 200_000.0
    recorded: list[RecordedRequest] = []
    while (at_ms := at_ms + draw.expovariate(0.008)) < 60_000.0:
        recorded.append(prompt(len(recorded), at_ms, 8_000, 300))
    for number in range(60):
        recorded.append(prompt(len(recorded), light_ms + 1_200.0 * number, 2_000, 20))
    load = recorded_workload(recorded, 64)
    fleet = RouterFleet(requests_per_worker_factor=1.25)
    engines = SimulatedLimits(64, 1500, 0, 64, 8192, 40_000, 10_000)

    result = SimulatedPool(load, make_policy("kv"), 5, engines, timing_model("h100-qwen3-8b"), routers=fleet).run()

    late = [real / expected for chosen_ms, _, expected, real in result.predicted if chosen_ms < light_ms]
    assert max(late) > 5.0, "caches are full, and first tokens late"
    chosen = Counter(worker for chosen_ms, worker, _, _ in result.predicted if chosen_ms >= light_ms)
    assert len(chosen) == 5
    assert max(chosen.values()) < 20, "of 60, one of five"


def prompt(number: int, at_ms: float, isl: int, osl: int) -> RecordedRequest:
    """Return a request whose prompt no other begins with."""
    return RecordedRequest(at_ms, isl, osl, [stable_u64(f"{number} {block}") for block in range(isl // 64)])


def test_what_is_expected_on_equal_workers_is_nearly_what_comes(conversations: Workload) -> None:
    report = policy_report(play(conversations, "kv", None), 4)["predicted_ttft"]

    assert report["error"] < 0.25
    assert 0.9 < report["bias"] < 1.1


def test_requests_that_met_their_target_are_counted(conversations: Workload) -> None:
    never, always = TtftTargets((0.001,)), TtftTargets((1e9,), told=False)

    assert play(conversations, "kv", None, never).targets_met == 0
    assert policy_report(play(conversations, "kv", None, always), 4)["ttft_targets_met_ratio"] == 1.0


def test_requests_that_wait_for_their_worker_have_their_first_tokens_sooner(conversations: Workload) -> None:
    slow = WorkerSpeeds((1.0, 1.0, 1.0, 0.25))

    def ttfts_ms(hold_limit_ms: float, routers: int = 1, delay_ms: float = 0.0) -> list[float]:
        fleet = RouterFleet(routers, delay_ms, hold_limit_ms=hold_limit_ms)
        pool = SimulatedPool(conversations, make_policy("kv"), 4, limits(conversations), routers=fleet, speeds=slow)
        return pool.run().ttft_ms

    never, held, late = ttfts_ms(0.0), ttfts_ms(4000.0), ttfts_ms(4000.0, delay_ms=3.0)
    assert len(held) == len(late) == len(never) == 300
    assert sum(held) < 0.9 * sum(never)
    assert sum(late) < 0.92 * sum(never), "also where a worker's word takes a while"
    assert sum(ttfts_ms(4000.0, routers=2)) < 1.05 * sum(ttfts_ms(0.0, routers=2)), "several do not wait"


class Even:
    """Every step takes ten milliseconds."""

    def prefill_ms(self, new_tokens: int) -> float:
        return 10.0 if new_tokens else 0.0

    def decode_ms(self, used_share: float) -> float:
        return 10.0


def test_what_a_worker_says_may_arrive_at_the_moment_at_which_a_step_ends() -> None:
    workload = build_workload([row(number, number + 1, at=0.0, osl=3) for number in range(0, 80, 2)], 1.0, 64)
    fleet = RouterFleet(event_delay_ms=10.0)

    pool = SimulatedPool(workload, make_policy("kv"), 2, limits(workload, max_num_tokens=1024), Even(), routers=fleet)

    assert pool.run().requests == 40
