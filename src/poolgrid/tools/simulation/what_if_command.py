"""`poolgrid what-if`: recorded traffic played on simulated engines, under the recorded settings and under others."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import reduce
from typing import Any

import click

from poolgrid.cli.command_line import cannot_write, command
from poolgrid.cli.journal_directory import UsageError, journal_errors
from poolgrid.cli.options import with_settings
from poolgrid.process.figures import counted, number, percent
from poolgrid.process.terminal_table import Heading, TerminalTable
from poolgrid.router.core.cost import CostWeights
from poolgrid.router.policy_loading import make_policy
from poolgrid.tools.simulation.pool import RouterFleet
from poolgrid.tools.simulation.recording import RecordingStage, load_recording, show_report
from poolgrid.tools.simulation.session_line import split_admission
from poolgrid.tools.simulation.settings import SIMULATED_POLICIES, WhatIfSettings

VARIANTS_MAX = 64
"""Simulations of one command; more of them nobody compares by eye."""

FIGURES: tuple[tuple[float, tuple[str, ...]], ...] = (
    (100.0, ("cached_token_ratio",)),
    (1.0, ("ttft_ms", "mean")),
    (1.0, ("ttft_ms", "p99")),
    (1.0, ("itl_ms", "mean")),
    (1.0, ("itl_ms", "p99")),
    (1.0, ("worker_tokens_max_over_mean",)),
)
"""Factor of each column of the table, and the place of its figure in a report."""

_SWEPT = ("overlap_weight", "queue_weight", "decode_weight", "temperature")

BASICS = (
    "policy",
    "workers",
    "timing",
    "overlap_weight",
    "queue_weight",
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
        variants = variants_of(settings, stage)
        reports: dict[str, dict[str, Any]] = {}
        for variant in variants:
            name, admission = split_admission(variant.policy)
            policy = make_policy(name, variant.weights, variant.temperature)
            played = stage.play(variant.name, policy, admission=admission)
            reports[variant.name] = {**played, "settings": variant.settings()}
        for remark in stage.remarks:
            click.echo(remark, err=True)
        report = stage.report(settings.speed, reports, RouterFleet(), measured=stage.measured)
        show_report(report, difference_table(stage, reports), settings.as_json, settings.out)
    return 0


@dataclass(frozen=True, slots=True)
class Variant:
    """Settings of a router."""

    name: str
    policy: str
    weights: CostWeights
    temperature: float

    def settings(self) -> dict[str, Any]:
        """Return the settings by their names in the router."""
        return {"policy": self.policy, **asdict(self.weights), "temperature": self.temperature}


def variants_of(settings: WhatIfSettings, stage: RecordingStage) -> list[Variant]:
    """Return the recorded settings and every combination of the given ones; raises ``UsageError``."""
    recorded = stage.recorded_settings
    weights = _scaled(
        CostWeights(**{name: float(recorded[name]) for name in CostWeights.__dataclass_fields__ if name in recorded}),
        float(recorded.get("overlap_weight", 1.0)),
    )
    policy = str(recorded.get("policy", "kv"))
    if policy not in SIMULATED_POLICIES:
        stage.remarks.append(f"the recorded policy {policy} cannot be simulated; kv stands in for it")
        policy = "kv"
    base = Variant("recorded", policy, weights, float(recorded.get("temperature", 0.0)))
    policies = _words(settings.policy) or [policy]
    for name in policies:
        if split_admission(name)[0] not in SIMULATED_POLICIES:
            allowed = ", ".join(SIMULATED_POLICIES)
            raise UsageError(
                f"--policy: {name!r} is unknown, allowed are {allowed}, each also with +sessions behind it"
            )
    swept = {name: _numbers(name, getattr(settings, name)) for name in _SWEPT}
    given = {name: values for name, values in swept.items() if values}
    variants = [base]
    for name, values in itertools.product(policies, itertools.product(*given.values())):
        # Only kv looks at weights; the others are tried once.
        chosen = dict(zip(given, values, strict=True)) if split_admission(name)[0] == "kv" else {}
        words = [f"{key.replace('_', '-')}={value:g}" for key, value in chosen.items()]
        variant = _with(Variant(" ".join([name, *words]), name, weights, base.temperature), chosen)
        if variant.settings() not in [each.settings() for each in variants]:
            variants.append(variant)
    if len(variants) > VARIANTS_MAX:
        raise UsageError(f"{counted(len(variants), 'combination')}, allowed are {VARIANTS_MAX}; nothing was simulated")
    if len(variants) == 1:
        stage.remarks.append("no other settings were given: try --policy, --overlap-weight or --temperature")
    return variants


def _with(variant: Variant, chosen: Mapping[str, float]) -> Variant:
    weights = replace(
        _scaled(variant.weights, chosen.get("overlap_weight", 1.0)),
        **{name: value for name, value in chosen.items() if name in CostWeights.__dataclass_fields__},
    )
    return replace(variant, weights=weights, temperature=chosen.get("temperature", variant.temperature))


def _scaled(weights: CostWeights, overlap: float) -> CostWeights:
    """Return weights with another credit for what is cached."""
    return replace(
        weights,
        device_weight=weights.device_weight * overlap,
        host_weight=weights.host_weight * overlap,
        disk_weight=weights.disk_weight * overlap,
    )


def _words(text: str | None) -> list[str]:
    return [word.strip() for word in (text or "").split(",") if word.strip()]


def _numbers(name: str, text: str | None) -> list[float]:
    values = []
    for word in _words(text):
        try:
            value = float(word)
        except ValueError:
            value = -1.0
        if not 0.0 <= value <= 1000.0:
            raise UsageError(f"--{name.replace('_', '-')}: {word!r}, allowed are numbers from 0 to 1000")
        values.append(value)
    return values


def difference_table(stage: RecordingStage, reports: Mapping[str, Mapping[str, Any]]) -> TerminalTable:
    """Return every variant's figures, and how they differ from those under the recorded settings."""
    headings = ("reused %", "TTFT mean", "TTFT p99", "ITL mean", "ITL p99", "spread")
    table = TerminalTable(
        [Heading("settings", numeric=False), *map(Heading, headings)],
        f"{counted(len(stage.workload.requests), 'request')} on {counted(stage.workers, 'simulated worker')}; an "
        f"infinite shared cache would reuse {percent(stage.workload.ideal_cached_token_ratio)}",
        "milliseconds; spread: prompt tokens of the busiest worker over the mean",
    )
    if stage.measured is not None:
        then = map(number, _figures(stage.measured))
        table.add("measured then", *then, style="dim")
    base: list[float] = []
    for name, report in reports.items():
        values = _figures(report)
        table.add(name, *map(number, values))
        if base:
            table.add("  compared", *(_change(value, before) for value, before in zip(values, base, strict=True)))
        base = base or values
    return table


def _figures(report: Mapping[str, Any]) -> list[float]:
    return [factor * float(reduce(lambda part, key: part[key], keys, report)) for factor, keys in FIGURES]  # type: ignore[arg-type]


def _change(value: float, before: float) -> str:
    return "new" if before == 0 and value else f"{(value - before) / before if before else 0.0:+.1%}"
