"""`poolgrid simulate`: a trace under several policies, in virtual time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from poolgrid.kernel.decision.policy import Policy
from poolgrid.plugins.simulation.pool import RouterFleet
from poolgrid.plugins.simulation.recording import load_agents, load_mixed, load_trace, show_report
from poolgrid.plugins.simulation.session_line import PEERS, split_admission
from poolgrid.plugins.simulation.settings import SIMULATED_POLICIES, SimulationSettings
from poolgrid.plugins.simulation.workload import SpeedError, WorkerSpeeds
from poolgrid.server.cli.command_line import cannot_write, command
from poolgrid.server.cli.journal_directory import UsageError, journal_errors
from poolgrid.server.cli.options import with_settings
from poolgrid.server.process.figures import number, percent
from poolgrid.server.process.terminal_table import Heading, TerminalTable
from poolgrid.server.router.policy_loading import PolicyError, make_policy

TRACE_POLICIES = "kv,round-robin,least-loaded"
AGENT_POLICIES = "kv,sticky,affinity,kv+sessions"

BASICS = (
    "agents",
    "mixed",
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
@click.argument(
    "trace",
    type=click.Path(path_type=Path),
    required=False,
    help="Mooncake-format trace (JSON lines); none with --agents.",
)
def simulate(settings: SimulationSettings, trace: Path | None) -> None:
    """Play a trace or agents through the router core and simulated engines in virtual time, per policy."""
    with journal_errors("simulating"):
        _simulate(trace, settings)


def _simulate(trace: Path | None, settings: SimulationSettings) -> None:
    """Simulate each policy on a trace; raises ``UsageError``."""
    policies = _policies(settings)
    if fault := cannot_write(settings.out):
        raise UsageError(f"--out: {fault}; nothing was simulated")
    if (trace is None) == (settings.agents is None):
        raise UsageError("TRACE or --agents is needed, and not both; nothing was simulated")
    if settings.mixed and settings.agents is None:
        raise UsageError("--mixed: needs --agents; nothing was simulated")
    if settings.agents is not None:
        load = load_mixed if settings.mixed else load_agents
        stage = load(settings.agents, settings, settings.kv_block_size)
    else:
        assert trace is not None, "one of the two is given"
        stage = load_trace(trace, settings, settings.kv_block_size)
    try:
        speeds = WorkerSpeeds.parse(settings.worker_speeds)
    except SpeedError as error:
        raise UsageError(str(error)) from None
    routers = RouterFleet(settings.routers)
    true_speeds = None if speeds == WorkerSpeeds() else speeds
    reports = {
        name: stage.play(name, policy, routers, true_speeds, split_admission(name)[1])
        for name, policy in policies.items()
    }
    for remark in stage.remarks:
        click.echo(remark, err=True)
    make_table = result_table if settings.agents is None else mixed_table if settings.mixed else agent_table
    table = make_table(stage.workload.ideal_cached_token_ratio, reports)
    show_report(stage.report(settings.speed, reports, routers), table, settings.as_json, settings.out)


def _policies(settings: SimulationSettings) -> dict[str, Policy]:
    policies: dict[str, Policy] = {}
    default = TRACE_POLICIES if settings.agents is None else AGENT_POLICIES
    given = default if settings.policy is None else settings.policy
    for name in [each.strip() for each in given.split(",") if each.strip()] or [""]:
        policy, _ = split_admission(name)
        if policy in PEERS:
            policies[name] = PEERS[policy]()
            continue
        if policy not in SIMULATED_POLICIES and ":" not in policy:
            allowed = f"{', '.join((*SIMULATED_POLICIES, *PEERS))}, or module:Class"
            raise UsageError(f"policy {name!r} is unknown, allowed are {allowed}, each also with +sessions behind it")
        try:
            policies[name] = make_policy(policy)
        except PolicyError as error:
            raise UsageError(str(error)) from None
    return policies


def agent_table(ideal: float, policies: Mapping[str, Mapping[str, Any]]) -> TerminalTable:
    """Return what agents would see of the policies, side by side."""
    names = ("cached", "of ideal", "turns/min", "TTFT mean", "first p50", "longest", "waited", "busy")
    table = TerminalTable(
        [Heading("policy", numeric=False), *map(Heading, names)],
        f"an infinite shared cache would reuse {percent(ideal)} of the prompt tokens",
        "times in s; first: TTFT of a session's first turn; waited: turns that waited for room for their session",
    )
    for name, report in policies.items():
        first = report["first_turn_ms"]
        table.add(
            name,
            percent(report["cached_token_ratio"]),
            percent(report["cached_token_ratio"] / ideal if ideal else None),
            number(report["turns_per_minute"], 1),
            number(report["ttft_ms"]["mean"] / 1000, 2),
            number(first["p50"] / 1000, 2),
            number(first["max"] / 1000, 2),
            number(report["waited_turns"], 0),
            percent(report["busy_ratio"], 0),
        )
    return table


def mixed_table(ideal: float, policies: Mapping[str, Mapping[str, Any]]) -> TerminalTable:
    """Return what each class of clients would see of the policies."""
    names = ("cached", "requests", "turns/min", "TTFT mean", "p50", "p99", "longest", "waited")
    table = TerminalTable(
        [Heading("policy", numeric=False), *map(Heading, names)],
        f"an infinite shared cache would reuse {percent(ideal)} of the prompt tokens",
        "times in s; waited: turns that waited for room for their session",
    )

    def times(report: Mapping[str, Any]) -> tuple[str, ...]:
        return tuple(number(report[name] / 1000, 2) for name in ("mean", "p50", "p99", "max"))

    for name, report in policies.items():
        classes = report["classes"]
        longest = max(each["max"] for each in classes.values())
        requests, turns = number(report["requests"], 0), number(report["turns_per_minute"], 1)
        values = times({**report["ttft_ms"], "max": longest})
        table.add(
            name, percent(report["cached_token_ratio"]), requests, turns, *values, number(report["waited_turns"], 0)
        )
        for kind, each in classes.items():
            table.add(f"  {kind}", "", number(each["requests"], 0), "", *times(each), "")
    return table


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
