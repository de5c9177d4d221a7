"""Find stop strings in text that arrives in pieces, holding back only what may still become one.

Rules: the match that **ends** first wins (of those, the one that starts first), because that is where a generation
watched character by character would have stopped; so the result does not depend on how the text was cut. The stop
string is never part of the output. Held back is the longest end of the text that begins some stop string.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """One sequence's search; at most the longest stop string less one character is held back."""

    __slots__ = ("_held", "_stops", "matched")

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
