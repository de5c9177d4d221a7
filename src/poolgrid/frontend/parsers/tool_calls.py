"""Tool calls in the text of an answer: where they begin, one after the other, and the content around them.

Rules
- Calls begin at an *opener* (``<tool_call>``), or, for formats without one, at the beginning of the text (``bare``).
  After it stands one call, or a list of them in brackets.
- White space between content and calls, and between calls, belongs to neither and is dropped.
- A call is passed on when it is complete, is of a function that the request declares, and its arguments are a JSON
  object: ``Kind.CALL`` with ``Kind.ARGUMENTS`` right after it. All else is content, with its opener and white space.
- Other markers end a list of calls as well as its bracket.
- Markers of which nothing depends (``drops``) are left out wherever they stand.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
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
from poolgrid.frontend.parsers.markers import Trimmer, first_marker, held_length
from poolgrid.frontend.parsers.pieces import AnswerPiece, OutputParser, PieceKind, joined_pieces
from poolgrid.frontend.parsers.tagged_call import TaggedCall, Tags, fitted

Declared = Mapping[str, Mapping[str, Any]]
"""The functions that calls may be of, each with the JSON schema of its parameters."""

_SPACE = " \t\n\r"


class ToolCalls:
    """The calls of one answer. ``form`` begins a call, given the character it begins with.

    ``declared``: the functions that may be meant, each with the JSON schema of its parameters.
    """

    def __init__(
        self,
        form: Callable[[str], CallForm],
        declared: Declared,
        *,
        openers: Sequence[str] = (),
        closers: Sequence[str] = (),
        drops: Sequence[str] = (),
        separators: str = "",
        objects: bool = False,
        bare: bool = False,
    ) -> None:
        self._form = form
        self._declared = declared
        self._openers = tuple(openers)
        self._closers = tuple(closers)
        """Markers that may follow a call (outside a list), each once, in this order."""
        self._drops = tuple(drops)
        self._markers = self._openers + self._drops
        self._ends = self._markers + self._closers
        self._separators = separators
        """Characters that may stand between calls outside a list."""
        self._objects = objects
        """Whether calls are objects that may follow one another without anything between."""
        self._state: Callable[[ToolCalls], bool] = ToolCalls._begin if bare else ToolCalls._text
        """What takes from the buffer next: no bound method, which would be a circle that waits for the collector."""
        self._buffer = ""
        self._out: list[AnswerPiece] = []
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

    def feed(self, text: str) -> list[AnswerPiece]:
        self._buffer += text
        while self._buffer and self._state(self):
            pass
        return self._taken()

    def finish(self) -> list[AnswerPiece]:
        if self._call is not None:
            self._call.end()
            self._call_ended(self._call)
        aside = "".join(self._aside)
        if self._announced and not aside.strip(_SPACE + self._separators + ",]"):
            aside = ""
        self._content(aside + self._buffer)
        self._buffer = ""
        self._aside.clear()
        rest = self._space.release()
        if rest:
            self._out.append(AnswerPiece(PieceKind.CONTENT, rest))
        return self._taken()

    def _taken(self) -> list[AnswerPiece]:
        out, self._out = self._out, []
        return joined_pieces(out)

    # Each state takes something from the buffer and returns True, or returns False when it needs more text.

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
        if marker in self._openers:
            self._aside.append(marker)
            self._announced = False
            self._state = ToolCalls._open
        return True

    def _open(self) -> bool:
        """After an opener: one call, or a list."""
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
        self._call = self._form(character)
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
        self._closers_left = self._closers

    def _after(self) -> bool:
        """After a call: the next one of a list, the list's end, closers, or content."""
        if not self._skip_space():
            return False
        character = self._buffer[0]
        if character == "{" and self._objects and (self._in_list or self._closers_left == self._closers):
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
        if character in self._separators:
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
        """No (further) call: what was set aside is content."""
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


def hermes(declared: Declared) -> ToolCalls:
    """``<tool_call>{"name": …, "arguments": …}</tool_call>``, repeated: Hermes, Qwen 2.5 and 3."""
    return ToolCalls(lambda _: JsonCall(), declared, openers=("<tool_call>",), closers=("</tool_call>",), objects=True)


def granite(declared: Declared) -> ToolCalls:
    """``<|tool_call|>[{"name": …, "arguments": …}, …]``: Granite 3."""
    return ToolCalls(
        lambda _: JsonCall(),
        declared,
        openers=("<|tool_call|>", "<tool_call>"),
        closers=("</tool_call>",),
        objects=True,
    )


def llama3_json(declared: Declared) -> ToolCalls:
    """``{"name": …, "parameters": …}`` as the whole answer, or after ``<|python_tag|>``; several with ``;`` between."""
    return ToolCalls(
        lambda _: JsonCall(), declared, openers=("<|python_tag|>",), separators=";", objects=True, bare=True
    )


_MISTRAL_HEAD = re.compile(r"\s*(?P<name>[A-Za-z0-9_.:-]+)\s*(?:\[CALL_ID\]\s*[A-Za-z0-9]+\s*)?(?:\[ARGS\]\s*)?")


def mistral(declared: Declared) -> ToolCalls:
    """``[TOOL_CALLS][{"name": …, "arguments": …}]``, and since 2025 ``[TOOL_CALLS]name[ARGS]{…}``, repeated."""

    def form(character: str) -> CallForm:
        return JsonCall() if character == "{" else HeadedCall(_MISTRAL_HEAD, "[TOOL_CALLS]")

    return ToolCalls(form, declared, openers=("[TOOL_CALLS]",))


def pythonic(declared: Declared) -> ToolCalls:
    """``[f(x=1), g()]`` as the whole answer, or in ``<|python_start|>…<|python_end|>``: Llama 3.2 and 4."""
    return ToolCalls(
        lambda _: PythonCall(declared),
        declared,
        openers=("<|python_start|>",),
        closers=("<|python_end|>",),
        bare=True,
    )


_DEEPSEEK_HEAD = re.compile(
    r"\s*(?:function<｜tool▁sep｜>(?=[A-Za-z0-9_.:-]))?(?P<name>[A-Za-z0-9_.:-]+)(?:<｜tool▁sep｜>)?\s*(?:```(?:json)?\s*)?"
)


def deepseek_v3(declared: Declared) -> ToolCalls:
    """``<｜tool▁call▁begin｜>function<｜tool▁sep｜>f`` with the arguments in a code block; V3.1 without either."""
    return ToolCalls(
        lambda _: HeadedCall(_DEEPSEEK_HEAD, "<｜tool▁call▁begin｜>"),
        declared,
        openers=("<｜tool▁call▁begin｜>",),
        closers=("```", "<｜tool▁call▁end｜>"),
        drops=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    )


_KIMI_HEAD = re.compile(r"\s*(?P<name>[A-Za-z0-9_.:-]+)\s*(?:<\|tool_call_argument_begin\|>\s*)?")


def kimi_k2(declared: Declared) -> ToolCalls:
    """``<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{…}<|tool_call_end|>``, in a section: Kimi K2."""
    return ToolCalls(
        lambda _: HeadedCall(_KIMI_HEAD, "<|tool_call_begin|>"),
        declared,
        openers=("<|tool_call_begin|>",),
        closers=("<|tool_call_end|>",),
        drops=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    )


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


def qwen3_coder(declared: Declared) -> ToolCalls:
    """``<tool_call><function=f><parameter=x>1</parameter></function></tool_call>``: Qwen 3 Coder.

    It sometimes leaves ``<tool_call>`` out, so ``<function=`` begins a call as well.
    """

    def form(character: str) -> CallForm:
        if character == "{":
            return JsonCall()
        return TaggedCall(_QWEN_TAGS if character == "<" else replace(_QWEN_TAGS, opener=""), declared)

    return ToolCalls(form, declared, openers=_QWEN_TAGS.openers, closers=("</tool_call>",))


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


def glm45(declared: Declared) -> ToolCalls:
    """``<tool_call>f<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>``: GLM 4.5 and later."""

    def form(character: str) -> CallForm:
        return JsonCall() if character == "{" else TaggedCall(_GLM_TAGS, declared)

    return ToolCalls(form, declared, openers=_GLM_TAGS.openers, closers=("</tool_call>",))


def required(declared: Declared) -> ToolCalls:
    """``[{"name": …, "parameters": …}, …]``: what guided decoding makes of ``tool_choice: required``."""
    return ToolCalls(lambda _: JsonCall(), declared, objects=True, bare=True)


def named(name: str, declared: Declared) -> ToolCalls:
    """The arguments of one function and nothing else: what guided decoding makes of a ``tool_choice`` with a name."""
    return ToolCalls(lambda _: GivenCall(name), declared, bare=True)


class CustomCalls:
    """Wraps the parser of an answer: the arguments of some functions become one piece, the text of the call.

    They are held until the call has ended; ``max_tokens`` bounds them as it bounds the answer.
    """

    def __init__(self, parser: OutputParser, names: Collection[str], text_of: Callable[[str], str]) -> None:
        self._parser: Final = parser
        self._names: Final = names
        self._text_of: Final = text_of
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
