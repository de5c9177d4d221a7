"""`poolgrid`: the one console command."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

import typer

from poolgrid import __version__
from poolgrid.cli.late_group import LateGroup


class Commands(LateGroup):
    """Every command, in the order of the help."""

    modules: ClassVar[Mapping[str, str]] = {
        "up": "poolgrid.cli.commands.up",
        "router": "poolgrid.cli.commands.router",
        "global-router": "poolgrid.cli.commands.global_router",
        "worker": "poolgrid.cli.commands.worker",
        "consolidator": "poolgrid.cli.commands.consolidator",
        "bench": "poolgrid.cli.commands.bench",
        "simulate": "poolgrid.cli.commands.simulate",
        "top": "poolgrid.cli.commands.top",
        "replay": "poolgrid.cli.commands.replay",
        "what-if": "poolgrid.cli.commands.what_if",
        "tune": "poolgrid.cli.commands.tune",
        "explain": "poolgrid.cli.commands.explain",
        "config": "poolgrid.cli.commands.config",
        "engine-config": "poolgrid.cli.commands.engine_config",
        "keys": "poolgrid.cli.commands.keys",
        "journal": "poolgrid.cli.commands.journal",
    }


app = typer.Typer(
    name="poolgrid",
    cls=Commands,
    help="An event-sourced, KV-cache-aware router in front of TensorRT-LLM workers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)


def _tell_version(asked: bool) -> None:
    if asked:
        typer.echo(f"poolgrid {__version__}")
        raise typer.Exit


@app.callback()
def poolgrid(
    version: Annotated[
        bool, typer.Option("--version", callback=_tell_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Hold the commands; what they share is said above."""


def run() -> None:
    """Run the command line."""
    app()


if __name__ == "__main__":
    run()
