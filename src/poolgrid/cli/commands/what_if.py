"""`poolgrid what-if`: recorded traffic under other settings."""

from __future__ import annotations

from typing import Annotated

import typer

from poolgrid.cli.help_page import CommandLine
from poolgrid.cli.options import with_settings
from poolgrid.tools.simulation.settings import WhatIfSettings

app = CommandLine()


@app.command()
@with_settings(WhatIfSettings, renamed={"as_json": "--json"})
def what_if(
    settings: WhatIfSettings,
    directory: Annotated[
        str,
        typer.Argument(help="Directory of the pool's journal (a data_dir), or nats://HOST:PORT/POOL."),
    ],
    decisions: Annotated[
        str | None, typer.Option(help="Where the decisions are, when not in `decisions` below the journal.")
    ] = None,
) -> None:
    """Play recorded traffic on simulated engines under the recorded settings and under others, and compare."""
    from poolgrid.cli.what_if import what_if as run_what_if

    raise typer.Exit(run_what_if(directory, decisions, settings))
