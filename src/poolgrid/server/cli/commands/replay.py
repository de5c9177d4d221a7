"""`poolgrid replay`: every recorded decision derived again.

Exit status: 0 when all that could be derived are identical; 1 at the first that differs, at damage, when nothing could
be derived at all, and with ``--strict`` when anything could not; 2 for wrong arguments.
"""

from __future__ import annotations

import json
from typing import Any

import click
from rich.console import Console

from poolgrid.kernel.consolidation.pool_state import BLOCKS_PER_WORKER_MAX
from poolgrid.server.cli.command_line import as_json, command, print_json
from poolgrid.server.cli.journal_directory import (
    UsageError,
    journal_errors,
    open_decisions,
    open_journal,
    progress_bar,
    survey_bytes,
)
from poolgrid.server.process.figures import counted
from poolgrid.server.router.decision_journal.opening import policy_of
from poolgrid.server.router.decision_journal.replay import DecisionReplay, ReplayOutcome, shown
from poolgrid.server.router.policy_loading import PolicyError

SIDE_CHARS_MAX = 4000
"""Characters shown of each side of a difference; ``--json`` has all."""


def run_replay(directory: str, decisions: str | None, strict: bool, as_json: bool) -> int:
    """Replay every router's decision journal against the pool's journal; return the exit status."""
    console = Console(highlight=False, soft_wrap=True)
    answer: dict[str, Any] = {"routers": {}}
    status = 0
    identical = 0
    with journal_errors():
        pool = open_journal(directory)
        found = open_decisions(directory if decisions is None else decisions)
        if not found:
            raise UsageError(
                f"no decisions in {decisions or directory}: routers record them under decisions/ROUTER_ID in their "
                "data_dir; name another directory with --decisions"
            )
        for name, disk in found:
            with progress_bar(f"replaying {name}", survey_bytes(disk)) as on_progress:
                try:
                    outcome = DecisionReplay(pool, disk, policy_of, BLOCKS_PER_WORKER_MAX).run(on_progress)
                except PolicyError as error:
                    raise UsageError(f"replaying {name}: {error}") from None
            identical += outcome.identical
            answer["routers"][name] = _row(outcome)
            if outcome.difference is not None or (strict and (outcome.not_derivable or outcome.lost_decisions)):
                status = 1
            if not as_json:
                _print(console, name, outcome)
    if identical == 0 and status == 0:
        status = 1
        click.echo("no decision could be derived", err=True)
    if as_json:
        print_json({"identical": status == 0, **answer})
    return status


def _row(outcome: ReplayOutcome) -> dict[str, Any]:
    difference = outcome.difference
    return {
        "identical": outcome.identical,
        "identical_admissions": outcome.identical_admissions,
        "not_derivable": outcome.not_derivable,
        "causes": outcome.causes,
        "lost_decisions": outcome.lost_decisions,
        "unknown": outcome.remarks.unknown,
        "difference": None
        if difference is None
        else {
            "file": difference.file,
            "entry": difference.number,
            "request_id": difference.request_id,
            "attempt": difference.attempt,
            "what": difference.what,
            "recorded": json.loads(shown(difference.recorded)),
            "derived": json.loads(shown(difference.derived)),
        },
    }


def _print(console: Console, name: str, outcome: ReplayOutcome) -> None:
    console.print(
        f"{name}: {counted(outcome.identical, 'decision')} derived again, bit for bit as recorded", markup=False
    )
    if outcome.identical_admissions:
        console.print(
            f"  {counted(outcome.identical_admissions, 'admission')} of sessions derived again, as recorded",
            markup=False,
        )
    for cause, count in outcome.causes.items():
        console.print(f"  {count:,} not derivable: {cause}", markup=False)
    if outcome.lost_decisions:
        console.print(f"  {outcome.lost_decisions:,} never recorded, according to the journal", markup=False)
    for kind, count in outcome.remarks.unknown.items():
        console.print(f"  skipped: {counted(count, 'entry')} of the unknown kind {kind}", markup=False)
    for torn in outcome.remarks.torn:
        console.print(f"  {torn.file}: torn at byte {torn.position}, entry {torn.offset}: {torn.detail}", markup=False)
    difference = outcome.difference
    if difference is not None:
        where = f"{difference.file}, entry {difference.number}"
        who = f"request {difference.request_id}, attempt {difference.attempt}: " if difference.request_id else ""
        console.print(f"  DIFFERENT at {where}: {who}{difference.what}", markup=False)
        console.print(f"    recorded: {shown(difference.recorded)[:SIDE_CHARS_MAX]}", markup=False)
        console.print(f"    derived:  {shown(difference.derived)[:SIDE_CHARS_MAX]}", markup=False)


@command()
@click.argument("directory", help="Directory of the pool's journal (a data_dir), or nats://HOST:PORT/POOL.")
@click.option(
    "--decisions",
    help="Where the decisions are, when not in `decisions` below the journal.",
)
@click.option("--strict", is_flag=True, help="Status 1 also when a decision cannot be derived.")
@as_json
def replay(directory: str, decisions: str | None, strict: bool, as_json: bool) -> None:
    """Derive every recorded decision again from the journal and compare bit for bit; status 1 at a difference."""
    raise SystemExit(run_replay(directory, decisions, strict, as_json))
