"""Where prompts are rendered and tokenized: short ones on the event loop, long ones in a few threads.

The tokenizer releases the GIL while it works, so a 60k-token prompt in a thread does not stall the streams of others.
Waiting for a thread is bounded; what does not fit is answered 429.

Token ids of prompt segments that were seen before: found by their text, in bounded memory.

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

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

import msgspec

from poolgrid.server.frontend.errors import RequestError
from poolgrid.server.process.caches import BudgetedLru

T = TypeVar("T")

QUEUE_MAX: Final = 256
"""Long prompts that may wait for a thread: of 8k tokens they are a few seconds of work for two threads."""

INLINE_BYTES: Final = 4096
"""Up to so many bytes of new text are tokenized on the event loop, in about 1 ms; handing a prompt to a thread costs
about 0.15 ms."""

RETRY_AFTER_S: Final = 1
"""Two threads drain a full queue of 8k-token prompts in seconds; a client that comes back after one finds room."""


FAST_FACTOR: Final = 16
"""How much longer a prompt may be for a fast tokenizer to be done at once: 64 KiB of text take it 0.05 ms, a third of
what handing them to a thread costs, and a run of letters without a blank, the worst there is, takes 3.5 ms: no longer
than a step of an engine."""


class TokenizationPool:
    """A bounded pool of threads with a bounded queue, owned by the event loop that calls ``run``."""

    def __init__(self, threads: int, queue_limit: int = QUEUE_MAX, inline_bytes: int = INLINE_BYTES) -> None:
        self._executor = ThreadPoolExecutor(max_workers=threads, thread_name_prefix="tokenizer")
        self._limit = threads + queue_limit
        self._queue_limit = queue_limit
        self._inline_bytes = inline_bytes
        self._lock = threading.Lock()
        self.pending = 0
        """Long prompts in the threads or waiting for one."""

    def is_short(self, size_bytes: int, fast: bool = False) -> bool:
        """Return whether work of this size is done on the event loop; ``fast``: by a fast tokenizer."""
        return size_bytes <= (self._inline_bytes * FAST_FACTOR if fast else self._inline_bytes)

    async def run(self, size_bytes: int, work: Callable[[], T], fast: bool = False) -> T:
        """Do ``work`` here when it is short, else in a thread; raises ``RequestError`` 429 when that is full."""
        return work() if self.is_short(size_bytes, fast) else await self.run_in_thread(work)

    async def run_in_thread(self, work: Callable[[], T], is_due: bool = False) -> T:
        """Do ``work`` in a thread; raises ``RequestError`` 429 when too much waits for one, unless the work ``is_due``:
        that of an answer which has been generated is never refused, and bounded by the requests there are."""
        if self.pending >= self._limit and not is_due:
            raise RequestError(
                429,
                "tokenizer_busy",
                f"tokenizing a long prompt: {self._queue_limit} are waiting already, the limit; try again later",
                headers=((b"retry-after", str(RETRY_AFTER_S).encode()),),
            )
        with self._lock:
            self.pending += 1
        future = self._executor.submit(work)
        # Counted until the thread is done, also when the client has gone: that is what occupies the thread.
        future.add_done_callback(self._done)
        try:
            return await asyncio.wrap_future(future)
        finally:
            # What the work raised refers to this frame, and the future to what it raised: without this, whatever the
            # request holds (a body of 32 MB) would wait for the collector, which runs seldom.
            del future

    def close(self) -> None:
        """Let running work end and take no more."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _done(self, _: object) -> None:
        # Called in the tokenizer thread, or on the event loop for work that was cancelled before it began.
        with self._lock:
            self.pending -= 1


SEGMENT_CHARS_MIN: Final = 256
"""Shortest segment that is cut off and cached: tokenizing less costs little more than looking it up."""

SAME_HEAD_MAX: Final = 8
"""Segments of one head that are compared, the newest ones: each takes up to as long as the comparison of a prompt."""

ENTRY_OVERHEAD_BYTES: Final = 800
"""Two objects and a map entry; the head and its own."""


_Name = str | tuple[str, str]
"""A segment, or a segment and its salt: most requests have none, and a string is the quicker key."""


class _Segment(msgspec.Struct, eq=False, gc=False):
    """A segment that is kept, with its ids."""

    text: str
    packed: bytes
    name: _Name
    """What it is kept under."""
    followed_by: Any = None
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
