"""`poolgrid completion`: the script by which a shell completes commands and options."""

from __future__ import annotations

import os
from pathlib import PurePath

import click
from click.shell_completion import get_completion_class

from poolgrid.server.cli.command_line import command

PROGRAM = "poolgrid"

COMPLETE_VARIABLE = "_POOLGRID_COMPLETE"
"""Set by the script when the shell asks for completions, which click answers."""

HOW_TO_KEEP = {
    "bash": "poolgrid completion bash > ~/.local/share/bash-completion/completions/poolgrid",
    "zsh": "poolgrid completion zsh > ~/.zfunc/_poolgrid   # with: fpath+=~/.zfunc; autoload -Uz compinit; compinit",
    "fish": "poolgrid completion fish > ~/.config/fish/completions/poolgrid.fish",
}
"""What makes completion last, by shell."""


def _shells(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    return [shell for shell in HOW_TO_KEEP if shell.startswith(incomplete)]


@command(epilog='For this terminal: eval "$(poolgrid completion bash)".')
@click.argument("shell", default="", shell_complete=_shells, help="bash, zsh or fish; by default the login shell.")
def completion(shell: str) -> None:
    """Print the script by which a shell completes commands, options and their values."""
    chosen = shell or PurePath(os.environ.get("SHELL", "")).name
    completer = get_completion_class(chosen)
    if chosen not in HOW_TO_KEEP or completer is None:
        click.echo(f"poolgrid completion: the shell is {chosen!r}, allowed are {', '.join(HOW_TO_KEEP)}", err=True)
        raise SystemExit(2)
    click.echo(completer(click.Command(PROGRAM), {}, PROGRAM, COMPLETE_VARIABLE).source())
    click.echo(f"To keep it: {HOW_TO_KEEP[chosen]}", err=True)
