"""Which run has a block as its first or last: a map in shards whose keys are small.

An integer of up to 60 bits takes 32 bytes in Python, one of 64 bits 48. So the leading bits of a hash, which say in
which of the first shards it is, are left out of its key.

Rules
    1. The key of a hash is its rest behind the first ``depth`` leading bits, ``key_mask``. Shards are split, never
       joined, so within a shard no two hashes have the same key.
    2. Shards fill evenly, so all would outgrow their tables within a few thousand blocks of each other, several in one
       call, at one or two milliseconds each. So tables that are costly to rebuild grow ahead of time, one after the
       other, and shards are split one after the other: a caller that stores asks for ``relieve`` once a shard has more
       than ``crowded_entries``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, Final

from poolgrid.kernel.index.run_forest import Run
from poolgrid.kernel.index.sharded_map import KEY_BITS, ShardedMap

TABLES = (16_384, 32_768)
"""Slots of the tables that grow ahead of time. A smaller one takes less than half a millisecond to rebuild."""

ROOM_LEFT: Final = 8
"""The part of a table's room that is left when growing ahead begins: one in so many."""

SPLIT_PACE: Final = 16
"""A shard is split after as many new blocks as this part of what one holds, at the least."""

LOOKED_AT: Final = 16
"""Shards that one call looks at to find one that is to grow."""


def _room(slots: int) -> int:
    """Return how many entries a table takes before CPython rebuilds it (``USABLE_FRACTION`` in its dictobject.c)."""
    return 2 * slots // 3


def _has_grown(shard: dict[int, Run], slots: int) -> bool:
    """Return whether a shard's table has more than so many slots: each takes two bytes, each entry 24."""
    return sys.getsizeof(shard) > 3 * slots + 36 * _room(slots)


def _grow(shard: dict[int, Any], slots: int) -> None:
    """Have a shard's table rebuilt with twice as many slots, by more entries than it has room for; they leave again."""
    passing = dict.fromkeys(range(len(shard) - _room(slots) - 1, 0))
    shard.update(passing)
    for key in passing:
        del shard[key]


class BlockMap(ShardedMap[Run]):
    """The run of each block that is the first or last of one, by sequence hash."""

    __slots__ = ("_grown_to", "_relieve_at", "_stage", "crowded_entries", "key_mask", "view")

    def __init__(self, shard_entries: int, depth: int) -> None:
        super().__init__(shard_entries, depth)
        self.key_mask = (1 << (KEY_BITS - depth)) - 1
        """What of a hash is its key."""
        self._stage = -1
        """Which of ``TABLES`` grows next."""
        self._grown_to = 0
        """Shards from this place on have not been looked at for that."""
        self._relieve_at = 0
        """How many entries there are before the next shard grows or is split."""
        self.crowded_entries = 0
        """Entries from which on a shard may have to be relieved."""
        self._begin_stage(0)
        self.view = (self.shards, self.shift, self.key_mask)
        """All that a look-up needs, in one place: ``shards[block >> shift][block & key_mask]``."""

    def relieve(self, key: int) -> None:
        """Split the shard of a block when it has grown too large, or have the table of one shard grow ahead of time;
        every call but a few does neither."""
        if self.entries < self._relieve_at:
            return
        if len(self.shards[key >> self.shift]) > self.shard_entries:
            super().relieve(key)
            self._relieve_at = self.entries + self.shard_entries // SPLIT_PACE
            self._begin_stage(0)  # for its parts
        elif self._stage < len(TABLES):
            slots = TABLES[self._stage]
            if self._grow_next(slots):
                # All have grown when half of the room is taken that was left.
                self._relieve_at = self.entries + _room(slots) // (2 * ROOM_LEFT)

    def _grow_next(self, slots: int) -> bool:
        shards = self.shards
        least = _room(slots) * (ROOM_LEFT - 2) // ROOM_LEFT
        for _ in range(LOOKED_AT):
            at = self._grown_to
            if at >= len(shards):
                self._begin_stage(self._stage + 1)
                return False
            shard = shards[at]
            self._grown_to = self._places(at)[1]
            if least < len(shard) <= _room(slots) and not _has_grown(shard, slots):
                _grow(shard, slots)
                return True
        return False

    def _begin_stage(self, stage: int) -> None:
        """Have tables of another size grow next, or none but by splitting."""
        self._stage = stage
        self._grown_to = 0
        crowded = self.shard_entries
        if stage < len(TABLES):
            room = _room(TABLES[stage])
            crowded = min(crowded, room - room // ROOM_LEFT)
        self.crowded_entries = crowded

    def leading(self, block: int) -> int:
        """Return the leading bits of a block that keys leave out, in their place: the same in all of its shard."""
        return block & ~self.key_mask

    def get(self, key: int) -> Run | None:
        return self.shards[key >> self.shift].get(key & self.key_mask)

    def __contains__(self, key: int) -> bool:
        return key & self.key_mask in self.shards[key >> self.shift]

    def __setitem__(self, key: int, value: Run) -> None:
        shard = self.shards[key >> self.shift]
        before = len(shard)
        shard[key & self.key_mask] = value
        self.entries += len(shard) - before

    def __delitem__(self, key: int) -> None:
        del self.shards[key >> self.shift][key & self.key_mask]
        self.entries -= 1

    def items(self) -> Iterator[tuple[int, Run]]:
        """Yield all blocks with their runs; the map must not change meanwhile."""
        before: dict[int, Run] | None = None
        for place, shard in enumerate(self.shards):
            if shard is not before:
                leading = self.leading(place << self.shift)
                yield from ((leading | key, run) for key, run in shard.items())
            before = shard

    def _spread(self, bits: int) -> None:
        super()._spread(bits)
        self._grown_to <<= bits
        self.view = (self.shards, self.shift, self.key_mask)
