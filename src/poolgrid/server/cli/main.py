"""`poolgrid`: the one console command."""

from __future__ import annotations

import click

from poolgrid import __version__
from poolgrid.server.cli.command_line import PLUGIN, LateGroup
from poolgrid.server.process import garbage
from poolgrid.server.process.environment import prepare_imports

PROGRAM = "poolgrid"

CORE = "poolgrid.server.cli.commands"

SECTIONS = {
    "Run": {
        "up": f"{CORE}.up",
        "router": f"{CORE}.router",
        "global-router": f"{CORE}.global_router",
        "worker": f"{CORE}.worker",
        "consolidator": f"{CORE}.consolidator",
    },
    "Look": {
        "top": f"{CORE}.top",
        "explain": f"{CORE}.explain",
        "doctor": PLUGIN,
        "journal": f"{CORE}.journal",
    },
    "Try": {
        "bench": PLUGIN,
        "simulate": PLUGIN,
        "replay": f"{CORE}.replay",
        "what-if": PLUGIN,
    },
    "Set up": {
        "config": f"{CORE}.config",
        "keys": f"{CORE}.keys",
        "engine-config": PLUGIN,
        "engine-check": PLUGIN,
        "completion": f"{CORE}.completion",
    },
    "Operate": {"drain": f"{CORE}.drain"},
}
"""The module of each command, by section of the help. A plug-in that is absent takes its commands along."""

app = LateGroup(
    SECTIONS,
    name=PROGRAM,
    help="Route LLM requests by KV cache and load to vLLM, SGLang and TensorRT-LLM workers.",
    epilog="Begin with: poolgrid up",
    no_args_is_help=True,
)
click.version_option(__version__, prog_name=PROGRAM, message="%(prog)s %(version)s", help="Print the version.")(app)


def run() -> None:
    """Run the command line, or answer a shell that completes one (click's ``_POOLGRID_COMPLETE``)."""
    garbage.collect_rarely()
    garbage.suspend()
    prepare_imports()
    app(prog_name=PROGRAM)


if __name__ == "__main__":
    run()
