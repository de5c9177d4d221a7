"""`poolgrid simulate`: a trace under several policies, in virtual time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from poolgrid.cli.command_line import cannot_write, command
from poolgrid.cli.journal_directory import UsageError, journal_errors
from poolgrid.cli.options import with_settings
from poolgrid.process.figures import number, percent
from poolgrid.process.terminal_table import Heading, TerminalTable
from poolgrid.router.core.policy import Policy
from poolgrid.router.policy_loading import PolicyError, make_policy
from poolgrid.tools.simulation.conditions import SpeedError, WorkerSpeeds
from poolgrid.tools.simulation.pool import RouterFleet
from poolgrid.tools.simulation.recording import load_trace, show_report
from poolgrid.tools.simulation.settings import SIMULATED_POLICIES, SimulationSettings

BASICS = (
    "workers",
    "policy",
    "timing",
    "speed",
    "block_size",
    "total_kv_blocks",
    "routers",
    "requests",
    "out",
    "as_json",
)


@command()
@with_settings(SimulationSettings, renamed={"as_json": "--json"}, basics=BASICS)
@click.argument("trace", type=click.Path(path_type=Path), help="Mooncake-format trace (JSON lines).")
def simulate(settings: SimulationSettings, trace: Path) -> None:
    """Play a trace through the router core and simulated engines in virtual time, per policy."""
    with journal_errors("simulating"):
        _simulate(trace, settings)


def _simulate(trace: Path, settings: SimulationSettings) -> None:
    """Simulate each policy on a trace; raises ``UsageError``."""
    policies = _policies(settings)
    if fault := cannot_write(settings.out):
        raise UsageError(f"--out: {fault}; nothing was simulated")
    stage = load_trace(trace, settings, settings.kv_block_size)
    try:
        speeds = WorkerSpeeds.parse(settings.worker_speeds)
    except SpeedError as error:
        raise UsageError(str(error)) from None
    routers = RouterFleet(settings.routers)
    true_speeds = None if speeds == WorkerSpeeds() else speeds
    reports = {name: stage.play(name, policy, routers, true_speeds) for name, policy in policies.items()}
    table = result_table(stage.workload.ideal_cached_token_ratio, reports)
    show_report(stage.report(settings.speed, reports, routers), table, settings.as_json, settings.out)


def _policies(settings: SimulationSettings) -> dict[str, Policy]:
    policies: dict[str, Policy] = {}
    for name in [each.strip() for each in settings.policy.split(",") if each.strip()] or [""]:
        if name not in SIMULATED_POLICIES and ":" not in name:
            allowed = f"{', '.join(SIMULATED_POLICIES)}, or module:Class"
            raise UsageError(f"policy {name!r} is unknown, allowed are {allowed}")
        try:
            policies[name] = make_policy(name)
        except PolicyError as error:
            raise UsageError(str(error)) from None
    return policies


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
