"""A client that sends many long prompts at once delays the short ones of others by what an engine may have waiting."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from poolgrid.kernel.wire.events import PrefillCompleted
from poolgrid.plugins.bench.trace import TraceRow
from poolgrid.plugins.simulated.core.engine import Fact, SimulatedLimits
from poolgrid.plugins.simulation.pool import RouterFleet, SimulatedPool
from poolgrid.plugins.simulation.workload import WorkerSpeeds, Workload, build_workload
from poolgrid.server.router.engine_backlog import BACKLOG_MS
from poolgrid.server.router.policy_loading import make_policy
from poolgrid.server.workers.timing import PolynomialTiming

FLOOD, BYSTANDER = "flood", "bystander"
LONG_TOKENS, SHORT_TOKENS = 9000, 40
LONG_MS = PolynomialTiming().prefill_ms(8192) + PolynomialTiming().prefill_ms(LONG_TOKENS - 8192)
BYSTANDER_BEGINS_MS, BYSTANDER_EVERY_MS = 500.0, 200.0


def prompts(count: int, tokens: int, osl: int, first_id: int, begins_ms: float, every_ms: float) -> list[TraceRow]:
    """Return prompts that share nothing."""
    blocks = -(-tokens // 512)
    return [
        TraceRow(begins_ms + number * every_ms, tokens, osl, tuple(range(at, at + blocks)))
        for number in range(count)
        for at in [first_id + number * blocks]
    ]


def workload_of(parts: Iterable[tuple[str, int, list[TraceRow]]]) -> tuple[Workload, dict[str, tuple[str, float]]]:
    """Return requests with tenants and priorities, and whose each is with its arrival."""
    rows = sorted(
        ((row, who, priority) for who, priority, rows in parts for row in rows), key=lambda each: each[0].timestamp
    )
    workload = build_workload([row for row, *_ in rows], 1.0, 32)
    whose = {}
    for place, (request, (_, who, priority)) in enumerate(zip(workload.requests, rows, strict=True)):
        workload.requests[place] = replace(request, tenant=who, priority=priority)
        whose[request.request_id] = who, request.arrival_ms
    return workload, whose


def waits_ms(
    workload: Workload,
    whose: dict[str, tuple[str, float]],
    policy: str = "kv",
    routers: RouterFleet | None = None,
    speeds: WorkerSpeeds | None = None,
) -> dict[str, list[float]]:
    """Return the times to the first token of two workers' requests, by whose they are."""
    found: dict[str, list[float]] = {FLOOD: [], BYSTANDER: [], "": []}

    def take(fact: Fact, now_ms: float) -> None:
        if isinstance(fact, PrefillCompleted):
            who, arrived_ms = whose[fact.request_id]
            found[who].append(now_ms - arrived_ms)

    limits = SimulatedLimits(32, 65_536, 0, 256, 8192, 131_072, max_waiting_requests=len(workload.requests))
    fleet = routers or RouterFleet(event_delay_ms=5.0)
    SimulatedPool(workload, make_policy(policy), 2, limits, on_fact=take, routers=fleet, speeds=speeds).run()
    return found


def flood(
    keys: bool = True, priorities: bool = False, long: int = 150, bystander: int = 60
) -> tuple[Workload, dict[str, tuple[str, float]]]:
    """Return 150 prompts of 9,000 tokens at once, which take two workers 15 s, and a bystander with short ones."""
    who = (FLOOD, BYSTANDER) if keys else ("", "")
    ranks = (-10, 10) if priorities else (0, 0)
    rows = (
        prompts(long, LONG_TOKENS, 16, 10_000, 0.0, 0.0),
        prompts(bystander, SHORT_TOKENS, 4, 10_000_000, BYSTANDER_BEGINS_MS, BYSTANDER_EVERY_MS),
    )
    workload, whose = workload_of(zip(who, ranks, rows, strict=True))
    if not keys:
        lengths = {each.request_id: each.isl for each in workload.requests}
        named = {SHORT_TOKENS: BYSTANDER, LONG_TOKENS: FLOOD}
        whose = {name: (named[lengths[name]], at_ms) for name, (_, at_ms) in whose.items()}
    return workload, whose


BOUND_MS = BACKLOG_MS + 2 * LONG_MS
"""What waits in an engine, the prompt that was the last to come, and the one that is being computed."""


@pytest.mark.parametrize("policy", ["kv", "least-loaded", "round-robin", "random"])
@pytest.mark.parametrize(
    ("keys", "priorities"), [(True, False), (False, True), (False, False)], ids=["keys", "priorities", "neither"]
)
def test_short_prompts_of_others_pass_a_backlog_of_long_ones(policy: str, keys: bool, priorities: bool) -> None:
    found = waits_ms(*flood(keys, priorities), policy)

    assert (len(found[BYSTANDER]), len(found[FLOOD])) == (60, 150)
    assert max(found[BYSTANDER]) < BOUND_MS
    # No other work is put off for it: the last long prompt is computed when two workers can have done that.
    assert max(found[FLOOD]) < 1.15 * 150 * LONG_MS / 2


def test_without_the_bound_they_wait_for_what_lies_in_engines() -> None:
    unbounded = RouterFleet(event_delay_ms=5.0, waits_for_engines=False)

    assert max(waits_ms(*flood(), routers=unbounded)[BYSTANDER]) > 4000


def test_a_long_prompt_of_another_tenant_waits_no_longer_than_a_short_one_and_itself() -> None:
    parts = (
        (FLOOD, 0, prompts(150, LONG_TOKENS, 16, 10_000, 0.0, 0.0)),
        (BYSTANDER, 0, prompts(20, LONG_TOKENS, 4, 10_000_000, BYSTANDER_BEGINS_MS, 600.0)),
    )
    found = waits_ms(*workload_of(parts))

    # It is planned with the others' for as long, before the order of turns holds.
    assert max(found[BYSTANDER]) < 500 + BOUND_MS + LONG_MS


def test_long_prompts_proceed_while_short_ones_keep_coming() -> None:
    parts = (
        (FLOOD, 0, prompts(2000, 400, 4, 10_000, 0.0, 4.0)),
        (BYSTANDER, 0, prompts(5, 60_000, 4, 10_000_000, BYSTANDER_BEGINS_MS, 1000.0)),
    )
    for routers in (1, 2):
        found = waits_ms(*workload_of(parts), routers=RouterFleet(routers, 5.0))
        own_ms = 60_000 / 8192 * PolynomialTiming().prefill_ms(8192)
        assert max(found[BYSTANDER]) < 4000 + 2.5 * own_ms, f"{routers} routers"


def test_of_workers_without_observations_the_card_counts_until_a_first_token_shows_their_pace() -> None:
    slow = 10.0
    found = waits_ms(*flood(long=30, bystander=150), speeds=WorkerSpeeds((1 / slow,)))

    assert max(found[BYSTANDER]) < slow * BOUND_MS
    learned = found[BYSTANDER][60:]
    assert max(learned) < BACKLOG_MS + 2 * slow * LONG_MS
