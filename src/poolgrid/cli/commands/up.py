"""`poolgrid up`: a whole pool on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from poolgrid.cli.help_page import CommandLine
from poolgrid.cli.local_pool import UpSettings
from poolgrid.cli.options import with_settings
from poolgrid.cli.up import run_up

app = CommandLine()


@app.command()
@with_settings(UpSettings)
def up(
    settings: UpSettings,
    as_json: Annotated[bool, typer.Option("--json", help="With --dry-run: print the plan as JSON.")] = False,
) -> None:
    """Run a whole pool on this machine: a consolidator, a router and simulated workers, as separate processes."""
    raise typer.Exit(run_up(settings, as_json))
