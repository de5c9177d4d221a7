"""Blocks that a worker holds without the block before them, one by one.

They do not count as overlap. The index brings them back into reach when the missing block is stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from poolgrid.consolidator.core.sharded_map import ShardedMap
from poolgrid.router.core.intrusive_lru import IntrusiveLru, LruEntry

CLEARED_COSTS: Final = 3
"""Entries that could be looked at while one is taken out of its maps and links."""


class Orphan(LruEntry):
    """One block, its holders, and its place among those with the same parent."""

    sequence_hash: int
    mask: int
    parent: int
    left: Any = None
    right: Any = None


class Orphans:
    """All blocks out of reach, by hash, by parent and by age."""

    def __init__(self, shard_entries: int) -> None:
        self.entries = 0
        self._by_hash: ShardedMap[Orphan] = ShardedMap(shard_entries)
        self._below: ShardedMap[Orphan] = ShardedMap(shard_entries)
        """The first orphan below each parent; the others follow to its right."""
        self._ages: IntrusiveLru[Orphan] = IntrusiveLru()

    def __del__(self) -> None:
        while (orphan := self._ages.discard_newest()) is not None:
            orphan.left = orphan.right = None
        self._ages.close()

    def get(self, sequence_hash: int) -> Orphan | None:
        return self._by_hash.get(sequence_hash)

    def mask(self, sequence_hash: int) -> int:
        """Return who holds a block out of reach."""
        orphan = self._by_hash.get(sequence_hash)
        return 0 if orphan is None else orphan.mask

    def below(self, parent: int, bit: int) -> list[int]:
        """Return the blocks below a parent that one worker holds out of reach."""
        found: list[int] = []
        orphan = self._below.get(parent)
        while orphan is not None:
            if orphan.mask & bit:
                found.append(orphan.sequence_hash)
            orphan = orphan.right
        return found

    def concern(self, hashes: Sequence[int]) -> bool:
        """Return whether any of these blocks is out of reach somewhere, or has such a block below it."""
        orphans, parents = self._by_hash, self._below
        return any(each in orphans or each in parents for each in hashes)

    def held_between(self, bit: int, first: int, end: int, out: list[int]) -> int:
        """Append the blocks that one worker holds out of reach, of the hashes from ``first`` to before ``end``.

        Returns how many were looked at.
        """
        looked = 0
        while first < end:
            shard, following = self._by_hash.shard_from(first)
            out.extend(h for h, orphan in shard.items() if first <= h < end and orphan.mask & bit)
            looked += len(shard)
            first = following
        return looked

    def add(self, sequence_hash: int, bit: int, parent: int) -> bool:
        """Note that a worker holds a block out of reach; refuse (False) another parent than the one that is known."""
        orphan = self._by_hash.get(sequence_hash)
        if orphan is None:
            orphan = Orphan(sequence_hash, bit, parent)
            self._by_hash[sequence_hash] = orphan
            self._ages.append(orphan)
            self._link(orphan)
            self.entries += 1
        elif orphan.parent != parent:
            return False
        else:
            orphan.mask |= bit
        return True

    def demote(self, sequence_hash: int, bit: int, parent: int) -> None:
        """Note that a block went out of reach, below the parent that it had there, whatever others claimed before."""
        orphan = self._by_hash.get(sequence_hash)
        if orphan is not None and orphan.parent != parent:
            self._unlink(orphan)
            orphan.parent = parent
            self._link(orphan)
        self.add(sequence_hash, bit, parent)

    def clear(self, orphan: Orphan, bits: int) -> None:
        """Take holders off a block; without any it is gone."""
        orphan.mask &= ~bits
        if orphan.mask:
            return
        del self._by_hash[orphan.sequence_hash]
        self._ages.remove(orphan)
        self._unlink(orphan)
        self.entries -= 1

    def _link(self, orphan: Orphan) -> None:
        first = self._below.get(orphan.parent)
        orphan.left = None
        orphan.right = first
        if first is not None:
            first.left = orphan
        self._below[orphan.parent] = orphan

    def _unlink(self, orphan: Orphan) -> None:
        left, right = orphan.left, orphan.right
        if right is not None:
            right.left = left
        if left is not None:
            left.right = right
        elif right is not None:
            self._below[orphan.parent] = right
        else:
            del self._below[orphan.parent]
        orphan.left = orphan.right = None

    @property
    def oldest(self) -> Orphan | None:
        return self._ages.oldest

    def begin_sweep(self) -> None:
        self._ages.begin_walk()

    def sweep(self, dead: int, entries: int) -> int:
        """Look at that many of them; return what of this number is left over once the sweep is done."""
        while entries > 0:
            orphan = self._ages.step()
            if orphan is None:
                break
            entries -= 1
            if orphan.mask & dead:
                self.clear(orphan, dead)
                entries -= CLEARED_COSTS
        return entries

    def __iter__(self) -> Iterator[Orphan]:
        return iter(self._ages)

    def discard(self, entries: int) -> int:
        """Free that many; return what of this number is left over."""
        for each in (self._by_hash, self._below):
            entries = each.discard(entries)
        while entries > 0 and (orphan := self._ages.discard_newest()) is not None:
            orphan.left = orphan.right = None
            self.entries -= 1
            entries -= 1
        return entries

    def size_bytes(self) -> int:
        return self._by_hash.size_bytes() + self._below.size_bytes()
