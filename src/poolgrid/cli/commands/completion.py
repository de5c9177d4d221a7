"""`poolgrid completion`: the script by which a shell completes commands and options."""

from __future__ import annotations

from typing import Annotated

import typer

from poolgrid.cli.completion import HOW_TO_KEEP, SHELLS, own_shell, script
from poolgrid.cli.help_page import CommandLine

app = CommandLine()


def _shells(incomplete: str) -> list[str]:
    return [shell for shell in SHELLS if shell.startswith(incomplete)]


@app.command(epilog='For this terminal: eval "$(poolgrid completion bash)".')
def completion(
    shell: Annotated[
        str, typer.Argument(help="bash, zsh or fish; by default the one you log in with.", autocompletion=_shells)
    ] = "",
) -> None:
    """Print the script by which a shell completes commands, options and their values."""
    chosen = shell or own_shell()
    if chosen not in SHELLS:
        typer.echo(f"poolgrid completion: the shell is {chosen!r}, allowed are {', '.join(SHELLS)}", err=True)
        raise typer.Exit(2)
    typer.echo(script(chosen))
    typer.echo(f"To keep it: {HOW_TO_KEEP[chosen]}", err=True)
