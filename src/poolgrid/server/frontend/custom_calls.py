"""Calls of custom tools: their one argument, a text, is what the client gets.

Rules
- The text is passed on as it comes, as long as the arguments begin with it.
- Other arguments are held until the call has ended, for their text to be found; ``max_tokens`` bounds them as it bounds
  the answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection

from poolgrid.server.frontend.answer_pieces import AnswerPiece, OutputParser, PieceKind, joined_pieces

BEGINNING_CHARS_MAX = 64
"""Characters within which the arguments show whether they begin with the text."""

_HIGH_HALF = r"\\u[dD][89abAB][0-9a-fA-F]{2}"
_DECODABLE = re.compile(
    rf'(?:[^"\\]+|{_HIGH_HALF}\\u[dD][c-fC-F][0-9a-fA-F]{{2}}|(?!{_HIGH_HALF})\\u[0-9a-fA-F]{{4}}|\\[^u])*'
)
_LONE_HALF = re.compile(rf"{_HIGH_HALF}(?=[^\\]|\\[^u]|\\u(?![dD][c-fC-F])....)", re.DOTALL)


class _Text:
    """The text of one call, taken out of its arguments."""

    def __init__(self, argument: str, text_of: Callable[[str], str]) -> None:
        self._begins = re.compile(rf'\s*\{{\s*"{re.escape(argument)}"\s*:\s*"')
        self._text_of = text_of
        self._held = ""
        self._streams = False
        self._ended = False

    def feed(self, arguments: str) -> str:
        """Take new arguments and return the text that is certain."""
        if self._ended:
            return ""
        self._held += arguments
        if not self._streams:
            begun = self._begins.match(self._held[:BEGINNING_CHARS_MAX])
            if begun is None:
                return ""
            self._streams = True
            self._held = self._held[begun.end() :]
        found: list[str] = []
        while True:
            decodable = _DECODABLE.match(self._held)
            assert decodable is not None, "the pattern matches nothing, too"
            found.append(json.loads(f'"{decodable[0]}"', strict=False))
            self._held = self._held[decodable.end() :]
            half = _LONE_HALF.match(self._held)
            if half is None:
                break
            found.append("\ufffd")
            self._held = self._held[half.end() :]
        self._ended = self._held.startswith('"')
        return "".join(found)

    def end(self) -> str:
        """Return the rest of the text; there are no further arguments."""
        return "" if self._streams or not self._held else self._text_of(self._held)


class CustomCalls:
    """Wraps the parser of an answer. ``argument``: that of the custom tools among the functions, ``names``.

    ``text_of`` finds the text in arguments that do not begin with it.
    """

    def __init__(
        self, parser: OutputParser, names: Collection[str], argument: str, text_of: Callable[[str], str]
    ) -> None:
        self._parser, self._names, self._argument, self._text_of = parser, names, argument, text_of
        self._text: _Text | None = None

    def feed(self, text: str) -> list[AnswerPiece]:
        return joined_pieces(self._converted(self._parser.feed(text)))

    def finish(self) -> list[AnswerPiece]:
        return joined_pieces([*self._converted(self._parser.finish()), self._rest()])

    def _converted(self, pieces: list[AnswerPiece]) -> list[AnswerPiece]:
        converted: list[AnswerPiece] = []
        for piece in pieces:
            if piece.kind is PieceKind.ARGUMENTS and self._text is not None:
                converted.append(AnswerPiece(PieceKind.ARGUMENTS, self._text.feed(piece.text)))
                continue
            converted += (self._rest(), piece)
            if piece.kind is PieceKind.CALL and piece.text in self._names:
                self._text = _Text(self._argument, self._text_of)
        return converted

    def _rest(self) -> AnswerPiece:
        text, self._text = self._text, None
        return AnswerPiece(PieceKind.ARGUMENTS, "" if text is None else text.end())
