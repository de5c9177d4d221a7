"""Where turns of conversations go, at light load and at peak: with the field's cost, and with that of ``kv``."""

from __future__ import annotations

from dataclasses import dataclass

from poolgrid.kernel.decision.policy import Policy
from poolgrid.plugins.policies.weighted_cost import FieldCost
from poolgrid.plugins.simulated.core.engine import SimulatedLimits
from poolgrid.plugins.simulation.pool import SimulatedPool
from poolgrid.server.router.policy_loading import make_policy
from poolgrid.server.workers.timing import timing_model
from tests.simulation.sessions import BLOCK_SIZE, Turn, sessions, workload_of

WORKERS = 4
LIGHT, PEAK = 1.8, 9.0
"""Sessions a second: 7 and 35 requests."""


@dataclass(frozen=True)
class Figures:
    """What became of conversations."""

    spread: float
    """Requests of the worker that has most, over the mean."""
    stayed: float
    """Share of later turns that found the whole turn before."""
    ttft_ms: float


def figures_of(turns: list[Turn], policy: Policy) -> Figures:
    limits = SimulatedLimits(
        block_size=BLOCK_SIZE, total_kv_blocks=15_258, max_batch_size=128, max_sequence_length=36_864
    )
    pool = SimulatedPool(workload_of(turns), policy, WORKERS, limits, timing_model("h200-qwen3-8b"))
    found: dict[str, int] = {}
    choose = policy.choose

    def watched(request, candidates):  # type: ignore[no-untyped-def]
        choice = choose(request, candidates)
        found[request.request_id] = int(candidates.device_overlap[choice.row])
        return choice

    policy.choose = watched  # type: ignore[method-assign]
    result = pool.run()
    before: dict[int, int] = {}
    later = whole = 0
    for number, turn in enumerate(turns):
        if turn.number:
            later += 1
            whole += found[f"recorded-{number}"] >= before[turn.session]
        before[turn.session] = len(turn.recorded.path)
    requests = result.worker_requests
    return Figures(max(requests) * WORKERS / sum(requests), whole / later, sum(result.ttft_ms) / len(result.ttft_ms))


def test_light_load_spreads_first_turns_although_system_prompts_attract() -> None:
    runs = [sessions(seed, LIGHT, 60.0) for seed in (1, 2)]
    fields = [figures_of(turns, FieldCost()) for turns in runs]
    kvs = [figures_of(turns, make_policy("kv")) for turns in runs]

    assert max(each.spread for each in kvs) < 1.4
    assert min(each.stayed for each in kvs) >= 0.98
    assert sum(each.ttft_ms for each in kvs) < 1.02 * sum(each.ttft_ms for each in fields)


def test_later_turns_stay_at_peak() -> None:
    turns = sessions(2, PEAK, 25.0)
    field, kv = figures_of(turns, FieldCost()), figures_of(turns, make_policy("kv"))

    assert field.stayed < 0.97, "every twenty-fifth later turn lost its history"
    assert kv.stayed >= 0.99
    assert kv.ttft_ms < 1.05 * field.ttft_ms
