"""Completion of command lines by shells: the script that a shell reads, and what it asks this program.

The script calls the program with the words so far in the environment; Typer finds the completions. They come from the
same declarations as ``--help``, so that there is no list to keep.
"""

from __future__ import annotations

import os
from pathlib import PurePath

COMPLETE_VARIABLE = "_POOLGRID_COMPLETE"
"""Set by the script when the shell asks for completions."""

SHELLS = ("bash", "zsh", "fish")

HOW_TO_KEEP = {
    "bash": "poolgrid completion bash > ~/.local/share/bash-completion/completions/poolgrid",
    "zsh": "poolgrid completion zsh > ~/.zfunc/_poolgrid   # with: fpath+=~/.zfunc; autoload -Uz compinit; compinit",
    "fish": "poolgrid completion fish > ~/.config/fish/completions/poolgrid.fish",
}
"""What makes completion last, by shell."""


def own_shell() -> str:
    """Return the name of the shell that the user logs in with; empty when the environment does not say."""
    return PurePath(os.environ.get("SHELL", "")).name


def script(shell: str) -> str:
    """Return the script for one of ``SHELLS``."""
    from typer import completion

    text: str = completion.get_completion_script(  # type: ignore[attr-defined]
        prog_name="poolgrid", complete_var=COMPLETE_VARIABLE, shell=shell
    )
    return text


def answer_shells() -> None:
    """Have the command line answer shells instead of running, when it is called by the script."""
    from typer import completion

    completion.completion_init()  # type: ignore[attr-defined]
