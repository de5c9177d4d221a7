"""`poolgrid simulate`: policies compared on a trace, in virtual time."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from poolgrid.cli.help_page import CommandLine
from poolgrid.cli.options import with_settings
from poolgrid.tools.simulation.settings import SimulationSettings

app = CommandLine()


@app.command()
@with_settings(SimulationSettings, renamed={"as_json": "--json"})
def simulate(
    settings: SimulationSettings,
    trace: Annotated[Path, typer.Argument(help="Mooncake-format trace (JSON lines).")],
) -> None:
    """Play a trace through the router core and simulated engines in virtual time, per policy."""
    from poolgrid.cli.simulate import run_simulation

    raise typer.Exit(run_simulation(trace, settings))
