"""Token ids of prompt segments that were seen before: found by their text, in bounded memory.

Rules
    1. At most ``budget_bytes``; the segment that was used longest ago goes first. One takes at most a sixteenth of it.
    2. A segment is found by requests of the salt that it was kept under, and by no others.
    3. A segment that stands at a place of a prompt is found without looking for its end and without hashing all of it:
       its head, the first ``SEGMENT_CHARS_MIN`` characters, names up to ``SAME_HEAD_MAX`` segments, and those are
       compared with the prompt as they are. What is not found so is found by its whole text.
    4. Segments that stand one behind the other are found in one go. Each remembers which one followed it last, and that
       is compared first: the turns of a conversation are the same segments each time.
    5. Threads may use it at once.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Final

from poolgrid.process.caches import BudgetedLru

SEGMENT_CHARS_MIN: Final = 256
"""Shortest segment that is cut off and cached: tokenizing less costs little more than looking it up."""

SAME_HEAD_MAX: Final = 8
"""Segments of one head that are compared, the newest ones: each takes up to as long as the comparison of a prompt."""

ENTRY_OVERHEAD_BYTES: Final = 800
"""Two objects and a map entry; the head and its own."""


_Name = str | tuple[str, str]
"""A segment, or a segment and its salt: most requests have none, and a string is the quicker key."""


class _Segment:
    """A segment that is kept, with its ids."""

    __slots__ = ("followed_by", "name", "packed", "text")

    def __init__(self, text: str, packed: bytes, name: _Name) -> None:
        self.text = text
        self.packed = packed
        self.name = name
        """What it is kept under."""
        self.followed_by: _Segment | None = None
        """Which one stood behind it last, under the same salt; one that is kept no more has no text."""


class SegmentCache:
    """Segments by their text."""

    def __init__(self, budget_bytes: int) -> None:
        self._kept: BudgetedLru[_Name, _Segment] = BudgetedLru(budget_bytes, _size, lambda _, gone: self._behead(gone))
        self._heads: dict[_Name, tuple[_Segment, ...]] = {}
        self._lock = threading.Lock()

    @property
    def used_bytes(self) -> int:
        return self._kept.used

    def follow(self, text: str, begin: int, delimiters: tuple[str, ...], salt: str, parts: list[bytes]) -> int:
        """Append the ids of the segments that ``text`` has from ``begin`` on, up to the first that is not found by its
        head; return where that begins. Each ends at a delimiter or at the end of the text."""
        heads, touch, length = self._heads, self._kept.touch, len(text)
        before: _Segment | None = None
        with self._lock:
            while begin < length:
                # No function of our own for both: it would be called for every segment.
                found = None if before is None else before.followed_by
                if found is not None and found.text and text.startswith(found.text, begin):
                    end = begin + len(found.text)
                    if end == length or text.startswith(delimiters, end):
                        touch(found.name)
                        parts.append(found.packed)
                        begin, before = end, found
                        continue
                head = text[begin : begin + SEGMENT_CHARS_MIN]
                for found in heads.get((salt, head) if salt else head, ()):
                    if text.startswith(found.text, begin):
                        end = begin + len(found.text)
                        if end == length or text.startswith(delimiters, end):
                            if before is not None:
                                before.followed_by = found
                            touch(found.name)
                            parts.append(found.packed)
                            begin, before = end, found
                            break
                else:
                    break
        return begin

    def get(self, segment: str, salt: str = "") -> bytes | None:
        """Return the ids of a segment."""
        name = (salt, segment) if salt else segment
        with self._lock:
            found = self._kept.get(name)
        return None if found is None else found.packed

    def keep(self, segment: str, packed: bytes, salt: str = "") -> None:
        """Remember a segment of at least ``SEGMENT_CHARS_MIN`` characters."""
        name = (salt, segment) if salt else segment
        kept = _Segment(segment, packed, name)
        if _size(name, kept) > self._kept.budget // 16:
            return
        with self._lock:
            if name in self._kept:
                return
            head = _head(name)
            self._heads[head] = (kept, *self._heads.get(head, ())[: SAME_HEAD_MAX - 1])
            self._kept.keep(name, kept)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            for name in list(self._kept):
                kept = self._kept.get(name)
                if kept is not None:
                    kept.followed_by = None  # some follow each other in circles
            self._kept.clear()
            self._heads.clear()

    def __len__(self) -> int:
        return len(self._kept)

    def _behead(self, gone: _Segment) -> None:
        """Have a segment not found any more; who stood before it holds no more of it than that."""
        head = _head(gone.name)
        left = tuple(each for each in self._heads.get(head, ()) if each is not gone)
        if left:
            self._heads[head] = left
        else:
            self._heads.pop(head, None)
        gone.text, gone.packed, gone.name, gone.followed_by = "", b"", "", None


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


def _head(name: _Name) -> _Name:
    return name[:SEGMENT_CHARS_MIN] if isinstance(name, str) else (name[0], name[1][:SEGMENT_CHARS_MIN])


def _size(name: _Name, kept: _Segment) -> int:
    segment, packed = kept.text, kept.packed
    # A character takes one, two or four bytes; four is the bound that needs no look at them. A salt is its request's
    # own object, which this may be the last to hold.
    salt_bytes = 0 if isinstance(name, str) else 4 * len(name[0])
    return salt_bytes + (len(segment) if segment.isascii() else 4 * len(segment)) + len(packed) + ENTRY_OVERHEAD_BYTES
