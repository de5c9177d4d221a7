"""The names of the formats in which models write reasoning and tool calls.

Routers have the parsers; workers may say which ones their model needs. So both know the names.
"""

from __future__ import annotations

from typing import Literal, get_args

ReasoningParser = Literal["auto", "none", "deepseek_r1", "qwen3", "granite", "mistral", "harmony"]
ToolCallParser = Literal[
    "auto",
    "none",
    "hermes",
    "llama3_json",
    "mistral",
    "pythonic",
    "deepseek_v3",
    "kimi_k2",
    "qwen3_coder",
    "glm45",
    "granite",
    "harmony",
]

AUTO = "auto"
"""Nobody says: what the workers name, else what the template and the vocabulary show."""

REASONING_PARSERS: tuple[str, ...] = get_args(ReasoningParser)
TOOL_CALL_PARSERS: tuple[str, ...] = get_args(ToolCallParser)


def parser_name(given: object) -> object:
    """Return a parser's name as it is written here: others write the same ones with hyphens."""
    return given.replace("-", "_") if isinstance(given, str) else given
