"""Tool calls in the text of an answer: where they begin, one after the other, and the content around them.

Rules
- Calls begin at an *opener* (``<tool_call>``), or, for formats without one, at the beginning of the text (``bare``).
  After it stands one call, or a list of them in brackets.
- White space between content and calls, and between calls, belongs to neither and is dropped.
- A call begins (``PieceKind.CALL``) once its function is known, which the request must declare, and a part of its
  arguments is certain; they follow as they come. What is no call by then is content, with its opener and white space.
- A call that has begun stays one. Where its arguments stop being a JSON object, what the model wrote follows as it is,
  up to the next marker. Where the text ends, they end. The client gets arguments that are no JSON in both cases.
- Other markers end a list of calls as well as its bracket.
- Markers without a meaning of their own (``drops``) are left out everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from functools import cache
from typing import Final

from poolgrid.plugins.parsers.call_forms import (
    CALL_CHARS_MAX,
    CallForm,
    Declared,
    GivenCall,
    HeadedCall,
    JsonCall,
    PythonCall,
)
from poolgrid.plugins.parsers.element_call import ElementCall
from poolgrid.plugins.parsers.formats import CallFormat
from poolgrid.plugins.parsers.markers import SPACE, StatefulParser, Trimmer, first_marker, held_length
from poolgrid.plugins.parsers.tagged_call import TaggedCall
from poolgrid.plugins.parsers.values import GEMMA, JSON
from poolgrid.server.frontend.answer_pieces import AnswerPiece, OutputParser, PieceKind


def begun_call(format: CallFormat, opener: str, character: str, declared: Declared, name: str = "") -> CallForm:
    """Return the form of a call that begins with a character after an opener; ``name``: its function, where given."""
    if format.form == "given":
        return GivenCall(declared, name)
    if format.form == "keyed":
        return JsonCall(declared, keyed=True)
    if format.form == "json" or (format.json and character == "{"):
        return JsonCall(declared)
    if format.form == "pythonic":
        return PythonCall(declared)
    if format.form == "elements":
        return ElementCall(declared, format.mark, "invoke")
    if format.form == "headed":
        notation = GEMMA if format.notation == "gemma" else JSON
        return HeadedCall(declared, _pattern(format.head), format.openers, notation)
    tags = next((each for each in format.tags if opener in each.openers), format.tags[0])
    return TaggedCall(declared, tags, is_open=character != "<")


@cache
def _pattern(head: str) -> re.Pattern[str]:
    return re.compile(head)


class ToolCalls(StatefulParser):
    """The calls of one answer.

    ``declared``: the functions that may be meant, each with the JSON schema of its parameters. ``given``: the function
    that is called, where the format does not name it.
    """

    def __init__(self, format: CallFormat, declared: Declared, given: str = "") -> None:
        super().__init__(ToolCalls._begin if format.bare else ToolCalls._text)
        self._format = format
        self._declared = declared
        self._given = given
        self._markers = format.openers + format.drops
        self._ends = self._markers + format.closers
        self._space = Trimmer(leading=False)
        self._call: CallForm | None = None
        self._begun = False
        """Whether the client knows of the call."""
        self._call_text: list[str] = []
        """The text of a call that has not begun."""
        self._call_chars = 0
        self._opener = ""
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
            self._take_arguments(self._call)
            self._call_ended(self._call)
        if self._state == ToolCalls._broken:
            self._out.append(AnswerPiece(PieceKind.ARGUMENTS, self._buffer))
            self._buffer = ""
        aside = "".join(self._aside)
        if self._announced and not aside.strip(SPACE + self._format.separators + ",]"):
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
            self._opener = marker
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
        self._call = begun_call(self._format, self._opener, character, self._declared, self._given)
        self._begun = False
        self._call_chars = 0
        self._state = ToolCalls._read

    def _read(self) -> bool:
        call = self._call
        assert call is not None, "the state after a call began"
        text = self._buffer if self._begun else self._buffer[: CALL_CHARS_MAX - self._call_chars]
        self._buffer = self._buffer[len(text) :]
        call.feed(text)
        if not self._begun:
            self._call_text.append(text)
            self._call_chars += len(text)
        self._take_arguments(call)
        if not call.done and not call.failed:
            if self._begun or self._call_chars < CALL_CHARS_MAX:
                return False
            call.left = ""
            call.failed = True
        self._call_ended(call)
        return bool(self._buffer)

    def _take_arguments(self, call: CallForm) -> None:
        arguments = call.take()
        if not arguments:
            return
        if not self._begun:
            self._begun = True
            self._announced = True
            self._call_text.clear()
            self._aside.clear()
            self._space.restart()
            self._out.append(AnswerPiece(PieceKind.CALL, call.name))
        self._out.append(AnswerPiece(PieceKind.ARGUMENTS, arguments))

    def _call_ended(self, call: CallForm) -> None:
        """After a call that is complete, that broke off, or that was none and is content."""
        self._call = None
        self._buffer = call.left + self._buffer
        if not self._begun:
            text = "".join(self._call_text)
            self._call_text.clear()
            self._aside.append(text[: len(text) - len(call.left)])
            self._give_back()
            return
        self._state = ToolCalls._after
        self._closers_left = self._format.closers
        if call.failed:
            self._out.append(AnswerPiece(PieceKind.ARGUMENTS, call.unread()))
            self._in_list = False
            self._state = ToolCalls._broken

    def _broken(self) -> bool:
        """The rest of a call that broke off, up to the next marker."""
        found = first_marker(self._buffer, self._ends)
        end = len(self._buffer) - held_length(self._buffer, self._ends) if found is None else found[0]
        self._out.append(AnswerPiece(PieceKind.ARGUMENTS, self._buffer[:end]))
        self._buffer = self._buffer[end:]
        if found is None:
            return False
        self._state = ToolCalls._after
        return True

    def _after(self) -> bool:
        """After a call: the next one of a list, the list's end, closers, or content."""
        if not self._skip_space():
            return False
        character = self._buffer[0]
        if character in self._format.following and (self._in_list or self._closers_left == self._format.closers):
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
        if self._buffer[0] in self._format.following:
            self._begin_call(self._buffer[0])
        else:
            self._give_back()
        return True

    def _may_be_end(self) -> bool:
        """Return whether a marker may begin here, which more text decides."""
        buffer = self._buffer
        return any(marker.startswith(buffer) and marker != buffer for marker in self._ends)

    def _skip_space(self) -> bool:
        """Set white space aside and return whether anything follows it."""
        stripped = self._buffer.lstrip(SPACE)
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


REQUIRED: Final = CallFormat(form="json", following="{", bare=True)
"""``[{"name": …, "parameters": …}, …]``: what guided decoding makes of ``tool_choice: required``."""

NAMED: Final = CallFormat(form="given", bare=True)
"""The arguments of one function and nothing else: what guided decoding makes of a ``tool_choice`` with a name."""
