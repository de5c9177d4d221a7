"""One workload under several settings of the router: what each would have given every request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from poolgrid.router.core.cost import CostWeights
from poolgrid.router.policy_loading import make_policy
from poolgrid.tools.simulation.pool import SimulatedPool
from poolgrid.tools.simulation.report import policy_report
from poolgrid.tools.simulation.workload import SimulatedRequest, Workload
from poolgrid.wire.events import PrefillCompleted, RequestFinished
from poolgrid.workers.core.timing import TimingModel
from poolgrid.workers.engines.simulated.core.engine import Fact, SimulatedLimits


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


@dataclass(frozen=True, slots=True)
class Served:
    """How one request was served."""

    ttft_ms: float
    itl_ms: float | None
    """Mean gap between its tokens; ``None`` when it had only one."""


@dataclass(frozen=True, slots=True)
class VariantResult:
    """What a variant did with a workload."""

    report: dict[str, Any]
    """The keys of ``poolgrid simulate``."""
    served: list[Served]
    span_ms: float

    def attained(self, ttft_target_ms: float, itl_target_ms: float) -> float:
        """Return the share of requests whose TTFT and mean ITL were both within their targets."""
        good = sum(
            each.ttft_ms <= ttft_target_ms and (each.itl_ms is None or each.itl_ms <= itl_target_ms)
            for each in self.served
        )
        return good / len(self.served) if self.served else 0.0

    def goodput_per_s(self, ttft_target_ms: float, itl_target_ms: float) -> float:
        """Return the requests per second that met both targets."""
        good = self.attained(ttft_target_ms, itl_target_ms) * len(self.served)
        return 1000.0 * good / self.span_ms if self.span_ms else 0.0


def run_variant(
    workload: Workload,
    variant: Variant,
    workers: int,
    limits: SimulatedLimits,
    timing: TimingModel,
    on_progress: Callable[[int], None] = lambda _: None,
) -> VariantResult:
    """Play a workload under a variant's settings, with fresh engines; ``on_progress`` is told the requests finished."""
    arrived: dict[str, SimulatedRequest] = {each.request_id: each for each in workload.requests}
    first_token_ms: dict[str, float] = {}
    served: list[Served] = []

    def on_fact(fact: Fact, now: float) -> None:
        if isinstance(fact, PrefillCompleted):
            first_token_ms.setdefault(fact.request_id, now)
        elif isinstance(fact, RequestFinished):
            request = arrived[fact.request_id]
            first = first_token_ms.pop(fact.request_id, now)
            itl_ms = (now - first) / (request.osl - 1) if request.osl > 1 else None
            served.append(Served(first - request.arrival_ms, itl_ms))

    policy = make_policy(variant.policy, variant.weights, variant.temperature)
    pool = SimulatedPool(workload, policy, workers, limits, timing, on_fact)
    result = pool.run(on_progress)
    report = {**policy_report(result, workers), "settings": variant.settings()}
    return VariantResult(report, served, result.span_ms)


def roomy_limits(workload: Workload, **given: int) -> SimulatedLimits:
    """Return engine limits under which every request of a workload fits; what is ``given`` is taken as it is."""
    blocks = workload.total_tokens // workload.block_size + 2 * len(workload.requests) + 1
    values = {"total_kv_blocks": blocks, "max_sequence_length": workload.longest + 1, **given}
    return SimulatedLimits(block_size=workload.block_size, max_waiting_requests=len(workload.requests) + 1, **values)
