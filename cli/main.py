"""`poolgrid`: the one console command."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import typer

from cli.late_group import LateGroup


class Commands(LateGroup):
    """Every command, in the order of the help."""

    modules: ClassVar[Mapping[str, str]] = {
        "up": "cli.commands.up",
        "router": "cli.commands.router",
        "global-router": "cli.commands.global_router",
        "worker": "cli.commands.worker",
        "consolidator": "cli.commands.consolidator",
        "bench": "cli.commands.bench",
        "simulate": "cli.commands.simulate",
        "top": "cli.commands.top",
        "replay": "cli.commands.replay",
        "what-if": "cli.commands.what_if",
        "tune": "cli.commands.tune",
        "explain": "cli.commands.explain",
        "config": "cli.commands.config",
        "engine-config": "cli.commands.engine_config",
        "keys": "cli.commands.keys",
        "journal": "cli.commands.journal",
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


@app.callback()
def poolgrid() -> None:
    """Hold the commands; what they share is said above."""


def run() -> None:
    """Run the command line."""
    app()


if __name__ == "__main__":
    run()
