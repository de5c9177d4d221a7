"""A fleet of pools in one virtual time, behind something that chooses a pool for each request.

Rules
    1. A pool is a simulated pool of its own: its router, its index, its workers, each with a speed and a price.
    2. Every request has latency targets that follow from its id and a stated mix, so all strategies face the same.
    3. A chooser sees a request, its targets and what the pools' routers know, when it arrives; it is told each first
       token and each end, at the moment they happen. Pools are never full and never down here: how requests pile up is
       what is measured.
    4. A request attains its targets when its TTFT and its mean ITL (first token to last, over the gaps) are both at
       most their target; an answer of one token has no ITL to miss.
    5. Strategies are compared only at equal cost per hour (``assert_equal_cost``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import isclose
from typing import Any, Protocol

from poolgrid.kernel.pool_grids.axis import AXIS
from poolgrid.kernel.pool_grids.closed_loop import CellKey, ClosedLoop, LoopStep
from poolgrid.kernel.pool_grids.destination import destination
from poolgrid.kernel.pool_grids.grid import Grid, GridRequest
from poolgrid.kernel.pool_grids.grid_document import GridDocument
from poolgrid.kernel.pool_grids.request_hints import RequestHints, Target
from poolgrid.kernel.wire.events import PrefillCompleted, RequestFinished
from poolgrid.kernel.wire.hashing import stable_u64
from poolgrid.plugins.simulated.core.engine import Fact, SimulatedLimits
from poolgrid.plugins.simulation.pool import SimulatedPool, play_workload
from poolgrid.plugins.simulation.recording import latency_summary
from poolgrid.plugins.simulation.workload import SimulatedRequest, Workload
from poolgrid.server.router.policy_loading import make_policy
from poolgrid.server.workers.timing import PolynomialTiming, ScaledTiming, TimingModel

EVALUATE_EVERY_MS = 1000.0
"""How often the closed loop judges its cells, as in the global router."""
HOUR_MS = 3_600_000.0


@dataclass(frozen=True, slots=True)
class WorkerClass:
    """How fast a kind of worker is and what one costs."""

    speedup: float
    """Divides all step times."""
    cost_per_hour: float


@dataclass(frozen=True, slots=True)
class FleetPool:
    """A pool of the fleet: its name and its workers."""

    name: str
    workers: tuple[WorkerClass, ...]

    @property
    def cost_per_hour(self) -> float:
        return sum(worker.cost_per_hour for worker in self.workers)


@dataclass(frozen=True, slots=True)
class Targets:
    """What a request must meet, in milliseconds."""

    ttft_ms: float
    itl_ms: float


@dataclass(frozen=True, slots=True)
class TargetClass:
    """A kind of request: its share of all requests, and its targets."""

    name: str
    share: float
    targets: Targets


@dataclass(frozen=True, slots=True)
class RequestOutcome:
    """How one request was served."""

    request_id: str
    pool: str
    target_class: TargetClass
    ttft_ms: float
    itl_ms: float | None
    """Mean gap between its tokens; ``None`` when it had only one."""
    output_tokens: int

    @property
    def attained(self) -> bool:
        """Tell whether both targets were met."""
        targets = self.target_class.targets
        return self.ttft_ms <= targets.ttft_ms and (self.itl_ms is None or self.itl_ms <= targets.itl_ms)


class PoolChooser(Protocol):
    """Sends each request to a pool, by its place in the fleet."""

    def choose(self, request: SimulatedRequest, targets: Targets, now: float) -> int:
        """Return the place of the pool that gets a request that arrives now."""
        ...

    def first_token(self, request_id: str, ttft_ms: float, now: float) -> None:
        """Hear that a request has its first token."""
        ...

    def finished(self, request_id: str, itl_ms: float | None, now: float) -> None:
        """Hear that a request has ended."""
        ...


class RoundRobinPools:
    """Each pool in turn; with one pool, that one."""

    def __init__(self, pools: int) -> None:
        self._pools = pools
        self._next = 0

    def choose(self, request: SimulatedRequest, targets: Targets, now: float) -> int:
        """Return the next place."""
        place = self._next
        self._next = (place + 1) % self._pools
        return place

    def first_token(self, request_id: str, ttft_ms: float, now: float) -> None:
        """Learn nothing."""

    def finished(self, request_id: str, itl_ms: float | None, now: float) -> None:
        """Learn nothing."""


class GridPools:
    """The pool of a grid document's aggregated stage; ``isl_basis`` and ``adapt`` are the document's."""

    def __init__(self, document: GridDocument, fleet: Sequence[FleetPool], pools: Sequence[SimulatedPool]) -> None:
        if document.aggregated is None:
            raise ValueError(f"simulating a grid: its mode is {document.mode!r}, allowed is 'aggregated'")
        names = [pool.name for pool in fleet]
        unknown = sorted({pool.name for pool in document.aggregated.pools} - set(names))
        if unknown:
            raise ValueError(f"simulating a grid: the fleet has no pool {unknown[0]!r}, it has {', '.join(names)}")
        self._document = document
        self._grid = Grid(document).stages["aggregated"]
        self._loop = ClosedLoop(document)
        self._place = {name: place for place, name in enumerate(names)}
        self._pools = pools
        self._watched: dict[str, tuple[CellKey, str]] = {}
        """By request, its cell and the pool that serves it."""
        self._evaluate_at_ms = EVALUATE_EVERY_MS
        self.spilled = 0
        self.steps: list[LoopStep] = []

    def choose(self, request: SimulatedRequest, targets: Targets, now: float) -> int:
        """Return the cell's pool, or where the closed loop spills to."""
        self._pass(now)
        cached: dict[str, int] = {}
        if self._document.isl_basis == "uncached":
            cached = {name: self._pools[place].best_overlap_tokens(request) for name, place in self._place.items()}
        hints = RequestHints(
            {
                "ttft": Target(targets.ttft_ms, AXIS["ttft"].hint_field),
                "itl": Target(targets.itl_ms, AXIS["itl"].hint_field),
            }
        )
        wish = GridRequest(request.isl, hints, cached_tokens=cached)
        there = destination(self._grid, self._loop, wish, stable_u64(request.request_id) / 2**64)
        if there.spill is not None:
            self.spilled += 1
        if there.cell is not None and self._document.adapt:
            self._watched[request.request_id] = (there.cell, there.wanted)
        return self._place[there.wanted]

    def first_token(self, request_id: str, ttft_ms: float, now: float) -> None:
        self._observe(request_id, "ttft", ttft_ms, now)

    def finished(self, request_id: str, itl_ms: float | None, now: float) -> None:
        """Let the closed loop have the mean ITL."""
        if itl_ms is not None:
            self._observe(request_id, "itl", itl_ms, now)
        self._watched.pop(request_id, None)

    def _observe(self, request_id: str, metric: str, value_ms: float, now: float) -> None:
        self._pass(now)
        watched = self._watched.get(request_id)
        if watched is not None:
            key, pool = watched
            self.steps += self._loop.observe(key, metric, value_ms, now, pool)

    def _pass(self, now: float) -> None:
        if not self._document.adapt:
            return
        while self._evaluate_at_ms <= now:
            self.steps += self._loop.evaluate(self._evaluate_at_ms)
            self._evaluate_at_ms += EVALUATE_EVERY_MS


@dataclass(slots=True)
class FleetResult:
    """What one strategy did with the workload."""

    cost_per_hour: float
    busy_cost: float = 0.0
    """Price of the time in which workers were stepping."""
    span_ms: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    pool_busy_ratio: dict[str, float] = field(default_factory=dict)
    outcomes: list[RequestOutcome] = field(default_factory=list)
    """In order of ending."""


MakeChooser = Callable[[Sequence[FleetPool], Sequence[SimulatedPool]], PoolChooser]


def round_robin(fleet: Sequence[FleetPool], pools: Sequence[SimulatedPool]) -> PoolChooser:
    """Return a chooser that takes each pool in turn."""
    return RoundRobinPools(len(pools))


def by_grid(document: GridDocument) -> MakeChooser:
    """Return what makes a chooser of a grid document."""
    return lambda fleet, pools: GridPools(document, fleet, pools)


def class_of(request_id: str, mix: Sequence[TargetClass]) -> TargetClass:
    """Return the kind of a request: a function of its id and the mix, whose shares add up to 1."""
    draw = stable_u64(f"targets of {request_id}") / 2**64
    for target_class in mix:
        if draw < target_class.share:
            return target_class
        draw -= target_class.share
    return mix[-1]


def assert_equal_cost(fleets: Sequence[Sequence[FleetPool]]) -> float:
    """Return the cost per hour that all fleets have; raise ``ValueError`` when they differ."""
    costs = [sum(pool.cost_per_hour for pool in fleet) for fleet in fleets]
    if not costs or not all(isclose(cost, costs[0]) for cost in costs):
        raise ValueError(f"comparing fleets: their costs per hour are {costs}, they must be equal")
    return costs[0]


class SimulatedFleet:
    """One run of one strategy: ``fleet`` behind the chooser that ``make_chooser`` returns."""

    def __init__(
        self,
        workload: Workload,
        fleet: Sequence[FleetPool],
        make_chooser: MakeChooser,
        mix: Sequence[TargetClass],
        limits: SimulatedLimits,
        timing: TimingModel | None = None,
    ) -> None:
        if not mix or not isclose(sum(target_class.share for target_class in mix), 1.0):
            raise ValueError(
                f"simulating a fleet: the shares are {[kind.share for kind in mix]}, they must add up to 1"
            )
        self._workload = workload
        self._fleet = tuple(fleet)
        self._mix = tuple(mix)
        base = timing or PolynomialTiming()
        self.pools = [
            SimulatedPool(
                workload,
                make_policy("kv"),
                len(pool.workers),
                limits,
                [ScaledTiming(base, worker.speedup) for worker in pool.workers],
                self._on_fact,
            )
            for pool in self._fleet
        ]
        self.chooser = make_chooser(self._fleet, self.pools)
        self._under_way: dict[str, tuple[SimulatedRequest, int, TargetClass]] = {}
        self._first_token_ms: dict[str, float] = {}
        self._result = FleetResult(sum(pool.cost_per_hour for pool in self._fleet))

    def run(self, on_progress: Callable[[int], None] = lambda _: None) -> FleetResult:
        """Play the whole workload; ``on_progress`` is called with the number of requests finished, now and then."""
        play_workload(self._workload, self.pools, self._choose, on_progress)
        result = self._result
        result.span_ms = max(pool.result.span_ms for pool in self.pools)
        for pool, simulated in zip(self._fleet, self.pools, strict=True):
            found = simulated.result
            result.prompt_tokens += found.prompt_tokens
            result.cached_tokens += found.cached_tokens
            result.preemptions += found.preemptions
            busy = zip(pool.workers, found.worker_busy_ms, strict=True)
            result.busy_cost += sum(worker.cost_per_hour * ms / HOUR_MS for worker, ms in busy)
            capacity_ms = len(pool.workers) * result.span_ms
            result.pool_busy_ratio[pool.name] = found.busy_ms / capacity_ms if capacity_ms else 0.0
        return result

    def _choose(self, request: SimulatedRequest, now: float) -> int:
        target_class = class_of(request.request_id, self._mix)
        place = self.chooser.choose(request, target_class.targets, now)
        self._under_way[request.request_id] = (request, place, target_class)
        return place

    def _on_fact(self, fact: Fact, now: float) -> None:
        if isinstance(fact, PrefillCompleted):
            request, _, _ = self._under_way[fact.request_id]
            self._first_token_ms[fact.request_id] = now
            self.chooser.first_token(fact.request_id, now - request.arrival_ms, now)
        elif isinstance(fact, RequestFinished):
            request, place, target_class = self._under_way.pop(fact.request_id)
            first_ms = self._first_token_ms.pop(fact.request_id)
            itl_ms = (now - first_ms) / (request.osl - 1) if request.osl > 1 else None
            self._result.outcomes.append(
                RequestOutcome(
                    fact.request_id,
                    self._fleet[place].name,
                    target_class,
                    first_ms - request.arrival_ms,
                    itl_ms,
                    request.osl,
                )
            )
            self.chooser.finished(fact.request_id, itl_ms, now)


def fleet_report(result: FleetResult) -> dict[str, Any]:
    """Return the figures of one strategy; costs are in the unit of the fleet's prices."""
    outcomes = result.outcomes
    attained = [outcome for outcome in outcomes if outcome.attained]
    tokens = sum(outcome.output_tokens for outcome in outcomes)
    good_tokens = sum(outcome.output_tokens for outcome in attained)
    cost = result.cost_per_hour * result.span_ms / HOUR_MS
    kinds = {outcome.target_class.name: outcome.target_class for outcome in outcomes}
    pools: dict[str, int] = {}
    for outcome in outcomes:
        pools[outcome.pool] = pools.get(outcome.pool, 0) + 1
    return {
        "requests": len(outcomes),
        "attainment": _share(len(attained), len(outcomes)),
        "attainment_by_class": {
            name: _share(
                sum(outcome.target_class is kind for outcome in attained),
                sum(outcome.target_class is kind for outcome in outcomes),
            )
            for name, kind in sorted(kinds.items())
        },
        "ttft_attainment": _share(sum(o.ttft_ms <= o.target_class.targets.ttft_ms for o in outcomes), len(outcomes)),
        "ttft_ms": latency_summary([outcome.ttft_ms for outcome in outcomes]),
        "itl_ms": latency_summary([outcome.itl_ms for outcome in outcomes if outcome.itl_ms is not None]),
        "cached_token_ratio": _share(result.cached_tokens, result.prompt_tokens),
        "cost_per_hour": result.cost_per_hour,
        "cost_per_million_tokens": _share(cost * 1e6, tokens),
        "cost_per_million_attained_tokens": _share(cost * 1e6, good_tokens),
        "busy_cost_per_million_tokens": _share(result.busy_cost * 1e6, tokens),
        "pool_busy_ratio": result.pool_busy_ratio,
        "pool_requests": dict(sorted(pools.items())),
        "span_ms": result.span_ms,
        "preemptions": result.preemptions,
    }


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
