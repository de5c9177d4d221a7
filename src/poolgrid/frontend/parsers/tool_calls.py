"""Tool calls in the text of an answer: where they begin, one after the other, and the content around them.

Rules
- Calls begin at an *opener* (``<tool_call>``), or, for formats without one, at the beginning of the text (``bare``).
  After it stands one call, or a list of them in brackets.
- White space between content and calls, and between calls, belongs to neither and is dropped.
- A call is passed on when it is complete, is of a function that the request declares, and its arguments are a JSON
  object: ``Kind.CALL`` with ``Kind.ARGUMENTS`` right after it. All else is content, with its opener and white space.
- Other markers end a list of calls as well as its bracket.
- Markers without a meaning of their own (``drops``) are left out everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from poolgrid.frontend.parsers.call_forms import (
    CALL_CHARS_MAX,
    CallForm,
    GivenCall,
    HeadedCall,
    JsonCall,
    PythonCall,
    declared_name,
)
from poolgrid.frontend.parsers.pieces import (
    AnswerPiece,
    OutputParser,
    PieceKind,
    StatefulParser,
    Trimmer,
    first_marker,
    held_length,
)
from poolgrid.frontend.parsers.tagged_call import TaggedCall, Tags, fitted

Declared = Mapping[str, Mapping[str, Any]]
"""The functions that calls may be of, each with the JSON schema of its parameters."""

_SPACE = " \t\n\r"


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a family of models writes calls."""

    form: Callable[[str, Declared], CallForm]
    """Begins a call, given the character it begins with."""
    openers: tuple[str, ...] = ()
    closers: tuple[str, ...] = ()
    """Markers that may follow a call (outside a list), each once, in this order."""
    drops: tuple[str, ...] = ()
    inside: tuple[str, ...] = ()
    """Markers within a call."""
    separators: str = ""
    """Characters that may stand between calls outside a list."""
    objects: bool = False
    """Whether calls are objects that may follow one another without anything between."""
    bare: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        """Return the markers that may be special tokens of the vocabulary."""
        return (*self.openers, *self.closers, *self.drops, *self.inside)


class ToolCalls(StatefulParser):
    """The calls of one answer.

    ``declared``: the functions that may be meant, each with the JSON schema of its parameters.
    """

    def __init__(self, format: CallFormat, declared: Declared) -> None:
        super().__init__(ToolCalls._begin if format.bare else ToolCalls._text)
        self._format = format
        self._declared = declared
        self._markers = format.openers + format.drops
        self._ends = self._markers + format.closers
        self._space = Trimmer(leading=False)
        self._call: CallForm | None = None
        self._call_text: list[str] = []
        self._call_chars = 0
        self._in_list = False
        self._announced = False
        """Whether there was a call since the opener."""
        self._aside: list[str] = []
        """Text since the opener, or the last call, that is in no piece: content, should no call follow."""
        self._closers_left: tuple[str, ...] = ()

    @property
    def beginnings(self) -> tuple[str, ...]:
        return self._markers

    def finish(self) -> list[AnswerPiece]:
        if self._call is not None:
            self._call.end()
            self._call_ended(self._call)
        aside = "".join(self._aside)
        if self._announced and not aside.strip(_SPACE + self._format.separators + ",]"):
            aside = ""
        self._content(aside + self._buffer)
        self._buffer = ""
        self._aside.clear()
        rest = self._space.release()
        if rest:
            self._out.append(AnswerPiece(PieceKind.CONTENT, rest))
        return self._taken()

    def _begin(self) -> bool:
        """At the beginning of an answer whose calls have no opener."""
        if not self._skip_space():
            return False
        if self._buffer[0] in "[{":
            self._state = ToolCalls._open
            self._announced = False
        else:
            self._give_back()
        return True

    def _text(self) -> bool:
        found = first_marker(self._buffer, self._markers)
        if found is None:
            keep = held_length(self._buffer, self._markers)
            end = len(self._buffer) - keep
            self._content(self._buffer[:end])
            self._buffer = self._buffer[end:]
            return False
        at, marker = found
        self._content(self._buffer[:at])
        self._buffer = self._buffer[at + len(marker) :]
        if marker in self._format.openers:
            self._aside.append(marker)
            self._announced = False
            self._state = ToolCalls._open
        return True

    def _open(self) -> bool:
        if not self._skip_space():
            return False
        character = self._buffer[0]
        if character == "[" and not self._in_list:
            self._in_list = True
            self._aside.append(character)
            self._buffer = self._buffer[1:]
            return True
        self._begin_call(character)
        return True

    def _begin_call(self, character: str) -> None:
        self._call = self._format.form(character, self._declared)
        self._call_chars = 0
        self._state = ToolCalls._read

    def _read(self) -> bool:
        call = self._call
        assert call is not None, "the state after a call began"
        text = self._buffer[: CALL_CHARS_MAX - self._call_chars]
        self._buffer = self._buffer[len(text) :]
        self._call_text.append(text)
        self._call_chars += len(text)
        call.feed(text)
        if not call.done and not call.failed:
            if self._call_chars < CALL_CHARS_MAX:
                return False
            call.left = ""
            call.failed = True
        self._call_ended(call)
        return bool(self._buffer)

    def _call_ended(self, call: CallForm) -> None:
        """Pass on a call that is complete and of a function that there is; else it is content."""
        text = "".join(self._call_text)
        self._call = None
        self._call_text.clear()
        self._aside.append(text[: len(text) - len(call.left)])
        self._buffer = call.left + self._buffer
        name = declared_name(call.name, self._declared) if call.done else None
        if name is None:
            self._give_back()
            return
        self._space.restart()
        self._aside.clear()
        self._announced = True
        self._out.append(AnswerPiece(PieceKind.CALL, name))
        self._out.append(AnswerPiece(PieceKind.ARGUMENTS, fitted(call.arguments, self._declared[name])))
        self._state = ToolCalls._after
        self._closers_left = self._format.closers

    def _after(self) -> bool:
        """After a call: the next one of a list, the list's end, closers, or content."""
        if not self._skip_space():
            return False
        character = self._buffer[0]
        if character == "{" and self._format.objects and (self._in_list or self._closers_left == self._format.closers):
            self._begin_call(character)
            return True
        if self._in_list and character not in ",]":
            if self._may_be_end():
                return False
            self._in_list = False  # a marker ends a list as well
        if self._in_list:
            self._aside.append(character)
            self._buffer = self._buffer[1:]
            if character == "]":
                self._in_list = False
                self._aside.clear()
            else:
                self._state = ToolCalls._next_in_list
            return True
        for number, closer in enumerate(self._closers_left):
            if self._buffer.startswith(closer):
                self._buffer = self._buffer[len(closer) :]
                self._closers_left = self._closers_left[number + 1 :]
                self._aside.clear()
                return True
            if closer.startswith(self._buffer):
                return False
        if character in self._format.separators:
            self._aside.append(character)
            self._buffer = self._buffer[1:]
            self._state = ToolCalls._next_alone
            return True
        self._give_back()
        return True

    def _next_in_list(self) -> bool:
        if not self._skip_space():
            return False
        if self._may_be_end():
            return False
        if self._buffer[0] == "]" or self._buffer.startswith(self._ends):
            self._aside.clear()  # the comma was one too many
            self._state = ToolCalls._after
        else:
            self._begin_call(self._buffer[0])
        return True

    def _next_alone(self) -> bool:
        if not self._skip_space():
            return False
        if self._buffer[0] == "{":
            self._begin_call("{")
        else:
            self._give_back()
        return True

    def _may_be_end(self) -> bool:
        """Return whether a marker may begin here, which more text decides."""
        buffer = self._buffer
        return any(marker.startswith(buffer) and marker != buffer for marker in self._ends)

    def _skip_space(self) -> bool:
        """Set white space aside and return whether anything follows it."""
        stripped = self._buffer.lstrip(_SPACE)
        if len(stripped) < len(self._buffer):
            self._aside.append(self._buffer[: len(self._buffer) - len(stripped)])
            self._buffer = stripped
        return bool(stripped)

    def _give_back(self) -> None:
        self._content("".join(self._aside))
        self._aside.clear()
        self._in_list = False
        self._state = ToolCalls._text

    def _content(self, text: str) -> None:
        shown = self._space.feed(text)
        if shown:
            self._out.append(AnswerPiece(PieceKind.CONTENT, shown))


class SomeCalls:
    """Passes on those calls of another parser whose function ``wants`` says yes to, asked once for each in order."""

    def __init__(self, calls: OutputParser, wants: Callable[[str], bool]) -> None:
        self._calls = calls
        self._wants = wants
        self._passes = True
        """Whether the call that began last is passed on."""

    def feed(self, text: str) -> list[AnswerPiece]:
        return self._kept(self._calls.feed(text))

    def finish(self) -> list[AnswerPiece]:
        return self._kept(self._calls.finish())

    def _kept(self, pieces: Sequence[AnswerPiece]) -> list[AnswerPiece]:
        kept: list[AnswerPiece] = []
        for piece in pieces:
            if piece.kind is PieceKind.CALL:
                self._passes = self._wants(piece.text)
            if self._passes or piece.kind not in (PieceKind.CALL, PieceKind.ARGUMENTS):
                kept.append(piece)
        return kept


def first_call(calls: OutputParser) -> SomeCalls:
    """Pass on one call at most: what ``parallel_tool_calls: false`` asks for."""
    first = iter((True,))
    return SomeCalls(calls, lambda name: next(first, False))


def calls_of(names: Collection[str], calls: OutputParser) -> SomeCalls:
    """Pass on calls of some functions: what ``tool_choice: allowed_tools`` asks for."""
    return SomeCalls(calls, lambda name: name in names)


def _json_or(other: Callable[[str, Declared], CallForm]) -> Callable[[str, Declared], CallForm]:
    """Return a form of calls that may be JSON objects as well."""
    return lambda character, declared: JsonCall() if character == "{" else other(character, declared)


def _headed(pattern: str, opener: str) -> Callable[[str, Declared], CallForm]:
    head = re.compile(pattern)
    return lambda character, declared: HeadedCall(head, opener)


_QWEN_TAGS = Tags(
    "<function=",
    ">",
    "<parameter=",
    ">",
    "",
    "</parameter>",
    "</function>",
    drops_line_breaks=True,
    after=("</tool_call>",),
    openers=("<tool_call>", "<function="),
)
_QWEN_TAGS_BEGUN = replace(_QWEN_TAGS, opener="")

_GLM_TAGS = Tags(
    "",
    "",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "</tool_call>",
    drops_line_breaks=False,
    openers=("<tool_call>",),
)

CALL_FORMATS: Final[Mapping[str, CallFormat]] = {
    # ``<tool_call>{"name": …, "arguments": …}</tool_call>``, repeated: Hermes, Qwen 2.5 and 3.
    "hermes": CallFormat(lambda *_: JsonCall(), ("<tool_call>",), ("</tool_call>",), objects=True),
    # ``{"name": …, "parameters": …}`` as the whole answer, or after ``<|python_tag|>``; several with ``;`` between.
    "llama3_json": CallFormat(lambda *_: JsonCall(), ("<|python_tag|>",), separators=";", objects=True, bare=True),
    # ``[TOOL_CALLS][{"name": …, "arguments": …}]``, and since 2025 ``[TOOL_CALLS]name[ARGS]{…}``, repeated.
    "mistral": CallFormat(
        _json_or(
            _headed(
                r"\s*(?P<name>[A-Za-z0-9_.:-]+)\s*(?:\[CALL_ID\]\s*[A-Za-z0-9]+\s*)?(?:\[ARGS\]\s*)?", "[TOOL_CALLS]"
            )
        ),
        ("[TOOL_CALLS]",),
        ("[/TOOL_CALLS]",),
        inside=("[ARGS]", "[CALL_ID]"),
    ),
    # ``[f(x=1), g()]`` as the whole answer, or in ``<|python_start|>…<|python_end|>``: Llama 3.2 and 4.
    "pythonic": CallFormat(
        lambda character, declared: PythonCall(declared), ("<|python_start|>",), ("<|python_end|>",), bare=True
    ),
    # ``<｜tool▁call▁begin｜>function<｜tool▁sep｜>f`` with the arguments in a code block; V3.1 without either.
    "deepseek_v3": CallFormat(
        _headed(
            r"\s*(?:function<｜tool▁sep｜>(?=[A-Za-z0-9_.:-]))?(?P<name>[A-Za-z0-9_.:-]+)(?:<｜tool▁sep｜>)?\s*"
            r"(?:```(?:json)?\s*)?",
            "<｜tool▁call▁begin｜>",
        ),
        ("<｜tool▁call▁begin｜>",),
        ("```", "<｜tool▁call▁end｜>"),
        ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        ("<｜tool▁sep｜>",),
    ),
    # ``<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{…}<|tool_call_end|>``, in a section: Kimi K2.
    "kimi_k2": CallFormat(
        _headed(r"\s*(?P<name>[A-Za-z0-9_.:-]+)\s*(?:<\|tool_call_argument_begin\|>\s*)?", "<|tool_call_begin|>"),
        ("<|tool_call_begin|>",),
        ("<|tool_call_end|>",),
        ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        ("<|tool_call_argument_begin|>",),
    ),
    # ``<tool_call><function=f><parameter=x>1</parameter></function></tool_call>``: Qwen 3 Coder. It sometimes leaves
    # ``<tool_call>`` out, so ``<function=`` begins a call as well.
    "qwen3_coder": CallFormat(
        _json_or(
            lambda character, declared: TaggedCall(_QWEN_TAGS if character == "<" else _QWEN_TAGS_BEGUN, declared)
        ),
        _QWEN_TAGS.openers,
        ("</tool_call>",),
    ),
    # ``<tool_call>f<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>``: GLM 4.5 and later.
    "glm45": CallFormat(
        _json_or(lambda character, declared: TaggedCall(_GLM_TAGS, declared)),
        _GLM_TAGS.openers,
        ("</tool_call>",),
        inside=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    # ``<|tool_call|>[{"name": …, "arguments": …}, …]``: Granite 3.
    "granite": CallFormat(lambda *_: JsonCall(), ("<|tool_call|>", "<tool_call>"), ("</tool_call>",), objects=True),
}

REQUIRED: Final = CallFormat(lambda *_: JsonCall(), objects=True, bare=True)
"""``[{"name": …, "parameters": …}, …]``: what guided decoding makes of ``tool_choice: required``."""


def named(name: str) -> CallFormat:
    """The arguments of one function and nothing else: what guided decoding makes of a ``tool_choice`` with a name."""
    return CallFormat(lambda *_: GivenCall(name), bare=True)


class CustomCalls:
    """Wraps the parser of an answer: the arguments of some functions become one piece, the text of the call.

    They are held until the call has ended; ``max_tokens`` bounds them as it bounds the answer.
    """

    def __init__(self, parser: OutputParser, names: Collection[str], text_of: Callable[[str], str]) -> None:
        self._parser, self._names, self._text_of = parser, names, text_of
        self._held: list[str] | None = None

    def feed(self, text: str) -> list[AnswerPiece]:
        return self._converted(self._parser.feed(text))

    def finish(self) -> list[AnswerPiece]:
        return [*self._converted(self._parser.finish()), *self._released()]

    def _converted(self, pieces: list[AnswerPiece]) -> list[AnswerPiece]:
        converted: list[AnswerPiece] = []
        for piece in pieces:
            if piece.kind is PieceKind.ARGUMENTS and self._held is not None:
                self._held.append(piece.text)
                continue
            converted += self._released()
            converted.append(piece)
            if piece.kind is PieceKind.CALL and piece.text in self._names:
                self._held = []
        return converted

    def _released(self) -> list[AnswerPiece]:
        held, self._held = self._held, None
        return [AnswerPiece(PieceKind.ARGUMENTS, self._text_of("".join(held)))] if held else []
