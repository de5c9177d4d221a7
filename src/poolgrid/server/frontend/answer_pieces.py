"""Pieces of an answer, and the interface of the parsers that make them."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple, Protocol


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
