"""`poolgrid replay`: every recorded decision derived again."""

from __future__ import annotations

from typing import Annotated

import typer

from poolgrid.cli.help_page import CommandLine
from poolgrid.cli.json_output import AsJson

app = CommandLine()


@app.command()
def replay(
    directory: Annotated[
        str,
        typer.Argument(help="Directory of the pool's journal (a data_dir), or nats://HOST:PORT/POOL."),
    ],
    decisions: Annotated[
        str | None,
        typer.Option(help="Where the decisions are, when not in `decisions` below the journal."),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Status 1 also when a decision cannot be derived.")] = False,
    as_json: AsJson = False,
) -> None:
    """Derive every recorded decision again from the journal and compare bit for bit; status 1 at a difference."""
    from poolgrid.cli.replay import replay as run_replay

    raise typer.Exit(run_replay(directory, decisions, strict, as_json))
