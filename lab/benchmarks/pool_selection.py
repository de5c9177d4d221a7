"""Ways to choose a pool, on a trace, in virtual time, at equal cost: one table.

    python -m lab.benchmarks.pool_selection TRACE [--requests N] [--speed X] [--only NAME,...] [--json OUT]

The fleet, its prices, the mix of targets and the grid are the constants below; docs/benchmarks.md (Choosing a pool)
explains them and has the results.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from lab.benchmarks.simulated_fleet import (
    FleetPool,
    GridPools,
    MakeChooser,
    SimulatedFleet,
    TargetClass,
    Targets,
    WorkerClass,
    assert_equal_cost,
    by_grid,
    fleet_report,
    round_robin,
)
from poolgrid.kernel.pool_grids.grid_document import GridDocument
from poolgrid.plugins.bench.trace import TraceError, read_trace
from poolgrid.plugins.simulated.core.engine import SimulatedLimits
from poolgrid.plugins.simulation.workload import Workload, build_workload
from poolgrid.server.global_router.document.reader import load_document

BLOCK_SIZE = 64
BLOCKS_PER_WORKER = 16_384
"""A million tokens of KV per worker: caches are full after some minutes and evict from then on."""
SPEED = 12.0

FAST = WorkerClass(speedup=2.0, cost_per_hour=3.0)
CHEAP = WorkerClass(speedup=1.0, cost_per_hour=1.0)
FAST_WORKERS = 2
CHEAP_WORKERS = 6
"""Workers of each of the two fast and the two cheap pools."""

HURRIED = TargetClass("hurried", 0.3, Targets(ttft_ms=300.0, itl_ms=15.0))
RELAXED = TargetClass("relaxed", 0.7, Targets(ttft_ms=2000.0, itl_ms=60.0))
MIX = (HURRIED, RELAXED)

MIXED_FLEET = (
    FleetPool("fast-a", (FAST,) * FAST_WORKERS),
    FleetPool("fast-b", (FAST,) * FAST_WORKERS),
    FleetPool("cheap-a", (CHEAP,) * CHEAP_WORKERS),
    FleetPool("cheap-b", (CHEAP,) * CHEAP_WORKERS),
)
COST_PER_HOUR = assert_equal_cost([MIXED_FLEET])

ISL_STEP = 8000
ISL_CELLS = 8
"""Wide cells: the closed loop needs 20 measurements per cell and window."""


@dataclass(frozen=True, slots=True)
class GridLimits:
    """The prompt lengths at which the grid passes from one pool to the next, in tokens, multiples of ``ISL_STEP``."""

    hurried_cheap: int = 0
    """Below, hurried requests go to cheap-a."""
    hurried_fast: int = 24_000
    """Below, hurried requests go to fast-a, else to fast-b."""
    hurried_lost: int = 32_000
    """From here on no pool can be in time for a hurried request, and it goes where relaxed ones go."""
    relaxed_cheap: int = 16_000
    """Below, relaxed requests go to cheap-a, else to cheap-b."""
    relaxed_fast: int = 48_000
    """From here on, relaxed requests go to fast-b."""


def one_pool(worker: WorkerClass) -> tuple[FleetPool, ...]:
    """Return a fleet of one pool of equal workers, as many as the mixed fleet's money buys."""
    fleet = (FleetPool("all", (worker,) * round(COST_PER_HOUR / worker.cost_per_hour)),)
    assert_equal_cost([MIXED_FLEET, fleet])
    return fleet


def mixed_pool() -> tuple[FleetPool, ...]:
    """Return a fleet of one pool with the mixed fleet's very workers."""
    return (FleetPool("all", tuple(worker for pool in MIXED_FLEET for worker in pool.workers)),)


def grid_document(limits: GridLimits, isl_basis: str, adapt: bool = False) -> GridDocument:
    """Return the grid: layers by prompt length, in each the tight row and column for hurried requests."""
    layers = []
    for cell in range(ISL_CELLS):
        isl = cell * ISL_STEP
        loose = "cheap-a" if isl < limits.relaxed_cheap else "cheap-b" if isl < limits.relaxed_fast else "fast-b"
        tight = "cheap-a" if isl < limits.hurried_cheap else "fast-a" if isl < limits.hurried_fast else "fast-b"
        if isl >= limits.hurried_lost:
            tight = loose
        layers.append([[tight, tight, tight], *[[tight, loose, loose]] * 3])
    stage = {
        "pools": [
            {"name": pool.name, "priority": 0 if pool.workers[0] == FAST else 1, "cost_per_hour": pool.cost_per_hour}
            for pool in MIXED_FLEET
        ],
        "isl_min": 0,
        "isl_max": ISL_CELLS * ISL_STEP,
        "isl_resolution": ISL_CELLS,
        # Cells whose middles, which the closed loop aims at, are close to the targets: 300 and 2100, 15 and 75 ms.
        "ttft_min_ms": 0,
        "ttft_max_ms": 2400,
        "ttft_resolution": 4,
        "itl_min_ms": 0,
        "itl_max_ms": 90,
        "itl_resolution": 3,
        "mapping": layers,
    }
    data = {"mode": "aggregated", "aggregated": stage, "isl_basis": isl_basis, "adapt": adapt}
    return load_document(json.dumps(data), "the benchmark's grid").document


def strategies(limits: GridLimits) -> dict[str, tuple[Sequence[FleetPool], MakeChooser]]:
    """Return what is compared, by name; all at the same cost per hour."""
    found: dict[str, tuple[Sequence[FleetPool], MakeChooser]] = {
        "a  one pool, same workers": (mixed_pool(), round_robin),
        "a' one pool, all cheap": (one_pool(CHEAP), round_robin),
        "a'' one pool, all fast": (one_pool(FAST), round_robin),
        "b  round robin": (MIXED_FLEET, round_robin),
        "c  static grid": (MIXED_FLEET, by_grid(grid_document(limits, "total"))),
        "d  grid on uncached": (MIXED_FLEET, by_grid(grid_document(limits, "uncached"))),
        "e  closed loop on d": (MIXED_FLEET, by_grid(grid_document(limits, "uncached", adapt=True))),
    }
    assert_equal_cost([fleet for fleet, _ in found.values()])
    return found


def engine_limits(workload: Workload) -> SimulatedLimits:
    """Return what every worker of every fleet holds."""
    return SimulatedLimits(
        block_size=BLOCK_SIZE,
        total_kv_blocks=BLOCKS_PER_WORKER,
        max_sequence_length=workload.longest + 1,
        max_waiting_requests=max(1, len(workload.requests)),
    )


def play(workload: Workload, fleet: Sequence[FleetPool], make_chooser: MakeChooser) -> dict[str, Any]:
    """Return the figures of one strategy."""
    simulated = SimulatedFleet(workload, fleet, make_chooser, MIX, engine_limits(workload))
    report = fleet_report(simulated.run())
    if isinstance(simulated.chooser, GridPools):
        report["spilled_requests"] = simulated.chooser.spilled
        report["closed_loop_steps"] = len(simulated.chooser.steps)
    return report


def table_of(reports: dict[str, dict[str, Any]], title: str) -> Table:
    """Return the strategies side by side."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title=title)
    headings = ("strategy", "SLA", "hurried", "relaxed", "TTFT p50", "p99", "cached", "cost/Mtok", "met", "busy")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "strategy" else "right", no_wrap=True)
    for name, report in reports.items():
        by_class = report["attainment_by_class"]
        table.add_row(
            name,
            f"{report['attainment']:.1%}",
            *(f"{by_class.get(kind.name, 0.0):.1%}" for kind in MIX),
            f"{report['ttft_ms']['p50']:.0f}",
            f"{report['ttft_ms']['p99']:.0f}",
            f"{report['cached_token_ratio']:.1%}",
            f"{report['cost_per_million_tokens']:.2f}",
            f"{report['cost_per_million_attained_tokens']:.2f}",
            f"{report['busy_cost_per_million_tokens']:.2f}",
        )
    return table


def main() -> int:
    """Run the strategies and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--requests", type=int, default=None, help="only the first N rows")
    parser.add_argument("--speed", type=float, default=SPEED, help="how many times as fast as recorded")
    parser.add_argument("--only", default="", help="beginnings of names, separated by commas: c,d")
    parser.add_argument("--json", type=Path, default=None, help="write the figures here too")
    arguments = parser.parse_args()
    try:
        workload = build_workload(read_trace(arguments.trace, arguments.requests), arguments.speed, BLOCK_SIZE)
    except (TraceError, OSError, ValueError) as error:
        sys.stderr.write(f"comparing ways to choose a pool: {error}\n")
        return 2
    wanted = tuple(f"{name.strip()} " for name in arguments.only.split(",") if name.strip())
    reports = {
        name: play(workload, fleet, make_chooser)
        for name, (fleet, make_chooser) in strategies(GridLimits()).items()
        if not wanted or name.startswith(wanted)
    }
    title = f"{len(workload.requests)} requests of {arguments.trace.name}, {arguments.speed:g} x, {COST_PER_HOUR:g} $/h"
    Console(width=110).print(table_of(reports, title))
    if arguments.json is not None:
        found = {"trace": arguments.trace.name, "speed": arguments.speed, "strategies": reports}
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
