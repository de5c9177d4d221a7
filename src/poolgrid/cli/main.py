"""`poolgrid`: the one console command."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, ClassVar

import typer

from poolgrid import __version__
from poolgrid.cli.completion import COMPLETE_VARIABLE, answer_shells
from poolgrid.cli.help_page import CommandLine
from poolgrid.cli.late_group import LateGroup
from poolgrid.process import garbage


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
        "drain": "poolgrid.cli.commands.drain",
        "replay": "poolgrid.cli.commands.replay",
        "what-if": "poolgrid.cli.commands.what_if",
        "tune": "poolgrid.cli.commands.tune",
        "explain": "poolgrid.cli.commands.explain",
        "config": "poolgrid.cli.commands.config",
        "engine-config": "poolgrid.workers.engines.trtllm.command",
        "engine-check": "poolgrid.cli.commands.engine_check",
        "keys": "poolgrid.cli.commands.keys",
        "model": "poolgrid.cli.commands.model",
        "journal": "poolgrid.cli.commands.journal",
        "completion": "poolgrid.cli.commands.completion",
    }


app = CommandLine(
    name="poolgrid",
    cls=Commands,
    help="An event-sourced, KV-cache-aware router in front of TensorRT-LLM workers.",
    epilog="Begin with: poolgrid up",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)

PROGRAM = "poolgrid"


def _tell_version(asked: bool) -> None:
    if asked:
        typer.echo(f"poolgrid {__version__}")
        raise typer.Exit


@app.callback()
def poolgrid(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_tell_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Hold the commands; what they share is said above."""


def run() -> None:
    """Run the command line, or answer a shell that completes one."""
    garbage.collect_rarely()
    if COMPLETE_VARIABLE in os.environ:
        answer_shells()
    app(prog_name=PROGRAM)


if __name__ == "__main__":
    run()
