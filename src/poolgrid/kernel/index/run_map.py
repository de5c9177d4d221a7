"""The blocks that workers hold: runs, found by their first and last block.

``poolgrid.kernel.index.prefix_index`` has the rules.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final

from poolgrid.kernel.index.block_locator import BlockLocator
from poolgrid.kernel.index.block_map import BlockMap
from poolgrid.kernel.index.run_forest import RUN_BYTES, Run, RunForest
from poolgrid.kernel.index.sharded_map import SHARD_ENTRIES, ShardedMap

RUN_BLOCKS_MAX = 1024
"""Blocks of one run: what is freed in one go, at the most, and twice what a split moves."""

PLACES_SHARD_ENTRIES: Final = 16_384
"""Blocks of a shard of ``BlockLocator``: looking through all of them takes five to ten microseconds, splitting them or
putting them in order about a millisecond."""

NEAR: Final = 8
"""Blocks of a path that a leap looks at, at each place, for one that is the first or last of a run."""

SIBLINGS_SEEN: Final = 16
"""Runs that continue a block which are asked whether a worker holds one of them; of more it is taken to."""

HOPS: Final = 16
"""Runs in a row that a look-up passes one by one though no worker's part of the path ends there; then it leaps."""


class RunMap:
    """Runs, their edges, and where each block is."""

    def __init__(self, shard_entries: int, first_depth: int) -> None:
        self.edges = BlockMap(shard_entries, first_depth)
        self.places = BlockLocator(min(shard_entries, PLACES_SHARD_ENTRIES), first_depth)
        self.blocks = 0
        """How many blocks are held; one that workers hold in different runs counts twice."""
        self.crossed = False
        """Whether two runs had the same block as their first or last, so that ``edges`` may lack one."""
        self.forest = RunForest()
        self.waiting: ShardedMap[Run] = ShardedMap(min(shard_entries, SHARD_ENTRIES))
        """By a block without a holder, the first of the runs that continue it; the others follow to its right."""
        self.broken = 0
        """Workers that may hold a run without the block before it: all that do, and others until they hold nothing."""
        self.yielded: list[tuple[array[int], int]] = []
        """Blocks that went because what was stored contradicts them, with their holders, for the index to count."""

    def size_bytes(self) -> int:
        """Return a close estimate: the maps exactly, 40 bytes a block for its key and place in its run."""
        maps = self.edges.size_bytes() + self.places.size_bytes() + self.waiting.size_bytes()
        return maps + 32 * self.edges.entries + 9 * self.blocks + RUN_BYTES * self.forest.ages.entries

    def discard(self, entries: int) -> int:
        """Free this many entries of a discarded map; return how many of the number are left over."""
        entries = self.places.discard(self.edges.discard(self.waiting.discard(entries)))
        while entries > 0 and (run := self.forest.discard_newest()) is not None:
            self.blocks -= len(run.blocks)
            entries -= len(run.blocks) + 1
        return entries

    def find(self, path: Sequence[int], live: int) -> list[tuple[int, int]]:
        """Return groups ``(depth, mask)`` of the workers in ``live``, deepest first: those of ``mask`` hold ``depth``.

        ``depth`` counts leading blocks of the path. Masks are disjoint; holders of nothing are in none.
        """
        shards, shift, key_mask = self.edges.view
        try:
            block = path[0]
        except IndexError:
            return []
        run = shards[block >> shift].get(block & key_mask)
        if self.crossed:
            run = self.child(None, block)
        if run is None or run.parent is not None or not (mask := run.mask & live):
            return []
        last = len(path) - 1
        blocks = run.blocks
        if len(blocks) > last and blocks[last] == path[last]:
            return [(last + 1, mask)]
        hops = patience = HOPS
        high_mask = 0
        if mask & self.broken:
            # Of these workers a run says nothing about those before it.
            hops = patience = len(path)
        else:
            block = path[last]
            high = shards[block >> shift].get(block & key_mask)
            if high is not None:
                high_mask = high.mask
                if high_mask & mask == mask:
                    return [(last + 1, mask)]
        at = 0 if blocks[0] == path[0] else -blocks.index(path[0])
        # From run to run: behind a path's part of one comes the first block of the next, or nothing with a holder.
        groups: list[tuple[int, int]] = []
        while True:
            end = at + len(blocks)
            if end > last:
                break
            block = path[end]
            below = run.child
            if below is None:
                break
            if below.right is None:
                if below.blocks[0] != block:
                    break
            else:
                below = shards[block >> shift].get(block & key_mask)
                if self.crossed:
                    below = self.child(blocks[-1], block)
                if below is None or below.parent != blocks[-1]:
                    break
            rest = below.mask & mask
            if rest == mask:
                # No worker's part ends here.
                if high_mask & mask == mask:
                    groups.append((last + 1, mask))
                    groups.reverse()
                    return groups
                run, at = below, end
                hops -= 1
                if not hops:
                    run, at = self.leap(path, run, at, mask)
                    if at == end:
                        patience *= 2
                    hops = patience
                blocks = run.blocks
                continue
            groups.append((end, mask ^ rest))
            if not rest:
                groups.reverse()
                return groups
            run, at, mask, hops = below, end, rest, patience
            blocks = run.blocks
        groups.append((at + _followed(blocks, path, at), mask))
        groups.reverse()
        return groups

    def leap(self, path: Sequence[int], run: Run, at: int, mask: int) -> tuple[Run, int]:
        """Return a run farther down a path that all of ``mask`` hold, and where it begins, or the same if none is seen.

        Looked for in steps that double, then halve, and only by edges: where these are rare runs are long.
        """
        shards, shift, key_mask = self.edges.view
        step, doubles = 2 * NEAR, True
        low, high = at, len(path)
        while high - low > 2 * NEAR:
            probe = low + step if doubles and low + step < high else (low + high) >> 1
            step *= 2
            for near in range(probe, min(probe + NEAR, high)):
                block = path[near]
                seen = shards[block >> shift].get(block & key_mask)
                if seen is not None:
                    if seen.mask & mask == mask:
                        run = seen
                        low = near
                        at = near if seen.blocks[0] == block else near + 1 - len(seen.blocks)
                    else:
                        high, doubles = probe, False
                    break
            else:
                high, doubles = probe, False
        return run, at

    def run_of(self, block: int, bit: int = -1) -> Run | None:
        """Return the run that a block is in, which certain workers hold, or any."""
        run = self.edges.get(block)
        return run if run is not None and run.mask & bit else self.inside(block, bit)

    def holder(self, block: int, bit: int) -> Run | None:
        """Return the run that a block is in, one that a worker holds if there is one."""
        run = self.edges.get(block)
        if run is not None and run.mask & bit:
            return run
        found = [each for each in self.places.where(block) if block in each.blocks]
        return next(
            (each for each in found if each.mask & bit), run if run is not None else found[0] if found else None
        )

    def breaks(self, run: Run, bit: int) -> None:
        """Note that a worker loses the last block of a run, and perhaps holds what continues it."""
        child = run.child
        for _ in range(SIBLINGS_SEEN):
            if child is None:
                return
            if child.mask & bit:
                break
            child = child.right
        self.broken |= bit

    def inside(self, block: int, bit: int) -> Run | None:
        """Return the run that a block is in and certain workers hold, where no edge has it; it takes microseconds."""
        return next((run for run in self.places.where(block) if run.mask & bit and block in run.blocks), None)

    def child(self, parent: int | None, block: int) -> Run | None:
        run = self.edges.get(block)
        if run is None or run.parent != parent or run.blocks[0] != block:
            run = None
            if self.crossed:
                found = self.places.where(block)
                run = next((each for each in found if each.parent == parent and each.blocks[0] == block), None)
        return run

    def add_run(self, bit: int, above: Run | None, parent: int | None, blocks: array[int]) -> Run | None:
        """Add new blocks, few enough for a run, behind a block of ``above``; return the run that ends with them.

        What contradicts edges is refused (``None``). None but the last may be a block that runs wait for.
        """
        edges = self.edges
        first, last = blocks[0], blocks[-1]
        if first in edges or last in edges or len(set(blocks)) != len(blocks):
            return None
        if above is not None and above.blocks[-1] != parent:
            assert parent is not None
            above = self.split(above, above.blocks.index(parent) + 1)
        self.blocks += len(blocks)
        if (
            above is not None
            and above.mask == bit
            and above.child is None
            and len(above.blocks) + len(blocks) <= RUN_BLOCKS_MAX
        ):
            if above.blocks[0] != parent:
                self.no_edge(above.blocks[-1], above)
            above.blocks.extend(blocks)
            above.used = True
            self.places.add(above, blocks)
            self.set_edge(last, above)
            self._continue(above)
            return above
        run = Run(parent, blocks[:], bit)
        self.set_edge(first, run)
        if first != last:
            self.set_edge(last, run)
        self.forest.add(run, above)
        self.places.enter(run)
        if above is None and parent is not None:
            after = self.waiting.get(parent)
            if after is not None:
                run.right = after
                after.left = run
            self.waiting[parent] = run
        self._continue(run)
        return run

    def _continue(self, run: Run) -> None:
        """Put the runs that waited for the last block of a run without children below it."""
        if self.waiting.entries:
            last = run.blocks[-1]
            child = self.waiting.get(last)
            if child is not None:
                del self.waiting[last]
                self.forest.give_children(run, child)

    def set_waiting(self, run: Run) -> None:
        """Have all that continues the last block of a run wait: that block goes."""
        child = run.child
        if child is None:
            return
        self.forest.take_children(run)
        last = run.blocks[-1]
        others = self.waiting.get(last)
        self.waiting[last] = child
        if others is not None:
            # Another run has the same last block, which contradicts one of them.
            end = child
            while end.right is not None:
                end = end.right
            end.right = others
            others.left = end

    def yields(self, edge: int, above: Run | None) -> bool:
        """Delete the run of an edge if none of its holders has the block before it: it contradicts what others hold."""
        run = self.edges.get(edge)
        if run is None or run is above or run.parent is None:
            return False
        before = self.above(run) if run.left is None else self.holder(run.parent, run.mask)
        if before is not None and before.mask & run.mask:
            return False
        self.yielded.append((run.blocks[:], run.mask))
        self.broken |= run.mask
        self.delete(run)
        return True

    def split(self, run: Run, at: int) -> Run:
        """Cut a run before position ``at``; return the front part, whose child the rest is.

        The shorter part becomes a run of its own: only its blocks are copied.
        """
        if 2 * at > len(run.blocks):
            moved = tail = self.forest.cut_tail(run, at)
            front = run
        else:
            parent = run.parent
            waits = self._waits_first(run)
            moved = front = self.forest.cut_front(run, at, self.above(run))
            tail = run
            if waits:
                assert parent is not None
                self.waiting[parent] = front
        self.places.take(run, moved.blocks)
        self.places.enter(moved)
        for part in (front, tail):
            self.set_edge(part.blocks[0], part, run)
            self.set_edge(part.blocks[-1], part, run)
        get = self.edges.get
        for part in (front, tail):
            if get(part.blocks[0]) is not part or get(part.blocks[-1]) is not part:
                # A run that has a block twice, which is then an edge of both parts.
                self.crossed = True
        return front

    def shorten(self, run: Run, count: int, evicted: bool = False) -> array[int]:
        """Take blocks from the end of a run, perhaps all; return them."""
        blocks = run.blocks
        gone = blocks[-count:]
        del blocks[-count:]
        self.blocks -= count
        self.places.take(run, gone)
        self.no_edge(gone[-1], run)
        if blocks:
            self.set_edge(blocks[-1], run, run)
            if gone[-1] == blocks[0]:
                self.set_edge(blocks[0], run, run)
        else:
            self.no_edge(gone[0], run)
            self.unlink(run, evicted)
            self.places.leave(run)
        return gone

    def set_edge(self, block: int, run: Run, before: Run | None = None) -> None:
        """Name a run for its first or last block, where no other was named but perhaps ``before``."""
        edges = self.edges
        shard = edges.shards[block >> edges.shift]
        key = block & edges.key_mask
        named = shard.get(key)
        if named is not run:
            shard[key] = run
            if named is None:
                edges.entries += 1
                if len(shard) > edges.crowded_entries:
                    edges.relieve(block)
            elif named is not before:
                self.crossed = True

    def no_edge(self, block: int, run: Run) -> None:
        edges = self.edges
        shard = edges.shards[block >> edges.shift]
        key = block & edges.key_mask
        if shard.get(key) is run:
            del shard[key]
            edges.entries -= 1

    def above(self, run: Run) -> Run | None:
        """Return the run whose ``child`` a run is."""
        if run.parent is None or run.left is not None or self._waits_first(run):
            return None
        above = self.edges.get(run.parent)
        if above is not None and above.child is run:
            return above
        # It is gone, or another run has the same edge: a link to one that is gone must not stay.
        return next((each for each in self.places.where(run.parent) if each.child is run), None)

    def _waits_first(self, run: Run) -> bool:
        """Return whether a run is the first of those that wait for a block."""
        return bool(self.waiting.entries and run.parent is not None and self.waiting.get(run.parent) is run)

    def delete(self, run: Run) -> None:
        """Delete a run; what continues it waits for its last block."""
        self.set_waiting(run)
        self.blocks -= len(run.blocks)
        self.no_edge(run.blocks[0], run)
        self.no_edge(run.blocks[-1], run)
        self.unlink(run)
        self.places.leave(run)

    def unlink(self, run: Run, evicted: bool = False) -> None:
        if self._waits_first(run):
            assert run.parent is not None
            if run.right is None:
                del self.waiting[run.parent]
            else:
                self.waiting[run.parent] = run.right
        self.forest.remove(run, self.above(run), evicted)


def _followed(blocks: Sequence[int], path: Sequence[int], at: int) -> int:
    """Return how many blocks of a run a path has that has the first of them at ``at``.

    A sequence hash names all before it, so equal hashes in one place are equal hashes in all places before.
    """
    count = min(len(blocks), len(path) - at)
    if blocks[count - 1] == path[at + count - 1]:
        return count
    low, high = max(0, -at), count - 1
    while high - low > 1:
        middle = (low + high) >> 1
        if blocks[middle] == path[at + middle]:
            low = middle
        else:
            high = middle
    return low + 1


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Return how many leading elements two sequences share."""
    count = min(len(left), len(right))
    if left[:count] == right[:count]:
        return count
    shared = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        shared += 1
    return shared
