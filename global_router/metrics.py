"""What the global router counts; ``docs/global_router.md`` explains each."""

from __future__ import annotations

from collections.abc import Collection

from prometheus_client import CollectorRegistry

from poolgrid.kernel.pool_grids.circuit_breaker import BreakerState
from poolgrid.kernel.pool_grids.destination import Served
from poolgrid.kernel.pool_grids.grid import Reading, Selection
from poolgrid.server.process.instruments import Counter, Histogram
from poolgrid.server.serving.metrics import ServingMetrics

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


LINES_MAX = 12
"""More rows or columns than this do not fit on a board."""


class TargetBoard:
    """How requests fared against their targets, as metrics: by pool and role, and by the cells of the grids.

    Rules
        1. A latency is judged where the closed loop would learn from it (``kernel.pool_grids.destination``), against
           the target with which its cell was chosen: the request's own, else the document's, else the middle of the
           axis.
        2. A grid is shown by its last two axes, in at most ``LINES_MAX`` rows and columns: finer ones are put
           together. So the series of a grid are bounded, for any document.
        3. With a new revision of the document the series of its cells restart: a cell may mean something else.
        4. Nothing is known of pools that are in no document any more.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._judged = Counter(
            "poolgrid_global_router_target_judgements_total",
            "Requests that `met` or `missed` their pool's target, by pool, role (`prefill`, `decode`, "
            "`aggregated`) and target (`ttft`, `itl`). A pool that misses is too slow or too small for its "
            "cells.",
            ["pool", "role", "target", "outcome"],
            registry=registry,
        )
        self._cells = Counter(
            "poolgrid_global_router_cell_requests_total",
            "Requests by cell of the grid and pool.",
            ["stage", "row", "column", "pool"],
            registry=registry,
        )
        self._cell_judged = Counter(
            "poolgrid_global_router_cell_judgements_total",
            "Requests that `met` or `missed` the target of their cell.",
            ["stage", "row", "column", "outcome"],
            registry=registry,
        )
        self._revision = 0

    def placed(self, selection: Selection, pool: str, revision: int) -> None:
        """Count a request in its cell, under the revision of the document that was in force."""
        if revision < self._revision:
            return
        self._begin(revision)
        self._cells.labels(selection.stage, *_place(selection), pool).inc()

    def judged(self, selection: Selection, served: Served, target: str, latency_ms: float, revision: int) -> None:
        """Judge a request's ``target`` (``ttft`` or ``itl``); a stage without an axis of it has none."""
        reading = next((each for each in selection.readings if each.axis.name == target), None)
        if reading is None:
            return
        outcome = "met" if latency_ms <= reading.value else "missed"
        self._judged.labels(served.pool, selection.stage, target, outcome).inc()
        if revision >= self._revision:
            self._begin(revision)
            self._cell_judged.labels(selection.stage, *_place(selection), outcome).inc()

    def keep(self, pools: Collection[str]) -> None:
        self._judged.retain(lambda labels: labels[0] in pools)
        self._cells.retain(lambda labels: labels[3] in pools)

    def _begin(self, revision: int) -> None:
        if revision > self._revision:
            self._revision = revision
            self._cells.retain(lambda _: False)
            self._cell_judged.retain(lambda _: False)


def _place(selection: Selection) -> tuple[str, str]:
    row, column = selection.readings[-2:]
    return _line(row), _line(column)


def _line(reading: Reading) -> str:
    """Return what a row or column is called: its number, so that it sorts, and its range with the unit."""
    axis = reading.axis
    together = -(-axis.resolution // LINES_MAX)
    first = reading.index // together * together
    last = min(first + together, axis.resolution) - 1
    number = f"{first // together + 1:02d}"
    low, high = axis.bounds(first)[0], axis.bounds(last)[1]
    if axis.resolution == 1:
        return f"{number} {axis.name}: all"
    if last == axis.resolution - 1:
        return f"{number} {axis.name} from {low:g} {axis.unit}"
    if first == 0:
        return f"{number} {axis.name} below {high:g} {axis.unit}"
    return f"{number} {axis.name} {low:g} to {high:g} {axis.unit}"
