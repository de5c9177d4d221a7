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
        typer.Argument(help="Directory of the pool's journal, with decisions (a data_dir), or nats://HOST:PORT/POOL."),
    ],
) -> None:
    """Play recorded traffic on simulated engines under the recorded settings and under others, and compare."""
    from poolgrid.cli.what_if import what_if as run_what_if

    raise typer.Exit(run_what_if(directory, settings))
