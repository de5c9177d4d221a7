"""Attack a pool: every attack of the catalogue, or of some parts, against fresh processes on this machine.

    python -m lab.attacks                               everything
    python -m lab.attacks guides slow-disk --seconds 20
    python -m lab.attacks connections --only 'endless header' --json table.json
    python -m lab.attacks --short                       what CI runs
    python -m lab.attacks --list

Each attack runs beside verified clients of another tenant. It has failed when nothing but itself noticed: no process
ended, no other client got an error or a wrong answer, p99 of others' short requests was at most 3 times idle, memory
and descriptors came back. The exit status is 0 when everything held, 1 when something fell, 2 when it could not be
run. All traffic stays on loopback. See lab/attacks/README.md.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import resource
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import uvloop
from rich.console import Console

from lab.attacks.attack import Part
from lab.attacks.catalogue import PARTS
from lab.attacks.runner import Options, loopback_allows, run_parts
from lab.attacks.table import Row, show, status, write

SHORT = Options(
    seconds=1.0,
    idle_s=1.0,
    window_min_s=1.0,
    share=0.05,
    settle_s=120.0,
    judge_latency=False,
    lease_ms=300_000,
    requests_min=6,
    pause_s=0.1,
    books_settle_s=120.0,
)
"""The short form: small attacks, and no judgement of times, which say nothing on cores that others use too: neither of
latencies, nor of how soon all comes back, nor of a worker that gets no CPU for seconds. Bystanders send less, as no p99
is wanted: their requests would be a third of its CPU."""


def chosen(names: Sequence[str], only: Sequence[str], short: bool) -> list[Part]:
    """Return the parts with the attacks that were asked for; raises ``ValueError`` for a name that is none."""
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        raise ValueError(f"part {unknown[0]!r} is unknown, allowed are {', '.join(PARTS)}")
    every = {attack.name for part in PARTS.values() for attack in part.attacks}
    strange = [name for name in only if name not in every]
    if strange:
        raise ValueError(f"attack {strange[0]!r} is unknown; --list names them all")
    found = []
    for name in names or PARTS:
        part = PARTS[name]
        attacks = tuple(
            attack
            for attack in part.attacks
            if (not only or attack.name in only) and (attack.short or not short or attack.name in only)
        )
        if attacks:
            found.append(dataclasses.replace(part, attacks=attacks))
    return found


def show_progress(console: Console, row: Row) -> None:
    """Say what came of an attack as soon as it is known."""
    said = f"{row.part}: {row.attack}: {row.verdict} ({row.took_s:.0f} s)  {row.got}  {'; '.join(row.faults)}"
    console.print(said, markup=False, soft_wrap=True)


def list_parts(console: Console) -> None:
    """Print the names of everything."""
    for part in PARTS.values():
        console.print(f"{part.name}: {part.title}", markup=False)
        for attack in part.attacks:
            console.print(f"  {attack.name}{' (short form too)' if attack.short else ''}: {attack.does}", markup=False)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(
        prog="python -m lab.attacks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; by default all")
    made.add_argument("--only", action="append", default=[], metavar="NAME", help="only this attack; may be repeated")
    made.add_argument("--short", action="store_true", help="small attacks only, no judgement of times: what CI runs")
    made.add_argument("--seconds", type=float, help="how long each attack goes on; default 10, short 1")
    made.add_argument("--share", type=float, help="of the full size of each attack, 0 to 1; default 1, short 0.05")
    made.add_argument("--seed", type=int, default=0, help="of everything that is drawn")
    made.add_argument("--no-latency", action="store_true", help="do not judge times: other work shares the cores")
    made.add_argument("--logs", type=Path, help="keep data and output of the processes here")
    made.add_argument("--json", type=Path, help="write the table here")
    made.add_argument("--list", action="store_true", help="name all parts and attacks; run nothing")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it and print the table; return the exit status."""
    given = parser().parse_args(arguments)
    console = Console(width=180)
    if given.list:
        list_parts(console)
        return 0
    try:
        parts = chosen(given.parts, given.only, given.short)
        if not parts:
            raise ValueError(f"no attack of {', '.join(given.parts)} is part of the short form; leave --short away")
        if given.seconds is not None and not 0.5 <= given.seconds <= 600:
            raise ValueError(f"--seconds is {given.seconds}, allowed are 0.5 to 600")
        if given.share is not None and not 0 < given.share <= 1:
            raise ValueError(f"--share is {given.share}, allowed are values above 0 up to 1")
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    reason = loopback_allows()
    if reason:
        sys.stderr.write(f"{reason}\n")
        return 2
    options = SHORT if given.short else Options()
    changes = {"seed": given.seed, "judge_latency": options.judge_latency and not given.no_latency}
    for name in ("seconds", "share"):
        if getattr(given, name) is not None:
            changes[name] = getattr(given, name)
    options = dataclasses.replace(options, **changes)
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed[1], allowed[1]))
    with tempfile.TemporaryDirectory(prefix="poolgrid-attacks-") as scratch:
        directory = given.logs or Path(scratch)
        directory.mkdir(parents=True, exist_ok=True)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            rows = runner.run(run_parts(parts, options, directory, partial(show_progress, Console(stderr=True))))
    show(rows, console)
    if given.json is not None:
        write(rows, given.json)
    return status(rows)


if __name__ == "__main__":
    sys.exit(main())
