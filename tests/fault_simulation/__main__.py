"""``python -m tests.fault_simulation``: play one seed, or many."""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from tests.fault_simulation.planted import PLANTED, planted
from tests.fault_simulation.scenario import PROFILES, Scenario, make_scenario
from tests.fault_simulation.seeds import SEEDS_FILE, keep, kept_seeds
from tests.fault_simulation.simulation import Report, Simulation, play

PLANTED_WITHIN_SEEDS = 200
EVENTS_SHOWN = 25
TASKS_AHEAD = 64
"""Runs handed to the processes at a time, so that an end by Ctrl-C is quick."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is left of a run that another process played."""

    profile: str
    seed: int
    failure: str | None
    events: int
    last_events: list[str]


def judge(task: tuple[int, str | None]) -> Verdict:
    """Play one seed."""
    seed, profile = task
    report = play(seed, profile)
    lines = report.last_events[-EVENTS_SHOWN:] if report.failure else []
    return Verdict(report.scenario.profile, seed, report.failure, report.events, lines)


def describe(scenario: Scenario) -> str:
    """Return a scenario in a few lines."""
    pools = "; ".join(
        f"{pool.name}: {', '.join(worker.role.name.lower() for worker in pool.workers)}, {len(pool.routers)} router(s)"
        f"{' with the consolidator inside' if pool.embedded else ''}, journal {pool.journal} ({pool.fsync})"
        for pool in scenario.pools
    )
    faults = "".join(f"\n  {1000 * fault.at_s:9.1f} ms  {fault}" for fault in scenario.faults) or " none"
    return (
        f"profile {scenario.profile}, {len(scenario.requests)} requests, blocks of {scenario.block_size}\n"
        f"{pools}{'; a global router' if scenario.global_router else ''}\n{scenario.network}\nfaults:{faults}"
    )


def command_for(profile: str, seed: int) -> str:
    """Return what reproduces a run."""
    return f"python -m tests.fault_simulation --profile {profile} --seed {seed} --trace"


def show_failure(console: Console, verdict: Verdict) -> None:
    """Print what a failed run saw and how to see it again."""
    console.print(f"\n[bold red]failed[/]: {verdict.profile} {verdict.seed}", highlight=False)
    console.print(verdict.failure, markup=False, highlight=False, soft_wrap=True)
    for line in verdict.last_events:
        console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"again: {command_for(verdict.profile, verdict.seed)}", markup=False, highlight=False, soft_wrap=True)


def play_one(console: Console, seed: int, profile: str | None, trace: bool) -> int:
    """Play a seed and tell of it; return the exit status."""
    scenario = make_scenario(seed, profile)
    console.print(describe(scenario), markup=False, highlight=False, soft_wrap=True)
    report: Report = Simulation(scenario, keep_all=trace).run()
    if trace:
        for line in report.last_events:
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    counts = ", ".join(f"{name} {count}" for name, count in sorted(report.counts.items()))
    console.print(
        f"{report.events} events in {report.virtual_s:.3f} virtual seconds, trace {report.digest}; {counts}",
        markup=False,
        highlight=False,
    )
    if report.failure is None:
        console.print("[green]passed[/]")
        return 0
    last = [] if trace else report.last_events[-EVENTS_SHOWN:]
    show_failure(console, Verdict(scenario.profile, seed, report.failure, report.events, last))
    return 1


def play_many(console: Console, seeds: range, profiles: list[str | None], jobs: int, keep_failures: bool) -> int:
    """Play seeds in several processes; return the exit status."""
    tasks = [(seed, profile) for seed in seeds for profile in profiles]
    failures: list[Verdict] = []
    events = 0
    began_s = time.monotonic()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with ProcessPoolExecutor(jobs) as pool, Progress(*columns, console=console) as progress:
        bar = progress.add_task("seeds", total=len(tasks))
        for at in range(0, len(tasks), TASKS_AHEAD * jobs):
            for verdict in pool.map(judge, tasks[at : at + TASKS_AHEAD * jobs], chunksize=4):
                events += verdict.events
                progress.advance(bar)
                if verdict.failure is not None:
                    failures.append(verdict)
                    progress.update(bar, description=f"seeds, {len(failures)} failed")
                    show_failure(console, verdict)
                    if keep_failures:
                        keep(verdict.profile, verdict.seed, verdict.failure)
    console.print(
        f"{len(tasks)} runs, {events} events, {len(failures)} failed, in {time.monotonic() - began_s:.0f} s",
        highlight=False,
    )
    for verdict in failures:
        console.print(command_for(verdict.profile, verdict.seed), markup=False, highlight=False, soft_wrap=True)
    return 1 if failures else 0


def first_catch(name: str, within: int = PLANTED_WITHIN_SEEDS) -> tuple[int, str] | None:
    """Return the first seed that catches a planted bug, and what it saw."""
    with planted(name) as bug:
        for seed in range(bug.from_seed, bug.from_seed + within):
            failure = play(seed, bug.profile).failure
            if failure is not None:
                return seed, failure
    return None


def show_planted(console: Console) -> int:
    """Plant every bug and tell which seed catches it; return the exit status."""
    missed = 0
    for name, bug in PLANTED.items():
        caught = first_catch(name)
        missed += caught is None
        seed, saw = ("no seed", "") if caught is None else (f"seed {caught[0]}", caught[1])
        console.print(f"[bold]{name}[/]: {bug.words}", highlight=False, soft_wrap=True)
        console.print(f"  {bug.profile}, {seed}: {saw[:200]}", markup=False, highlight=False, soft_wrap=True)
    return 1 if missed else 0


def _seeds(text: str) -> range:
    first, dots, last = text.partition("..")
    try:
        return range(int(first), int(last) + 1 if dots else int(first) + 1)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form A..B, for instance 0..999") from None


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return the exit status."""
    parser = argparse.ArgumentParser("python -m tests.fault_simulation", description=__doc__)
    parser.add_argument("--seed", type=int, help="play this seed")
    parser.add_argument("--seeds", type=_seeds, metavar="A..B", help="play all of these, both ends included")
    parser.add_argument("--profile", choices=PROFILES, help="kind of trouble; without it the seed chooses")
    parser.add_argument("--all-profiles", action="store_true", help="with --seeds: each seed under every profile")
    parser.add_argument("--trace", action="store_true", help="with --seed: print every event and every log line")
    parser.add_argument("--jobs", type=int, default=1, help="processes that play (default 1)")
    parser.add_argument("--keep", action="store_true", help=f"add failing seeds to {SEEDS_FILE.name}")
    parser.add_argument("--kept", action="store_true", help=f"play the seeds of {SEEDS_FILE.name}")
    parser.add_argument("--planted", action="store_true", help="plant every bug and see which seed catches it")
    options = parser.parse_args(arguments)
    console = Console()
    if options.planted:
        return show_planted(console)
    if options.kept:
        return max([play_one(console, kept.seed, kept.profile, False) for kept in kept_seeds()], default=0)
    if options.seeds is not None:
        profiles: list[str | None] = list(PROFILES) if options.all_profiles else [options.profile]
        return play_many(console, options.seeds, profiles, max(1, options.jobs), options.keep)
    if options.seed is not None:
        return play_one(console, options.seed, options.profile, options.trace)
    parser.print_help()
    return 2


if __name__ == "__main__":
    sys.exit(main())
