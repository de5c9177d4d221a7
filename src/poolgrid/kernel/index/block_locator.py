"""Which runs each block may be in: filled thousands of blocks at a time, asked rarely.

The index finds nearly all that it is asked for by the first and last blocks of runs. What is left, a block inside a
run by its bare hash, is found here, in some microseconds.

Rules
    1. What comes and goes is written down one after the other, a block and the number of its run, in *fresh* arrays.
       Once these are full they are sorted and handed out to *shards* by the leading bits of the hash. Within a shard
       nothing is sorted: a look-up reads the whole shard and the fresh entries.
    2. What goes is written down as well, with ``GONE`` in its number. Of each block and run, what came less what went
       is what there is. A shard of which a third are removals is put in order.
    3. What ``where`` returns are runs that a block is in or was in: numbers are given again. The caller checks
       the run itself.
    4. A shard beyond ``shard_entries`` is split in two. What is put in order or split in one go is as much as what was
       handed out asks for, so nothing here takes longer because there are many blocks.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from poolgrid.kernel.index.run_forest import Run
from poolgrid.kernel.index.sharded_map import KEY_BITS, unknown_dict

GONE: Final = 1 << 31
"""In the number of a run: this block went."""

FRESH_ENTRIES: Final = 8192
"""Blocks that are handed out in one go: a quarter of a millisecond."""

GONE_SHARE: Final = 3
"""Share of a shard's entries that may be removals; what came and went takes twice as much."""

GONE_SPARED: Final = 128
"""Entries of a small shard that are not worth it: twice as many in 256 shards take 0.8 MB."""

RELIEF_PACE: Final = 3
"""Entries that are put in order for each that is handed out. Four or less go through it for each block that goes, and
half of what is handed out are removals. Shards are alike and come to it together: one at a time, however
small, would never catch up."""

SPREAD: Final = np.uint64(0x9E3779B97F4A7C15)
"""Odd, so that different numbers of runs are different products."""

SHARDS_FREED: Final = 16
"""Shards that are freed as one entry, each of two pieces of memory."""

SPLIT_BITS: Final = 1

DEPTH_MAX: Final = 32
"""Leading bits that shards differ by at the most."""

PAGE_BITS: Final = 12
"""Runs are found by their number on pages of so many: a dict of them is unknown to the garbage collector, and small."""

_PAGE_MASK: Final = (1 << PAGE_BITS) - 1

_ENTRY_BYTES: Final = 12


class _Shard:
    """Blocks whose hashes have the same leading bits, with the numbers of their runs."""

    __slots__ = ("blocks", "depth", "gone", "numbers")

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.blocks = bytearray()
        self.numbers = bytearray()
        self.gone = 0
        """How many of these are removals."""


class BlockLocator:
    """The runs that a block is in, by the numbers that it gives to runs."""

    __slots__ = (
        "_crowded",
        "_free",
        "_next",
        "_pages",
        "_shards",
        "_starts",
        "fresh_blocks",
        "fresh_entries",
        "fresh_numbers",
        "shard_entries",
    )

    def __init__(self, shard_entries: int, depth: int) -> None:
        self.shard_entries = shard_entries
        self.fresh_entries = max(1, min(FRESH_ENTRIES, shard_entries))
        """Number of fresh entries that are handed out at once. A single block is written here, without a call."""
        self.fresh_blocks = array("Q")
        self.fresh_numbers = array("I")
        self._shards = [_Shard(depth) for _ in range(1 << depth)]
        self._starts = array("Q", (place << (KEY_BITS - depth) for place in range(1 << depth)))
        """The least hash of each shard."""
        self._crowded: dict[int, None] = {}
        """Shards, by their least hash, that are to be put in order or split."""
        self._pages: list[dict[int, Run]] = []
        self._free: list[int] = []
        self._next = 0

    def enter(self, run: Run) -> None:
        """Give a new run a number, and write its blocks down, as ``add`` does."""
        if self._free:
            number = self._free.pop()
        else:
            number = self._next
            self._next += 1
            if number >> PAGE_BITS == len(self._pages):
                self._pages.append(unknown_dict())
        run.number = number
        self._pages[number >> PAGE_BITS][number & _PAGE_MASK] = run
        self.add(run, run.blocks)

    def leave(self, run: Run) -> None:
        """Take back the number of a run, and write down that the blocks went that it still has."""
        if run.blocks:
            self.take(run, run.blocks)
        number = run.number
        del self._pages[number >> PAGE_BITS][number & _PAGE_MASK]
        self._free.append(number)

    def add(self, run: Run, blocks: array[int]) -> None:
        self._write(run.number, blocks)

    def take(self, run: Run, blocks: array[int]) -> None:
        self._write(run.number | GONE, blocks)

    def _write(self, number: int, blocks: array[int]) -> None:
        self.fresh_blocks.extend(blocks)
        numbers = self.fresh_numbers
        numbers.extend(array("I", (number,)) * len(blocks))
        if len(numbers) >= self.fresh_entries:
            self.hand_out()

    def where(self, block: int) -> list[Run]:
        shard = self._shards[bisect_right(self._starts, block) - 1]
        wanted = np.uint64(block)
        # What is in a run twice comes once.
        numbers: dict[int, None] = {}
        for blocks, of_runs in ((shard.blocks, shard.numbers), (self.fresh_blocks, self.fresh_numbers)):
            at = (np.frombuffer(blocks, np.uint64) == wanted).nonzero()[0]
            if len(at):
                numbers.update(dict.fromkeys((np.frombuffer(of_runs, np.uint32)[at] & ~np.uint32(GONE)).tolist()))
        found: list[Run] = []
        for number in numbers:
            run = self._pages[number >> PAGE_BITS].get(number & _PAGE_MASK)
            if run is not None:
                found.append(run)
        return found

    def shard_from(self, first: int) -> tuple[list[int], list[Run], int]:
        """Return the blocks of the shard that a hash is in, with their runs, and the first hash of the next shard.

        A walk by these hashes meets every block that was there when it began, however many shards are split meanwhile.
        """
        if self.fresh_blocks:
            self.hand_out()
        place = bisect_right(self._starts, first) - 1
        shard = self._shards[place]
        if shard.gone:
            _put_in_order(shard)
        blocks = np.frombuffer(shard.blocks, np.uint64).tolist()
        runs = [
            self._pages[number >> PAGE_BITS][number & _PAGE_MASK]
            for number in np.frombuffer(shard.numbers, np.uint32).tolist()
        ]
        return blocks, runs, self._end(place)

    def items(self) -> Iterator[tuple[int, Run]]:
        """Yield all blocks with their runs; nothing must change meanwhile."""
        first = 0
        while first < 1 << KEY_BITS:
            blocks, runs, first = self.shard_from(first)
            yield from zip(blocks, runs, strict=True)

    def discard(self, entries: int) -> int:
        """Free this many entries of a discarded locator; return how many of the number are left over."""
        shards = self._shards
        while entries > 0 and shards:
            del shards[-SHARDS_FREED:]
            entries -= 1
        while entries > 0 and self._pages:
            page = self._pages[-1]
            while page and entries > 0:
                page.popitem()
                entries -= 1
            if not page:
                self._pages.pop()
                entries -= 1
        return entries

    def size_bytes(self) -> int:
        entries = sum(len(shard.numbers) // 4 for shard in self._shards) + len(self.fresh_numbers)
        return _ENTRY_BYTES * entries + 200 * len(self._shards)

    def _end(self, place: int) -> int:
        return self._starts[place + 1] if place + 1 < len(self._starts) else 1 << KEY_BITS

    def hand_out(self) -> None:
        """Give all that is fresh to the shards."""
        blocks = np.frombuffer(self.fresh_blocks, np.uint64)
        numbers = np.frombuffer(self.fresh_numbers, np.uint32)
        self.fresh_blocks, self.fresh_numbers = array("Q"), array("I")
        order = np.argsort(blocks)
        blocks, numbers = blocks[order], numbers[order]
        cuts = np.append(np.searchsorted(blocks, np.frombuffer(self._starts, np.uint64)), len(blocks))
        went = np.concatenate(([0], np.cumsum(numbers >= GONE)))[cuts]
        some = np.flatnonzero(np.diff(cuts))
        begins, ends, gone = cuts[some], cuts[some + 1], went[some + 1] - went[some]
        pieces = zip(some.tolist(), begins.tolist(), ends.tolist(), gone.tolist(), strict=True)
        blocks_bytes, numbers_bytes = memoryview(blocks.tobytes()), memoryview(numbers.tobytes())
        for place, begin, end, gone_here in pieces:
            shard = self._shards[place]
            shard.blocks += blocks_bytes[8 * begin : 8 * end]
            shard.numbers += numbers_bytes[4 * begin : 4 * end]
            shard.gone += gone_here
            entries = len(shard.numbers) >> 2
            if entries > self.shard_entries or GONE_SHARE * shard.gone > entries + GONE_SPARED:
                self._crowded[self._starts[place]] = None
        left = RELIEF_PACE * len(blocks)
        while left > 0 and self._crowded:
            start = next(iter(self._crowded))
            del self._crowded[start]
            place = bisect_right(self._starts, start) - 1
            left -= len(self._shards[place].numbers) >> 2
            self._relieve(place)

    def _relieve(self, place: int) -> None:
        """Put a shard in order, and split it when it is still too large."""
        shard = self._shards[place]
        if shard.gone:
            _put_in_order(shard)
        if len(shard.numbers) <= 4 * self.shard_entries or shard.depth + SPLIT_BITS > DEPTH_MAX:
            return
        depth = shard.depth + SPLIT_BITS
        blocks = np.frombuffer(shard.blocks, np.uint64)
        numbers = np.frombuffer(shard.numbers, np.uint32)
        start = self._starts[place]
        parts: list[_Shard] = []
        of_parts = (blocks >> np.uint64(KEY_BITS - depth)) & np.uint64((1 << SPLIT_BITS) - 1)
        for each in range(1 << SPLIT_BITS):
            part = _Shard(depth)
            chosen = of_parts == each
            part.blocks += blocks[chosen].tobytes()
            part.numbers += numbers[chosen].tobytes()
            parts.append(part)
        self._shards[place : place + 1] = parts
        starts = array("Q", (start + (each << (KEY_BITS - depth)) for each in range(1 << SPLIT_BITS)))
        self._starts[place : place + 1] = starts
        for part, first in zip(parts, starts, strict=True):
            if len(part.numbers) > 4 * self.shard_entries:
                self._crowded[first] = None


def _put_in_order(shard: _Shard) -> None:
    """Leave of a shard what is there: of each block and run, what came less what went."""
    blocks: NDArray[np.uint64] = np.frombuffer(shard.blocks, np.uint64)
    numbers: NDArray[np.uint32] = np.frombuffer(shard.numbers, np.uint32)
    runs = numbers & ~np.uint32(GONE)
    # One sort of one number is several times faster than a sort by two. Alike in it are nearly always the same block
    # and run; where they are not, both are looked at.
    both = blocks ^ (runs * SPREAD)
    order = np.argsort(both)
    both, blocks, runs = both[order], blocks[order], runs[order]
    alike = both[1:] == both[:-1]
    same = alike & (runs[1:] == runs[:-1])
    if np.count_nonzero(same) != np.count_nonzero(alike):
        again = np.lexsort((runs, blocks))
        order, blocks, runs = order[again], blocks[again], runs[again]
        same = (blocks[1:] == blocks[:-1]) & (runs[1:] == runs[:-1])
    signs = np.where(numbers[order] >= GONE, -1, 1)
    differs = np.ones(len(blocks), bool)
    np.logical_not(same, out=differs[1:])
    begins = np.flatnonzero(differs)
    left = np.add.reduceat(signs, begins)
    kept = np.repeat(begins, left)
    shard.blocks = bytearray(blocks[kept].tobytes())
    shard.numbers = bytearray(runs[kept].tobytes())
    shard.gone = 0
