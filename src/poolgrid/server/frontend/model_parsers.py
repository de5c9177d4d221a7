"""What takes the answers of one model apart: the port of the plug-in that reads formats, and what is left without it.

The plug-in is found by its entry point, and imported when the first model is loaded that has a chat template.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Final, Protocol

from poolgrid.server.frontend.answer_pieces import OutputParser
from poolgrid.server.frontend.errors import unsupported
from poolgrid.server.frontend.tool_use import ToolUse
from poolgrid.server.process.parser_names import AUTO, NONE
from poolgrid.server.process.plugins import PARSERS, has_plugin, load_plugin
from poolgrid.server.structured_output.guide_parts import Part

PROMPT_END_CHARS = 64
"""How much of the end of a prompt is looked at for an open or closed stretch of reasoning."""

_CHOOSING: Final = "model"
"""Entry point of the function that chooses a model's parsers."""

MISSING: Final = f"the plug-in {_CHOOSING!r} of {PARSERS} is not installed"


class ModelParsers(Protocol):
    """The parsers of one model by name; an empty name = none."""

    @property
    def reasoning(self) -> str: ...

    @property
    def tools(self) -> str: ...

    @property
    def signs(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Of formats that ``auto`` chose the markers that show them: those of reasoning, and of calls."""
        ...

    @property
    def always_reasons(self) -> bool:
        """Whether every answer begins with reasoning, by the model's prompts."""
        ...

    def active(self, tools: ToolUse | None) -> bool:
        """Return whether the answer to a request is taken apart at all."""
        ...

    def markers(self, tools: ToolUse | None) -> frozenset[str]:
        """Return the markers that the parsers of a request must see in the text, special tokens or not."""
        ...

    def parser(
        self, tools: ToolUse | None, prompt_end: str = "", guided: bool = False, continued: str | None = None
    ) -> OutputParser | None:
        """Return a fresh parser for one answer, or ``None`` when it is all content.

        ``prompt_end`` is the end of the rendered prompt (``PROMPT_END_CHARS``); ``guided`` means that the engine was
        told to write JSON, or JSON or calls; ``continued`` is the assistant's text so far, when the answer
        continues it.
        """
        ...

    def calls_guide(self, tools: ToolUse, template: str) -> Part | None:
        """Return calls as a part of a structural tag; ``None`` where they are JSON without a marker, or not read."""
        ...

    def call_schemas(self, tools: ToolUse) -> list[dict[str, Any]]:
        """Return the schema of a call of each function, where calls are JSON without a marker."""
        ...


class PlainText:
    """All of an answer is content: no format is installed."""

    reasoning: Final = ""
    tools: Final = ""
    signs: Final[tuple[tuple[str, ...], tuple[str, ...]]] = ((), ())
    always_reasons: Final = False

    def active(self, tools: ToolUse | None) -> bool:
        """Return that it is not; raises ``RequestError`` where calls are forced: without a parser they are text."""
        if tools is not None and tools.guided:
            raise unsupported("tool_choice", f"a call is forced, and {MISSING}")
        return False

    def markers(self, tools: ToolUse | None) -> frozenset[str]:
        return frozenset()

    def parser(
        self, tools: ToolUse | None, prompt_end: str = "", guided: bool = False, continued: str | None = None
    ) -> OutputParser | None:
        return None

    def calls_guide(self, tools: ToolUse, template: str) -> Part | None:
        return None

    def call_schemas(self, tools: ToolUse) -> list[dict[str, Any]]:
        return []


PLAIN_TEXT: Final = PlainText()


def choose_parsers(
    reasoning: str, tools: str, template: str, vocabulary: Collection[str], turn_beginnings: tuple[str, ...]
) -> ModelParsers:
    """Resolve ``auto`` and ``none``.

    ``template`` is the source of the chat template(s), ``vocabulary`` the tokens that were added to the model's
    vocabulary, ``turn_beginnings`` how prompts end that leave the answer to a user's message to the model. Raises
    ``ValueError`` for a name that there is not.
    """
    if {reasoning, tools} <= {AUTO, NONE} and not has_plugin(PARSERS, _CHOOSING):
        return PLAIN_TEXT
    choose: Callable[..., ModelParsers] = load_plugin(PARSERS, _CHOOSING)
    return choose(reasoning, tools, template, vocabulary, turn_beginnings)
