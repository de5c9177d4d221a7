"""Token ids of prompt segments that were seen before: found by their text, in bounded memory.

Rules
    1. At most ``budget_bytes``; the segment that was used longest ago goes first. One takes at most a sixteenth of it.
    2. A segment is found by requests of the salt that it was kept under, and by no others.
    3. A segment that stands at a place of a prompt is found without looking for its end and without hashing all of it:
       its head, the first ``SEGMENT_CHARS_MIN`` characters, names up to ``SAME_HEAD_MAX`` segments, and those are
       compared with the prompt as they are. Those that stand one behind the other are found in one go. What is not
       found so is found by its whole text.
    4. Threads may use it at once.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from poolgrid.runtime.budgeted_lru import BudgetedLru

SEGMENT_CHARS_MIN = 256
"""Shortest segment that is cut off and cached: tokenizing less costs little more than looking it up."""

SAME_HEAD_MAX = 8
"""Segments of one head that are compared, the newest ones: each takes up to as long as the comparison of a prompt."""

ENTRY_OVERHEAD_BYTES = 800
"""Two objects and a map entry; the head and its own."""


_Name = str | tuple[str, str]
"""A segment, or a segment and its salt: most requests have none, and a string is the quicker key."""

_Kept = tuple[str, bytes, _Name]
"""A segment, its ids, and what it is kept under."""


class SegmentCache:
    """Segments by their text."""

    def __init__(self, budget_bytes: int) -> None:
        self._packed: BudgetedLru[_Name, bytes] = BudgetedLru(budget_bytes, _size, lambda name, _: self._behead(name))
        self._heads: dict[_Name, tuple[_Kept, ...]] = {}
        self._lock = threading.Lock()

    @property
    def used_bytes(self) -> int:
        """Return about how much memory the segments take."""
        return self._packed.used

    def follow(self, text: str, begin: int, delimiters: tuple[str, ...], salt: str, parts: list[bytes]) -> int:
        """Append the ids of the segments that ``text`` has from ``begin`` on, up to the first that is not found by its
        head; return where that begins. Each ends at a delimiter or at the end of the text."""
        heads, touch, length = self._heads, self._packed.touch, len(text)
        with self._lock:
            while begin < length:
                head = text[begin : begin + SEGMENT_CHARS_MIN]
                for segment, packed, name in heads.get((salt, head) if salt else head, ()):
                    if text.startswith(segment, begin):
                        end = begin + len(segment)
                        if end == length or text.startswith(delimiters, end):
                            touch(name)
                            parts.append(packed)
                            begin = end
                            break
                else:
                    break
        return begin

    def get(self, segment: str, salt: str = "") -> bytes | None:
        """Return the ids of a segment."""
        name = (salt, segment) if salt else segment
        with self._lock:
            return self._packed.get(name)

    def keep(self, segment: str, packed: bytes, salt: str = "") -> None:
        """Remember a segment of at least ``SEGMENT_CHARS_MIN`` characters."""
        name = (salt, segment) if salt else segment
        if _size(name, packed) > self._packed.budget // 16:
            return
        with self._lock:
            if name in self._packed:
                return
            head = _head(name)
            self._heads[head] = ((segment, packed, name), *self._heads.get(head, ())[: SAME_HEAD_MAX - 1])
            self._packed.keep(name, packed)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._packed.clear()
            self._heads.clear()

    def __len__(self) -> int:
        return len(self._packed)

    def _behead(self, name: _Name) -> None:
        head, segment = _head(name), _segment(name)
        left = tuple(each for each in self._heads.get(head, ()) if each[0] is not segment)
        if left:
            self._heads[head] = left
        else:
            self._heads.pop(head, None)


def cut(text: str, delimiters: Sequence[str]) -> list[str]:
    """Cut a text in front of delimiters, into segments of at least ``SEGMENT_CHARS_MIN`` characters but the last."""
    cutter = Cutter(text, delimiters)
    segments: list[str] = []
    begin = 0
    while begin < len(text):
        end = cutter.end_from(begin)
        segments.append(text[begin:end])
        begin = end
    return segments or [""]


class Cutter:
    """Finds where the segments of one text end, looking at each character once for each delimiter, or not at all."""

    def __init__(self, text: str, delimiters: Sequence[str]) -> None:
        self._text = text
        self._delimiters = delimiters
        self._places = [-1] * len(delimiters)
        """Where each delimiter was found last; the end of the text when it does not come again."""

    def end_from(self, begin: int) -> int:
        """Return the end of the segment that begins at ``begin``; what is asked for only grows."""
        text, places = self._text, self._places
        nearest = length = len(text)
        earliest = begin + SEGMENT_CHARS_MIN
        for number, delimiter in enumerate(self._delimiters):
            place = places[number]
            if place < earliest and place < length:
                place = text.find(delimiter, earliest)
                places[number] = place = length if place < 0 else place
            if place < nearest:
                nearest = place
        return nearest


def _segment(name: _Name) -> str:
    return name if isinstance(name, str) else name[1]


def _head(name: _Name) -> _Name:
    return name[:SEGMENT_CHARS_MIN] if isinstance(name, str) else (name[0], name[1][:SEGMENT_CHARS_MIN])


def _size(name: _Name, packed: bytes) -> int:
    segment = _segment(name)
    # A character takes one, two or four bytes; four is the bound that needs no look at them. A salt is its request's
    # own object, which this may be the last to hold.
    salt_bytes = 0 if isinstance(name, str) else 4 * len(name[0])
    return salt_bytes + (len(segment) if segment.isascii() else 4 * len(segment)) + len(packed) + ENTRY_OVERHEAD_BYTES
