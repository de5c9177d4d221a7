"""Blocks that stay as they are while they are read, although events go on: nothing is copied to freeze them.

Rules for this file:

1. To freeze a mapping of blocks is to promise not to change it. It becomes the *base* of an ``Overlay``, which takes
   its place among what is held: what goes away is noted in ``_gone``, what comes in ``_top``. Whoever reads the base
   sees what was held at that moment, for as long as the overlay is not thawed.
2. An overlay answers as the mapping would that had been changed itself, order included: what is stored again after it
   went away comes last. (A block that is given another parent moves to the end, too. No journal makes that of one.)
3. ``thaw`` ends the promise: the changes go into the base, so many at a time, what went away first. In between, the
   overlay goes on answering. When nothing is left of it, the base takes its place again.
4. Both cost in proportion to the changes, not to what is held. The number of changes between the two is bounded by
   what is made of the base meanwhile: seconds of events.
5. Large mappings that nobody needs any more are freed so many blocks at a time (``Discarded``): a million, freed at
   once, are twenty milliseconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, MutableMapping, Sequence

from poolgrid.consolidator.core.owned_blocks import OwnedBlocks

FREED_AT_ONCE_BLOCKS = 4096
"""Mappings of up to so many blocks are freed at once: a tenth of a millisecond."""

_MISSING: int = -1


class Discarded:
    """Blocks that nobody asks for any more, on their way out of memory."""

    def __init__(self) -> None:
        self.in_slices = False
        """Whether somebody calls ``free``; else everything is freed at once."""
        self._waiting: deque[OwnedBlocks] = deque()

    def __len__(self) -> int:
        return sum(map(len, self._waiting))

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def put(self, blocks: OwnedBlocks) -> None:
        """Take blocks that nobody holds or reads."""
        if self.in_slices and len(blocks) > FREED_AT_ONCE_BLOCKS:
            self._waiting.append(blocks)

    def free(self, blocks: int) -> bool:
        """Free at most that many blocks; return whether there are more."""
        while self._waiting and blocks > 0:
            newest = self._waiting[-1]
            count = min(blocks, len(newest))
            blocks -= count
            newest.discard(count)
            if not newest:
                self._waiting.pop()
        return bool(self._waiting)


class Overlay(MutableMapping[int, int | None]):
    """What became of a frozen mapping of blocks."""

    __slots__ = ("_gone", "_thawing", "_top", "base")

    def __init__(self, base: OwnedBlocks) -> None:
        self.base = base
        """What was held when it was frozen; unchanged until ``thaw``."""
        self._gone: set[int] = set()
        """Blocks of the base that are not held any more, or were stored again since."""
        self._top = OwnedBlocks()
        """Blocks stored since; one of the base is here only if it is gone, too."""
        self._thawing = False

    @property
    def changes(self) -> int:
        """Return how many changes are not in the base yet."""
        return len(self._gone) + len(self._top)

    def thaw(self, changes: int) -> int:
        """Put at most that many changes into the base; return how many more it could have been."""
        self._thawing = True
        gone, top, base = self._gone, self._top, self.base
        count = min(changes, len(gone))
        base.remove([gone.pop() for _ in range(count)])
        changes -= count
        if top and changes > 0:
            for parent, chain in top.take_oldest(changes):
                added = base.add(parent, chain)
                assert added, "a block is both in the base and stored since"
                changes -= len(chain)
        return changes

    # As the mapping

    def __len__(self) -> int:
        return len(self.base) - len(self._gone) + len(self._top)

    def __contains__(self, sequence_hash: object) -> bool:
        return sequence_hash in self._top or (sequence_hash in self.base and sequence_hash not in self._gone)

    def __getitem__(self, sequence_hash: int) -> int | None:
        if sequence_hash in self._top:
            return self._top[sequence_hash]
        if sequence_hash in self._gone:
            raise KeyError(sequence_hash)
        return self.base[sequence_hash]

    def __setitem__(self, sequence_hash: int, parent: int | None) -> None:
        if sequence_hash not in self._top and sequence_hash in self.base and sequence_hash not in self._gone:
            if self.base[sequence_hash] == parent:
                return
            del self[sequence_hash]
        self._top[sequence_hash] = parent

    def __delitem__(self, sequence_hash: int) -> None:
        if self.pop(sequence_hash, _MISSING) == _MISSING:
            raise KeyError(sequence_hash)

    def __iter__(self) -> Iterator[int]:
        gone = self._gone
        yield from (sequence_hash for sequence_hash in self.base if sequence_hash not in gone)
        yield from self._top

    def pop(self, sequence_hash: int, default: int | None) -> int | None:  # type: ignore[override]
        """Take out a block and return its parent, or ``default`` when it is not held."""
        if sequence_hash in self._top:
            return self._top.pop(sequence_hash, default)
        if sequence_hash in self._gone or sequence_hash not in self.base:
            return default
        if self._thawing:
            parent = self.base[sequence_hash]
            del self.base[sequence_hash]
            return parent
        self._gone.add(sequence_hash)
        return self.base[sequence_hash]

    def add(self, parent: int | None, hashes: Sequence[int]) -> bool:
        """Take in a chain of blocks; refuse it (``False``) when one of them is held already, or is named twice."""
        return self.is_disjoint(hashes) and self._top.add(parent, hashes)

    def remove(self, hashes: Iterable[int]) -> list[int]:
        """Take out blocks; return those that were held."""
        pop = self.pop
        return [sequence_hash for sequence_hash in hashes if pop(sequence_hash, _MISSING) != _MISSING]

    def is_disjoint(self, hashes: Iterable[int]) -> bool:
        """Say whether none of some blocks is held."""
        if not self._top.is_disjoint(hashes):
            return False
        if self.base.is_disjoint(hashes):
            return True
        return all(sequence_hash in self._gone or sequence_hash not in self.base for sequence_hash in hashes)

    def copy(self) -> OwnedBlocks:
        """Return a mapping of what is held; takes all of it in one go."""
        return OwnedBlocks({sequence_hash: self[sequence_hash] for sequence_hash in self})
