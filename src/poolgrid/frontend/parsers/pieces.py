"""The vocabulary of the parsers: pieces of an answer, and what every parser can do."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any, NamedTuple, Protocol


class PieceKind(Enum):
    """What a piece of an answer is."""

    CONTENT = "content"
    REASONING = "reasoning"
    CALL = "call"
    """A tool call begins; the text is the name of its function."""
    ARGUMENTS = "arguments"
    """The next part of the arguments (JSON) of the call that began last."""


class AnswerPiece(NamedTuple):
    """Text of one kind."""

    kind: PieceKind
    text: str


class OutputParser(Protocol):
    """A state machine over the text of one answer."""

    def feed(self, text: str) -> list[AnswerPiece]:
        """Take new text and return what is certain now."""
        ...

    def finish(self) -> list[AnswerPiece]:
        """Return what was held back: the text has ended. Nothing is fed afterwards."""
        ...


FEED_CHARS_MAX = 8192
"""Most text that a parser gets at a time: at each marker it copies what is left of it."""


def taken_apart(parser: OutputParser | None, text: str, ended: bool) -> list[AnswerPiece]:
    """Return the pieces that new text makes certain, all that is left with them once it has ``ended``.

    Without a parser all of it is content.
    """
    if parser is None:
        return [AnswerPiece(PieceKind.CONTENT, text)] if text else []
    if len(text) <= FEED_CHARS_MAX:
        pieces = parser.feed(text) if text else []
    else:
        parts = (text[at : at + FEED_CHARS_MAX] for at in range(0, len(text), FEED_CHARS_MAX))
        pieces = joined_pieces(piece for part in parts for piece in parser.feed(part))
    return [*pieces, *parser.finish()] if ended else pieces


def joined_pieces(pieces: Iterable[AnswerPiece]) -> list[AnswerPiece]:
    """Join neighbours of one kind and leave out empty ones; a call is never joined with another."""
    result: list[AnswerPiece] = []
    for piece in pieces:
        if piece.kind is PieceKind.CALL:
            result.append(piece)
        elif piece.text:
            if result and result[-1].kind is piece.kind:
                result[-1] = AnswerPiece(piece.kind, result[-1].text + piece.text)
            else:
                result.append(piece)
    return result


class StatefulParser:
    """A parser with a buffer, and the state that takes from it next.

    A state takes something from the buffer and returns True, or returns False when it needs more text. It is a
    function of the class and no bound method, which would be a circle that waits for the collector.
    """

    def __init__(self, state: Callable[[Any], bool]) -> None:
        self._state = state
        self._buffer = ""
        self._out: list[AnswerPiece] = []

    def feed(self, text: str) -> list[AnswerPiece]:
        """Take new text and return what is certain now."""
        self._buffer += text
        while self._buffer and self._state(self):
            pass
        return self._taken()

    def _taken(self) -> list[AnswerPiece]:
        out, self._out = self._out, []
        return joined_pieces(out)
