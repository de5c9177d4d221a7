"""A map from u64 hashes that never stops to rebuild itself whole.

Python's dict rebuilds itself when it runs out of room, in growth and also at a constant size, since deleted
entries leave gaps: tens of milliseconds at a million entries, hundreds at eight million. Here no dict is large.

Rules
    1. The leading bits of a key choose its *shard*, a dict. ``shards`` lists them in the order of their keys;
       a shard that has not been split as often as others stands in several neighbouring places.
    2. A shard beyond ``shard_entries`` is split in eight by its next three bits. In eight, since what costs is that
       entries are moved: most of them once in their life, where halves would move each of them every time that the
       map doubles. A caller that stores many keys at once asks for relief of one of their shards, not of all: over many
       calls every shard has its turn.
    3. Keys that share all of their leading ``DEPTH_MAX`` bits are not kept apart. Sequence hashes are XXH3, which
       spreads them evenly.
    4. The garbage collector knows no shard, so that nothing waits while it looks at millions of entries. Values are
       numbers, or objects that it does not know either.
    5. ``entries`` is the number of keys. Code that works on ``shards`` directly, for speed, keeps it right.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from itertools import chain, repeat
from typing import Any, Final, Generic, TypeVar

V = TypeVar("V")

KEY_BITS: Final = 64

SHARD_ENTRIES: Final = 2048
"""Entries of a shard before it is split: 0.3 to 0.7 ms, for a map that begins small."""

SPLIT_EVERY_ENTRIES = 256
"""New entries between two splits at the least; shards fill evenly, and many would be split in one call."""

SPLIT_BITS: Final = 3

DEPTH_MAX = 18
"""Leading bits that shards differ by at the most: a quarter of a million shards, half a billion entries."""


ALL_DICTS_ARE_KNOWN: Final = sys.version_info >= (3, 14)
"""Whether the garbage collector knows each dict: up to Python 3.13 it knows none of numbers, or of other values that it
does not know."""

_untrack = ctypes.pythonapi.PyObject_GC_UnTrack
_untrack.argtypes, _untrack.restype = [ctypes.py_object], None


def unknown_dict() -> dict[Any, Any]:
    """Return an empty dict that the collector does not know, for values that it does not know either.

    What refers back to such a dict is never found to be garbage.
    """
    made: dict[Any, Any] = {}
    if ALL_DICTS_ARE_KNOWN:
        _untrack(made)
    return made


class ShardedMap(Generic[V]):
    """A dict from u64 to anything, in shards of bounded size."""

    __slots__ = ("entries", "shard_entries", "shards", "shift")

    def __init__(self, shard_entries: int = SHARD_ENTRIES, depth: int = 0) -> None:
        """Make an empty map of ``2**depth`` shards: what is sure to grow large begins with more than one."""
        self.shard_entries = shard_entries
        self.shards: list[dict[int, V]] = [unknown_dict() for _ in range(1 << depth)]
        self.shift = KEY_BITS - depth
        """``shards[key >> shift]`` is the shard of a key."""
        self.entries = 0

    def get(self, key: int) -> V | None:
        return self.shards[key >> self.shift].get(key)

    def __contains__(self, key: int) -> bool:
        return key in self.shards[key >> self.shift]

    def __setitem__(self, key: int, value: V) -> None:
        shard = self.shards[key >> self.shift]
        before = len(shard)
        shard[key] = value
        if len(shard) != before:
            self.entries += 1
            if before >= self.shard_entries and self.entries % SPLIT_EVERY_ENTRIES == 0:
                self.relieve(key)

    def __delitem__(self, key: int) -> None:
        del self.shards[key >> self.shift][key]
        self.entries -= 1

    def __len__(self) -> int:
        return self.entries

    def relieve(self, key: int) -> None:
        """Split the shard of a key when it has grown too large."""
        at = key >> self.shift
        shard = self.shards[at]
        if len(shard) <= self.shard_entries:
            return
        first, end = self._places(at)
        if end - first < 1 << SPLIT_BITS:
            if self.shift - SPLIT_BITS < KEY_BITS - DEPTH_MAX:
                return
            self._deepen()
            first, end = self._places(key >> self.shift)
        width = (end - first) >> SPLIT_BITS
        shift = self.shift + width.bit_length() - 1
        parts: list[dict[int, V]] = [unknown_dict() for _ in range(1 << SPLIT_BITS)]
        last = len(parts) - 1
        for each, value in shard.items():
            parts[each >> shift & last][each] = value
        self.shards[first:end] = [part for part in parts for _ in range(width)]

    def replace(self, key: int, shard: dict[int, V]) -> None:
        """Put another dict with the same entries in the place of the shard of a key."""
        first, end = self._places(key >> self.shift)
        self.shards[first:end] = [shard] * (end - first)

    def _deepen(self) -> None:
        self._spread(SPLIT_BITS)

    def _spread(self, bits: int) -> None:
        """Let each shard stand in 2**bits places for each one that it stood in."""
        self.shards = list(chain.from_iterable(map(repeat, self.shards, repeat(1 << bits))))
        self.shift -= bits

    def _places(self, at: int) -> tuple[int, int]:
        """Return the first place of the shard at a place, and the one behind its last."""
        shards = self.shards
        shard = shards[at]
        width = 1
        while width < len(shards):
            # A shard fills 2**n places from a multiple of 2**n on.
            wider = width << 1
            first = at & -wider
            if shards[first] is not shard or first + wider > len(shards) or shards[first + wider - 1] is not shard:
                break
            width = wider
        first = at & -width
        return first, first + width

    def shard_from(self, key: int) -> tuple[dict[int, V], int]:
        """Return the shard of a key, and the first key of the next shard (``2**64``: there is none).

        A walk by these keys meets every entry that was there when it began, however many shards are split meanwhile.
        """
        at = key >> self.shift
        return self.shards[at], self._places(at)[1] << self.shift

    def each_shard(self) -> Iterator[dict[int, V]]:
        """Yield every shard once."""
        before: dict[int, V] | None = None
        for shard in self.shards:
            if shard is not before:
                yield shard
            before = shard

    def items(self) -> Iterator[tuple[int, V]]:
        """Yield all keys with their values; the map must not change meanwhile."""
        for shard in self.each_shard():
            yield from shard.items()

    def discard(self, entries: int) -> int:
        """Free this many entries of a discarded map; return how many of the number are left over."""
        shards = self.shards
        while entries > 0 and shards:
            shard = shards[-1]
            if len(shard) < entries:
                entries -= len(shard) + 1
                self.entries -= len(shard)
                while shards and shards[-1] is shard:
                    shards.pop()
            else:
                for _ in range(entries):
                    shard.popitem()
                self.entries -= entries
                entries = 0
        return entries

    def size_bytes(self) -> int:
        return sys.getsizeof(self.shards) + sum(sys.getsizeof(shard) for shard in self.each_shard())
