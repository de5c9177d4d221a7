"""The blocks that one source holds on one tier, in order of arrival, in a mapping that never rebuilds itself whole.

Python's dict builds all of itself anew when it runs out of room: 80 to 180 ms at a million blocks, in which no token of
any request goes on. Here no dict is large, and order is kept beside them.

Rules
    1. Blocks are written down as they come, on *pages*: their hashes in a row, and where a block's parent is not the
       block before it, that parent. ``_page_of`` says on which page a block is held (``ShardedMap``).
    2. A page gets no block a second time: once one of its blocks goes, it is closed, and what comes is written on the
       next. So what stands on a page and is not held there any more is passed over, and order is that of one dict: a
       block that is stored again after it went away comes last.
    3. A page that runs empty goes. One of which little is left is written anew when another begins; most run empty
       before that.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from itertools import islice, repeat

from poolgrid.consolidator.core.sharded_map import ShardedMap

PAGE_BLOCKS = 1024
"""Blocks of a page, and the rest of the chain that fills it: looking for one on its page takes microseconds."""

SHARD_ENTRIES = 4096
"""Blocks that are looked up in one dict, which is quicker than in several; it is split in a millisecond."""

SPARSE_SHARE = 8
"""A page is to be written anew when no more than this part of it is held."""

REWRITTEN_AT_ONCE = 2
"""Pages written anew when a page begins: more than become sparse in that time, and a quarter of a millisecond."""

SPARSE_BLOCKS_MIN = 32
"""Shorter pages are not worth it."""

_NOWHERE = -1


class _Page:
    """Blocks in order of arrival, and what is left of them."""

    __slots__ = ("hashes", "held", "parents")

    def __init__(self) -> None:
        self.hashes = array("Q")
        self.held = 0
        """Blocks that are still held here."""
        self.parents: dict[int, int | None] = {}
        """By place: the parent of a block that does not come behind it here."""

    def write(self, parent: int | None, hashes: Sequence[int]) -> None:
        """Add a chain."""
        written = self.hashes
        at = len(written)
        if not at or written[-1] != parent:
            self.parents[at] = parent
        written.extend(hashes)
        self.held += len(hashes)

    def pairs(self) -> Iterator[tuple[int, int | None]]:
        """Yield all that was written, with parents."""
        parents = self.parents
        before: int | None = None
        for at, sequence_hash in enumerate(self.hashes):
            yield sequence_hash, parents.get(at, before)
            before = sequence_hash


class OwnedBlocks(MutableMapping[int, "int | None"]):
    """Sequence hash to parent, in order of arrival."""

    __slots__ = ("_closed", "_newest", "_number", "_page_blocks", "_page_of", "_pages", "_sparse")

    def __init__(
        self,
        blocks: Mapping[int, int | None] | None = None,
        page_blocks: int = PAGE_BLOCKS,
        shard_entries: int = SHARD_ENTRIES,
    ) -> None:
        self._page_blocks = page_blocks
        self._page_of: ShardedMap[int] = ShardedMap(shard_entries)
        self._number = 0
        """Of the page that is written on."""
        self._pages: dict[int, _Page] = {0: _Page()}
        self._closed = False
        """Whether a block went from the page that is written on."""
        self._newest = 0
        """What came last."""
        self._sparse: dict[int, None] = {}
        """Pages to be written anew."""
        if blocks is not None:
            self.update(blocks)

    # -- in bulk -------------------------------------------------------------------------------------------------------

    def is_disjoint(self, hashes: Iterable[int]) -> bool:
        """Say whether none of some blocks is held."""
        shards, shift = self._page_of.shards, self._page_of.shift
        return not any(each in shards[each >> shift] for each in hashes)

    def add(self, parent: int | None, hashes: Sequence[int]) -> bool:
        """Take in a chain of blocks; refuse it (``False``) when one of them is held already, or is named twice."""
        page_of = self._page_of
        page = self._pages[self._number]
        if self._closed or len(page.hashes) >= self._page_blocks:
            page = self._next_page()
        number = self._number
        shards, shift = page_of.shards, page_of.shift
        if len(shards) == 1:
            [shard] = shards
            new = dict.fromkeys(hashes, number)
            if len(new) != len(hashes) or not shard.keys().isdisjoint(new):
                return False
            shard.update(new)
        else:
            for at, each in enumerate(hashes):
                if each in (shard := shards[each >> shift]):
                    for before in islice(hashes, at):
                        del shards[before >> shift][before]
                    return False
                shard[each] = number
        if hashes:
            page.write(parent, hashes)
            page_of.entries += len(hashes)
            self._newest = hashes[-1]
        return True

    def remove(self, hashes: Iterable[int]) -> list[int]:
        """Take out blocks; return those that were held."""
        shards, shift = self._page_of.shards, self._page_of.shift
        hashes = hashes if isinstance(hashes, (tuple, list)) else tuple(hashes)
        if len(shards) == 1:
            numbers = list(map(shards[0].pop, hashes, repeat(_NOWHERE)))
        else:
            numbers = [shards[each >> shift].pop(each, _NOWHERE) for each in hashes]
        if not numbers:
            return []
        number = numbers[0]
        if number != _NOWHERE and numbers.count(number) == len(numbers):
            # Those that go together mostly came together.
            self._count_off(number, len(numbers))
            gone = list(hashes)
        else:
            gone = [each for each, number in zip(hashes, numbers, strict=True) if number != _NOWHERE]
            for number, count in Counter(numbers).items():
                if number != _NOWHERE:
                    self._count_off(number, count)
        self._page_of.entries -= len(gone)
        return gone

    def take_oldest(self, blocks: int) -> list[tuple[int | None, list[int]]]:
        """Take out at most that many blocks that came first; return them as chains, each with its parent."""
        chains: list[tuple[int | None, list[int]]] = []
        before: int | None = None
        for sequence_hash, parent in islice(self.items(), blocks):
            if not chains or parent is None or parent != before:
                chains.append((parent, []))
            chains[-1][1].append(sequence_hash)
            before = sequence_hash
        for _, chain in chains:
            self.remove(chain)
        return chains

    def discard(self, blocks: int) -> None:
        """Free at most that many blocks of a mapping that nobody asks any more; emptied dicts count as blocks."""
        self._page_of.discard(blocks)
        if not self._page_of.entries:
            self._pages.clear()
            self._sparse.clear()

    def copy(self) -> OwnedBlocks:
        """Return another mapping of the same; takes all of it in one go."""
        return OwnedBlocks(dict(self.items()), self._page_blocks, self._page_of.shard_entries)

    # -- as a mapping --------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self._page_of.entries

    def __contains__(self, sequence_hash: object) -> bool:
        return isinstance(sequence_hash, int) and sequence_hash in self._page_of

    def __getitem__(self, sequence_hash: int) -> int | None:
        number = self._page_of.get(sequence_hash)
        if number is None:
            raise KeyError(sequence_hash)
        page = self._pages[number]
        at = page.hashes.index(sequence_hash)
        return page.parents[at] if at in page.parents else page.hashes[at - 1]

    def __setitem__(self, sequence_hash: int, parent: int | None) -> None:
        number = self._page_of.get(sequence_hash)
        if number is None:
            self.add(parent, (sequence_hash,))
        else:
            page = self._pages[number]
            page.parents[page.hashes.index(sequence_hash)] = parent

    def __delitem__(self, sequence_hash: int) -> None:
        if not self.remove((sequence_hash,)):
            raise KeyError(sequence_hash)

    def __iter__(self) -> Iterator[int]:
        return (sequence_hash for sequence_hash, _ in self.items())

    def items(self) -> Iterator[tuple[int, int | None]]:  # type: ignore[override]
        """Yield blocks and their parents; nothing may change meanwhile."""
        for number, page in self._pages.items():
            yield from self._held_on(number, page)

    # -- pages ---------------------------------------------------------------------------------------------------------

    def _held_on(self, number: int, page: _Page) -> Iterator[tuple[int, int | None]]:
        if page.held == len(page.hashes):
            return page.pairs()
        shards, shift = self._page_of.shards, self._page_of.shift
        return (pair for pair in page.pairs() if shards[pair[0] >> shift].get(pair[0]) == number)

    def _next_page(self) -> _Page:
        """Begin a page."""
        self._settle(self._number)
        self._page_of.relieve(self._newest)  # one shard in so many arrivals: each has its turn
        for _ in range(min(REWRITTEN_AT_ONCE, len(self._sparse))):
            self._rewrite(self._sparse.popitem()[0])
        self._number += 1
        self._closed = False
        page = self._pages[self._number] = _Page()
        return page

    def _rewrite(self, number: int) -> None:
        """Keep of a page what is held."""
        page = self._pages.get(number)
        if page is None:
            return  # it ran empty meanwhile, as most do
        held = list(self._held_on(number, page))
        page.hashes, page.parents, page.held = array("Q"), {}, 0
        for sequence_hash, parent in held:
            page.write(parent, (sequence_hash,))

    def _count_off(self, number: int, gone: int) -> None:
        """Take note that blocks of a page are not held any more."""
        self._pages[number].held -= gone
        if number == self._number:
            self._closed = True
        else:
            self._settle(number)

    def _settle(self, number: int) -> None:
        """Let go of a page that is closed and empty, and remember one of which little is left."""
        page = self._pages[number]
        if not page.held:
            del self._pages[number]
        elif page.held * SPARSE_SHARE < len(page.hashes) and len(page.hashes) >= SPARSE_BLOCKS_MIN:
            self._sparse[number] = None
