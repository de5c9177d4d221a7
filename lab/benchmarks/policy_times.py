"""Policies on equal and unlike workers, in virtual time: the tables of ``docs/benchmarks.md``.

    python -m lab.benchmarks.policy_times TRACE [--rows 4000] [--table equal] [--policies kv,lmetric] [--jobs 2]
        [--hold-limit-ms 0] [--spread-ms 3000]

Tables: ``equal`` (load and caches), ``unlike`` (half of the workers three times slower, one at a quarter of its speed
for a third of the time, both), ``targets`` (requests that are in a hurry, and not), ``bounds`` (what the unlike rows
could be at all: routers that know everything, the fast workers alone, all at full speed, and a mean and a p99 that no
router can pass). With ``--spread-ms`` each request comes up to so much later, evenly drawn: the trace has all that came
within three seconds at one moment. Nothing is timed, so a busy machine finds the same.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

import msgspec

from lab.benchmarks.clairvoyant import Clairvoyant, ClairvoyantPool, least_ttfts
from poolgrid.kernel.decision.policy import HOLD_LIMIT_MS
from poolgrid.plugins.bench.trace import TraceRow, read_trace
from poolgrid.plugins.simulated.core.engine import SimulatedLimits
from poolgrid.plugins.simulation.pool import RouterFleet, RunResult, SimulatedPool
from poolgrid.plugins.simulation.recording import policy_report
from poolgrid.plugins.simulation.workload import SpeedChange, TtftTargets, WorkerSpeeds, Workload, build_workload
from poolgrid.server.router.policy_loading import make_policy
from poolgrid.server.workers.timing import TimingModel, timing_model

WORKERS = 8
BLOCK_SIZE = 64
SMALL, LARGE = 8192, 60_000
"""Blocks of a worker: half a million tokens, and more than it ever needs."""

TARGETS_MS = (200.0, 1000.0, 4000.0)
"""A third of the requests each."""

CLAIRVOYANT = (Clairvoyant().name, Clairvoyant(together=True).name)
"""Names of the routers that know everything."""

SPREAD_SEED = 5

LEAST = "no router"
"""In the place of a policy: what none can pass."""

HALF_SLOW = WorkerSpeeds((1.0, 1.0, 1.0, 1.0, 1 / 3, 1 / 3, 1 / 3, 1 / 3))


@dataclass(frozen=True)
class Run:
    """One simulation."""

    trace: Path
    rows: int
    speed: float
    blocks: int
    policy: str
    speeds: WorkerSpeeds | None = None
    timing: str = "published"
    labels: tuple[str, ...] = field(default=())
    targets: TtftTargets | None = None
    workers: int = WORKERS
    hold_limit_ms: float = HOLD_LIMIT_MS
    spread_ms: int = 0


def limits_of(workload: Workload, blocks: int) -> SimulatedLimits:
    """Return engines with so many blocks."""
    return SimulatedLimits(
        block_size=BLOCK_SIZE,
        total_kv_blocks=blocks,
        max_sequence_length=workload.longest + 1,
        max_waiting_requests=len(workload.requests),
    )


def play(run: Run) -> tuple[Run, RunResult]:
    """Simulate one run."""
    workload = build_workload(rows_of(run), run.speed, BLOCK_SIZE)
    timing = timing_model(run.timing)
    limits = limits_of(workload, run.blocks)
    if run.policy == LEAST:
        return run, least_result(run, workload, timing, limits.max_num_tokens)
    if run.policy in CLAIRVOYANT:
        knowing = Clairvoyant(together=run.policy == CLAIRVOYANT[1])
        return run, ClairvoyantPool(workload, knowing, run.workers, limits, timing, run.speeds).run()
    pool = SimulatedPool(
        workload,
        make_policy(run.policy),
        run.workers,
        limits,
        timing,
        routers=RouterFleet(hold_limit_ms=run.hold_limit_ms),
        speeds=run.speeds,
        targets=run.targets,
    )
    return run, pool.run()


def rows_of(run: Run) -> list[TraceRow]:
    """Return the rows of a run, in order, each as much later as was drawn for it."""
    rows = read_trace(run.trace, run.rows)
    if not run.spread_ms:
        return rows
    draw = Random(SPREAD_SEED)
    later = [msgspec.structs.replace(row, timestamp=row.timestamp + draw.randrange(run.spread_ms)) for row in rows]
    return sorted(later, key=lambda row: row.timestamp)


def least_result(run: Run, workload: Workload, timing: TimingModel, step_tokens: int) -> RunResult:
    """Return a result with the TTFTs that no router can pass; its mean is that of the best division of requests."""
    speeds = run.speeds or WorkerSpeeds()
    best = [
        max(
            speeds.pattern[number % len(speeds.pattern)],
            *(each.speed for each in speeds.changes if each.worker == number),
            0.0,
        )
        for number in range(run.workers)
    ]
    alone, mean_ms = least_ttfts(workload, timing, step_tokens, best)
    return RunResult(f"{mean_ms:,.1f}", requests=len(alone), ttft_ms=alone)


def middle_third(trace: Path, rows: int, speed: float, share: float) -> SpeedChange:
    """Return that the first worker has a share of its speed in the middle third of the time."""
    last_ms = read_trace(trace, rows)[-1].timestamp / speed
    return SpeedChange(0, last_ms / 3, 2 * last_ms / 3, share)


def equal_runs(options: argparse.Namespace) -> Iterator[Run]:
    """Yield runs on equal workers."""
    for speed in options.loads or (1.0, 2.0, 4.0, 7.0):
        for blocks in (SMALL, LARGE):
            for policy in options.policies or ("kv", "field", "lmetric"):
                labels = (f"x{speed:g}", "small" if blocks == SMALL else "large")
                yield Run(options.trace, options.rows, speed, blocks, policy, None, options.timing, labels)


def unlike_runs(options: argparse.Namespace) -> Iterator[Run]:
    """Yield runs on unlike workers."""
    for speed in options.loads or (1.0, 2.0):
        for name, speeds in unlike_pools(options, speed).items():
            for policy in options.policies or ("kv", "field", "lmetric"):
                yield Run(
                    options.trace, options.rows, speed, LARGE, policy, speeds, options.timing, (f"x{speed:g}", name)
                )


def unlike_pools(options: argparse.Namespace, speed: float) -> dict[str, WorkerSpeeds]:
    """Return the pools of unlike workers by name."""
    slows = middle_third(options.trace, options.rows, speed, 0.25)
    return {
        "half 3x slower": HALF_SLOW,
        "one at a quarter": WorkerSpeeds(changes=(slows,)),
        "both": WorkerSpeeds(HALF_SLOW.pattern, (slows,)),
    }


def bound_runs(options: argparse.Namespace) -> Iterator[Run]:
    """Yield what unlike workers could do at all, and what pools without the slow ones do."""
    for speed in options.loads or (1.0, 2.0):
        for name, speeds in unlike_pools(options, speed).items():
            for policy in options.policies or ("kv", "field", *CLAIRVOYANT, LEAST):
                labels = (f"x{speed:g}", name)
                yield Run(options.trace, options.rows, speed, LARGE, policy, speeds, options.timing, labels)
        for name, workers in (("four fast alone", 4), ("all at full speed", WORKERS)):
            for policy in options.policies or ("kv", "field", *CLAIRVOYANT, LEAST):
                labels = (f"x{speed:g}", name)
                yield Run(
                    options.trace, options.rows, speed, LARGE, policy, None, options.timing, labels, workers=workers
                )


def target_runs(options: argparse.Namespace) -> Iterator[Run]:
    """Yield runs of requests with TTFT targets, which the router is told and not told."""
    for speed in options.loads or (2.0, 4.0, 7.0):
        for name, speeds in (("equal", None), ("half 3x slower", HALF_SLOW)):
            for policy in options.policies or ("kv", "field"):
                for told in (False, True) if policy == "kv" else (False,):
                    labels = (f"x{speed:g}", f"{name}, {'told' if told else 'not told'}")
                    targets = TtftTargets(TARGETS_MS, told)
                    yield Run(
                        options.trace, options.rows, speed, LARGE, policy, speeds, options.timing, labels, targets
                    )


def shown(run: Run, result: RunResult) -> str:
    """Return a row of a table."""
    report = policy_report(result, run.workers)
    if run.policy == LEAST:
        cells = [*run.labels, run.policy, result.policy, f"{report['ttft_ms']['p99']:,.0f}", *[""] * 6]
        return f"| {' | '.join(cells)} |"
    ttft, short, guess = report["ttft_ms"], report["short_prompt_ttft_ms"], report["predicted_ttft"]
    cells = [
        *run.labels,
        run.policy,
        f"{ttft['mean']:,.1f}",
        f"{ttft['p99']:,.0f}",
        f"{short['mean']:,.0f}",
        f"{short['p99']:,.0f}",
        f"{100 * report['cached_token_ratio']:.1f}",
        f"{100 * report['busy_ratio']:.0f}",
        "" if run.targets is None else f"{100 * report['ttft_targets_met_ratio']:.1f}",
        "" if guess is None else f"{guess['error']:.2f} {guess['bias']:.2f} {guess['p50']:.2f}",
    ]
    return f"| {' | '.join(cells)} |"


HEAD = "| load | pool | policy | TTFT | p99 | short | short p99 | cached % | busy % | met % | error, bias, p50 |"

TABLES = {"equal": equal_runs, "unlike": unlike_runs, "targets": target_runs, "bounds": bound_runs}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--rows", type=int, default=4000)
    parser.add_argument("--table", choices=TABLES, default="equal")
    parser.add_argument("--policies", type=lambda text: tuple(text.split(",")), default=())
    parser.add_argument("--loads", type=lambda text: tuple(map(float, text.split(","))), default=())
    parser.add_argument("--timing", default="published")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--hold-limit-ms", type=float, default=HOLD_LIMIT_MS)
    parser.add_argument("--spread-ms", type=int, default=0)
    options = parser.parse_args(arguments)
    print(HEAD, flush=True)
    print(f"|{'---|' * (HEAD.count('|') - 1)}", flush=True)
    runs = [
        replace(run, hold_limit_ms=options.hold_limit_ms, spread_ms=options.spread_ms)
        for run in TABLES[options.table](options)
    ]
    if options.jobs == 1:
        for run in runs:
            print(shown(*play(run)), flush=True)
        return
    with ProcessPoolExecutor(options.jobs) as executor:
        for run, result in executor.map(play, runs):
            print(shown(run, result), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
