"""How completions are written down for each shell: one a line, with what it is for where the shell shows it."""

from __future__ import annotations

from typing import Any

# The classes that Typer registers; it has no public way to write an answer differently.
from typer import _completion_classes as of_typer

from poolgrid.cli.help_page import first_sentence


def described(item: Any) -> str:
    """Return what a completion is, on one line; a colon may stand after a condition."""
    return first_sentence(item.help, ".;")


class ForBash(of_typer.BashComplete):
    """Values alone."""

    def get_completion_args(self) -> tuple[list[str], str]:
        """Return the words before the cursor, and the one at it; to bash an equals sign is a word of its own."""
        words, incomplete = super().get_completion_args()
        return [word for word in words if word != "="], incomplete


class ForZsh(of_typer.ZshComplete):
    """``value:what it is for``, as ``_describe`` reads it."""

    def format_completion(self, item: Any) -> str:
        """Return the line of a completion."""
        value = str(item.value).replace("\\", "\\\\").replace(":", "\\:")
        return f"{value}:{described(item)}" if item.help else value

    def complete(self) -> str:
        """Return a line for each completion; none where the shell knows better."""
        return "\n".join(map(self.format_completion, self.get_completions(*self.get_completion_args())))


class ForFish(of_typer.FishComplete):
    """``value<tab>what it is for``."""

    def format_completion(self, item: Any) -> str:
        return f"{item.value}\t{described(item)}" if item.help else str(item.value)

    def complete(self) -> str:
        """Return a line for each completion; of ``--option=value`` fish completes the whole."""
        words, incomplete = self.get_completion_args()
        option, equals, _ = incomplete.partition("=")
        before = f"{option}=" if equals and option.startswith("-") else ""
        return "\n".join(before + self.format_completion(item) for item in self.get_completions(words, incomplete))


def register() -> None:
    """Have Typer answer shells with these."""
    of_typer.completion_init()
    for shell, answers in (("bash", ForBash), ("zsh", ForZsh), ("fish", ForFish)):
        of_typer.add_completion_class(answers, shell)  # type: ignore[attr-defined]
