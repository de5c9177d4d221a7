"""How ``--help`` reads: every name whole, at any width, in a terminal and in a pipe.

An option stands on a line of its own, which is never broken; what it does stands below it. Tables in columns, which
the libraries draw, cut the longer half of our options at 80 columns.
"""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from poolgrid.cli.former_settings import former_setting

C = TypeVar("C", bound=Callable[..., Any])

INDENT = 2
TEXT_INDENT = 6
"""Where the description of an option begins."""

KINDS = {"str": "TEXT", "int": "INTEGER", "float": "NUMBER", "datetime": "TIME"}
"""What stands for a value of an option."""

WIDTH_MAX = 110
"""Longer lines are hard to read, however wide the terminal is."""


def filled(text: str, width: int, indent: int = 0) -> str:
    """Return a text in lines of at most ``width``, broken between words only; empty lines part its paragraphs."""
    paragraphs = [" ".join(part.split()) for part in re.split(r"\n\s*\n", text.strip())]
    prefix = " " * indent
    return "\n\n".join(
        textwrap.fill(
            part,
            width,
            initial_indent=prefix,
            subsequent_indent=prefix,
            break_long_words=False,
            break_on_hyphens=False,
        )
        for part in paragraphs
    )


def help_page(command: Any, context: Any, width: int) -> str:
    """Return the help of a command or of a group of commands."""
    width = min(width, WIDTH_MAX)
    parts = [f"Usage: {context.command_path} {' '.join(command.collect_usage_pieces(context))}"]
    if command.help:
        parts.append(filled(command.help.partition("\f")[0], width))
    parts += _parameters(command, context, width)
    if isinstance(command, TyperGroup):
        parts.append(_commands(command, context, width))
    if variables := _variables(command, context):
        parts.append(filled(variables, width))
    if command.epilog:
        parts.append(filled(command.epilog, width))
    return "\n\n".join(parts) + "\n"


def _parameters(command: Any, context: Any, width: int) -> Iterator[str]:
    """Yield a section for arguments, one for options, and one for each further heading that options have."""
    sections: dict[str, list[str]] = {}
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record is None:
            continue
        usual = "Arguments" if parameter.param_type_name == "argument" else "Options"
        heading = getattr(parameter, "rich_help_panel", None) or usual
        names, text = record
        sections.setdefault(heading, []).append(_entry(names, text, width))
    usual_first = [heading for heading in ("Arguments", "Options") if heading in sections]
    for heading in [*usual_first, *(each for each in sections if each not in usual_first)]:
        yield "\n".join([f"{heading}:", *sections[heading]])


def _variables(command: Any, context: Any) -> str:
    """Return what there is to say of environment variables that no option names; empty when there is none."""
    unnamed = {
        parameter.opts[0]: parameter.envvar
        for parameter in command.get_params(context)
        if parameter.param_type_name == "option" and parameter.envvar and not parameter.show_envvar
    }
    if not unnamed:
        return ""
    usual = {option: "POOLGRID_" + option[2:].replace("-", "_").upper() for option in unnamed}
    others = [f"{option} is {name}" for option, name in unnamed.items() if name != usual[option]]
    example = next((option for option, name in unnamed.items() if name == usual[option]), None)
    rule = [] if example is None else [f"{example} is {usual[example]}, and so on"]
    return f"Options are environment variables too ({'; '.join([*rule, *others])}); the command line wins."


def _entry(names: str, text: str, width: int) -> str:
    # Versions of Typer name the types of values differently.
    names = re.sub(r"<(?:list\[)?(\w+)\]?( range)?>", lambda kind: KINDS.get(kind[1], kind[1].upper()), names)
    # Typer puts defaults that are given as text into parentheses.
    text = re.sub(r"\[default: \((.*?)\)(?=[;\]])", r"[default: \1", text)
    head = " " * INDENT + names
    return f"{head}\n{filled(text, width, TEXT_INDENT)}" if text.strip() else head


def _commands(group: TyperGroup, context: Any, width: int) -> str:
    names = group.list_commands(context)
    column = INDENT + max((len(name) for name in names), default=0) + 2
    lines = ["Commands:"]
    for name in names:
        command = group.get_command(context, name)
        if command is None or command.hidden:
            continue
        text = first_sentence((command.help or "").split("\n\n")[0])
        described = filled(text, width, column)
        lines.append(f"{' ' * INDENT}{name}".ljust(column) + described[column:])
    return "\n".join(lines)


def first_sentence(text: str, stops: str = ".;:") -> str:
    """Return a text up to the first of some stops outside brackets, on one line."""
    text = " ".join(text.split())
    for end in re.finditer(rf"[{stops}](?=\s|$)", text):
        before = text[: end.start()]
        if before.count("(") == before.count(")"):
            return before
    return text


class HelpedCommand(TyperCommand):
    """A command whose help is a :func:`help_page`, and which refuses the settings that it had in an earlier version."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the arguments; raises ``typer.Exit`` with a line on standard error for a former setting."""
        if refusal := former_setting(str(self.name), args, os.environ):
            typer.echo(refusal, err=True)
            raise typer.Exit(2)
        return super().parse_args(ctx, args)

    def get_short_help_str(self, limit: int = 0) -> str:
        """Return what it does, whole: shells show it beside the name."""
        return first_sentence(self.help or "")

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write(help_page(self, ctx, formatter.width))


class HelpedGroup(TyperGroup):
    """A group of commands whose help is a :func:`help_page`."""

    def get_short_help_str(self, limit: int = 0) -> str:
        return first_sentence(self.help or "")

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write(help_page(self, ctx, formatter.width))


class CommandLine(typer.Typer):
    """A Typer application whose commands and groups have our help, and no options for completion of their own."""

    def __init__(self, **attributes: Any) -> None:
        """Take what ``typer.Typer`` takes."""
        attributes.setdefault("cls", HelpedGroup)
        super().__init__(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False, **attributes)

    def command(self, name: str | None = None, **attributes: Any) -> Callable[[C], C]:
        """Return a decorator that adds a command."""
        attributes.setdefault("cls", HelpedCommand)
        return super().command(name, **attributes)
