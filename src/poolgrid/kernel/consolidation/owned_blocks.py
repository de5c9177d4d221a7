"""The blocks that one source holds on one tier, in order of arrival, in a mapping that never rebuilds itself whole.

Python's dict rebuilds itself when it runs out of room: 80 to 180 ms at a million blocks, during which no request
gets a token. Here no dict is large, and order is kept separately.

Rules
    1. Blocks are written down as they come, on *pages*: their hashes in a row, and where a block's parent is not the
       block before it, that parent. ``_page_of`` has the page of each block (``ShardedMap``).
    2. A page gets no block a second time: once one of its blocks goes, it is closed, and what comes is written on the
       next. So what stands on a page and is not held there any more is passed over, and order is that of one dict: a
       block that is stored again after it went away comes last.
    3. An empty page is dropped. A sparse one is rewritten when another begins; most run empty
       before that.
    4. ``freeze`` copies nothing. Pages only grow behind what was frozen, or are replaced; a shard is copied before its
       first change after a freeze (copy on write), so the cost is in proportion to what changes.
    5. Large mappings that are no longer needed are freed so many blocks at a time (``Discarded``): a million, freed at
       once, are twenty milliseconds.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from itertools import islice, repeat

from poolgrid.kernel.index.sharded_map import ShardedMap, unknown_dict

PAGE_BLOCKS = 1024
"""Blocks of a page, and the rest of the chain that fills it: looking for one on its page takes microseconds."""

SHARD_ENTRIES = 4096
"""Blocks that are looked up in one dict, which is quicker than in several; it is split in a millisecond."""

SPARSE_SHARE = 8
"""A page is rewritten when no more than this part of it is held."""

REWRITTEN_AT_ONCE = 2
"""Pages rewritten when a page begins: more than become sparse in that time, and a quarter of a millisecond."""

SPARSE_BLOCKS_MIN = 32
"""Shorter pages are not worth it."""

FREED_AT_ONCE_BLOCKS = 4096
"""Mappings of up to so many blocks are freed at once: a tenth of a millisecond."""

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
        written = self.hashes
        at = len(written)
        if not at or written[-1] != parent:
            self.parents[at] = parent
        written.extend(hashes)
        self.held += len(hashes)

    def copy(self) -> _Page:
        made = _Page()
        made.hashes, made.held, made.parents = self.hashes[:], self.held, dict(self.parents)
        return made

    def pairs(self, count: int) -> Iterator[tuple[int, int | None]]:
        """Return the first ``count`` blocks that were written, with parents."""
        hashes = list(islice(self.hashes, count))
        parents: list[int | None] = [None, *hashes[:-1]]
        for at, parent in self.parents.items():
            if at < count:
                parents[at] = parent
        return zip(hashes, parents, strict=False)


class FrozenBlocks(Mapping[int, "int | None"]):
    """What a source held at one moment, as it stays whatever comes and goes."""

    __slots__ = ("_count", "_pages", "_shards", "_shift")

    def __init__(self, pages: Mapping[int, _Page], shards: Sequence[dict[int, int]], shift: int, count: int) -> None:
        self._pages = [(number, page, len(page.hashes), page.held) for number, page in pages.items()]
        self._shards = list(shards)
        self._shift = shift
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __contains__(self, sequence_hash: object) -> bool:
        return isinstance(sequence_hash, int) and sequence_hash in self._shards[sequence_hash >> self._shift]

    def __getitem__(self, sequence_hash: int) -> int | None:
        return dict(self.items())[sequence_hash]

    def __iter__(self) -> Iterator[int]:
        return (sequence_hash for sequence_hash, _ in self.items())

    def items(self) -> Iterator[tuple[int, int | None]]:  # type: ignore[override]
        """Yield blocks and their parents in order of arrival."""
        shards, shift = self._shards, self._shift
        for number, page, count, held in self._pages:
            if held == count:
                yield from page.pairs(count)
            else:
                yield from (pair for pair in page.pairs(count) if shards[pair[0] >> shift].get(pair[0]) == number)


class OwnedBlocks(MutableMapping[int, "int | None"]):
    """Sequence hash to parent, in order of arrival."""

    __slots__ = ("_closed", "_frozen", "_newest", "_number", "_page_blocks", "_page_of", "_pages", "_sparse")

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
        """Pages to be rewritten."""
        self._frozen: set[int] = set()
        """Shards that were there when this was frozen last, by identity; each is copied before it changes."""
        if blocks is not None:
            self.update(blocks)

    # -- in bulk -------------------------------------------------------------------------------------------------------

    def add(self, parent: int | None, hashes: Sequence[int]) -> bool:
        """Take in a chain of blocks; refuse it (``False``) when one of them is held already, or is named twice."""
        page_of = self._page_of
        page = self._pages[self._number]
        if self._closed or len(page.hashes) >= self._page_blocks:
            page = self._next_page()
        number = self._number
        if self._frozen:
            self._own(hashes)
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

    def remove(self, hashes: Sequence[int]) -> list[int]:
        """Take out blocks; return those that were held."""
        if self._frozen:
            self._own(hashes)
        shards, shift = self._page_of.shards, self._page_of.shift
        if len(shards) == 1:
            numbers = list(map(shards[0].pop, hashes, repeat(_NOWHERE)))
        else:
            numbers = [shards[each >> shift].pop(each, _NOWHERE) for each in hashes]
        if not numbers:
            return []
        number = numbers[0]
        if number != _NOWHERE and numbers.count(number) == len(numbers):
            # Those that go together mostly came together.
            counts: Iterable[tuple[int, int]] = ((number, len(numbers)),)
            gone = list(hashes)
        else:
            counts = Counter(numbers).items()
            gone = [each for each, number in zip(hashes, numbers, strict=True) if number != _NOWHERE]
        for number, count in counts:
            if number == _NOWHERE:
                continue
            page = self._pages[number]
            page.held -= count
            if number == self._number:
                self._closed = True
            elif page.held * SPARSE_SHARE < len(page.hashes):
                self._settle(number)
        self._page_of.entries -= len(gone)
        return gone

    def freeze(self) -> FrozenBlocks:
        """Return what is held now, as it stays; nothing is copied."""
        page_of = self._page_of
        self._frozen = set(map(id, page_of.shards))
        return FrozenBlocks(self._pages, page_of.shards, page_of.shift, page_of.entries)

    def _own(self, hashes: Sequence[int]) -> None:
        """Copy the frozen shards of some blocks, which are about to change."""
        page_of, frozen = self._page_of, self._frozen
        for each in hashes:
            shard = page_of.shards[each >> page_of.shift]
            if id(shard) in frozen:
                frozen.discard(id(shard))
                copy = unknown_dict()
                copy.update(shard)
                page_of.replace(each, copy)

    def discard(self, blocks: int) -> None:
        """Free at most this many blocks of a discarded mapping; emptied dicts count as blocks."""
        if self._frozen:
            self._page_of = ShardedMap()  # who reads what was frozen has the rest
        self._page_of.discard(blocks)
        if not self._page_of.entries:
            self._pages.clear()
            self._sparse.clear()

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
            page = self._pages[number] = self._pages[number].copy()  # the one before may be frozen
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
            return page.pairs(page.held)
        shards, shift = self._page_of.shards, self._page_of.shift
        return (pair for pair in page.pairs(len(page.hashes)) if shards[pair[0] >> shift].get(pair[0]) == number)

    def _next_page(self) -> _Page:
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
        page = self._pages[number] = _Page()  # in the place of the other, also in their order
        for sequence_hash, parent in held:
            page.write(parent, (sequence_hash,))

    def _settle(self, number: int) -> None:
        """Drop a page that is closed and empty, and remember a sparse one."""
        page = self._pages[number]
        if not page.held:
            del self._pages[number]
        elif page.held * SPARSE_SHARE < len(page.hashes) and len(page.hashes) >= SPARSE_BLOCKS_MIN:
            self._sparse[number] = None


class Discarded:
    """Blocks that are no longer used, waiting to be freed."""

    def __init__(self) -> None:
        self.in_slices = False
        """Whether ``free`` is called; otherwise everything is freed at once."""
        self._waiting: deque[OwnedBlocks] = deque()

    def __len__(self) -> int:
        return sum(map(len, self._waiting))

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def put(self, blocks: OwnedBlocks) -> None:
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
