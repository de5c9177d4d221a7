"""`poolgrid tune`: cost weights searched for an objective."""

from __future__ import annotations

from typing import Annotated

import typer

from poolgrid.cli.help_page import CommandLine
from poolgrid.cli.options import with_settings
from poolgrid.tools.simulation.settings import TuneSettings

app = CommandLine()


@app.command()
@with_settings(TuneSettings, renamed={"as_json": "--json", "config_out": "--config"})
def tune(
    settings: TuneSettings,
    source: Annotated[
        str,
        typer.Argument(help="A data_dir with recorded decisions, nats://HOST:PORT/POOL, or a Mooncake-format trace."),
    ],
    decisions: Annotated[
        str | None, typer.Option(help="Where the decisions are, when not in `decisions` below the journal.")
    ] = None,
) -> None:
    """Search cost weights for an objective, and justify them on traffic that the search did not see."""
    from poolgrid.cli.tune import tune as run_tune

    raise typer.Exit(run_tune(source, decisions, settings))
