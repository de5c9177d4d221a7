"""Which worker holds which prefix: runs of blocks, found by their first and last block.

How it works
    A sequence hash names its whole path. A ``Run`` is consecutive blocks of one path that the same workers hold, and
    only its last block has others behind it. The depth of every worker is found by going from run to run: ``_edges``
    maps the first and last block of each to the run, and what lies between is compared with the path. Engines store
    behind last blocks and evict last blocks, so nearly all that is asked for is an edge, and along a path the masks
    only lose bits: where a later run has the mask, those in between are leapt over.

Rules
    1. Exact always. A worker may hold a run and not the block before it (``RunMap.broken`` has its bit): the run stays
       where it is, or waits for that block if it has no holder (``RunMap.waiting``), and does not count as overlap
       until the block is stored. So a block that goes or comes back costs the same however many are behind it. For such
       a worker a look-up goes through every run.
    2. All blocks of a run have the same holders and only its last block has children. A store or remove that would
       break this splits the run first. A run without holders does not exist. None grows beyond ``RUN_BLOCKS_MAX``.
    3. A block is *held* while it lies on any tier. ``lower`` has the holders on the host, on disk, and only there;
       it is empty in a pool without lower tiers.
    4. A worker owns one bit. Dropping it clears the bit from ``_live`` at once; the masks are swept a slice at a time
       during later calls, newest run first, and the bit is given out again only after that.
    5. At most ``budget_bytes``, after every store. Beyond it leaves go from their ends, oldest first, but leaves in use
       get a second chance; evictions are counted.
    6. No call takes longer because the index is large. Nothing is copied or scanned whole, no map is rebuilt whole
       (``BlockMap``, ``BlockLocator``), and what sweeping and eviction do in one call has a limit. Beyond that a call
       does what its own event requires: its blocks, and the runs that they cut.
    7. ``_places`` has every block, also those inside of runs, and is used where no edge has the place of a block: where
       a path branches inside a run, where a block goes from its middle, and of blocks without a holder, in a few
       microseconds a block.
    8. A chain that has a block twice, or begins or ends with an edge of a run that it does not continue, is refused,
       unless none of that run's holders has the block before it: then the run is deleted, as it stands for nothing.
       No check is made whether another block of a new chain is inside of some run: there it would contradict the path
       that its hash names, and counts for the reporting worker alone. Where such a block becomes an edge of two runs
       ``_edges`` can name but one: from then on (``_crossed``) ``_places`` is asked for what ``_edges`` does not know.

Nothing here reads a clock, logs, or raises on an event that contradicts the index: a second store or an unknown remove
changes nothing and is counted.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from typing import Final

from poolgrid.kernel.index.block_locator import GONE
from poolgrid.kernel.index.following_tokens import FollowingTokens
from poolgrid.kernel.index.group_index import GroupIndex
from poolgrid.kernel.index.lower_tiers import LowerTiers, TierOverlap, add_bits
from poolgrid.kernel.index.run_forest import Run
from poolgrid.kernel.index.run_map import RUN_BLOCKS_MAX, RunMap, common_prefix
from poolgrid.kernel.index.sharded_map import KEY_BITS, SHARD_ENTRIES
from poolgrid.kernel.wire.events import BlocksRemoved, BlocksStored, GroupsReported
from poolgrid.kernel.wire.hashing import hash_array
from poolgrid.kernel.wire.identifiers import Tier, WorkerKey

BYTES_PER_BLOCK: Final = 128
"""Budgeted bytes per distinct block. Of runs of a hundred blocks one takes 20 to 40 (its place in the run, and as it is
written down), of runs of a few several hundred; recorded decisions are replayed with the same number."""

SWEEP_SLICE_ENTRIES: Final = 1024
"""Runs, entries of lower tiers and freed blocks looked at per call after a worker was dropped, at the most:
0.3 ms."""

SWEPT_PER_CALL: Final = 64
SWEPT_PER_BLOCK: Final = 2
"""Entries looked at for each call, and for each block of its event: many calls come in one turn of an event loop, and
sweeping is to cost them about as much as the events themselves."""

EVICTION_SLICE_BLOCKS = 1024
"""Blocks evicted per call while over budget, besides four for each block of the event: 0.4 ms."""

LOOK_SLICE_ENTRIES: Final = 2048
"""Entries looked at per call by a caller that lists all blocks of a worker, and a shard's more: half a millisecond."""

DEVICE: Final = Tier.DEVICE
"""Found once, not in the enumeration for each event."""

HASHES_END: Final = 1 << KEY_BITS
"""Behind the last hash."""

FIRST_DEPTH: Final = 8
"""Leading bits that the shards of an empty index differ by: 256. With more, a store has more memory to touch."""

EDGES_SHARD_ENTRIES: Final = 32_768
"""Edges of a shard before it is split: eight million need no split, and a rebuild takes two to three milliseconds. At
8,192 storing took 50 % longer from two million blocks on, where all shards were split, and a young run of the
collector, which looks at all that is in new dicts, a tenth of a second."""

SECOND_CHANCES = 64
"""Leaves in use that one call of eviction passes over; then it takes what it finds, so that it always gets there."""


@dataclass(slots=True)
class IndexCounters:
    """What happened to the index since it was made."""

    evicted_blocks: int = 0
    contradictions: int = 0
    """Events that name another parent for an edge of a run, or a block twice in one chain; the rest was ignored."""


class Holdings:
    """What workers hold, by their bits: runs, and on which lower tier a block lies.

    ``PrefixIndex`` decides the usual cases of its calls itself; what cuts or reconnects runs is decided here.
    """

    def __init__(self, reach: RunMap, lower: LowerTiers) -> None:
        self.reach = reach
        self.lower = lower
        self.contradictions = 0
        """Not counted yet by the index."""

    def store(self, bit: int, parent: int | None, hashes: array[int]) -> int:
        """Store a chain for one worker; return how many blocks the worker did not hold before."""
        reach = self.reach
        run: Run | None = None
        position = 0
        if parent is not None:
            run = reach.holder(parent, bit)
            if run is not None:
                position = run.blocks.index(parent) + 1
            if run is None or not run.mask & bit:
                reach.broken |= bit
                if run is not None and position < len(run.blocks) and run.blocks[position] == hashes[0]:
                    run = reach.split(run, position)
        at = 0
        stored = 0
        end = len(hashes)
        while at < end:
            if run is not None and position < len(run.blocks):
                # Held already: skip what the chain shares with the rest of its run.
                shared = 0
                if run.mask & bit:
                    rest = run.blocks[position : position + end - at]
                    shared = common_prefix(rest, hashes[at : at + len(rest)])
                if shared:
                    at += shared
                    position += shared
                    parent = hashes[at - 1]
                    continue
            else:
                below = reach.child(parent, hashes[at])
                if below is not None:
                    run = below
                    position = 0
                    if run.mask & bit:
                        continue
                    blocks = run.blocks
                    part = hashes[at : at + len(blocks)]
                    position = len(blocks) if blocks == part else common_prefix(blocks, part)
                    if position < len(blocks):
                        run = reach.split(run, position)
                    run.mask |= bit
                    run.used = True
                    at += position
                    stored += position
                    parent = hashes[at - 1]
                    continue
            # It branches off.
            until = self._make_way(hashes, at, run)
            run = reach.add_run(bit, run, parent, hashes[at:until])
            if run is None:
                self.contradictions += 1
                break
            stored += until - at
            at = until
            parent = hashes[at - 1]
            position = len(run.blocks)
        return stored

    def _make_way(self, hashes: array[int], at: int, above: Run | None) -> int:
        """Return up to where a chain can be one run: the first block that runs wait for, which then continue it.

        Runs in its way that stand for nothing are deleted.
        """
        reach = self.reach
        while True:
            until = min(len(hashes), at + RUN_BLOCKS_MAX)
            if reach.waiting.entries:
                until = next((place + 1 for place in range(at, until) if hashes[place] in reach.waiting), until)
            if not (reach.yields(hashes[at], above) or reach.yields(hashes[until - 1], above)):
                return until

    def remove_reached(self, run: Run, going: array[int], at: int, bit: int) -> int:
        """Remove a block of a run, and what goes next as far as the run has it there, backwards or forwards.

        Returns how many went.
        """
        sequence_hash = going[at]
        forward = 0
        if run.blocks[-1] != sequence_hash:
            place = run.blocks.index(sequence_hash)
            end = place + 1
            if at + 1 < len(going) and run.blocks[end] == going[at + 1]:
                # In the order of the path: all of it goes at once.
                part = run.blocks[place : place + len(going) - at]
                forward = common_prefix(part, going[at : at + len(part)])
                end = place + forward
            if end < len(run.blocks):
                run = self.reach.split(run, end)
        blocks = run.blocks
        child = run.child
        if child is not None:
            self.reach.breaks(run, bit)
        held = len(blocks)
        count = forward
        if not forward:
            most = min(held, len(going) - at)
            count = common_prefix(blocks[: -most - 1 : -1], going[at : at + most])
        rest = run.mask ^ bit
        if not rest:
            self.reach.set_waiting(run)
            self.reach.shorten(run, count)
        elif count == held:
            run.mask = rest
        elif (
            child is not None
            and child.right is None
            and child.mask == rest
            and len(child.blocks) + count <= RUN_BLOCKS_MAX
        ):
            # The border between "all holders" and "all but this one" moves up.
            moved = blocks[-count:]
            del blocks[-count:]
            if len(child.blocks) > 1:
                self.reach.no_edge(child.blocks[0], child)
            if count > 1:
                self.reach.no_edge(moved[-1], run)
            child.blocks[:0] = moved
            child.parent = blocks[-1]
            self.reach.places.take(run, moved)
            self.reach.places.add(child, moved)
            self.reach.set_edge(moved[0], child, run)
            self.reach.set_edge(blocks[-1], run, run)
        else:
            tail = self.reach.split(run, held - count).child
            assert tail is not None, "a run that was split has no tail"
            tail.mask = rest
        return count

    def store_lower(self, bit: int, hashes: Sequence[int], tier: Tier) -> int:
        """Store blocks on a tier below the device; return how many that tier did not have of the worker."""
        lower = self.lower
        where = lower.tier(tier)
        added = 0
        run: Run | None = None
        position = 0
        reaches = True
        for sequence_hash in hashes:
            if not (where.get(sequence_hash) or 0) & bit:
                add_bits(where, sequence_hash, bit)
                added += 1
            if run is not None and position < len(run.blocks) and run.blocks[position] == sequence_hash:
                position += 1
                continue
            if reaches or self.reach.broken & bit:
                run = self.reach.run_of(sequence_hash, bit)
                if run is not None:
                    position = run.blocks.index(sequence_hash) + 1
                    continue
                # Nor is held what is behind it, but by a worker that holds blocks without those before.
                reaches = False
            add_bits(lower.off_device, sequence_hash, bit)
        return added

    def holdings_from(self, bit: int, first: int, entries: int) -> tuple[list[tuple[int, Tier]], int]:
        found: list[tuple[int, Tier]] = []
        while entries > 0 and first < HASHES_END:
            blocks, runs, end = self.reach.places.shard_from(first)
            held = [h for h, run in zip(blocks, runs, strict=True) if h >= first and run.mask & bit]
            held.sort()
            if self.lower.in_use:
                for h in held:
                    found.extend((h, tier) for tier in self.lower.tiers_of(h, bit))
            else:
                found.extend((h, Tier.DEVICE) for h in held)
            entries -= len(blocks) + 1
            first = end
        return found, first


class PrefixIndex:
    """Exact overlap of any path with every worker, in a handful of map look-ups."""

    def __init__(
        self,
        budget_bytes: int | None = None,
        sweep_slice_entries: int = SWEEP_SLICE_ENTRIES,
        shard_entries: int = EDGES_SHARD_ENTRIES,
        first_depth: int = FIRST_DEPTH,
    ) -> None:
        if budget_bytes is not None and budget_bytes < BYTES_PER_BLOCK:
            raise ValueError(
                f"making a prefix index: budget_bytes is {budget_bytes}, allowed are integers from {BYTES_PER_BLOCK}"
            )
        self._sweep_slice_entries = sweep_slice_entries
        self._shard_entries = shard_entries
        self._first_depth = first_depth
        self._max_blocks = sys.maxsize if budget_bytes is None else budget_bytes // BYTES_PER_BLOCK
        self._reach = RunMap(shard_entries, first_depth)
        self.lower = LowerTiers(min(shard_entries, SHARD_ENTRIES))
        self.groups = GroupIndex(self._max_blocks)
        self._holdings = Holdings(self._reach, self.lower)
        self._slots: dict[WorkerKey, int] = {}
        self._workers: list[WorkerKey | None] = []
        self._held: list[int] = []
        self._lower_blocks: list[int] = []
        self._free_slots: list[int] = []
        self._live = 0
        self._dead = 0
        self._sweeping = 0
        self._swept_too_far = 0
        """Entries that the last slice looked at beyond its limit: the blocks of a run are freed together."""
        self.slot_changes = 0
        """Grows when a worker gets a bit, changes it or loses it: values derived from bits are then derived again."""
        self.counters = IndexCounters()

    # -- membership ------------------------------------------------------------------------------------------------

    def slot(self, worker: WorkerKey) -> int:
        """Return the bit number of a worker, giving it one on first sight."""
        slot = self._slots.get(worker)
        if slot is None:
            if self._free_slots:
                slot = self._free_slots.pop()
                self._workers[slot] = worker
            else:
                slot = len(self._workers)
                self._workers.append(worker)
                self._held.append(0)
                self._lower_blocks.append(0)
            self._slots[worker] = slot
            self._live |= 1 << slot
            self.slot_changes += 1
        return slot

    def worker(self, slot: int) -> WorkerKey:
        worker = self._workers[slot]
        assert worker is not None, f"slot {slot} belongs to no worker"
        return worker

    def drop(self, worker: WorkerKey) -> None:
        """Forget a worker and all it holds; constant time, the masks are swept later."""
        slot = self._slots.pop(worker, None)
        if slot is None:
            return
        self._workers[slot] = None
        self._held[slot] = 0
        self._lower_blocks[slot] = 0
        self._live &= ~(1 << slot)
        if self.groups.reported:
            self.groups.report(1 << slot, None)
        self._dead |= 1 << slot
        self.slot_changes += 1

    # -- events ----------------------------------------------------------------------------------------------------

    def store(self, worker: WorkerKey, parent: int | None, hashes: Sequence[int], tier: Tier = Tier.DEVICE) -> None:
        """Record that a chain of blocks became reusable: each continues the one before, the first ``parent``."""
        if not hashes:
            return
        slot = self._slots.get(worker)
        if slot is None:
            slot = self.slot(worker)
        bit = 1 << slot
        if tier is not DEVICE:
            self._lower_blocks[slot] += self._holdings.store_lower(bit, hashes, tier)
        elif self.lower.off_device.entries:
            self.lower.onboard(bit, hashes)
        if type(hashes) is not array:
            hashes = array("Q", hashes)
        edges, waiting = self._reach.edges, self._reach.waiting
        shards, shift, key_mask = edges.view
        first, last = hashes[0], hashes[-1]
        count = len(hashes)
        above = None if parent is None else shards[parent >> shift].get(parent & key_mask)
        shard = shards[last >> shift]
        if (
            first & key_mask in shards[first >> shift]
            or last & key_mask in shard
            or (parent is not None and (above is None or not above.mask & bit or above.blocks[-1] != parent))
            or (waiting.entries and any(each in waiting for each in hashes))
            or count > RUN_BLOCKS_MAX
        ):
            holdings = self._holdings
            stored = holdings.store(bit, parent, hashes)
            if holdings.contradictions:
                self.counters.contradictions += holdings.contradictions
                holdings.contradictions = 0
            if self._reach.yielded:
                self.counters.contradictions += 1
                for blocks, mask in self._reach.yielded:
                    self._forget(blocks, mask)
                self._reach.yielded.clear()
        elif (
            above is not None
            and above.mask == bit
            and above.child is None
            and len(before := above.blocks) + count <= RUN_BLOCKS_MAX
        ):
            # A sequence that its only holder continues: the usual growth, almost without a call.
            assert parent is not None
            places = self._reach.places
            if count > 1 and len(set(hashes)) != count:
                self.counters.contradictions += 1
                stored = 0
            else:
                shard[last & key_mask] = above
                if before[0] != parent:
                    del shards[parent >> shift][parent & key_mask]
                else:
                    edges.entries += 1
                if count > 1:
                    before.extend(hashes)
                    places.add(above, hashes)
                else:
                    # What generation adds, block by block.
                    before.append(first)
                    places.fresh_blocks.append(first)
                    places.fresh_numbers.append(above.number)
                    if len(places.fresh_blocks) >= places.fresh_entries:
                        places.hand_out()
                above.used = True
                self._reach.blocks += count
                stored = count
                if len(shard) > edges.crowded_entries:
                    edges.relieve(last)
        else:
            # A chain that no worker holds yet, below the last of blocks that this worker holds.
            stored = count if self._reach.add_run(bit, above, parent, hashes) else 0
            if not stored:
                self.counters.contradictions += 1
        self._held[slot] += stored
        if self._dead or self._sweeping:
            self._sweep_slice(SWEPT_PER_CALL + SWEPT_PER_BLOCK * count)
        if self._reach.blocks > self._max_blocks:
            self._evict(EVICTION_SLICE_BLOCKS + 4 * count)

    def remove(self, worker: WorkerKey, hashes: Sequence[int], tier: Tier = Tier.DEVICE) -> None:
        """Record that blocks left one tier; in any order, also parents before their children."""
        slot = self._slots.get(worker)
        if slot is None:
            return
        bit = 1 << slot
        lower = self.lower
        if tier is not DEVICE or lower.host.entries or lower.disk.entries:
            hashes, lowered = lower.take_off(bit, hashes, tier)
            self._lower_blocks[slot] -= lowered
        edges, places = self._reach.edges, self._reach.places
        removed = at = 0
        count = len(hashes)
        in_order = hashes if type(hashes) is array else array("Q", hashes)
        while at < count:
            sequence_hash = in_order[at]
            at += 1
            shards, shift, key_mask = edges.view
            run = (shard := shards[sequence_hash >> shift]).get(key := sequence_hash & key_mask)
            if run is not None and run.mask & bit:
                if run.mask == bit and run.child is None and (blocks := run.blocks)[-1] == sequence_hash:
                    # The usual case: the end of what no other worker holds, as engines evict; from there on backwards,
                    # probably as far as either goes.
                    held = len(blocks)
                    if held == 1 or (at < count and blocks[-2] == in_order[at]):
                        length = min(held, count - at + 1)
                        ending = blocks[-length:]
                        ending.reverse()
                        going = in_order[at - 1 : at - 1 + length]
                        if ending != going:
                            length = common_prefix(ending, going)
                        self._reach.shorten(run, length)
                        removed += length
                        at += length - 1
                        continue
                    # One block, without a call.
                    blocks.pop()
                    self._reach.blocks -= 1
                    removed += 1
                    places.fresh_blocks.append(sequence_hash)
                    places.fresh_numbers.append(run.number | GONE)
                    if len(places.fresh_blocks) >= places.fresh_entries:
                        places.hand_out()
                    if blocks[0] != sequence_hash:
                        del shard[key]
                        edges.entries -= 1
                    if held > 2:
                        self._reach.set_edge(blocks[-1], run, run)
                    continue
            else:
                run = self._reach.inside(sequence_hash, bit)
                if run is None:
                    continue
            gone = self._holdings.remove_reached(run, in_order, at - 1, bit)
            removed += gone
            at += gone - 1
        self._held[slot] -= removed
        if self._reach.broken and not self._held[slot]:
            self._reach.broken &= ~bit
        if self._dead or self._sweeping:
            self._sweep_slice(SWEPT_PER_CALL + SWEPT_PER_BLOCK * count)
        if self._reach.blocks > self._max_blocks:
            # Blocks that went out of reach for one worker, and not for others, take room twice.
            self._evict(EVICTION_SLICE_BLOCKS + 4 * count)

    def clear(self, worker: WorkerKey) -> None:
        """Forget all that a worker holds, but not the worker; its bit is another one from now on."""
        slot = self._slots.get(worker)
        groups = None if slot is None or not self.groups.reported else self.groups.report_of(1 << slot)
        if slot is not None:
            self.drop(worker)
        slot = self.slot(worker)
        if groups is not None:
            self.groups.report(1 << slot, groups)  # the model's, whatever is held

    # -- a whole index in the place of another ---------------------------------------------------------------------

    def empty(self) -> PrefixIndex:
        """Return an index with the same bounds that holds nothing."""
        index = PrefixIndex(None, self._sweep_slice_entries, self._shard_entries, self._first_depth)
        index._max_blocks = self._max_blocks
        return index

    def exchange(self, other: PrefixIndex) -> None:
        """Take all that another index holds and give it what was held here; constant time. What it counted is added."""
        self.slot_changes += 1
        for name in _CONTENTS:
            mine = getattr(self, name)
            setattr(self, name, getattr(other, name))
            setattr(other, name, mine)
        for each in fields(IndexCounters):
            setattr(self.counters, each.name, getattr(self.counters, each.name) + getattr(other.counters, each.name))
        other.counters = IndexCounters()

    def discard(self, entries: int) -> bool:
        """Free this many entries of a discarded index; return whether there are more.

        Freed at once, a million blocks block the event loop for a tenth of a second.
        """
        for each in (self.lower, self._reach, self.groups):
            entries = each.discard(entries)
        return entries <= 0

    # -- KV groups other than full attention -----------------------------------------------------------------------

    def report_groups(self, worker: WorkerKey, report: GroupsReported | None) -> None:
        self.groups.report(1 << self.slot(worker), report)

    def change_group(self, worker: WorkerKey, event: BlocksStored | BlocksRemoved) -> None:
        """Take what happened to blocks of another group than full attention."""
        hashes, groups = hash_array(event.sequence_hashes), self.groups
        change = groups.store if type(event) is BlocksStored else groups.remove
        change(1 << self.slot(worker), event.group, hashes, event.tier)
        if self._dead or self._sweeping:
            self._sweep_slice(SWEPT_PER_CALL + SWEPT_PER_BLOCK * len(hashes))

    # -- queries ---------------------------------------------------------------------------------------------------

    def find(
        self, path: Sequence[int], deepest: int | None = None, following: FollowingTokens | None = None
    ) -> list[tuple[int, int]]:
        """Return groups ``(depth, mask)``, deepest first: the workers of ``mask`` hold exactly ``depth`` blocks.

        ``depth`` counts leading blocks of the path. Masks are disjoint; a worker that holds nothing of the path is in
        none. For workers with several KV groups it is the deepest place to resume, at most ``deepest``; where hashes
        look ahead, the tokens ``following`` the blocks of the path count, without which they are not looked at.
        """
        found = self._reach.find(path, self._live)
        groups = self.groups
        return groups.resumable(path, found, self._live, deepest, following) if groups.reported else found

    def holders(self, path: Sequence[int]) -> list[tuple[int, int]]:
        """Return the same as ``find`` of full attention alone: what is stored, wherever an engine can resume."""
        return self._reach.find(path, self._live)

    def overlap(self, path: Sequence[int], worker: WorkerKey) -> TierOverlap:
        slot = self._slots.get(worker)
        if slot is None:
            return TierOverlap(0)
        for depth, mask in self.find(path):
            if mask >> slot & 1:
                return self.by_tier(path, slot, depth)
        return TierOverlap(0)

    def by_tier(self, path: Sequence[int], slot: int, depth: int) -> TierOverlap:
        """Split a depth that ``find`` returned by tier; walks the path only for workers that use lower tiers."""
        if not self._lower_blocks[slot]:
            return TierOverlap(depth)
        host, disk = self.lower.count(islice(path, depth), 1 << slot)
        return TierOverlap(depth - host - disk, host, disk)

    def held_blocks(self, worker: WorkerKey) -> int:
        slot = self._slots.get(worker)
        return 0 if slot is None else self._held[slot]

    def holdings_from(
        self, worker: WorkerKey, first: int, entries: int = LOOK_SLICE_ENTRIES
    ) -> tuple[list[tuple[int, Tier]], int]:
        """Return what a worker holds from block hash ``first`` on, and where to continue, at most ``HASHES_END``.

        Looks at about that many entries, and at a shard at least. A walk meets every block that is held all the while,
        once, however the index changes between two calls. Hashes are in order, and for each its tiers by name.
        """
        slot = self._slots.get(worker)
        return ([], HASHES_END) if slot is None else self._holdings.holdings_from(1 << slot, first, entries)

    @property
    def workers(self) -> tuple[WorkerKey, ...]:
        """Return every worker that has a bit, in order of arrival."""
        return tuple(self._slots)

    def __len__(self) -> int:
        """Return how many blocks are resident."""
        return self._reach.blocks

    def size_bytes(self) -> int:
        """Return a close estimate: the maps exactly, 40 bytes a block for its key and place in its run."""
        return self._reach.size_bytes() + self.lower.size_bytes() + self.groups.size_bytes()

    # -- sweeping and eviction -------------------------------------------------------------------------------------

    @property
    def sweeps(self) -> bool:
        return bool(self._dead or self._sweeping)

    def sweep(self) -> None:
        """Clear the bits of all dropped workers now, instead of a slice at a time."""
        while self.sweeps:
            self._sweep_slice(self._sweep_slice_entries)

    def _sweep_slice(self, entries: int) -> None:
        left = min(entries, self._sweep_slice_entries) - self._swept_too_far
        self._swept_too_far = max(0, -left)
        if left <= 0:
            return
        ages = self._reach.forest.ages
        if not self._sweeping:
            self._sweeping, self._dead = self._dead, 0
            # Newest first: what is new meanwhile has no dead holder.
            ages.begin_walk()
            self.lower.begin_sweep()
            self.groups.begin_sweep()
        dead = self._sweeping
        while left > 0 and (run := ages.step()) is not None:
            left -= 1
            if run.mask & dead:
                run.mask &= ~dead
                if not run.mask:
                    left -= len(run.blocks)
                    self._reach.delete(run)
        left = self.groups.sweep(dead, self.lower.sweep(dead, left))
        self._swept_too_far = max(0, -left)
        if left > 0:
            self._reach.broken &= ~dead
            self._free_slots.extend(slots_of(dead))
            self._sweeping = 0

    def _evict(self, slice_blocks: int) -> None:
        """Evict until within budget, a bounded number of blocks."""
        excess = self._reach.blocks - self._max_blocks
        runs = self._reach.forest
        chances = SECOND_CHANCES
        while excess > 0 and slice_blocks > 0 and (run := runs.oldest_leaf) is not None:
            slice_blocks -= 1
            if run.used and chances:
                run.used = False
                chances -= 1
                runs.postpone(run)
                continue
            count = min(len(run.blocks), excess, slice_blocks)
            gone = self._reach.shorten(run, count, evicted=True)
            excess -= count
            slice_blocks -= count
            self._forget(gone, run.mask)
            self.counters.evicted_blocks += count

    def _forget(self, blocks: Sequence[int], mask: int) -> None:
        """Take note that blocks are gone for their holders, though none of these removed them."""
        for slot in slots_of(mask & self._live):
            self._held[slot] -= len(blocks)
        if self.lower.in_use:
            for block in blocks:
                for lower in self.lower.forget(block, mask):
                    for slot in slots_of(lower & self._live):
                        self._lower_blocks[slot] -= 1


_CONTENTS = (
    "_reach",
    "lower",
    "groups",
    "_holdings",
    "_slots",
    "_workers",
    "_held",
    "_lower_blocks",
    "_free_slots",
    "_live",
    "_dead",
    "_sweeping",
)
"""All that an index holds, as against its bounds and what it counted."""


def slots_of(mask: int) -> Iterator[int]:
    """Yield the bit numbers of a mask, lowest first."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest
