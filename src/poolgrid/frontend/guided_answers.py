"""Tell reasoning from an answer that keeps to a guide, where the prompt leaves the reasoning open.

Some engines apply a guide from the first token on, so the answer has no reasoning and never closes it; others let the
model reason first. So what a parser takes for reasoning is held back as long as it may be the guided answer: until the
reasoning ends, or the text leaves the guide. Text that ends before that is the answer. ``max_tokens`` bounds it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from poolgrid.frontend.guides import Guide
from poolgrid.frontend.parsers.pieces import AnswerPiece, OutputParser, PieceKind, joined_pieces

_SCALAR: Final = re.compile(r"-?\d*(\.\d*)?([eE][+-]?\d*)?\s*")
"""How a JSON number begins; a string, an object or a list is recognized by the parser itself."""

_NAMES: Final = ("true", "false", "null")


def guided_answer(parser: OutputParser, guide: Guide) -> OutputParser:
    """Return the parser of an answer under a guide; the same where the guide leaves room to reason, or is none."""
    choices = guide.get("guided_choice")
    if choices is not None:
        return GuidedAnswer(parser, lambda text: any(choice.startswith(text) for choice in choices))
    if "guided_json" in guide:
        return GuidedAnswer(parser, _may_be_scalar)
    # What a regular expression or a grammar allows is not known here: any text may be it.
    return GuidedAnswer(parser, None) if {"guided_regex", "guided_grammar"} & guide.keys() else parser


def _may_be_scalar(text: str) -> bool:
    word = text.strip()
    return any(name.startswith(word) for name in _NAMES) or _SCALAR.fullmatch(text.lstrip()) is not None


class GuidedAnswer:
    """One answer that an engine was told to keep to a guide.

    ``fits`` tells whether text may be its beginning; ``None`` = any text may.
    """

    def __init__(self, parser: OutputParser, fits: Callable[[str], bool] | None) -> None:
        self._parser = parser
        self._fits = fits
        self._is_decided = False
        self._texts: list[str] = []
        self._held: list[AnswerPiece] = []

    def feed(self, text: str) -> list[AnswerPiece]:
        pieces = self._parser.feed(text)
        if self._is_decided:
            return pieces
        self._texts.append(text)
        self._held += pieces
        reasons_only = all(piece.kind is PieceKind.REASONING for piece in pieces)
        if reasons_only and (self._fits is None or self._fits("".join(self._texts))):
            return []
        self._is_decided = True
        self._texts.clear()
        held, self._held = self._held, []
        return joined_pieces(held)

    def finish(self) -> list[AnswerPiece]:
        pieces = [*self._held, *self._parser.finish()]
        if not self._is_decided and all(piece.kind is PieceKind.REASONING for piece in pieces):
            return [AnswerPiece(PieceKind.CONTENT, "".join(self._texts))]
        return joined_pieces(pieces)
