"""Names of parsers as options take them: of the formats that are installed; without any, ``auto`` and ``none``."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Literal

from poolgrid.server.process.plugins import PARSERS, has_plugin, load_plugin

AUTO = "auto"
"""Not given: what the workers name, else what the template and the vocabulary show."""

NONE = "none"

_REASONING = "reasoning"
_TOOL_CALLS = "tool-calls"
"""Entry points of the two kinds of formats: their ``names``, and the name for each of their ``aliases()``."""


def _names(kind: str) -> tuple[str, ...]:
    return (AUTO, NONE, *(load_plugin(PARSERS, kind).names if has_plugin(PARSERS, kind) else ()))


REASONING_PARSERS: tuple[str, ...] = _names(_REASONING)
TOOL_CALL_PARSERS: tuple[str, ...] = _names(_TOOL_CALLS)

if TYPE_CHECKING:
    ReasoningParser = str
    ToolCallParser = str
else:
    ReasoningParser = Literal[REASONING_PARSERS]
    ToolCallParser = Literal[TOOL_CALL_PARSERS]


def reasoning_parser_name(given: object) -> object:
    """Return a parser's name as it is written here: other engines have others for the same format, or write hyphens.

    Raises ``ValueError`` where no format is installed that could have the name.
    """
    return _parser_name(given, _REASONING, REASONING_PARSERS)


def tool_call_parser_name(given: object) -> object:
    """Return the name of a parser of tool calls likewise."""
    return _parser_name(given, _TOOL_CALLS, TOOL_CALL_PARSERS)


def _parser_name(given: object, kind: str, names: Collection[str]) -> object:
    if not isinstance(given, str):
        return given
    name = given.replace("-", "_")
    return name if name in names else load_plugin(PARSERS, kind).aliases().get(name, name)
