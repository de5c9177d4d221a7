"""Reasoning in the text of an answer: a stretch between two markers at its beginning, and maybe others further on.

White space at the borders of the two is dropped. Whether the answer begins inside the reasoning depends on the prompt:
templates of some models open it themselves, or close it to have none.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import Enum

from poolgrid.plugins.parsers.markers import (
    StatefulParser,
    Trimmer,
    first_marker,
    held_length,
    known_until,
    may_begin,
)
from poolgrid.server.frontend.answer_pieces import AnswerPiece, PieceKind


class Begins(Enum):
    """What the first text of an answer is."""

    REASONING = "reasoning"
    CONTENT = "content"
    OPEN = "open"
    """Reasoning, if the text begins with an opening marker, else content; a closing marker there ends nothing."""


class MarkedReasoning(StatefulParser):
    """Reasoning from the first of ``openers`` to the first of ``closers``.

    ``drops`` are markers that are left out of the content. ``guided``: how an answer may begin that the engine was
    told to write; then it is content, for the guide may leave no room to reason.
    """

    def __init__(
        self,
        openers: Sequence[str],
        closers: Sequence[str],
        *,
        begins: Begins = Begins.OPEN,
        drops: Sequence[str] = (),
        guided: Sequence[str] = (),
    ) -> None:
        super().__init__(MarkedReasoning._content if begins is Begins.CONTENT else MarkedReasoning._start)
        self._openers = tuple(openers)
        self._closers = tuple(closers)
        self._drops = tuple(drops)
        self._begins = begins
        self._guided = tuple(guided)
        self._lead: list[str] = []
        """White space before the first text."""
        self._before = ""
        """The last character of the reasoning."""
        self._space = Trimmer()

    def feed(self, text: str) -> list[AnswerPiece]:
        if self._state == MarkedReasoning._content and not self._drops and not self._buffer:
            return [AnswerPiece(PieceKind.CONTENT, text)] if text else []
        return super().feed(text)

    def finish(self) -> list[AnswerPiece]:
        kind = PieceKind.REASONING if self._state == MarkedReasoning._reasoning else PieceKind.CONTENT
        rest = "".join(self._lead) + self._buffer
        if kind is PieceKind.REASONING:
            rest = self._space.feed(rest) + self._space.release()
        self._buffer = ""
        self._out.append(AnswerPiece(kind, rest))
        return self._taken()

    def _start(self) -> bool:
        stripped = self._buffer.lstrip()
        self._lead.append(self._buffer[: len(self._buffer) - len(stripped)])
        self._buffer = stripped
        if not stripped:
            return False
        for opener in self._openers:
            if stripped.startswith(opener):
                self._lead.clear()
                self._buffer = stripped[len(opener) :]
                self._state = MarkedReasoning._reasoning
                return True
        for closer in self._closers:
            if stripped.startswith(closer):
                self._lead.clear()
                self._buffer = stripped[len(closer) :]
                self._state = MarkedReasoning._gap
                return True
        if may_begin(stripped, (*self._openers, *self._closers)):
            return False
        if self._begins is Begins.REASONING and not stripped.startswith(self._guided):
            if may_begin(stripped, self._guided):
                return False
            self._lead.clear()
            self._state = MarkedReasoning._reasoning
        else:
            self._buffer = "".join(self._lead) + self._buffer
            self._lead.clear()
            self._state = MarkedReasoning._content
        return True

    def _reasoning(self) -> bool:
        end, closer = known_until(self._buffer, self._closers, self._before)
        self._out.append(AnswerPiece(PieceKind.REASONING, self._space.feed(self._buffer[:end])))
        if end:
            self._before = self._buffer[end - 1]
        self._buffer = self._buffer[end + len(closer) :]
        if not closer:
            return False
        self._state = MarkedReasoning._gap
        return True

    def _gap(self) -> bool:
        """Between the reasoning and the content: white space and markers that are left out."""
        self._buffer = self._buffer.lstrip()
        for marker in self._drops:
            if self._buffer.startswith(marker):
                self._buffer = self._buffer[len(marker) :]
                return True
        if not self._buffer or any(marker.startswith(self._buffer) for marker in self._drops):
            return False
        self._state = MarkedReasoning._content
        return True

    def _content(self) -> bool:
        found = first_marker(self._buffer, self._drops)
        end = len(self._buffer) - held_length(self._buffer, self._drops) if found is None else found[0]
        self._out.append(AnswerPiece(PieceKind.CONTENT, self._buffer[:end]))
        if found is None:
            self._buffer = self._buffer[end:]
            return False
        self._buffer = self._buffer[end + len(found[1]) :]
        return True


class FurtherReasoning(StatefulParser):
    """Stretches of reasoning in content, after the first stretch, which ``MarkedReasoning`` reads.

    A stretch that begins after text must also end: text about the marker is content. Markers in quotes or in a block of
    code are text.
    """

    def __init__(self, opener: str, closer: str) -> None:
        super().__init__(FurtherReasoning._content)
        self._closer = (closer,)
        self._markers = (opener, _FENCE)
        self._opener = opener
        self._begun = re.compile(f"[{re.escape(opener[0] + _FENCE[0])}]")
        self._before = ""
        self._space = Trimmer()
        self._in_code = False
        self._fresh = True
        """Whether only white space was content since the last stretch of reasoning or the last call."""
        self._held: list[str] = []
        self._held_chars = 0

    def feed(self, text: str) -> list[AnswerPiece]:
        """Take new content and return what is certain now."""
        if not self._buffer and self._state == FurtherReasoning._content and not self._begun.search(text):
            if not text:
                return []
            self._before = text[-1]
            self._fresh = self._fresh and text.isspace()
            return [AnswerPiece(PieceKind.CONTENT, text)]
        return super().feed(text)

    def call(self) -> None:
        self._fresh = True

    def finish(self) -> list[AnswerPiece]:
        if self._state == FurtherReasoning._inside:
            self._out.append(AnswerPiece(PieceKind.REASONING, self._space.feed(self._buffer)))
        else:
            held = "".join(self._held)
            self._out.append(AnswerPiece(PieceKind.CONTENT, (self._opener + held if held else "") + self._buffer))
        self._buffer = ""
        return self._taken()

    def _content(self) -> bool:
        end, marker = known_until(self._buffer, self._markers, self._before)
        if marker == _FENCE or (marker and self._in_code):
            self._in_code ^= marker == _FENCE
            end, marker = end + len(marker), ""
            more = True
        else:
            more = bool(marker)
        text = self._buffer[:end]
        self._buffer = self._buffer[end + len(marker) :]
        if text:
            self._out.append(AnswerPiece(PieceKind.CONTENT, text))
            self._before = text[-1]
            self._fresh = self._fresh and text.isspace()
        if marker:
            self._space.restart()
            self._before = ""
            self._state = FurtherReasoning._inside if self._fresh else FurtherReasoning._maybe_inside
        return more

    def _inside(self) -> bool:
        end, closer = known_until(self._buffer, self._closer, self._before)
        self._out.append(AnswerPiece(PieceKind.REASONING, self._space.feed(self._buffer[:end])))
        if end:
            self._before = self._buffer[end - 1]
        self._buffer = self._buffer[end + len(closer) :]
        if closer:
            self._end()
        return bool(closer)

    def _maybe_inside(self) -> bool:
        end, closer = known_until(self._buffer, self._closer, self._before)
        end = min(end, HELD_CHARS_MAX - self._held_chars)
        text = self._buffer[:end]
        self._held.append(text)
        self._held_chars += len(text)
        if text:
            self._before = text[-1]
        full = self._held_chars == HELD_CHARS_MAX
        if not closer and not full:
            self._buffer = self._buffer[end:]
            return False
        self._out.append(AnswerPiece(PieceKind.REASONING, self._space.feed("".join(self._held))))
        self._held.clear()
        self._held_chars = 0
        if full:
            self._buffer = self._buffer[end:]
            self._state = FurtherReasoning._inside
        else:
            self._buffer = self._buffer[end + len(closer) :]
            self._end()
        return True

    def _end(self) -> None:
        self._space.restart()
        self._before = ""
        self._fresh = True
        self._state = FurtherReasoning._gap

    def _gap(self) -> bool:
        self._buffer = self._buffer.lstrip()
        if not self._buffer:
            return False
        self._state = FurtherReasoning._content
        return True


_FENCE = "```"

HELD_CHARS_MAX = 256 * 1024
"""Longest text that is held back to see whether a stretch of reasoning ends; longer text is reasoning."""


def begins_after(prompt_end: str, openers: tuple[str, ...], closers: tuple[str, ...]) -> Begins | None:
    """Return how an answer begins after an open or a closed stretch of reasoning in the prompt; ``None`` = neither."""
    end = prompt_end.rstrip()
    if end.endswith(openers):
        return Begins.REASONING
    if end.endswith(closers):
        return Begins.OPEN  # a model may reason although it was told not to
    return None
