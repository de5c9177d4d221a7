"""Run a simulation and print what it found."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from poolgrid.cli.json_output import cannot_write, json_text, print_json
from poolgrid.process.figures import number, percent
from poolgrid.process.terminal_table import Heading, TerminalTable, terminal
from poolgrid.router.core.cost import CostWeights
from poolgrid.router.core.policy import Policy
from poolgrid.router.policy_loading import PolicyError, make_policy
from poolgrid.tools.bench.trace import TraceError, read_trace
from poolgrid.tools.simulation.pool import RouterFleet, SimulatedPool
from poolgrid.tools.simulation.report import policy_report
from poolgrid.tools.simulation.settings import SIMULATED_POLICIES, SimulationSettings
from poolgrid.tools.simulation.ttft_targets import TargetError, TtftTargets
from poolgrid.tools.simulation.worker_speeds import SpeedError, WorkerSpeeds
from poolgrid.tools.simulation.workload import build_workload
from poolgrid.workers.core.shipped_timing import timing_model
from poolgrid.workers.core.timing import TableError
from poolgrid.workers.engines.simulated.core.engine import EngineLimits


def run_simulation(trace: Path, settings: SimulationSettings) -> int:
    """Simulate each policy on a trace; return the exit status."""
    errors = Console(stderr=True)
    names = [name.strip() for name in settings.policy.split(",") if name.strip()]
    weights = CostWeights(
        prefill_weight=settings.prefill_weight,
        queue_weight=settings.queue_weight,
        decode_weight=settings.decode_weight,
        device_weight=settings.device_weight,
    )
    chosen: dict[str, Policy] = {}
    for name in names or [""]:
        if name not in SIMULATED_POLICIES and ":" not in name:
            allowed = f"{', '.join(SIMULATED_POLICIES)}, or module:Class"
            errors.print(f"simulating: policy {name!r} is unknown, allowed are {allowed}", markup=False)
            return 2
        try:
            chosen[name] = make_policy(name, weights, settings.temperature)
        except PolicyError as error:
            errors.print(f"simulating: {error}", markup=False)
            return 2
    try:
        rows = read_trace(trace, settings.requests)
        timing = timing_model(settings.timing, settings.timing_table)
        targets = TtftTargets.parse(settings.ttft_targets_ms, not settings.hide_targets)
        speeds = WorkerSpeeds.parse(settings.worker_speeds, settings.slowdowns, settings.workers)
    except (TraceError, TableError, SpeedError, TargetError, OSError) as error:
        errors.print(f"simulating: {error}", markup=False)
        return 2
    if fault := cannot_write(settings.out):
        errors.print(f"simulating: --out: {fault}; nothing was simulated", markup=False)
        return 2
    workload = build_workload(rows, settings.speed, settings.block_size)
    roomy = workload.total_tokens // settings.block_size + 2 * len(rows) + 1
    try:
        limits = EngineLimits(
            block_size=settings.block_size,
            total_kv_blocks=settings.blocks_per_worker or roomy,
            host_kv_blocks=settings.host_blocks_per_worker,
            max_batch_size=settings.max_batch_size,
            max_num_tokens=settings.max_num_tokens,
            max_sequence_length=workload.longest + 1,
            max_waiting_requests=len(rows),
        )
    except ValueError as error:
        errors.print(f"simulating: {error}", markup=False)
        return 2
    if limits.total_kv_blocks * limits.block_size < workload.longest:
        errors.print(
            f"simulating: blocks_per_worker is {limits.total_kv_blocks}, the longest request needs "
            f"{-(-workload.longest // limits.block_size)}",
            markup=False,
        )
        return 2
    policies = {}
    with Progress(
        TextColumn("{task.description:12}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=errors,
        disable=not sys.stderr.isatty(),
    ) as progress:
        for name, policy in chosen.items():
            task = progress.add_task(name, total=len(workload.requests))
            pool = SimulatedPool(
                workload,
                policy,
                settings.workers,
                limits,
                timing,
                routers=RouterFleet(
                    settings.routers,
                    settings.event_delay_ms,
                    settings.separate_routers,
                    settings.crowding_retries,
                    settings.retention,
                    settings.hold_limit_ms,
                ),
                speeds=None if speeds == WorkerSpeeds() else speeds,
                targets=targets,
            )
            result = pool.run(lambda done, task=task: progress.update(task, completed=done))  # type: ignore[misc]
            policies[name] = policy_report(result, settings.workers)
    report = {
        "trace": trace.name,
        "requests": len(workload.requests),
        "workers": settings.workers,
        "routers": settings.routers,
        "event_delay_ms": settings.event_delay_ms,
        "retention": settings.retention,
        "speed": settings.speed,
        "block_size": settings.block_size,
        "blocks_per_worker": limits.total_kv_blocks,
        "ideal_cached_token_ratio": workload.ideal_cached_token_ratio,
        "policies": policies,
    }
    if settings.as_json:
        print_json(report)
    else:
        terminal().print(result_table(workload.ideal_cached_token_ratio, policies))
    if settings.out is not None:
        settings.out.write_text(json_text(report), encoding="utf-8")
    return 0


def result_table(ideal: float, policies: Mapping[str, Mapping[str, Any]]) -> TerminalTable:
    """Return the policies side by side."""
    names = ("cached", "of ideal", "TTFT mean", "p99", "ITL mean", "p99", "busy", "spread")
    table = TerminalTable(
        [Heading("policy", numeric=False), *map(Heading, names)],
        f"an infinite shared cache would reuse {percent(ideal)} of the prompt tokens",
        "times in ms; spread: prompt tokens of the busiest worker over the mean",
    )
    for name, report in policies.items():
        ttft, itl = report["ttft_ms"], report["itl_ms"]
        table.add(
            name,
            percent(report["cached_token_ratio"]),
            percent(report["cached_token_ratio"] / ideal if ideal else None),
            number(ttft["mean"], 0),
            number(ttft["p99"], 0),
            number(itl["mean"], 1),
            number(itl["p99"], 1),
            percent(report["busy_ratio"], 0),
            number(report["worker_tokens_max_over_mean"]),
        )
    return table
