"""Agents, chats, retrieval, batches and single requests on four workers, and what clients see of a policy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from poolgrid.kernel.decision.policy import Policy
from poolgrid.kernel.wire.events import PrefillCompleted, RequestFinished
from poolgrid.plugins.simulated.core.engine import Fact, SimulatedLimits
from poolgrid.plugins.simulation.agents import PREFIX_TOKENS
from poolgrid.plugins.simulation.mixed_traffic import SINGLE_KINDS, MixedDraws, MixedWorkload
from poolgrid.plugins.simulation.pool import RouterFleet, SimulatedPool
from poolgrid.plugins.simulation.session_line import line_of
from poolgrid.plugins.simulation.workload import SimulatedRequest
from tests.simulation.slow_prefill import SCALE, SlowPrefill

BLOCK = 16
TENANTS, SLOTS, WORKERS = 4, 64, 4


@dataclass(frozen=True, slots=True)
class Outcome:
    """What clients saw; times in seconds."""

    reuse: float
    turns_per_minute: float
    output_tokens: int
    """Of answers that were complete before the last arrival."""
    all_mean: float
    single_mean: float
    single_p99: float
    agent_mean: float
    chat_mean: float
    later_p50: float
    """Of agents, without their first turns."""
    longest: float
    """Of sessions."""
    waited: int


def mixed_traffic(seed: int) -> MixedWorkload:
    return MixedDraws(seed, TENANTS, BLOCK, SCALE).workload(SLOTS)


def blocks_of_worker(traffic: MixedWorkload, pressure: float) -> int:
    """Return the blocks with which open sessions need so many times what the pool has."""
    needed = SLOTS * traffic.plan.own_tokens_mean() + TENANTS * PREFIX_TOKENS * SCALE * WORKERS
    return int(needed / pressure / WORKERS / BLOCK)


def play(traffic: MixedWorkload, policy: Policy, pressure: float, admission: str = "", routers: int = 1) -> Outcome:
    arrived: dict[str, SimulatedRequest] = {}
    ttft_s: dict[str, float] = {}
    ended_ms: dict[str, float] = {}

    def note(fact: Fact, now_ms: float) -> None:
        if isinstance(fact, PrefillCompleted):
            request = arrived[fact.request_id] = pool._arrived[fact.request_id]
            ttft_s[fact.request_id] = (now_ms - request.arrival_ms) / 1000
        elif isinstance(fact, RequestFinished):
            ended_ms[fact.request_id] = now_ms

    def of(*kinds: str) -> list[float]:
        return [ttft for request_id, ttft in ttft_s.items() if request_id.startswith(kinds)]

    limits = SimulatedLimits(BLOCK, blocks_of_worker(traffic, pressure), 0, 256, 512, traffic.longest + 1, 10**6)
    line = line_of(admission, BLOCK)
    fleet = RouterFleet(routers)
    pool = SimulatedPool(traffic, policy, WORKERS, limits, SlowPrefill(), on_fact=note, routers=fleet, line=line)
    result = pool.run()
    in_time = [request_id for request_id, at_ms in ended_ms.items() if at_ms <= traffic.duration_ms]
    later = [ttft_s[each] for each in ttft_s if each.startswith("agent") and arrived[each].turn]
    return Outcome(
        result.cached_tokens / result.prompt_tokens,
        60_000 * sum(not each.startswith(SINGLE_KINDS) for each in in_time) / traffic.duration_ms,
        sum(arrived[each].osl for each in in_time),
        float(np.mean(list(ttft_s.values()))),
        float(np.mean(of(*SINGLE_KINDS))),
        float(np.percentile(of(*SINGLE_KINDS), 99)),
        float(np.mean(of("agent"))),
        float(np.mean(of("chat"))),
        float(np.median(later)),
        max(of("agent", "chat")),
        result.waited,
    )
