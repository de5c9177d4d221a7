"""Answers with reasoning: what is left of them as content is read for tool calls and for further reasoning.

Rules
- Calls in reasoning that ends are talk about calls. Where reasoning does not end, or nothing follows its end, the calls
  in it are meant: models forget the closing marker before a call. So the rest of the reasoning is held back from the
  first marker of a call on, until that is decided.
- Text of such an answer before its first call is reasoning, text after it is content.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from poolgrid.frontend.parsers.call_forms import CALL_CHARS_MAX
from poolgrid.frontend.parsers.pieces import (
    AnswerPiece,
    OutputParser,
    PieceKind,
    first_marker,
    held_length,
    joined_pieces,
)
from poolgrid.frontend.parsers.reasoning import FurtherReasoning


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
