"""Calls of custom tools: the model writes their text as the one argument of a function, the client gets the text."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final

from poolgrid.frontend.parsers.pieces import Kind, OutputParser, Piece


class CustomCalls:
    """Wraps the parser of an answer: the arguments of some functions become one piece, the text of the call.

    They are held until the call has ended; ``max_tokens`` bounds them as it bounds the answer.
    """

    def __init__(self, parser: OutputParser, names: Collection[str], text_of: Callable[[str], str]) -> None:
        self._parser: Final = parser
        self._names: Final = names
        self._text_of: Final = text_of
        self._held: list[str] | None = None

    def feed(self, text: str) -> list[Piece]:
        return self._converted(self._parser.feed(text))

    def finish(self) -> list[Piece]:
        return [*self._converted(self._parser.finish()), *self._released()]

    def _converted(self, pieces: list[Piece]) -> list[Piece]:
        converted: list[Piece] = []
        for piece in pieces:
            if piece.kind is Kind.ARGUMENTS and self._held is not None:
                self._held.append(piece.text)
                continue
            converted += self._released()
            converted.append(piece)
            if piece.kind is Kind.CALL and piece.text in self._names:
                self._held = []
        return converted

    def _released(self) -> list[Piece]:
        held, self._held = self._held, None
        return [Piece(Kind.ARGUMENTS, self._text_of("".join(held)))] if held else []
