"""The search for markers (``<think>``, ``[TOOL_CALLS]``) in text that arrives in parts, and parsers that go by them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from poolgrid.server.frontend.answer_pieces import AnswerPiece, joined_pieces

SPACE = " \t\n\r"
"""White space between the parts of calls and of JSON."""


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
        self._buffer += text
        while self._buffer and self._state(self):
            pass
        return self._taken()

    def _taken(self) -> list[AnswerPiece]:
        out, self._out = self._out, []
        return joined_pieces(out)


def first_marker(text: str, markers: Sequence[str]) -> tuple[int, str] | None:
    """Return where the first of ``markers`` begins in ``text`` and which it is; the longest, where several begin."""
    best: tuple[int, int] | None = None
    found = ""
    for marker in markers:
        at = text.find(marker)
        if at >= 0 and (best is None or (at, -len(marker)) < best):
            best = (at, -len(marker))
            found = marker
    return None if best is None else (best[0], found)


QUOTES = ("`", "'", '"')


def known_until(text: str, markers: Sequence[str], before: str = "") -> tuple[int, str]:
    """Return how much of ``text`` certainly stands before a marker, and the marker that begins there, if it is known.

    A marker between two equal quotes is talked about and does not count. ``before`` is the character before ``text``.
    """
    at = 0
    while found := first_marker(text[at:], markers):
        where, marker = at + found[0], found[1]
        quote = text[where - 1] if where else before
        at = where + len(marker)
        if quote not in QUOTES:
            return where, marker
        if at == len(text):
            return where, ""
        if text[at] != quote:
            return where, marker
    return len(text) - held_length(text, markers), ""


def held_length(text: str, markers: Sequence[str]) -> int:
    """Return the length of the longest end of ``text`` that may still become one of ``markers``."""
    longest = 0
    for marker in markers:
        for length in range(min(len(marker) - 1, len(text)), longest, -1):
            if text.endswith(marker[:length]):
                longest = length
                break
    return longest


def may_begin(text: str, markers: Sequence[str]) -> bool:
    """Return whether ``text`` is the beginning of one of ``markers``, or begins with one."""
    return any(marker.startswith(text) or text.startswith(marker) for marker in markers)


class Trimmer:
    """One stretch of text without the white space at its ends. What may be its last white space is held back."""

    def __init__(self, leading: bool = True) -> None:
        self._leading = leading
        """Whether white space at the beginning is dropped."""
        self._begun = False
        self._held: list[str] = []

    def feed(self, text: str) -> str:
        """Take new text and return what is certain to be inside."""
        if not self._begun and self._leading:
            text = text.lstrip()
        if not text:
            return ""
        inside = text.rstrip()
        if not inside:
            self._held.append(text)
            return ""
        self._begun = True
        found = self.release() + inside
        if len(inside) < len(text):
            self._held.append(text[len(inside) :])
        return found

    def release(self) -> str:
        """Return the white space that was held back: the stretch turned out not to end here."""
        held = "".join(self._held)
        self._held.clear()
        return held

    def restart(self, leading: bool = True) -> None:
        """Drop what is held back and begin a new stretch."""
        self._held.clear()
        self._begun = False
        self._leading = leading
