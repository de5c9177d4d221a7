"""How a long-running command writes its log: the options of each, and what its children are told of them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, NamedTuple

import typer

from poolgrid.process import logs
from poolgrid.process.log_lines import Field

LEVEL_HELP = (
    "Least severe log lines shown: debug, info, warning or error; with LOGGER=LEVEL behind it others for some, as in "
    "info,router=debug,httpx=warning."
)
FORMAT_HELP = (
    "How log lines are written: text for people, json for machines, an object a line. By default text, and json where "
    "DYN_LOGGING_JSONL is set."
)

LogLevel = Annotated[str, typer.Option(help=LEVEL_HELP, envvar="POOLGRID_LOG_LEVEL")]

LogFormat = Annotated[str | None, typer.Option(help=FORMAT_HELP, envvar="POOLGRID_LOG_FORMAT")]


class LogChoice(NamedTuple):
    """What a command was told of its log."""

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
