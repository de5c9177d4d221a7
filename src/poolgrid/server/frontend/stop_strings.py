"""Find stop strings in text that arrives in pieces, holding back only what may still become one.

Rules: the match that **ends** first wins (of those, the one that starts first), because that is where a generation
watched character by character would have stopped; so the result does not depend on how the text was cut. The stop
string is never part of the output. Held back is the longest end of the text that begins some stop string.

Where an answer is parsed, stop strings are searched for in its content alone: a model that thinks often writes the
words of its prompt, and a call that ends in the middle of its arguments is no call.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from poolgrid.server.frontend.answer_pieces import AnswerPiece, OutputParser, PieceKind, joined_pieces


class StopStrings:
    """One sequence's search; at most the longest stop string less one character is held back."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None
        """The stop string that ended the text; nothing may be fed after it."""

    def feed(self, text: str) -> str:
        """Take new text and return what can be shown now; after a match, what came before the stop string."""
        if not text:
            return ""
        buffer = self._held + text
        best: tuple[int, int] | None = None
        for stop in self._stops:
            start = buffer.find(stop)
            if start >= 0:
                candidate = (start + len(stop), start)
                if best is None or candidate < best:
                    best = candidate
        if best is not None:
            end, start = best
            self.matched = buffer[start:end]
            self._held = ""
            return buffer[:start]
        keep = self._held_length(buffer)
        if keep == 0:
            self._held = ""
            return buffer
        self._held = buffer[-keep:]
        return buffer[:-keep]

    def flush(self) -> str:
        """Return what is still held back: the text has ended without becoming a stop string."""
        held, self._held = self._held, ""
        return held

    def _held_length(self, buffer: str) -> int:
        longest = 0
        for stop in self._stops:
            first = stop[0]
            at = buffer.find(first, max(0, len(buffer) - len(stop) + 1))
            while at >= 0:
                length = len(buffer) - at
                if length <= longest:
                    break
                if stop.startswith(buffer[at:]):
                    longest = length
                    break
                at = buffer.find(first, at + 1)
        return longest


class StoppedContent:
    """Takes the text of one answer apart; its content ends with the first stop string, and the answer with it."""

    def __init__(self, parser: OutputParser, stops: StopStrings) -> None:
        self._parser = parser
        self._stops = stops
        self._pieces: list[AnswerPiece] = []

    def feed(self, text: str, searches: bool) -> None:
        """Take new text. Without ``searches`` what becomes certain now is part of the answer, whatever it is."""
        self._take(self._parser.feed(text), searches)

    def end(self, searches: bool) -> None:
        """Take note that the text has ended."""
        self._take(self._parser.finish(), searches)
        self._show(PieceKind.CONTENT, self._stops.flush())

    def take(self) -> list[AnswerPiece]:
        """Return the pieces that have become certain and forget them."""
        pieces, self._pieces = self._pieces, []
        return joined_pieces(pieces)

    def _take(self, pieces: Iterable[AnswerPiece], searches: bool) -> None:
        for piece in pieces:
            if self._stops.matched is not None:
                return
            if piece.kind is PieceKind.CONTENT and searches:
                self._show(PieceKind.CONTENT, self._stops.feed(piece.text))
            else:
                self._show(PieceKind.CONTENT, self._stops.flush())
                self._pieces.append(piece)

    def _show(self, kind: PieceKind, text: str) -> None:
        if text:
            self._pieces.append(AnswerPiece(kind, text))


class StoppedPieces:
    """What an encoder reads of such an answer in place of its text."""

    def __init__(self, content: StoppedContent) -> None:
        self._content = content

    def feed(self, text: str) -> list[AnswerPiece]:
        return self._content.take()

    def finish(self) -> list[AnswerPiece]:
        return self._content.take()
