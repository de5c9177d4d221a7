"""Which blocks one worker rank holds, per tier, KV group and source.

Rules for this file:

1. A block is *visible* on a tier while at least one source of the worker reports it there. Readers of the pool see
   first arrivals (``BlocksStored``) and last departures (``BlocksRemoved``), tier by tier, and nothing in between.
2. Changes only between sources are reported as ``BlocksShared`` and ``BlocksReleased``: readers ignore them, and the
   fold of the journal needs them to know after a restart who still holds what.
3. Two ways in. ``store``, ``remove``, ``clear`` and ``restate`` take what a source claims, change the state and append
   the events that follow to ``out``. ``apply`` takes those events back and reaches the same state: that is the fold.
4. The fold is idempotent for stored blocks, so a chain that would fall into many pieces is passed on whole.

5. Groups are kept apart as tiers are. What a model's groups need is nothing to the rules here.

Almost always a worker has one source and a chain is wholly new; that path is a handful of C calls on a dictionary
from sequence hash to parent, and the event passes through unchanged. Parents are kept for dumps; a block whose parent
is absent is as good as any other, because a sequence hash names its whole path.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import assert_never

from poolgrid.kernel.consolidation.owned_blocks import Discarded, FrozenBlocks, OwnedBlocks
from poolgrid.kernel.wire.events import (
    AnyEvent,
    BlocksReleased,
    BlocksRemoved,
    BlocksShared,
    BlocksStored,
    CacheCleared,
    SnapshotBegan,
)
from poolgrid.kernel.wire.hashing import hash_array, pack_hashes
from poolgrid.kernel.wire.identifiers import Tier
from poolgrid.kernel.wire.limits import BLOCKS_PER_EVENT_MAX

BlockEvent = BlocksStored | BlocksRemoved | BlocksShared | BlocksReleased | CacheCleared | SnapshotBegan
"""What an event may contain about blocks."""

Frozen = list[tuple[Tier, int, str, FrozenBlocks]]
"""Everything held at one moment: tier, group, source, blocks."""

DUMP_STEP_BLOCKS = 2048
"""Blocks looked at between two chains of a dump, at the most: about a millisecond."""

CHAIN_BLOCKS_MAX = 2048
"""Longest chain of a dump; ``SNAPSHOT_CHAINS_PER_PART_MAX`` counts on it."""

TIERS = len(Tier)

PIECES_MAX = 6
"""A stored chain that known blocks cut into more pieces than this is passed on whole, duplicates included: they cost a
reader more than blocks that it knows."""


class BlockOwnership:
    """The blocks of one worker rank."""

    __slots__ = ("_blocks_max", "_discarded", "_places", "refused_blocks")

    def __init__(self, blocks_max: int = 4 * 1024 * 1024, discarded: Discarded | None = None) -> None:
        """``discarded`` takes large numbers of blocks that are dropped at once; its owner frees them."""
        self._places: list[dict[str, OwnedBlocks]] = [{} for _ in Tier]
        """By tier, those of group 0 first; of other groups once they hold something."""
        self._discarded = discarded
        self._blocks_max = blocks_max
        self.refused_blocks = 0
        """Blocks not taken in because the worker was beyond its limit; the view is then a subset of the truth."""

    def __len__(self) -> int:
        return sum(len(held) for tier in self._places for held in tier.values())

    def counts(self) -> tuple[int, int, int]:
        """Return the number of visible blocks on device, host and disk."""
        device, host, disk = (self._visible(tier) for tier in Tier)
        return device, host, disk

    def count_of(self, source: str) -> int:
        return sum(len(tier.get(source, ())) for tier in self._places)

    def sources(self) -> list[str]:
        return sorted({source for tier in self._places for source in tier})

    def holds(self, sequence_hash: int, tier: Tier = Tier.DEVICE) -> bool:
        return any(sequence_hash in held for held in self._places[tier].values())

    # What a source claims

    def store(self, source: str, event: BlocksStored, out: list[AnyEvent]) -> None:
        """Take in a chain; append what readers must know of it."""
        hashes = hash_array(event.sequence_hashes)
        if not hashes:
            return
        room = self._blocks_max - len(hashes)
        for holdings in self._places:
            for each in holdings.values():
                room -= len(each)
        if room < 0:
            self.refused_blocks += len(hashes)
            return
        tier = self._place(event.tier, event.group) if event.group else self._places[event.tier]
        held = tier.get(source)
        if held is None:
            held = tier[source] = OwnedBlocks()
        if len(tier) == 1 and held.add(event.parent, hashes):
            out.append(event)
            return
        self._store_each(event, hashes, held, [other for name, other in tier.items() if name != source], out)

    def _store_each(
        self,
        event: BlocksStored,
        hashes: Sequence[int],
        held: OwnedBlocks,
        others: list[OwnedBlocks],
        out: list[AnyEvent],
    ) -> None:
        pieces: list[tuple[int | None, list[int]]] = []
        shared: list[int] = []
        open_piece = False
        previous = event.parent
        for sequence_hash in hashes:
            if sequence_hash in held:
                open_piece = False
            else:
                known = next((other for other in others if sequence_hash in other), None)
                if known is not None:
                    shared.append(sequence_hash)
                    held[sequence_hash] = known[sequence_hash]
                    open_piece = False
                else:
                    if not open_piece:
                        pieces.append((previous, []))
                        open_piece = True
                    pieces[-1][1].append(sequence_hash)
                    held[sequence_hash] = previous
            previous = sequence_hash
        if len(pieces) > PIECES_MAX:
            # Also right for what is shared: the fold reads a stored block as held by its source.
            out.append(event)
            return
        out.extend(BlocksStored(parent, pack_hashes(piece), event.tier, event.group) for parent, piece in pieces)
        if shared:
            out.append(BlocksShared(pack_hashes(shared), event.tier, event.group))

    def remove(self, source: str, event: BlocksRemoved, out: list[AnyEvent]) -> None:
        """Take blocks out of one tier of a source; blocks that it does not hold are ignored."""
        tier = self._place(event.tier, event.group) if event.group else self._places[event.tier]
        held = tier.get(source)
        if held is None:
            return
        hashes = hash_array(event.sequence_hashes)
        gone = held.remove(hashes)
        if not held:
            del tier[source]
        if not tier or (len(tier) == 1 and source in tier):
            if len(gone) == len(hashes) and gone:
                out.append(event)
            elif gone:
                out.append(BlocksRemoved(pack_hashes(gone), event.tier, event.group))
            return
        self._depart(gone, event.tier, event.group, source, out)

    def clear(self, source: str, out: list[AnyEvent]) -> None:
        if all(name == source for tier in self._places for name in tier):
            if any(self._places):
                out.append(CacheCleared())
            self.forget_all()
            return
        self._take_all(source, out)

    def restate(self, source: str, event: SnapshotBegan, out: list[AnyEvent]) -> bool:
        """Take everything from a source that starts over; return whether readers see a full resync."""
        if all(name == source for tier in self._places for name in tier):
            self.forget_all()
            out.append(event)
            return True
        self._take_all(source, out)
        return False

    def _take_all(self, source: str, out: list[AnyEvent]) -> None:
        for place, sources in enumerate(self._places):
            held = sources.pop(source, None)
            if held:
                self._depart(list(held), *_of_place(place), source, out)

    def _depart(self, gone: Sequence[int], tier: Tier, group: int, source: str, out: list[AnyEvent]) -> None:
        others = [held for name, held in self._place(tier, group).items() if name != source]
        last: list[int] = []
        kept: list[int] = []
        for sequence_hash in gone:
            (kept if any(sequence_hash in other for other in others) else last).append(sequence_hash)
        out.extend(BlocksRemoved(pack_hashes(part), tier, group) for part in _parts(last))
        out.extend(BlocksReleased(pack_hashes(part), tier, group) for part in _parts(kept))

    # The fold

    def apply(self, source: str, event: BlockEvent) -> None:
        match event:
            case BlocksStored():
                hashes = hash_array(event.sequence_hashes)
                held = self._of(event.tier, event.group, source)
                if not held.add(event.parent, hashes):
                    previous = event.parent
                    for sequence_hash in hashes:
                        held.setdefault(sequence_hash, previous)
                        previous = sequence_hash
            case BlocksRemoved():
                tier = self._place(event.tier, event.group)
                for name in list(tier):
                    self._drop(tier, name, hash_array(event.sequence_hashes))
            case BlocksShared():
                self._share(source, event)
            case BlocksReleased():
                self._drop(self._place(event.tier, event.group), source, hash_array(event.sequence_hashes))
            case CacheCleared() | SnapshotBegan():
                self.forget_all()
            case _:
                assert_never(event)

    @staticmethod
    def _drop(tier: dict[str, OwnedBlocks], source: str, hashes: Sequence[int]) -> None:
        held = tier.get(source)
        if held is None:
            return
        held.remove(hashes)
        if not held:
            del tier[source]

    def _place(self, tier: Tier, group: int) -> dict[str, OwnedBlocks]:
        places = self._places
        if not group:
            return places[tier]
        place = TIERS * group + tier
        while len(places) <= place:
            places.append({})
        return places[place]

    def _of(self, tier: Tier, group: int, source: str) -> OwnedBlocks:
        """Return what a source holds of a group on a tier, nothing at first."""
        place = self._place(tier, group)
        held = place.get(source)
        if held is None:
            held = place[source] = OwnedBlocks()
        return held

    def _share(self, source: str, event: BlocksShared) -> None:
        others = [held for name, held in self._place(event.tier, event.group).items() if name != source]
        held = self._of(event.tier, event.group, source)
        for sequence_hash in hash_array(event.sequence_hashes):
            held[sequence_hash] = next((other[sequence_hash] for other in others if sequence_hash in other), None)

    def forget_all(self) -> None:
        for tier in self._places:
            for held in tier.values():
                if self._discarded is not None:
                    self._discarded.put(held)
            tier.clear()

    # Dumps

    def freeze(self) -> Frozen:
        """Return what is held now, as it stays; nothing is copied."""
        return [
            (*_of_place(place), source, held.freeze())
            for place, sources in enumerate(self._places)
            for source, held in sources.items()
        ]

    def load(self, tier: Tier, group: int, source: str, parent: int | None, hashes: Sequence[int]) -> None:
        held = self._of(tier, group, source)
        if not held.add(parent, hashes):
            previous = parent
            for sequence_hash in hashes:
                held[sequence_hash] = previous
                previous = sequence_hash

    def _visible(self, tier: Tier) -> int:
        """Return how many blocks at least one source holds on a tier."""
        holdings = list(self._places[tier].values())
        if len(holdings) == 1:
            return len(holdings[0])
        return len({sequence_hash for held in holdings for sequence_hash in held})


def _of_place(place: int) -> tuple[Tier, int]:
    return Tier(place % TIERS), place // TIERS


def dump(holdings: Sequence[Mapping[int, int | None]]) -> Iterator[tuple[int | None, list[int]]]:
    """Yield the blocks that at least one of several sources holds, each once, as chains.

    They come in order of arrival, ``DUMP_STEP_BLOCKS`` at a time, and only among those are chains looked for and do
    parents come first: no step is longer because much is held. A parent that went away and came back may come after its
    children.
    """
    for number, held in enumerate(holdings):
        others = holdings[:number]
        blocks = iter(held.items())
        while step := dict(islice(blocks, DUMP_STEP_BLOCKS)):
            for other in others:
                step = {sequence_hash: parent for sequence_hash, parent in step.items() if sequence_hash not in other}
            yield from chains(step)


def chains(held: Mapping[int, int | None]) -> Iterator[tuple[int | None, list[int]]]:
    """Yield ``(parent, sequence hashes)`` for everything held: parents before children, each block once.

    Blocks that follow each other come as one chain of at most ``CHAIN_BLOCKS_MAX``. The order is a function of the
    order of arrival. Hashes that name each other in a circle (no honest source makes them) are still dumped once.
    """
    heir: dict[int, int] = {}
    roots: list[int] = []
    branches: dict[int, list[int]] = {}
    for sequence_hash, parent in held.items():
        if parent is None or parent not in held:
            roots.append(sequence_hash)
        elif heir.setdefault(parent, sequence_hash) != sequence_hash:
            branches.setdefault(parent, []).append(sequence_hash)
    dumped = 0
    seen: set[int] = set()
    circular = False
    stack = roots[::-1]
    while True:
        while stack:
            start = stack.pop()
            if circular:
                if start in seen:
                    continue
                seen.add(start)
            run = [start]
            at = heir.get(start)
            while at is not None and at not in seen:
                run.append(at)
                if circular:
                    seen.add(at)
                at = heir.get(at)
            dumped += len(run)
            for position in range(0, len(run), CHAIN_BLOCKS_MAX):
                parent = held[start] if position == 0 else run[position - 1]
                yield parent, run[position : position + CHAIN_BLOCKS_MAX]
            if branches:
                for sequence_hash in run:
                    found = branches.pop(sequence_hash, None)
                    if found is not None:
                        stack.extend(reversed(found))
        if dumped == len(held):
            return
        # Only circles, and what hangs on them, are left: enter them in arrival order, at any place.
        assert not circular, "a dump in circular mode visits every block"
        circular = True
        seen = _reached(held)
        stack = list(held)[::-1]


def _reached(held: Mapping[int, int | None]) -> set[int]:
    """Return the blocks whose line of parents ends."""
    ends: dict[int, bool] = {}
    for start in held:
        path: list[int] = []
        on_path: set[int] = set()
        at: int | None = start
        while at is not None and at in held and at not in ends and at not in on_path:
            path.append(at)
            on_path.add(at)
            at = held[at]
        end = ends[at] if at is not None and at in ends else not (at is not None and at in on_path)
        for node in path:
            ends[node] = end
    return {sequence_hash for sequence_hash, end in ends.items() if end}


def _parts(hashes: list[int]) -> Iterator[list[int]]:
    for at in range(0, len(hashes), BLOCKS_PER_EVENT_MAX):
        yield hashes[at : at + BLOCKS_PER_EVENT_MAX]
