"""A group of commands of which only the one that runs is imported.

Importing every command's settings and libraries took each process half a second of CPU, which a pool of ten processes
pays ten times. ``--help`` of the group and tests that look at all commands import all of them; completion of a
command's name imports none.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, ClassVar, NamedTuple

import typer.main

from poolgrid.cli.help_page import HelpedGroup


class LateCommands(MutableMapping[str, Any]):
    """Commands by name; one is made from its module's ``app`` when it is asked for."""

    def __init__(self, modules: Mapping[str, str]) -> None:
        """Take the module of each command, in the order of the help."""
        self._modules = dict(modules)
        self._made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        command = self._made.get(name)
        if command is None:
            command = typer.main.get_command(importlib.import_module(self._modules[name]).app)
            # An application with one command is that command, under the name of its function.
            command.name = name
            self._made[name] = command
        return command

    def __setitem__(self, name: str, command: Any) -> None:
        self._modules.setdefault(name, "")
        self._made[name] = command

    def __delitem__(self, name: str) -> None:
        del self._modules[name]
        self._made.pop(name, None)

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def __len__(self) -> int:
        return len(self._modules)


class Word(NamedTuple):
    """A completion, as shells are told of it."""

    value: str
    help: str = ""
    type: str = "plain"


class LateGroup(HelpedGroup):
    """A group whose commands are ``modules``; subclasses name them."""

    modules: ClassVar[Mapping[str, str]] = {}

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = LateCommands(self.modules)

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Return the commands that begin like a word, without making them, and what options there are."""
        if incomplete.startswith("-"):
            return list(super().shell_complete(ctx, incomplete))
        return [Word(name) for name in self.commands if name.startswith(incomplete)]
