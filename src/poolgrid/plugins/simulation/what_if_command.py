"""`poolgrid what-if`: recorded traffic played on simulated engines, under the recorded settings and under others."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import Any

import click

from poolgrid.kernel.decision.policy import Policy
from poolgrid.kernel.routing.kv_policy import KvAware
from poolgrid.plugins.simulation.pool import RouterFleet
from poolgrid.plugins.simulation.recording import RecordingStage, load_recording, show_report
from poolgrid.plugins.simulation.session_line import split_admission
from poolgrid.plugins.simulation.settings import SIMULATED_POLICIES, WhatIfSettings
from poolgrid.plugins.simulation.workload import Workload
from poolgrid.server.cli.command_line import cannot_write, command
from poolgrid.server.cli.journal_directory import UsageError, journal_errors
from poolgrid.server.cli.options import with_settings
from poolgrid.server.process.figures import counted, number, percent
from poolgrid.server.process.terminal_table import Heading, TerminalTable
from poolgrid.server.router.decision_journal.opening import policy_of
from poolgrid.server.router.policy_loading import make_policy

FIGURES: tuple[tuple[float, tuple[str, ...]], ...] = (
    (100.0, ("cached_token_ratio",)),
    (1.0, ("ttft_ms", "mean")),
    (1.0, ("ttft_ms", "p99")),
    (1.0, ("itl_ms", "mean")),
    (1.0, ("itl_ms", "p99")),
    (1.0, ("worker_tokens_max_over_mean",)),
)
"""Factor of each column of the table, and the place of its figure in a report."""

RECORDED = "recorded"

REUSE_POINTS_MAX, TTFT_FACTOR_MAX = 2.0, 1.5
"""Differences to what was measured up to which a simulation reproduces it: smaller than those between policies."""

BASICS = (
    "policy",
    "workers",
    "timing",
    "decisions",
    "requests",
    "out",
    "as_json",
)


@command()
@with_settings(WhatIfSettings, renamed={"as_json": "--json"}, basics=BASICS)
@click.argument(
    "directory", help="Directory of the pool's journal with decisions (a data_dir), or nats://HOST:PORT/POOL."
)
def what_if(settings: WhatIfSettings, directory: str) -> None:
    """Play recorded traffic on simulated engines under the recorded settings and under others, and compare."""
    raise SystemExit(run_what_if(directory, settings))


def run_what_if(directory: str, settings: WhatIfSettings) -> int:
    """Play recorded traffic under each variant; return the exit status."""
    with journal_errors("trying other settings"):
        if fault := cannot_write(settings.out):
            raise UsageError(f"--out: {fault}; nothing was simulated")
        stage = load_recording(directory, settings.decisions, settings)
        reports: dict[str, dict[str, Any]] = {}
        # Routers that do not name the setting admitted sessions.
        was_on = stage.noted is None or bool(stage.noted.settings.get("session_admission", True))
        recorded = "sessions" if was_on else ""
        for name, policy in variants_of(settings, stage).items():
            played = stage.play(name, policy, admission=recorded if name == RECORDED else split_admission(name)[1])
            reports[name] = {**played, "settings": {"policy": policy.name}}
        if fault := unlike_measured(stage.measured, reports[RECORDED]):
            stage.remarks.append(fault)
        for remark in stage.remarks:
            click.echo(remark, err=True)
        report = stage.report(settings.speed, reports, RouterFleet(), measured=stage.measured)
        show_report(report, difference_table(stage, reports), settings.as_json, settings.out)
    return 0


def variants_of(settings: WhatIfSettings, stage: RecordingStage) -> dict[str, Policy]:
    """Return the recorded policy and the given ones; raises ``UsageError``."""
    noted = stage.noted
    recorded = KvAware.name if noted is None else str(noted.settings.get("policy", KvAware.name))
    if noted is None or recorded not in SIMULATED_POLICIES:
        stage.remarks.append(f"the recorded policy {recorded} cannot be simulated; kv stands in for it")
        variants = {RECORDED: make_policy(KvAware.name)}
    else:
        variants = {RECORDED: policy_of(noted)}
    workload = stage.workload
    has_sessions = isinstance(workload, Workload) and any(each.session is not None for each in workload.requests)
    names = [word.strip() for word in (settings.policy or "").split(",") if word.strip()]
    for name in names:
        if split_admission(name)[0] not in SIMULATED_POLICIES:
            raise UsageError(f"--policy: {name!r} is unknown, allowed are {', '.join(SIMULATED_POLICIES)}")
        if name != recorded or has_sessions:
            variants[name] = make_policy(split_admission(name)[0])
    if len(variants) == 1:
        stage.remarks.append("no other policy was given: try --policy kv,round-robin")
    return variants


def difference_table(stage: RecordingStage, reports: Mapping[str, Mapping[str, Any]]) -> TerminalTable:
    """Return every variant's figures, and how they differ from those under the recorded settings."""
    headings = ("reused %", "TTFT mean", "TTFT p99", "ITL mean", "ITL p99", "spread", "waited")
    table = TerminalTable(
        [Heading("settings", numeric=False), *map(Heading, headings)],
        f"{counted(len(stage.workload.requests), 'request')} on {counted(stage.workers, 'simulated worker')}; an "
        f"infinite shared cache would reuse {percent(stage.workload.ideal_cached_token_ratio)}",
        "milliseconds; spread: prompt tokens of the busiest worker over the mean; waited: turns without room for their "
        "session",
    )
    if stage.measured is not None:
        then = map(number, _figures(stage.measured))
        table.add("measured then", *then, "", style="dim")
    base: list[float] = []
    for name, report in reports.items():
        values = _figures(report)
        table.add(name, *map(number, values), number(report["waited_turns"], 0))
        if base:
            table.add("  compared", *(_change(value, before) for value, before in zip(values, base, strict=True)), "")
        base = base or values
    return table


def unlike_measured(measured: Mapping[str, Any] | None, played: Mapping[str, Any]) -> str:
    """Return in what the simulation under the recorded settings differs from what was measured; empty = in nothing."""
    if measured is None:
        return ""
    (then_reused, then_ttft, *_), (reused, ttft, *_) = _figures(measured), _figures(played)
    is_like = abs(reused - then_reused) <= REUSE_POINTS_MAX and ttft <= TTFT_FACTOR_MAX * then_ttft
    if is_like and then_ttft <= TTFT_FACTOR_MAX * ttft:
        return ""
    return (
        f"the simulation does not reproduce what was measured: {number(then_reused)} % reused and TTFT "
        f"{number(then_ttft)} ms, simulated {number(reused)} % and {number(ttft)} ms; compare the simulated rows only "
        "with each other"
    )


def _figures(report: Mapping[str, Any]) -> list[float]:
    return [factor * float(reduce(lambda part, key: part[key], keys, report)) for factor, keys in FIGURES]  # type: ignore[arg-type]


def _change(value: float, before: float) -> str:
    return "new" if before == 0 and value else f"{(value - before) / before if before else 0.0:+.1%}"
