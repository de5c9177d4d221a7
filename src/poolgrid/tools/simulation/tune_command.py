"""`poolgrid tune`: cost weights searched on one part of the traffic and justified on another that came later."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from poolgrid.cli.command_line import cannot_write, command, json_text, print_json
from poolgrid.cli.journal_directory import STREAM_SCHEMES, UsageError, journal_errors
from poolgrid.cli.options import with_settings
from poolgrid.process.figures import counted
from poolgrid.process.terminal_table import terminal
from poolgrid.tools.simulation.recording import Stage, load_recording, load_trace
from poolgrid.tools.simulation.settings import TuneSettings
from poolgrid.tools.simulation.tuning import WORTHWHILE, Objective, Trial, best_of, search
from poolgrid.tools.simulation.variants import Variant, VariantResult, run_variant
from poolgrid.tools.simulation.what_if_command import difference_table, report_of
from poolgrid.tools.simulation.workload import Workload, part_of

SEARCH_SHARE = 0.6
"""Share of the requests, the earliest, to search on; the rest is held back."""

REQUESTS_MIN = 20
"""Fewer requests in either part say nothing about a 99th percentile, or about anything."""

BASICS = (
    "objective",
    "trials",
    "ttft_target_ms",
    "itl_target_ms",
    "workers",
    "decisions",
    "seed",
    "config_out",
    "as_json",
)


@command()
@with_settings(TuneSettings, renamed={"as_json": "--json", "config_out": "--config"}, basics=BASICS)
@click.argument("source", help="A data_dir with recorded decisions, nats://HOST:PORT/POOL, or a Mooncake-format trace.")
def tune(settings: TuneSettings, source: str) -> None:
    """Search cost weights for an objective, and justify them on traffic that the search did not see."""
    raise SystemExit(run_tune(source, settings))


def run_tune(source: str, settings: TuneSettings) -> int:
    """Search, compare with the defaults on held-back traffic, print and write what was found; return the status."""
    console = terminal()
    with journal_errors("tuning"):
        for name, out in (("--out", settings.out), ("--config", settings.config_out)):
            if fault := cannot_write(out):
                raise UsageError(f"{name}: {fault}; nothing was searched")
        if source.startswith(STREAM_SCHEMES) or Path(source).is_dir():
            stage = load_recording(source, settings.decisions, settings)
        else:
            stage = load_trace(Path(source), settings, settings.block_size)
        count = len(stage.workload.requests)
        cut = int(count * SEARCH_SHARE)
        if cut < REQUESTS_MIN or count - cut < REQUESTS_MIN:
            raise UsageError(
                f"{counted(count, 'request')}, of which {cut:,} to search on: both parts need at least {REQUESTS_MIN}; "
                "nothing was searched"
            )
        objective = Objective(settings.objective, settings.ttft_target_ms, settings.itl_target_ms)
        searched = part_of(stage.workload, 0, cut)
        held_back = part_of(stage.workload, cut, count)
        trials = _search(searched, stage, objective, settings)
        best = best_of(trials, objective)
        default = _run(held_back, Variant("default"), stage)
        found = default if best.variant == trials[0].variant else _run(held_back, best.variant, stage)
        gain = objective.gain(found, default)
        accepted = gain >= WORTHWHILE
        chosen = best.variant if accepted else Variant("default")
        verdict = _verdict(objective, best, trials[0], found, default, gain, accepted)
        for remark in stage.remarks:
            click.echo(remark, err=True)
        shown = {"default": default.report}
        if found is not default:
            shown["tuned"] = found.report
        held = Stage(stage.name, held_back, stage.workers, stage.limits, stage.timing)
        answer = _answer(held, settings, objective, trials, best, shown, accepted, gain, verdict)
        if settings.as_json:
            print_json(answer)
        else:
            console.print(difference_table(held, shown))
            console.print(verdict, soft_wrap=True)
        if settings.out is not None:
            settings.out.write_text(json_text(answer), encoding="utf-8")
        if settings.config_out is not None:
            settings.config_out.write_text(config_text(stage, settings, chosen, verdict), encoding="utf-8")
            click.echo(f"try it: poolgrid up --settings-file {settings.config_out}", err=settings.as_json)
    return 0


def _run(workload: Workload, variant: Variant, stage: Stage) -> VariantResult:
    return run_variant(workload, variant, stage.workers, stage.limits, stage.timing)


def _search(workload: Workload, stage: Stage, objective: Objective, settings: TuneSettings) -> list[Trial]:
    with Progress(
        TextColumn("{task.description:36}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        disable=not sys.stderr.isatty(),
        transient=True,
    ) as progress:
        task = progress.add_task("searching", total=settings.trials)

        def on_trial(number: int, best: Trial) -> None:
            shown = f"best {objective.name} {objective.value(best.result):,.2f}"
            progress.update(task, completed=number, description=shown)

        return search(
            lambda variant: _run(workload, variant, stage), objective, settings.trials, settings.seed, on_trial
        )


def _verdict(
    objective: Objective,
    best: Trial,
    first: Trial,
    found: VariantResult,
    default: VariantResult,
    gain: float,
    accepted: bool,
) -> str:
    unit = "ms" if objective.name == "ttft-p99" else "requests/s within both targets"
    if best.variant == first.variant:
        value = objective.value(first.result)
        return f"Nothing tried beat the defaults on the search part ({value:,.2f} {unit}). Keep the defaults."
    on_search = objective.gain(best.result, first.result)
    held = (
        f"{objective.value(default):,.2f} → {objective.value(found):,.2f} {unit} ({gain:+.1%}) on the held-back part, "
        f"{on_search:+.1%} on the part searched"
    )
    if accepted:
        return f"Better by {objective.name}: {held}."
    return (
        f"Nothing found beats the defaults by {WORTHWHILE:.0%} on traffic it had not seen: {held}. Keep the defaults."
    )


def _answer(
    held: Stage,
    settings: TuneSettings,
    objective: Objective,
    trials: list[Trial],
    best: Trial,
    shown: dict[str, Any],
    accepted: bool,
    gain: float,
    verdict: str,
) -> dict[str, Any]:
    return {
        **report_of(held, settings.speed, shown),
        "tune": {
            "objective": objective.name,
            "ttft_target_ms": objective.ttft_target_ms,
            "itl_target_ms": objective.itl_target_ms,
            "seed": settings.seed,
            "accepted": accepted,
            "gain_held_back": gain,
            "gain_searched": objective.gain(best.result, trials[0].result),
            "best": best.variant.settings(),
            "verdict": verdict,
            "trials": [
                {"settings": trial.variant.settings(), "value": objective.value(trial.result)} for trial in trials
            ],
        },
    }


def config_text(stage: Stage, settings: TuneSettings, chosen: Variant, verdict: str) -> str:
    """Return the settings file: why, as comments, and the weights."""
    count = len(stage.workload.requests)
    lines = [
        f"# {verdict}",
        f"# poolgrid tune {stage.name}: {counted(count, 'request')} on {counted(stage.workers, 'simulated worker')}, "
        f"objective {settings.objective}, {counted(settings.trials, 'trial')}, seed {settings.seed};",
        f"# searched on the first {SEARCH_SHARE:.0%}, compared on the rest. Engines are a model: measure it.",
    ]
    # How long blocks stay was not searched, and is the router's own affair.
    chosen_settings = {name: value for name, value in chosen.settings().items() if name != "retention"}
    lines += [f"{name} = {json.dumps(value)}" for name, value in chosen_settings.items()]
    return "\n".join(lines) + "\n"
