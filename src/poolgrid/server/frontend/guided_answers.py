"""Tell reasoning from an answer that keeps to a guide, where the prompt leaves the reasoning open.

Some engines apply a guide from the first token on, so the answer has no reasoning and never closes it; others let the
model reason first. So what a parser takes for reasoning is held back as long as it may be the guided answer: until the
reasoning ends, or the text leaves the guide. Text that ends before that is the answer. ``max_tokens`` bounds it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final

from poolgrid.server.frontend.answer_pieces import AnswerPiece, OutputParser, PieceKind, joined_pieces
from poolgrid.server.frontend.guides import Guide

_SCALAR: Final = re.compile(r"-?\d*(\.\d*)?([eE][+-]?\d*)?\s*")
"""How a JSON number begins; a string, an object or a list is recognized by the parser itself."""

_NAMES: Final = ("true", "false", "null")
_DIGITS: Final = re.compile(r"\d+")
_SPACE: Final = re.compile(r"\s+")


def guided_answer(parser: OutputParser, guide: Guide) -> OutputParser:
    """Return the parser of an answer under a guide; the same where the guide leaves room to reason, or is none."""
    choices = guide.get("guided_choice")
    if choices is not None:
        return GuidedAnswer(parser, _Choices(choices).fits)
    if "guided_json" in guide:
        return GuidedAnswer(parser, _Scalar().fits)
    # What a regular expression or a grammar allows is not known here: any text may be it.
    return GuidedAnswer(parser, None) if {"guided_regex", "guided_grammar"} & guide.keys() else parser


class _Choices:
    """The choices that an answer may still be."""

    def __init__(self, choices: Sequence[str]) -> None:
        self._left = choices
        self._chars = 0
        """Characters of the answer so far."""

    def fits(self, text: str) -> bool:
        self._left = [choice for choice in self._left if choice.startswith(text, self._chars)]
        self._chars += len(text)
        return bool(self._left)


class _Scalar:
    """Whether an answer may be a JSON number or name so far."""

    def __init__(self) -> None:
        self._begun = ""
        """The answer with one digit for several, and one blank for white space: as short as its form."""

    def fits(self, text: str) -> bool:
        self._begun = _DIGITS.sub("0", _SPACE.sub(" ", self._begun + text)).lstrip()
        word = self._begun.rstrip()
        return any(name.startswith(word) for name in _NAMES) or _SCALAR.fullmatch(self._begun) is not None


class GuidedAnswer:
    """One answer that an engine was told to keep to a guide.

    ``fits`` takes its text in pieces and returns whether all of them may be its beginning; ``None`` = any text may.
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
        if reasons_only and (self._fits is None or self._fits(text)):
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
