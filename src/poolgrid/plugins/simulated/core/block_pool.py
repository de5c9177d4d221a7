"""A paged KV block pool with prefix caching: who holds which block, on the device and on the host.

A device block is in one of three states:

* **private**: a running request fills it; it has no name yet. Only counted.
* **shared**: full, named by its sequence hash, held by ``refs`` > 0 requests.
* **idle**: full, named, held by no request (``refs`` = 0), kept for reuse until its place is needed.

Rules:

1. A request holds a whole prefix: every ancestor of a block it holds. It takes prefixes from the front and releases
   them from the back.
2. So a child becomes idle before its parent, or with it and ahead of it; idle blocks in the order in which they became
   idle have every child before its parent, and evicting the oldest evicts leaves first. Where no request says how long
   its blocks stay, no tree is needed.
3. With a host tier an evicted block moves there and keeps its name, unless its priority is below 30; the host evicts by
   the same order. A host hit brings the block back to the device. A block is on one tier at a time, and every ancestor
   of a block is on some tier.
4. When a request fills a block whose name is already there, its copy is given up and the one there is shared.
5. Blocks have a priority, 35 unless a request said otherwise. Of idle blocks the lowest priority is evicted first, and
   of one priority the oldest. The last request that took a block has the last word: what it says of the block replaces
   both, and where it says nothing the priority stays and its duration goes. Any priority but 35 lapses so long after
   the block became idle as its duration says; the block is the newest of those with 35 then.
6. Blocks below a block that leaves the cache leave with it: they could not be found. Their room is free at once.

All operations work on whole prefixes, so that their cost per block is a few dictionary operations.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from poolgrid.kernel.wire.events import BlocksStored
from poolgrid.kernel.wire.identifiers import Tier
from poolgrid.kernel.wire.requests import RETENTION_DEFAULT
from poolgrid.kernel.worker_protocol.cache_facts import chains, stored_chain
from poolgrid.plugins.simulated.core.kv_groups import CacheRecorder, GroupCaches, Link, SimulatedGroup


class IdleQueues:
    """The idle blocks of one tier that have another priority than the usual one, and those that have it.

    As TensorRT-LLM's: one queue for each priority, the lowest is emptied first, from its front. A priority that has a
    duration lapses so long after the block became idle, and the block is the newest of those with the usual one then.
    """

    __slots__ = ("_added", "_lapses", "_priority", "_queues", "_usual")

    def __init__(self, usual: OrderedDict[int, None]) -> None:
        """``usual`` are the blocks with the usual priority, the oldest first; it stays the caller's, too."""
        self._usual = usual
        self._queues: dict[int, OrderedDict[int, int]] = {}
        """By priority; of each block its number in the order of being added."""
        self._priority: dict[int, int] = {}
        self._lapses: list[tuple[float, int, int]] = []
        """A heap: when a priority lapses, the block's number, and its hash. Entries that no longer hold are skipped."""
        self._added = 0

    def __len__(self) -> int:
        """Return how many there are, those with the usual priority not counted."""
        return len(self._priority)

    def __iter__(self) -> Iterator[int]:
        return iter(self._priority)

    def __contains__(self, sequence_hash: int) -> bool:
        """Return whether a block is among them, those with the usual priority not counted."""
        return sequence_hash in self._priority

    def add(self, sequence_hash: int, priority: int, lapses_ms: float | None = None) -> None:
        """Add a block with another priority than the usual one, until a time or without end."""
        self._added += 1
        queue = self._queues.get(priority)
        if queue is None:
            queue = self._queues[priority] = OrderedDict()
        queue[sequence_hash] = self._added
        self._priority[sequence_hash] = priority
        if lapses_ms is None:
            return
        heappush(self._lapses, (lapses_ms, self._added, sequence_hash))
        if len(self._lapses) > 4 * len(self._priority) + 64:
            self._lapses = [lapse for lapse in self._lapses if self._holds(lapse)]
            heapify(self._lapses)

    def discard(self, sequence_hash: int) -> None:
        """Take a block out, of any priority."""
        priority = self._priority.pop(sequence_hash, None)
        if priority is None:
            self._usual.pop(sequence_hash, None)
            return
        queue = self._queues[priority]
        del queue[sequence_hash]
        if not queue:
            del self._queues[priority]

    def lapse(self, now_ms: float) -> list[int]:
        """Give the usual priority to blocks whose time is over, and return them."""
        lapses = self._lapses
        lapsed: list[int] = []
        while lapses and lapses[0][0] <= now_ms:
            lapse = heappop(lapses)
            if self._holds(lapse):
                self.discard(lapse[2])
                self._usual[lapse[2]] = None
                lapsed.append(lapse[2])
        return lapsed

    def pop(self) -> tuple[int, int]:
        """Take out the block that goes next, and return it with its priority; ``KeyError`` where there is none."""
        lowest = min(self._queues, default=RETENTION_DEFAULT)
        if lowest >= RETENTION_DEFAULT and self._usual:
            return self._usual.popitem(last=False)[0], RETENTION_DEFAULT
        sequence_hash = next(iter(self._queues[lowest]))
        self.discard(sequence_hash)
        return sequence_hash, lowest

    def _holds(self, lapse: tuple[float, int, int]) -> bool:
        _, number, sequence_hash = lapse
        priority = self._priority.get(sequence_hash)
        return priority is not None and self._queues[priority][sequence_hash] == number


Kept = tuple[int | None, int | None]
"""What a request asks for a block: its priority (``None`` = nothing), and for how many milliseconds it has it once
no request holds it (``None`` = until another request changes it)."""

MOVED_FROM_PRIORITY = 30
"""Evicted blocks of a lower priority are not moved to the host: TensorRT-LLM's ``secondary_offload_min_priority``,
where it is not set."""


class Match(NamedTuple):
    """How much of a prefix is cached: so many blocks on the device, and so many on the host.

    Those of the device come first, unless requests said how long blocks stay.
    """

    device: int
    idle: int
    """How many of the device blocks are held by no request."""
    host: int


class BlockPool:
    """The blocks of one engine."""

    def __init__(
        self,
        total_blocks: int,
        host_blocks: int,
        block_size: int,
        recorder: CacheRecorder,
        groups: Sequence[SimulatedGroup] = (),
    ) -> None:
        for name, value, lowest in (
            ("total_blocks", total_blocks, 1),
            ("host_blocks", host_blocks, 0),
            ("block_size", block_size, 1),
        ):
            if value < lowest:
                raise ValueError(f"making a block pool: {name} is {value}, allowed are integers from {lowest}")
        self.total_blocks = total_blocks
        self.host_blocks = host_blocks
        self.block_size = block_size
        self.version = 0
        """Changes whenever blocks became free or were stored: a request that did not fit before may fit now."""
        self.now_ms = 0.0
        """The caller's time, by which priorities lapse."""
        self._recorder = recorder
        self._groups = GroupCaches(groups, block_size, total_blocks, recorder) if groups else None
        self._refs: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._host: OrderedDict[int, None] = OrderedDict()
        self._parents: dict[int, int | None] = {}
        self._private = 0
        self._kept: dict[int, tuple[int, int | None]] = {}
        """Blocks of either tier with another priority than the usual one, and its duration; empty until a request asks
        for one."""
        self._idle_kept = IdleQueues(self._idle)
        self._host_kept = IdleQueues(self._host)
        self._children: dict[int, int | set[int]] | None = None
        """What hangs off each block, of most a single one; ``None`` until a request says how long its blocks stay."""

    @property
    def cached_blocks(self) -> int:
        return len(self._refs)

    @property
    def active_blocks(self) -> int:
        return len(self._refs) - len(self._idle) - len(self._idle_kept) + self._private

    @property
    def available_blocks(self) -> int:
        """Device blocks that can be had, by eviction if need be."""
        return self.total_blocks - len(self._refs) + len(self._idle) + len(self._idle_kept) - self._private

    def match(self, hashes: Sequence[int], limit: int) -> Match:
        """Return how many of the first ``limit`` blocks of a prefix can be reused. Changes nothing."""
        found = self._match(hashes, limit)
        if self._groups is None:
            return found
        depth = self._groups.resumable(hashes, found.device + found.host)
        return self._match(hashes, depth)

    def _match(self, hashes: Sequence[int], limit: int) -> Match:
        refs = self._refs
        device = idle = host = 0
        for sequence_hash in hashes[:limit]:
            held = refs.get(sequence_hash)
            if held is None:
                break
            device += 1
            if not held:
                idle += 1
        if self._host or self._host_kept:
            for sequence_hash in hashes[device:limit]:
                if self._is_on_host(sequence_hash):
                    host += 1
                    continue
                held = refs.get(sequence_hash)
                if held is None:
                    break
                # On the device behind the host: it was to stay longer than what it hangs off.
                device += 1
                if not held:
                    idle += 1
        return Match(device, idle, host)

    def take(
        self, hashes: Sequence[int], match: Match, new_blocks: int, retention: Sequence[Kept] | None = None
    ) -> bool:
        """Hold a matched prefix and ``new_blocks`` more device blocks (host hits included in those), or nothing.

        ``match`` must be fresh. ``retention`` is what the request says of each block of the match. Afterwards the
        caller holds ``match.device + match.host`` shared blocks and ``new_blocks - match.host`` private ones.
        """
        if self.available_blocks - match.idle < new_blocks:
            return False
        refs = self._refs
        idle, kept = self._idle, self._kept
        matched = hashes[: match.device + match.host]
        if kept:
            self._lapse()
        onboarded: list[int] = []
        for sequence_hash in matched:
            held = refs.get(sequence_hash)
            if held is None:
                # Off the host first: making room below pushes other blocks there and could evict just these.
                self._host_kept.discard(sequence_hash)
                onboarded.append(sequence_hash)
                continue
            if not held:
                if sequence_hash in kept:
                    self._idle_kept.discard(sequence_hash)
                else:
                    del idle[sequence_hash]
            refs[sequence_hash] = held + 1
        if kept or retention is not None:
            self._say(matched, retention)
        self._make_room(new_blocks)
        if onboarded:
            for sequence_hash in onboarded:
                refs[sequence_hash] = 1
            self._recorder.moved(self._links(onboarded), Tier.HOST, Tier.DEVICE)
        self._private += new_blocks - match.host
        return True

    def reserve(self) -> bool:
        if self.available_blocks < 1:
            return False
        self._make_room(1)
        self._private += 1
        return True

    def store(
        self,
        hashes: Sequence[int],
        start: int,
        end: int,
        tokens: Callable[[int, int], bytes],
        seed: int,
        media: Callable[[int, int], Mapping[int, Sequence[int]]] | None = None,
        retention: Sequence[Kept] | None = None,
    ) -> None:
        """Name the caller's private blocks ``start`` to ``end`` of its prefix; it holds all blocks before them.

        ``tokens(first_block, end_block)`` returns the token ids of a range of blocks, ``media`` the hashes of the media
        that touch them, by position in the range. ``retention`` is what the request says of each of these blocks.
        """
        refs = self._refs
        self._private -= end - start
        self.version += 1
        if self._groups is not None:
            self._groups.store(hashes, start, end)
        at = start
        returned: list[int] = []
        # What is there already comes first: every ancestor of a block is on some tier (rule 3).
        while at < end:
            sequence_hash = hashes[at]
            held = refs.get(sequence_hash)
            if held is None:
                if not self._is_on_host(sequence_hash):
                    break
                self._host_kept.discard(sequence_hash)
                returned.append(sequence_hash)
                refs[sequence_hash] = 1
                at += 1
                continue
            if not held:
                self._idle_kept.discard(sequence_hash)
            refs[sequence_hash] = held + 1
            at += 1
        if returned:
            self._recorder.moved(self._links(returned), Tier.HOST, Tier.DEVICE)
        if at < end:
            fresh = hashes[at:end]
            parent = hashes[at - 1] if at else None
            refs.update(dict.fromkeys(fresh, 1))
            parents = self._parents
            previous = parent
            for sequence_hash in fresh:
                parents[sequence_hash] = previous
                previous = sequence_hash
            if self._children is not None:
                self._note_children(fresh)
            if retention is not None:
                self._say(fresh, retention[at - start :])
            first = at
            if media is None:
                self._recorder.stored(parent, fresh, lambda: tokens(first, end), self.block_size, seed)
            else:
                self._recorder.stored(
                    parent, fresh, lambda: tokens(first, end), self.block_size, seed, media(first, end)
                )

    def release(self, hashes: Sequence[int], private: int) -> None:
        """Give up a held prefix (all of what the caller holds of it) and private blocks."""
        self._private -= private
        self.version += 1
        refs = self._refs
        idle = self._idle
        if not self._kept:
            for sequence_hash in reversed(hashes):
                held = refs[sequence_hash] - 1
                refs[sequence_hash] = held
                if not held:
                    idle[sequence_hash] = None
            return
        # Before anything becomes idle: what has lapsed by now is older than these.
        self._lapse()
        kept, now_ms = self._kept, self.now_ms
        for sequence_hash in reversed(hashes):
            held = refs[sequence_hash] = refs[sequence_hash] - 1
            if held:
                continue
            own = kept.get(sequence_hash)
            if own is None:
                idle[sequence_hash] = None
            else:
                priority, duration_ms = own
                self._idle_kept.add(sequence_hash, priority, None if duration_ms is None else now_ms + duration_ms)

    def _say(self, hashes: Sequence[int], retention: Sequence[Kept] | None) -> None:
        """Let blocks that a request holds, and that are not idle any more, have what it says of them."""
        kept = self._kept
        if retention is None:
            for sequence_hash in hashes:
                own = kept.get(sequence_hash)
                if own is not None and own[1] is not None:
                    kept[sequence_hash] = (own[0], None)
            return
        if self._children is None:
            self._children = {}
            self._note_children(list(self._parents))
        for sequence_hash, (said, duration_ms) in zip(hashes, retention, strict=True):
            priority = kept.get(sequence_hash, _USUAL)[0] if said is None else said
            if priority == RETENTION_DEFAULT:
                kept.pop(sequence_hash, None)
            else:
                kept[sequence_hash] = (priority, duration_ms)

    def _note_children(self, hashes: Sequence[int]) -> None:
        assert self._children is not None
        parents, children = self._parents, self._children
        for sequence_hash in hashes:
            parent = parents[sequence_hash]
            if parent is None:
                continue
            beside = children.get(parent)
            if beside is None:
                children[parent] = sequence_hash
            elif isinstance(beside, set):
                beside.add(sequence_hash)
            else:
                children[parent] = {beside, sequence_hash}

    def _lapse(self) -> None:
        """Give the usual priority to idle blocks whose time is over."""
        for sequence_hash in self._idle_kept.lapse(self.now_ms):
            del self._kept[sequence_hash]

    def _is_on_host(self, sequence_hash: int) -> bool:
        return sequence_hash in self._host or sequence_hash in self._host_kept

    def resident(self, tier: Tier) -> list[Link]:
        """Return every named block of a tier with its parent, parents before children."""
        blocks: list[int] = []
        if tier is Tier.DEVICE:
            blocks = list(self._refs)
        elif tier is Tier.HOST:
            blocks = [*reversed(self._host), *self._host_kept]
        return self._links(blocks if self._children is None else self._parents_first(blocks))

    def restate(self) -> list[BlocksStored]:
        """Return the whole cache as wire events, parents before children."""
        events: list[BlocksStored] = []
        for tier in (Tier.DEVICE, Tier.HOST):
            for parent, hashes in chains(self.resident(tier)):
                events += stored_chain(parent, hashes, tier)
        return events

    def _parents_first(self, hashes: Sequence[int]) -> list[int]:
        """Return blocks of one tier in an order in which no block comes before one that it hangs off."""
        left = dict.fromkeys(hashes)
        ordered: list[int] = []
        for sequence_hash in hashes:
            chain: list[int] = []
            at: int | None = sequence_hash
            while at is not None and at in left:
                del left[at]
                chain.append(at)
                at = self._parents[at]
            ordered += reversed(chain)
        return ordered

    def _links(self, hashes: Iterable[int]) -> list[Link]:
        parents = self._parents
        return [(sequence_hash, parents[sequence_hash]) for sequence_hash in hashes]

    def _make_room(self, blocks: int) -> None:
        """Evict the oldest idle blocks until ``blocks`` device blocks are free; the caller has checked that it can."""
        missing = blocks - (self.total_blocks - len(self._refs) - self._private)
        if missing <= 0:
            return
        if self._children is not None:
            self._evict_by_priority(missing)
            return
        pop = self._idle.popitem
        refs = self._refs
        evicted = [pop(last=False)[0] for _ in range(missing)]
        for sequence_hash in evicted:
            del refs[sequence_hash]
        if not self.host_blocks:
            for sequence_hash in evicted:
                del self._parents[sequence_hash]
            self._recorder.removed(evicted, Tier.DEVICE)
            return
        host = self._host
        for sequence_hash in evicted:
            host[sequence_hash] = None
        self._recorder.moved(self._links(evicted), Tier.DEVICE, Tier.HOST)
        if len(host) > self.host_blocks:
            dropped = [host.popitem(last=False)[0] for _ in range(len(host) - self.host_blocks)]
            for sequence_hash in dropped:
                del self._parents[sequence_hash]
            self._recorder.removed(dropped, Tier.HOST)

    def _evict_by_priority(self, missing: int) -> None:
        """Evict until so many device blocks more are free, those of the lowest priority and of one the oldest."""
        self._lapse()
        queues, refs = self._idle_kept, self._refs
        wanted = len(refs) - missing
        gone: dict[Tier, list[int]] = {Tier.DEVICE: [], Tier.HOST: []}
        while len(refs) > wanted:
            sequence_hash, priority = queues.pop()
            if not self.host_blocks or priority < MOVED_FROM_PRIORITY:
                self._drop(sequence_hash, Tier.DEVICE, gone)
                continue
            if len(self._host) + len(self._host_kept) >= self.host_blocks:
                self._drop(self._host_kept.pop()[0], Tier.HOST, gone)
            if sequence_hash not in refs:
                # It hung off what the host had to give up for it.
                continue
            self._tell_removed(gone)
            del refs[sequence_hash]
            if priority == RETENTION_DEFAULT:
                self._host[sequence_hash] = None
            else:
                # On the host a priority does not lapse.
                self._kept[sequence_hash] = (priority, None)
                self._host_kept.add(sequence_hash, priority)
            self._recorder.moved(self._links([sequence_hash]), Tier.DEVICE, Tier.HOST)
        self._tell_removed(gone)

    def _drop(self, sequence_hash: int, tier: Tier, gone: dict[Tier, list[int]]) -> None:
        """Forget a block that is out of its tier's queue, and all that hangs off it; leaves are noted as gone first."""
        assert self._children is not None
        children, parents = self._children, self._parents
        parent = parents[sequence_hash]
        if parent is not None:
            beside = children[parent]
            if isinstance(beside, set):
                beside.discard(sequence_hash)
            if not isinstance(beside, set) or not beside:
                del children[parent]
        found = [sequence_hash]
        for each in found:
            behind = children.pop(each, None)
            if behind is not None:
                # Sorted, as the order of a set is not defined.
                found += sorted(behind) if isinstance(behind, set) else (behind,)
        for each in reversed(found):
            if each in self._refs:
                self._idle_kept.discard(each)
                del self._refs[each]
                gone[Tier.DEVICE].append(each)
            else:
                self._host_kept.discard(each)
                gone[Tier.HOST].append(each)
            del parents[each]
            self._kept.pop(each, None)

    def _tell_removed(self, gone: dict[Tier, list[int]]) -> None:
        for tier, hashes in gone.items():
            if hashes:
                self._recorder.removed(hashes, tier)
                gone[tier] = []


_USUAL = (RETENTION_DEFAULT, None)
