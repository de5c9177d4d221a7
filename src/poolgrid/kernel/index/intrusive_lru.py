"""Things in order of age: a list whose links lie in the things themselves, so that any can go at any time.

The garbage collector does not know these things (``gc=False``), nor dicts that hold nothing else: it would look at each
of millions whenever it looked at one, about fifty milliseconds at a time. So a caller that drops them cuts their links,
which would keep them alive.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import msgspec


class LruEntry(msgspec.Struct, kw_only=True, eq=False, gc=False):
    """What can stand in an ``IntrusiveLru``, in one at a time."""

    older: Any = None
    newer: Any = None

    __repr__ = object.__repr__
    """Not by its fields, which lead to all the others."""


A = TypeVar("A", bound=LruEntry)


class IntrusiveLru(Generic[A]):
    """A doubly linked ring with its own end; oldest first.

    What is taken out keeps no link to what stays: should anything still name it, it would else keep alive whatever was
    its neighbour, and that its own next neighbour, and so on without end.

    One walk at a time goes from the newest to the oldest in as many steps as one likes. It meets all that was there
    when it began and is not removed before its turn; what comes in behind a thing that was not met yet is met as well.
    """

    __slots__ = ("_cursor", "_end", "entries")

    def __init__(self) -> None:
        end: Any = LruEntry()
        end.older = end.newer = end
        self._end = end
        self._cursor = end
        self.entries = 0

    def append(self, thing: A) -> None:
        end = self._end
        before = end.older
        thing.older = before
        thing.newer = end
        before.newer = end.older = thing
        self.entries += 1

    def insert_behind(self, older: A, thing: A) -> None:
        """Add a thing as the next newer of another."""
        newer = older.newer
        thing.older = older
        thing.newer = newer
        older.newer = newer.older = thing
        self.entries += 1
        if self._cursor is older:
            self._cursor = thing

    def insert_before(self, newer: A, thing: A) -> None:
        """Add a thing as the next older of another; a walk that has met that one meets it, too, unless it is over."""
        older = newer.older
        thing.older = older
        thing.newer = newer
        older.newer = newer.older = thing
        self.entries += 1
        if self._cursor is older and older is not self._end:
            self._cursor = thing

    def remove(self, thing: A) -> None:
        older = thing.older
        newer = thing.newer
        older.newer = newer
        newer.older = older
        thing.older = thing.newer = None
        self.entries -= 1
        if self._cursor is thing:
            self._cursor = older

    def begin_walk(self) -> None:
        self._cursor = self._end.older

    def step(self) -> A | None:
        """Return the next thing of the walk, or ``None`` at its end."""
        thing = self._cursor
        if thing is self._end:
            return None
        self._cursor = thing.older
        return thing  # type: ignore[no-any-return]

    @property
    def oldest(self) -> A | None:
        thing = self._end.newer
        return None if thing is self._end else thing

    def discard_newest(self) -> A | None:
        thing = self._end.older
        if thing is self._end:
            return None
        self.remove(thing)
        return thing  # type: ignore[no-any-return]

    def close(self) -> None:
        """Cut the link of an empty list to itself; it is of no use any more."""
        self._end.older = self._end.newer = None

    def __iter__(self) -> Iterator[A]:
        """Yield all from the oldest to the newest; the list must not change meanwhile."""
        thing = self._end.newer
        while thing is not self._end:
            yield thing
            thing = thing.newer
