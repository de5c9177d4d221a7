"""What every command of ``poolgrid`` shares, on click's public classes: help, late imports, common options.

A command's module is imported when the command runs. Importing every command's settings and libraries costs a process
half a second of CPU, which a pool of ten processes pays ten times. ``--help`` of the group imports all of them;
completion of a command's name imports none.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import os
import re
from collections import UserDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import EntryPoints
from pathlib import Path
from typing import Any, NamedTuple

import click
import msgspec
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from poolgrid.kernel.requests.log_fields import Field
from poolgrid.kernel.wire.addresses import without_credentials
from poolgrid.server.cli.dynamo_options import in_our_words
from poolgrid.server.process import garbage, logs
from poolgrid.server.process.plugins import COMMANDS, installed_plugins

HELP = {"help_option_names": ["-h", "--help"], "max_content_width": 112}

EVERY_PANEL = "all"
"""What ``--help`` takes in place of a panel to show every option."""

PLUGIN = ""
"""In place of a command's module: an entry point of ``COMMANDS`` names it, ``name = "module:command"``."""


class Option(click.Option):
    """An option in a panel of the help; the basic ones of a command stand on the first page."""

    def __init__(self, *declarations: Any, panel: str = "Options", is_basic: bool = False, **attributes: Any) -> None:
        super().__init__(*declarations, **attributes)
        self.panel = panel
        self.is_basic = is_basic

    def process_value(self, ctx: click.Context, value: Any) -> Any:
        """Read a value; an error names the variable where that gave it, which is what a person looks for."""
        try:
            return super().process_value(ctx, value)
        except click.BadParameter as error:
            if ctx.get_parameter_source(str(self.name)) is ParameterSource.ENVIRONMENT:
                error.param_hint = str(self.envvar)
            raise


class Command(click.Command):
    """A command that refuses the settings which it had in an earlier version.

    When some of its options are basic, ``--help`` shows those and the names of the panels; ``--help PANEL`` shows one
    panel, ``--help all`` or ``--help-all`` every option.
    """

    def __init__(self, *declarations: Any, **attributes: Any) -> None:
        super().__init__(*declarations, **{"context_settings": HELP, **attributes})

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the arguments; ends with status 2 and a line on standard error for an option of Dynamo that has none of
        ours."""
        try:
            args = in_our_words(str(self.name), args, os.environ)
        except ValueError as error:
            click.echo(error, err=True)
            raise SystemExit(2) from None
        if self.has_basics:
            args = [f"--help={EVERY_PANEL}" if each == "--help-all" else each for each in args]
        rest = super().parse_args(ctx, args)
        if not ctx.resilient_parsing:
            refuse_misspelt_variable(ctx, os.environ)
        return rest

    def get_short_help_str(self, limit: int = 0) -> str:
        return first_sentence(self.help or "")

    @functools.cached_property
    def has_basics(self) -> bool:
        """Whether the help has a first page that leaves most options out."""
        return any(isinstance(each, Option) and each.is_basic for each in self.params)

    def get_help_option(self, ctx: click.Context) -> click.Option | None:
        return self._panel_help if self.has_basics else super().get_help_option(ctx)

    @functools.cached_property
    def _panel_help(self) -> click.Option:
        def show(ctx: click.Context, parameter: click.Parameter, panel: str | None) -> None:
            if panel is not None and not ctx.resilient_parsing:
                ctx.meta[_PANEL] = panel
                click.echo(self.get_help(ctx), color=ctx.color)
                ctx.exit()

        def complete(ctx: click.Context, parameter: click.Parameter, word: str) -> list[str]:
            return [each for each in map(_slug, self._panels(ctx)) if each.startswith(word)]

        return click.Option(
            ["-h", "--help"],
            metavar="[PANEL]",
            is_flag=False,
            flag_value="",
            is_eager=True,
            expose_value=False,
            callback=show,
            shell_complete=complete,
            help="Show the basic options, or those of a panel; --help-all shows every option.",
        )

    def _panels(self, ctx: click.Context) -> dict[str, list[click.Parameter]]:
        panels: dict[str, list[click.Parameter]] = {}
        for parameter in self.get_params(ctx):
            if isinstance(parameter, click.Option):
                panels.setdefault(getattr(parameter, "panel", "Options"), []).append(parameter)
        return panels

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write one section for each panel that is asked for; raises ``click.UsageError`` for an unknown panel."""
        panels = self._panels(ctx)
        asked = ctx.meta.get(_PANEL, "" if self.has_basics else EVERY_PANEL)
        if asked == EVERY_PANEL:
            for panel, parameters in panels.items():
                _write_options(ctx, formatter, panel, parameters)
        elif asked:
            named = [panel for panel in panels if asked.lower() in (_slug(panel), *_slug(panel).split("-"))]
            if not named:
                known = ", ".join(map(_slug, panels))
                raise click.UsageError(f"--help {asked}: no such panel; the panels are {known}", ctx)
            for panel in named:
                _write_options(ctx, formatter, panel, panels[panel])
        else:
            basic = [each for each in self.params if isinstance(each, Option) and each.is_basic]
            others = [each for each in panels.get("Options", ()) if each not in basic]
            _write_options(ctx, formatter, "Basic options", [*basic, *others])
            rows = [
                (f"--help {_slug(panel)}", f"{panel} ({len(parameters)})")
                for panel, parameters in panels.items()
                if panel != "Options"
            ]
            with formatter.section("More options, by panel"):
                formatter.write_dl([*rows, ("--help-all", "Every option")])

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the note about environment variables, then the epilog."""
        variables = {each.opts[0]: each.envvar for each in self.params if isinstance(each, Option) and each.envvar}
        for option, variable in list(variables.items())[:1]:
            formatter.write_paragraph()
            formatter.write_text(
                f"Options are environment variables too ({option} is {variable}, and so on); the command line wins."
            )
        super().format_epilog(ctx, formatter)


ENVIRONMENT_PREFIX = "POOLGRID_"

API_KEY_VARIABLE = "POOLGRID_API_KEY"
"""The API key of the commands that ask a router."""

MISSPELT = 0.85
"""Likeness of two names from which on one is taken for the other: one letter of six is missing."""


def refuse_misspelt_variable(ctx: click.Context, environment: Mapping[str, str]) -> None:
    """Raise ``click.UsageError`` for a variable that is nearly one of the command's; processes share an environment, so
    what another command reads is none."""
    own = variables_of(ctx.command)
    for variable in sorted(environment):
        if not variable.startswith(ENVIRONMENT_PREFIX) or variable in own or variable == API_KEY_VARIABLE:
            continue
        near = difflib.get_close_matches(variable[len(ENVIRONMENT_PREFIX) :], map(_suffix, own), 1, MISSPELT)
        if near and variable not in variables_of(ctx.find_root().command):
            raise click.UsageError(
                f"{variable} is no variable of poolgrid; did you mean {ENVIRONMENT_PREFIX}{near[0]}?", ctx
            )


def _suffix(variable: str) -> str:
    return variable.removeprefix(ENVIRONMENT_PREFIX)


def variables_of(command: click.Command) -> set[str]:
    """Return the environment variables that options of a command are, and of those below it; imports them all."""
    found = {str(each.envvar) for each in command.params if each.envvar}
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            with suppress(click.UsageError):  # it is not installed
                below = command.get_command(context, name)
                found |= set() if below is None else variables_of(below)
    return found


_PANEL = "poolgrid.panel"


def _slug(panel: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", panel.lower()).strip("-")


def _write_options(
    ctx: click.Context, formatter: click.HelpFormatter, title: str, parameters: Sequence[click.Parameter]
) -> None:
    records = [record for each in parameters if (record := each.get_help_record(ctx)) is not None]
    if records:
        with formatter.section(title):
            formatter.write_dl(records)


class Group(click.Group):
    """A group of such commands."""

    command_class = Command

    def __init__(self, *declarations: Any, **attributes: Any) -> None:
        super().__init__(*declarations, **{"context_settings": HELP, **attributes})

    def get_short_help_str(self, limit: int = 0) -> str:
        return first_sentence(self.help or "")


class LateCommands(UserDict[str, Any]):
    """Commands by name, each imported when it is asked for: from a module of the core, or from a plug-in."""

    def __getitem__(self, name: str) -> Any:
        found = self.data[name]
        if found == PLUGIN:
            found = self.data[name] = _of_plugin(name)
        elif isinstance(found, str):
            module = importlib.import_module(found)
            found = self.data[name] = getattr(module, name.replace("-", "_"))
        return found


class LateGroup(Group):
    """The commands of a table, and those that entry points add."""

    def __init__(self, sections: Mapping[str, Mapping[str, str]], **attributes: Any) -> None:
        """``sections`` has, by title of a section of the help, the module of each command by its name, or
        ``PLUGIN``."""
        self.sections = {title: tuple(names) for title, names in sections.items()}
        commands = {name: module for modules in sections.values() for name, module in modules.items()}
        super().__init__(commands=LateCommands(commands), **attributes)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*self.commands, *(each.name for each in _added() if each.name not in self.commands)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in self.commands:
            return self.commands[cmd_name]
        return next((each.load() for each in _added() if each.name == cmd_name), None)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Import a command, for which ``run`` has suspended the collector."""
        found = super().resolve_command(ctx, args)
        garbage.resume()
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write what each command does, by section; one that is not installed is marked."""
        added = tuple(name for name in self.list_commands(ctx) if name not in self.commands)
        for title, names in {**self.sections, "Added by other packages": added}.items():
            rows = []
            for name in names:
                try:
                    command = self.get_command(ctx, name)
                    rows.append((name, "" if command is None else command.get_short_help_str()))
                except click.UsageError as error:
                    rows.append((name, error.message.removeprefix(f"{name}: ")))
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return the commands that begin like a word, without importing them, and the options."""
        names = [CompletionItem(name) for name in self.list_commands(ctx) if name.startswith(incomplete)]
        return [*names, *click.Command.shell_complete(self, ctx, incomplete)]


def _added() -> EntryPoints:
    return installed_plugins(COMMANDS)


def _of_plugin(name: str) -> Any:
    """Return the command of a plug-in; raises ``click.UsageError`` when the plug-in is absent."""
    for found in _added().select(name=name):
        try:
            return found.load()
        except ModuleNotFoundError as error:
            if not (error.name or "").startswith("poolgrid."):
                raise
            raise click.UsageError(f"{name}: not installed (there is no {error.name})") from None
    raise click.UsageError(f"{name}: not installed (no entry point of {COMMANDS} has this name)")


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

    def checked(context: click.Context, parameter: click.Parameter, url: str) -> str:
        if not url.startswith(("http://", "https://", "dyn://")):
            allowed = "http://HOST[:PORT], https://HOST[:PORT] and the name dyn://NAMESPACE.router.http"
            raise click.BadParameter(f"{without_credentials(url)!r} is none, allowed are {allowed}")
        return url

    return click.option(
        "--url", default=default, envvar="POOLGRID_URL", callback=checked, help=f"{text} [default: {default}]"
    )


LOG_PANEL = "Logs and traces"
LEVEL_HELP = (
    "Show log lines of at least this level: debug, info, warning, error. Add LOGGER=LEVEL for single loggers, as in "
    "info,router=debug."
)
FORMAT_HELP = (
    "Write log lines as text or as json (one object a line). The default is text; json if DYN_LOGGING_JSONL is set."
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

    @click.option("--log-format", cls=Option, panel=LOG_PANEL, envvar="POOLGRID_LOG_FORMAT", help=FORMAT_HELP)
    @click.option(
        "--log-level",
        cls=Option,
        panel=LOG_PANEL,
        default="info",
        envvar="POOLGRID_LOG_LEVEL",
        help=f"{LEVEL_HELP} [default: info]",
    )
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
