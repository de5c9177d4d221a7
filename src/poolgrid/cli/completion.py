"""Completion of command lines by shells: the script that a shell reads, and what it asks this program.

The script calls the program with the words so far in the environment; Typer finds the completions. They come from the
same declarations as ``--help``, so that there is no list to keep. The scripts are ours, and so is how an answer is
written down: with Typer's, zsh finds nothing at the first Tab, both break descriptions into lines that look like
completions, and a program that is called by its path is not found.
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

# The first argument of a completion function of bash is the command as it was typed.
BASH = r"""_poolgrid_completion() {
    local IFS=$'\n'
    COMPREPLY=( $( env COMP_WORDS="${COMP_WORDS[*]}" COMP_CWORD=$COMP_CWORD _POOLGRID_COMPLETE=complete_bash "$1" ) )
}

complete -o default -F _poolgrid_completion poolgrid"""

# A file of functions is the function's body at its first call: it then has to complete too, not only to define.
ZSH = r"""#compdef poolgrid

_poolgrid() {
  local line="${words[1,CURRENT-1]} $PREFIX"
  local -a told
  told=("${(@f)$(_call_program poolgrid \
    env _POOLGRID_COMPLETE=complete_zsh _TYPER_COMPLETE_ARGS=${(q)line} ${words[1]})}")
  if [[ -z $told ]]; then
    _files
    return
  fi
  [[ $PREFIX == -*=* ]] && compset -P 1 '*='
  _describe -V poolgrid told
}

if [[ $funcstack[1] == _poolgrid ]]; then
  _poolgrid "$@"
else
  compdef _poolgrid poolgrid
fi"""

# Variables that are set before a command are no part of it.
FISH = r"""function __poolgrid_complete
    set -l line (commandline -cp | string replace --regex '^\s*(\w+=\S*\s+)*' '')
    set -l program (string split --max 1 ' ' -- $line)[1]
    set program (string replace --regex '^~(?=/)' $HOME -- $program)
    set -l told (env _POOLGRID_COMPLETE=complete_fish _TYPER_COMPLETE_FISH_ACTION=get-args \
        _TYPER_COMPLETE_ARGS="$line" $program)
    if test -n "$told"
        printf '%s\n' $told
    else
        __fish_complete_path (commandline -ct)
    end
end

complete --command poolgrid --no-files --keep-order --arguments '(__poolgrid_complete)'"""

SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}


def own_shell() -> str:
    """Return the name of the shell that the user logs in with; empty when the environment does not say."""
    return PurePath(os.environ.get("SHELL", "")).name


def script(shell: str) -> str:
    """Return the script for one of ``SHELLS``."""
    return SCRIPTS[shell]


def answer_shells() -> None:
    """Have the command line answer shells instead of running, when it is called by the script."""
    from poolgrid.cli import shell_answers

    shell_answers.register()
