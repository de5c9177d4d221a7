"""One workload under several settings of the router."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from poolgrid.router.core.cost import CostWeights
from poolgrid.router.policy_loading import make_policy
from poolgrid.tools.simulation.pool import SimulatedPool
from poolgrid.tools.simulation.report import policy_report
from poolgrid.tools.simulation.workload import Workload
from poolgrid.workers.core.timing import TimingModel
from poolgrid.workers.engines.simulated.core.engine import SimulatedLimits


@dataclass(frozen=True, slots=True)
class Variant:
    """Settings of a router."""

    name: str
    policy: str = "kv"
    weights: CostWeights = CostWeights()
    temperature: float = 0.0

    def settings(self) -> dict[str, Any]:
        """Return the settings by their names in the router."""
        return {
            "policy": self.policy,
            **asdict(self.weights),
            "temperature": self.temperature,
        }


def run_variant(
    workload: Workload,
    variant: Variant,
    workers: int,
    limits: SimulatedLimits,
    timing: TimingModel,
    on_progress: Callable[[int], None] = lambda _: None,
) -> dict[str, Any]:
    """Play a workload under a variant's settings, with fresh engines; return the figures and the settings.

    ``on_progress`` is told the requests finished.
    """
    policy = make_policy(variant.policy, variant.weights, variant.temperature)
    result = SimulatedPool(workload, policy, workers, limits, timing).run(on_progress)
    return {**policy_report(result, workers), "settings": variant.settings()}


def roomy_limits(workload: Workload, **given: int) -> SimulatedLimits:
    """Return engine limits under which every request of a workload fits; what is ``given`` is taken as it is."""
    blocks = workload.total_tokens // workload.block_size + 2 * len(workload.requests) + 1
    values = {"total_kv_blocks": blocks, "max_sequence_length": workload.longest + 1, **given}
    return SimulatedLimits(block_size=workload.block_size, max_waiting_requests=len(workload.requests) + 1, **values)
