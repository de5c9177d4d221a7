"""What every command of ``poolgrid`` shares, on click's public classes: help, late imports, common options.

A command's module is imported when the command runs. Importing every command's settings and libraries costs a process
half a second of CPU, which a pool of ten processes pays ten times. ``--help`` of the group imports all of them;
completion of a command's name imports none.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import os
import re
from collections import UserDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import click
import msgspec
from click.shell_completion import CompletionItem

from poolgrid.cli.former_settings import former_setting
from poolgrid.process import logs
from poolgrid.process.log_lines import Field

HELP = {"help_option_names": ["-h", "--help"], "max_content_width": 112}

ENTRY_POINTS = "poolgrid.commands"
"""Group of entry points by which other distributions add commands: ``name = "module:command"``."""


class Option(click.Option):
    """An option that may stand under a heading of its own."""

    def __init__(self, *declarations: Any, heading: str = "Options", **attributes: Any) -> None:
        super().__init__(*declarations, **attributes)
        self.heading = heading


class Command(click.Command):
    """A command that refuses the settings which it had in an earlier version."""

    def __init__(self, *declarations: Any, **attributes: Any) -> None:
        super().__init__(*declarations, **{"context_settings": HELP, **attributes})

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the arguments; ends with status 2 and a line on standard error for a former setting."""
        if refusal := former_setting(str(self.name), args, os.environ):
            click.echo(refusal, err=True)
            raise SystemExit(2)
        return super().parse_args(ctx, args)

    def get_short_help_str(self, limit: int = 0) -> str:
        """Return what it does, whole."""
        return first_sentence(self.help or "")

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write a section for the options, and one for each further heading of options."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = None if isinstance(parameter, click.Argument) else parameter.get_help_record(ctx)
            if record is not None:
                sections.setdefault(getattr(parameter, "heading", "Options"), []).append(record)
        for heading, records in sections.items():
            with formatter.section(heading):
                formatter.write_dl(records)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write what there is to say of environment variables, then the epilog."""
        variables = {each.opts[0]: each.envvar for each in self.params if isinstance(each, Option) and each.envvar}
        for option, variable in list(variables.items())[:1]:
            formatter.write_paragraph()
            formatter.write_text(
                f"Options are environment variables too ({option} is {variable}, and so on); the command line wins."
            )
        super().format_epilog(ctx, formatter)


class Group(click.Group):
    """A group of such commands."""

    command_class = Command

    def __init__(self, *declarations: Any, **attributes: Any) -> None:
        super().__init__(*declarations, **{"context_settings": HELP, **attributes})

    def get_short_help_str(self, limit: int = 0) -> str:
        return first_sentence(self.help or "")


class LateCommands(UserDict[str, Any]):
    """Commands by name, each imported from the module in which it is declared when it is asked for."""

    def __getitem__(self, name: str) -> Any:
        found = self.data[name]
        if isinstance(found, str):
            try:
                module = importlib.import_module(found)
            except ModuleNotFoundError as error:
                if not (error.name or "").startswith("poolgrid."):
                    raise
                raise click.UsageError(f"{name}: not installed (there is no {error.name})") from None
            found = self.data[name] = getattr(module, name.replace("-", "_"))
        return found


class LateGroup(Group):
    """The commands of a table, and those that other distributions add by entry points."""

    def __init__(self, modules: Mapping[str, str], **attributes: Any) -> None:
        """``modules`` has the module of each command, which is called there as it is here, in the order of the help."""
        super().__init__(commands=LateCommands(modules), **attributes)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*self.commands, *(each.name for each in _added() if each.name not in self.commands)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command; ``None`` when there is none of that name."""
        if cmd_name in self.commands:
            return self.commands[cmd_name]
        return next((each.load() for each in _added() if each.name == cmd_name), None)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write what each command does; one that is not installed is marked."""
        rows = []
        for name in self.list_commands(ctx):
            try:
                command = self.get_command(ctx, name)
                rows.append((name, "" if command is None else command.get_short_help_str()))
            except click.UsageError as error:
                rows.append((name, error.message.removeprefix(f"{name}: ")))
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return the commands that begin like a word, without importing them, and the options."""
        names = [CompletionItem(name) for name in self.list_commands(ctx) if name.startswith(incomplete)]
        return [*names, *click.Command.shell_complete(self, ctx, incomplete)]


def _added() -> importlib.metadata.EntryPoints:
    return importlib.metadata.entry_points(group=ENTRY_POINTS)


def first_sentence(text: str, stops: str = ".;:") -> str:
    """Return a text up to the first of some stops outside brackets, on one line."""
    text = " ".join(text.split())
    for end in re.finditer(rf"[{stops}](?=\s|$)", text):
        before = text[: end.start()]
        if before.count("(") == before.count(")"):
            return before
    return text


command = functools.partial(click.command, cls=Command)
"""Decorator that makes a command of a function."""

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON to standard output instead.")
"""Option of every command that has something to tell programs."""


def router_url(text: str) -> Callable[[Any], Any]:
    """Return the option of a command that asks a router."""
    default = "http://127.0.0.1:8000"
    return click.option("--url", default=default, envvar="POOLGRID_URL", help=f"{text} [default: {default}]")


LEVEL_HELP = (
    "Least severe log lines shown: debug, info, warning or error; with LOGGER=LEVEL behind it others for some, as in "
    "info,router=debug,httpx=warning."
)
FORMAT_HELP = (
    "How log lines are written: text for people, json for machines, an object a line. By default text, and json where "
    "DYN_LOGGING_JSONL is set."
)


class LogChoice(NamedTuple):
    """The log options of a long-running command."""

    level: str
    format: str | None = None
    default: str = "info"
    """The level of all where only some are named."""

    @property
    def arguments(self) -> list[str]:
        """Return the options that tell another process of ours the same."""
        names_some = "=" in self.level.partition(",")[0]
        level = f"{self.default},{self.level}" if names_some else self.level
        return ["--log-level", level, *(["--log-format", self.format] if self.format is not None else [])]

    def configure(self, process_name: str, fields: Mapping[str, Field] | None = None) -> None:
        """Begin to write this process's log; raises ``ValueError`` for what is no level or format."""
        log_format = logs.format_wanted(self.format, os.environ)
        logs.configure(process_name, self.level, log_format, fields, self.default)


def log_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options of its log; it is called with ``log_choice``."""

    @click.option("--log-format", envvar="POOLGRID_LOG_FORMAT", help=FORMAT_HELP)
    @click.option("--log-level", default="info", envvar="POOLGRID_LOG_LEVEL", help=f"{LEVEL_HELP} [default: info]")
    @functools.wraps(function)
    def with_log(*settings: Any, log_level: str, log_format: str | None, **values: Any) -> Any:
        return function(*settings, log_choice=LogChoice(log_level, log_format), **values)

    return with_log


def json_text(answer: Any) -> str:
    """Return an answer as indented JSON with a line end."""
    return msgspec.json.format(msgspec.json.encode(answer)).decode() + "\n"


def print_json(answer: Any) -> None:
    """Print an answer for programs."""
    click.echo(json_text(answer), nl=False)


def cannot_write(out: Path | None) -> str:
    """Return why a file cannot be written; empty when it can, or none is wanted."""
    if out is None:
        return ""
    if out.is_dir():
        return f"{out} is a directory"
    place = out if out.exists() else out.parent
    return "" if os.access(place, os.W_OK) else f"{place} cannot be written to"
