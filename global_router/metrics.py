"""What the global router counts; ``docs/global_router.md`` explains each."""

from __future__ import annotations

from collections.abc import Collection

from prometheus_client import CollectorRegistry

from poolgrid.global_router.core.choice.circuit_breaker import BreakerState
from poolgrid.global_router.target_board import TargetBoard
from poolgrid.process.instruments import Counter, Histogram
from poolgrid.serving.metrics import ServingMetrics

SELECT_SECONDS_BUCKETS = (100e-6, 250e-6, 500e-6, 750e-6, 1e-3, 1.5e-3, 2.5e-3, 5e-3, 10e-3, 50e-3, 0.25, 1.0)
WAIT_CAUSES = "`pools_full`, `behind_others`, or, after the first output, `next_leg_or_move`."


class GlobalRouterMetrics(ServingMetrics):
    """The global router's own series; requests and latencies are counted by the front end."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__("poolgrid_global_router", WAIT_CAUSES, registry)
        self.dispatches = Counter(
            "poolgrid_global_router_dispatches_total",
            "Dispatches by pool, stage and how the pool was found: grid, override, fallback, retry or spill.",
            ["pool", "stage", "how"],
            registry=registry,
        )
        self.passed_over = Counter(
            "poolgrid_global_router_passed_over_total",
            "Times that a pool was skipped, by its state: down, draining or saturated.",
            ["pool", "state"],
            registry=registry,
        )
        self.targets = TargetBoard(registry)
        self.select_seconds = Histogram(
            "poolgrid_global_router_select_seconds",
            "Round-trip time of one select-and-reserve at a pool's router: the TTFT that the global router adds.",
            buckets=SELECT_SECONDS_BUCKETS,
            registry=registry,
        )
        self.moves = Counter(
            "poolgrid_global_router_moves_total",
            "Requests moved to another worker before or during their output.",
            ["cause"],
            registry=registry,
        )
        self.breaker_steps = Counter(
            "poolgrid_global_router_breaker_steps_total",
            "State changes of a pool's circuit breaker, by the new state.",
            ["pool", "state"],
            registry=registry,
        )
        self.loop_steps = Counter(
            "poolgrid_global_router_loop_steps_total",
            "Steps of the closed loop, by the pool whose traffic spills.",
            ["pool"],
            registry=registry,
        )
        self.reloads = Counter(
            "poolgrid_global_router_reloads_total",
            "Attempts to change the document, by outcome. `refused`: the document has problems, and the old "
            "one stays in force.",
            ["outcome"],
            registry=registry,
        )

    def use_pools(self, names: Collection[str]) -> None:
        """Show these pools and no others: a frozen series would look like one of a pool that is there.

        Breakers' steps are shown from 0 on. A series that begins with its first step has no increase to be seen.
        """
        for name in names:
            for state in BreakerState:
                self.breaker_steps.labels(name, state.value)
            self.loop_steps.labels(name)
        for counter in (self.dispatches, self.passed_over, self.breaker_steps, self.loop_steps):
            counter.retain(lambda labels: labels[0] in names)
        self.targets.keep(names)
