"""Which parsers a model's answers need: by name, or from what its template and vocabulary show.

``harmony`` is one format for both; its analysis and its calls are read by the same parser.

Answers with reasoning: what is left of them as content is read for tool calls and for further reasoning.

Rules
- Calls in reasoning that ends are talk about calls. Where reasoning does not end, or nothing follows its end, the calls
  in it are meant: models forget the closing marker before a call. So the rest of the reasoning is held back from the
  first marker of a call on, until that is decided.
- Text of such an answer before its first call is reasoning, text after it is content.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from poolgrid.plugins.parsers.call_forms import CALL_CHARS_MAX
from poolgrid.plugins.parsers.call_guides import calls_part, llama3_json
from poolgrid.plugins.parsers.formats import (
    REASONING,
    TOOL_CALLS,
    call_format,
    call_formats,
    reasoning_format,
    reasoning_formats,
    shown,
)
from poolgrid.plugins.parsers.harmony import MARKERS as HARMONY_MARKERS
from poolgrid.plugins.parsers.harmony import Harmony
from poolgrid.plugins.parsers.markers import first_marker, held_length
from poolgrid.plugins.parsers.reasoning import Begins, FurtherReasoning, MarkedReasoning, begins_after
from poolgrid.plugins.parsers.tool_calls import NAMED, REQUIRED, ToolCalls, calls_of, first_call
from poolgrid.server.frontend.answer_pieces import AnswerPiece, OutputParser, PieceKind, joined_pieces
from poolgrid.server.frontend.tool_use import ToolUse
from poolgrid.server.process.parser_names import AUTO, NONE
from poolgrid.server.structured_output.guide_parts import Part


class ReasoningAndCalls:
    """One answer. ``beginnings`` are the markers with which ``calls`` begin."""

    def __init__(
        self,
        reasoning: OutputParser,
        further: FurtherReasoning,
        calls: OutputParser | None,
        beginnings: Sequence[str],
    ) -> None:
        self._reasoning = reasoning
        self._further = further
        self._calls = calls
        self._beginnings = tuple(beginnings)
        self._reasoned = False
        """Whether there was reasoning."""
        self._tail = ""
        """The end of the reasoning, which may be the beginning of a marker."""
        self._held: list[str] = []
        """The reasoning from the first marker of a call on."""
        self._held_chars = 0
        self._over = False
        """Whether the reasoning is read as if it had ended: it held a call, and more than can be held back."""

    def feed(self, text: str) -> list[AnswerPiece]:
        return joined_pieces(self._through(self._reasoning.feed(text)))

    def finish(self) -> list[AnswerPiece]:
        result = self._through(self._reasoning.finish())
        called = False
        held = self._release()
        pieces = [] if self._calls is None else [*self._calls.feed(held), *self._calls.finish()]
        if held and not any(piece.kind is PieceKind.CALL for piece in pieces):
            pieces = [AnswerPiece(PieceKind.REASONING, held)]
        for piece in pieces:
            called = called or piece.kind is PieceKind.CALL
            if held and not called:
                result.append(AnswerPiece(PieceKind.REASONING, piece.text))
            else:
                result += self._content([piece])
        result += self._further.finish()
        return joined_pieces(result)

    def _through(self, pieces: Iterable[AnswerPiece]) -> list[AnswerPiece]:
        result: list[AnswerPiece] = []
        for piece in pieces:
            if piece.kind is PieceKind.REASONING and not self._over:
                self._reasoned = True
                result += self._reason(piece.text)
                continue
            if not self._over:
                result.append(AnswerPiece(PieceKind.REASONING, self._release()))
            result += self._content([piece] if self._calls is None else self._calls.feed(piece.text))
        return result

    def _content(self, pieces: Iterable[AnswerPiece]) -> list[AnswerPiece]:
        result: list[AnswerPiece] = []
        for piece in pieces:
            if piece.kind is PieceKind.CONTENT and self._reasoned:
                result += self._further.feed(piece.text)
            else:
                if piece.kind is PieceKind.CALL:
                    self._further.call()
                result.append(piece)
        return result

    def _release(self) -> str:
        held = "".join(self._held) + self._tail
        self._held.clear()
        self._tail = ""
        return held

    def _reason(self, text: str) -> list[AnswerPiece]:
        """Return the reasoning before the first marker of a call."""
        if not self._beginnings:
            return [AnswerPiece(PieceKind.REASONING, text)]
        if self._held:
            self._held.append(text)
            self._held_chars += len(text)
            if self._held_chars <= CALL_CHARS_MAX or self._calls is None:
                return []
            self._over = True
            return self._content(self._calls.feed(self._release()))
        text = self._tail + text
        found = first_marker(text, self._beginnings)
        end = len(text) - held_length(text, self._beginnings) if found is None else found[0]
        if end < len(text):
            end = len(text[:end].rstrip())  # white space before a call is dropped with it
        if found is None:
            self._tail = text[end:]
        else:
            self._tail = ""
            self._held_chars = len(text) - end
            self._held.append(text[end:])
        return [AnswerPiece(PieceKind.REASONING, text[:end])]


HARMONY = "harmony"


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """The parsers of one model by name; an empty name = none."""

    reasoning: str = ""
    tools: str = ""
    signs: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    """Of formats that ``auto`` chose the markers that show them: those of reasoning, and of calls."""
    turn_beginnings: tuple[str, ...] = ()
    """How prompts end that leave the answer to a user's message to the model; empty = not known."""

    @classmethod
    def choose(
        cls,
        reasoning: str,
        tools: str,
        template: str,
        vocabulary: Collection[str] = (),
        turn_beginnings: tuple[str, ...] = (),
    ) -> OutputFormat:
        """Resolve ``auto`` and ``none``, as ``model_parsers.choose_parsers`` says."""
        chosen: list[str] = []
        signs: list[tuple[str, ...]] = []
        for what, name, (names, aliases), formats in (
            ("reasoning", reasoning, REASONING, reasoning_formats),
            ("tool call", tools, TOOL_CALLS, call_formats),
        ):
            found: tuple[str, tuple[str, ...]] = ("", ())
            if name == AUTO:
                found = shown(formats(), template, vocabulary)
            elif name != NONE:
                found = (name if name in names else aliases().get(name, ""), ())
                if not found[0]:
                    raise ValueError(f"choosing a {what} parser: {name!r}, allowed are auto, none, {', '.join(names)}")
            chosen.append(found[0])
            signs.append(found[1])
        return cls(chosen[0], chosen[1], (signs[0], signs[1]), turn_beginnings)

    @property
    def always_reasons(self) -> bool:
        """Return whether every answer of the model begins with reasoning, by its prompts."""
        if not self.reasoning:
            return False
        if self.reasoning == HARMONY:
            return True
        for beginning in self.turn_beginnings:
            parser = self.parser(None, beginning)
            assert parser is not None, "it has reasoning"
            if any(piece.kind is PieceKind.REASONING for piece in (*parser.feed("word"), *parser.finish())):
                return True
        return False

    def markers(self, tools: ToolUse | None) -> frozenset[str]:
        """Return the markers that the parsers of a request must see in the text, special tokens or not."""
        if HARMONY in (self.reasoning, self.tools):
            return frozenset(HARMONY_MARKERS)
        markers: set[str] = set()
        if self.reasoning:
            markers.update(reasoning_format(self.reasoning).markers)
        if tools is not None and self.tools and not tools.guided:
            markers.update(call_format(self.tools).markers)
        return frozenset(markers)

    def active(self, tools: ToolUse | None) -> bool:
        return bool(self.reasoning) or (tools is not None and (bool(self.tools) or tools.guided))

    def parser(
        self,
        tools: ToolUse | None,
        prompt_end: str = "",
        guided: bool = False,
        continued: str | None = None,
    ) -> OutputParser | None:
        """Return a fresh parser for one answer, as ``ModelParsers`` says."""
        if not self.active(tools):
            return None
        guided_calls = tools is not None and tools.guided
        if HARMONY in (self.reasoning, self.tools) and not guided_calls:
            declared = tools.declared if tools is not None and self.tools == HARMONY else None
            read = Harmony(reasoning=self.reasoning == HARMONY, declared=declared)
            return read if tools is None else _let_through(read, tools)
        calls: OutputParser | None = None
        beginnings: tuple[str, ...] = ()
        if tools is not None and (self.tools or guided_calls):
            known_calls = NAMED if tools.named else REQUIRED if tools.required else call_format(self.tools)
            only_allowed = known_calls.bare and not tools.named
            found = ToolCalls(known_calls, tools.allowed if only_allowed else tools.declared, tools.named)
            beginnings = found.beginnings
            calls = _let_through(found, tools)
        if not self.reasoning or self.reasoning == HARMONY:
            return calls
        known = reasoning_format(self.reasoning)
        opener, closer = known.openers[-1], known.closers[-1]
        if continued is None:
            new_turn = not self.turn_beginnings or prompt_end.rstrip().endswith(self.turn_beginnings)
            # Else the prompt continues a turn, after a tool's result perhaps, in which the reasoning came before.
            begins = begins_after(prompt_end, known.openers, known.closers)
            if begins is None:
                begins = Begins.REASONING if known.begins_inside and new_turn else Begins.OPEN
        else:
            inside = continued.rfind(opener) > continued.rfind(closer)
            begins = Begins.REASONING if inside else Begins.CONTENT
        told: tuple[str, ...] = ()
        if guided or guided_calls:
            told = (*_JSON, *call_format(self.tools).markers) if tools is not None and self.tools else _JSON
        further = FurtherReasoning(opener, closer)
        reasoning = MarkedReasoning(known.openers, known.closers, begins=begins, drops=known.drops, guided=told)
        return ReasoningAndCalls(reasoning, further, calls, beginnings)

    def calls_guide(self, tools: ToolUse, template: str) -> Part | None:
        guides = call_format(self.tools).guides if self.tools else ()
        guide = next((each for each in guides if each.template in template), None)
        return None if guide is None else calls_part(guide, tools.allowed, tools.parallel)

    def call_schemas(self, tools: ToolUse) -> list[dict[str, Any]]:
        return llama3_json(tools.allowed)


_JSON = ("{", "[", '"')
"""How a JSON object, list or string begins."""


def _let_through(calls: OutputParser, tools: ToolUse) -> OutputParser:
    if len(tools.names) < len(tools.schemas):
        calls = calls_of(tools.names, calls)
    return calls if tools.parallel else first_call(calls)
