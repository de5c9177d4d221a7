"""A paged KV block pool with prefix caching: who holds which block, on the device and on the host.

A device block is in one of three states:

* **private**: a running request fills it; it has no name yet. Only counted.
* **shared**: full, named by its sequence hash, held by ``refs`` > 0 requests.
* **idle**: full, named, held by nobody (``refs`` = 0), kept for reuse until its place is needed.

Rules:

1. A request holds a whole prefix: every ancestor of a block it holds. It takes prefixes from the front and releases
   them from the back.
2. So a child becomes idle before its parent, or with it and ahead of it; idle blocks in the order in which they became
   idle have every child before its parent, and evicting the oldest evicts leaves first. No tree is needed.
3. With a host tier an evicted block moves there and keeps its name, unless its priority is below 30; the host evicts
   its oldest. A host hit brings the block back to the device. A block is on one tier at a time, and every ancestor of
   a host block is on some tier.
4. When a request fills a block whose name is already there, its copy is given up and the one there is shared.
5. Idle blocks have a priority, 35 unless a request said otherwise. The lowest priority is evicted first, and of one
   priority the oldest. A priority above 35 may lapse; when room is needed next, the block is one of the newest with 35.
   A new block has what its request says. A later request can only raise it, and a block that something hangs off has
   at least the priority of that, for at least as long, so that rule 2 holds.

All operations work on whole prefixes, so that their cost per block is a few dictionary operations.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from poolgrid.wire.identifiers import Tier
from poolgrid.wire.requests import RETENTION_DEFAULT
from poolgrid.workers.engines.simulated.core.cache_recorder import CacheRecorder, Link

Retention = Sequence[tuple[int, int | None]]
"""Of each block of a request, in order: its priority, and for how many milliseconds after its release it has it."""

Kept = tuple[int, float | None]
"""A block's priority, and when it lapses; ``None`` = never."""

USUAL: Kept = (RETENTION_DEFAULT, None)

MOVED_FROM_PRIORITY = 30
"""Evicted blocks of a lower priority are not moved to the host: TensorRT-LLM's ``secondary_offload_min_priority``,
where it is not set."""


class Match(NamedTuple):
    """How much of a prefix is cached: ``device`` blocks from the front, then ``host`` blocks."""

    device: int
    idle: int
    """How many of the device blocks nobody holds now."""
    host: int


class BlockPool:
    """The blocks of one engine."""

    def __init__(self, total_blocks: int, host_blocks: int, block_size: int, recorder: CacheRecorder) -> None:
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
        self._refs: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._host: OrderedDict[int, None] = OrderedDict()
        self._parents: dict[int, int | None] = {}
        self._private = 0
        self._kept: dict[int, Kept] = {}
        """Blocks with another priority than the usual one; empty until a request asks for one."""
        self._idle_kept: dict[int, OrderedDict[int, int]] = {}
        """Those of them that are idle, by priority, each with its number in the order of becoming idle; they are not in
        ``_idle``."""
        self._idle_kept_count = 0
        self._lapses: list[tuple[float, int, int]] = []
        """A heap: when the priority of an idle block lapses, its number, and its hash. Entries that no longer hold are
        skipped."""
        self._idled = 0

    @property
    def cached_blocks(self) -> int:
        """Named device blocks, held or not."""
        return len(self._refs)

    @property
    def active_blocks(self) -> int:
        """Device blocks that requests hold."""
        return len(self._refs) - len(self._idle) - self._idle_kept_count + self._private

    @property
    def available_blocks(self) -> int:
        """Device blocks that can be had, by eviction if need be."""
        return self.total_blocks - len(self._refs) + len(self._idle) + self._idle_kept_count - self._private

    def match(self, hashes: Sequence[int], limit: int) -> Match:
        """Return how many of the first ``limit`` blocks of a prefix are cached. Changes nothing."""
        refs = self._refs
        device = idle = host = 0
        for sequence_hash in hashes[:limit]:
            held = refs.get(sequence_hash)
            if held is None:
                break
            device += 1
            if not held:
                idle += 1
        if self._host:
            for sequence_hash in hashes[device:limit]:
                if sequence_hash not in self._host:
                    break
                host += 1
        return Match(device, idle, host)

    def take(self, hashes: Sequence[int], match: Match, new_blocks: int) -> bool:
        """Hold a matched prefix and ``new_blocks`` more device blocks (host hits included in those), or nothing.

        ``match`` must be fresh. Afterwards the caller holds ``match.device + match.host`` shared blocks and
        ``new_blocks - match.host`` private ones.
        """
        if self.available_blocks - match.idle < new_blocks:
            return False
        refs = self._refs
        idle, kept = self._idle, self._kept
        for sequence_hash in hashes[: match.device]:
            held = refs[sequence_hash]
            if not held:
                if sequence_hash in kept:
                    self._wake(sequence_hash)
                else:
                    del idle[sequence_hash]
            refs[sequence_hash] = held + 1
        onboarded = hashes[match.device : match.device + match.host]
        # Off the host first: making room below pushes other blocks there and could evict just these.
        for sequence_hash in onboarded:
            del self._host[sequence_hash]
        self._make_room(new_blocks)
        if onboarded:
            for sequence_hash in onboarded:
                refs[sequence_hash] = 1
            self._recorder.moved(self._links(onboarded), Tier.HOST, Tier.DEVICE)
        self._private += new_blocks - match.host
        return True

    def reserve(self) -> bool:
        """Take one more private block; say whether there was one."""
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
        retention: Retention | None = None,
    ) -> None:
        """Name the caller's private blocks ``start`` to ``end`` of its prefix; it holds all blocks before them.

        ``tokens(first_block, end_block)`` returns the token ids of a range of blocks, ``media`` the hashes of the media
        that touch them, by position in the range. ``retention`` is of the whole prefix.
        """
        refs = self._refs
        self._private -= end - start
        self.version += 1
        at = start
        # What is there already comes first: residency is closed under taking prefixes (rules 2 and 3).
        while at < end:
            held = refs.get(hashes[at])
            if held is None:
                break
            if not held:
                if hashes[at] in self._kept:
                    self._wake(hashes[at])
                else:
                    del self._idle[hashes[at]]
            refs[hashes[at]] = held + 1
            at += 1
        returning = at
        while at < end and hashes[at] in self._host:
            del self._host[hashes[at]]
            refs[hashes[at]] = 1
            at += 1
        if at > returning:
            self._recorder.moved(self._links(hashes[returning:at]), Tier.HOST, Tier.DEVICE)
        if at < end:
            fresh = hashes[at:end]
            parent = hashes[at - 1] if at else None
            refs.update(dict.fromkeys(fresh, 1))
            parents = self._parents
            previous = parent
            for sequence_hash in fresh:
                parents[sequence_hash] = previous
                previous = sequence_hash
            if retention is not None:
                for sequence_hash, (priority, _) in zip(fresh, retention[at:end], strict=True):
                    if priority < RETENTION_DEFAULT:
                        self._kept[sequence_hash] = (priority, None)
            first = at
            if media is None:
                self._recorder.stored(parent, fresh, lambda: tokens(first, end), self.block_size, seed)
            else:
                self._recorder.stored(
                    parent, fresh, lambda: tokens(first, end), self.block_size, seed, media(first, end)
                )

    def release(self, hashes: Sequence[int], private: int, retention: Retention | None = None) -> None:
        """Give up a held prefix (all of what the caller holds of it) and private blocks; it says how long they stay."""
        self._private -= private
        self.version += 1
        if retention is not None or self._kept:
            self._release_by_priority(hashes, retention)
            return
        refs = self._refs
        idle = self._idle
        for sequence_hash in reversed(hashes):
            held = refs[sequence_hash] - 1
            refs[sequence_hash] = held
            if not held:
                idle[sequence_hash] = None

    def _release_by_priority(self, hashes: Sequence[int], retention: Retention | None) -> None:
        """Do what ``release`` does where blocks have priorities; what a block has goes to those before it."""
        # Before anything becomes idle: what hangs off these blocks and has lapsed is older than they are.
        self._lapse()
        refs, kept, now_ms = self._refs, self._kept, self.now_ms
        behind: Kept = (0, None)
        for at in range(len(hashes) - 1, -1, -1):
            sequence_hash = hashes[at]
            own = kept.get(sequence_hash, USUAL)
            if own[1] is not None and own[1] <= now_ms:
                own = USUAL
            if retention is not None:
                priority, duration_ms = retention[at]
                if priority > RETENTION_DEFAULT:
                    own = _longer(own, (priority, None if duration_ms is None else now_ms + duration_ms))
            behind = own = _longer(own, behind)
            if own == USUAL:
                kept.pop(sequence_hash, None)
            else:
                kept[sequence_hash] = own
            held = refs[sequence_hash] = refs[sequence_hash] - 1
            if held:
                continue
            if own == USUAL:
                self._idle[sequence_hash] = None
                continue
            self._idled += 1
            self._idle_kept.setdefault(own[0], OrderedDict())[sequence_hash] = self._idled
            self._idle_kept_count += 1
            if own[1] is not None:
                heappush(self._lapses, (own[1], self._idled, sequence_hash))
        if len(self._lapses) > 4 * self._idle_kept_count + 64:
            self._lapses = [entry for entry in self._lapses if self._holds(entry)]
            heapify(self._lapses)

    def _wake(self, sequence_hash: int) -> None:
        """Take an idle block with a priority of its own out of the idle ones."""
        priority = self._kept[sequence_hash][0]
        idle = self._idle_kept[priority]
        del idle[sequence_hash]
        if not idle:
            del self._idle_kept[priority]
        self._idle_kept_count -= 1

    def _holds(self, lapse: tuple[float, int, int]) -> bool:
        _, number, sequence_hash = lapse
        kept = self._kept.get(sequence_hash)
        idle = None if kept is None else self._idle_kept.get(kept[0])
        return idle is not None and idle.get(sequence_hash) == number

    def _lapse(self) -> None:
        """Give the usual priority to idle blocks whose time is over."""
        lapses = self._lapses
        while lapses and lapses[0][0] <= self.now_ms:
            lapse = heappop(lapses)
            if self._holds(lapse):
                self._wake(lapse[2])
                del self._kept[lapse[2]]
                self._idle[lapse[2]] = None

    def resident(self, tier: Tier) -> list[Link]:
        """Return every named block of a tier with its parent, parents before children."""
        if tier is Tier.DEVICE:
            return self._links(self._refs)
        if tier is Tier.HOST:
            return self._links(reversed(self._host))
        return []

    def _links(self, hashes: Iterable[int]) -> list[Link]:
        parents = self._parents
        return [(sequence_hash, parents[sequence_hash]) for sequence_hash in hashes]

    def _make_room(self, blocks: int) -> None:
        """Evict the oldest idle blocks until ``blocks`` device blocks are free; the caller has checked that it can."""
        missing = blocks - (self.total_blocks - len(self._refs) - self._private)
        if missing <= 0:
            return
        pop = self._idle.popitem
        refs = self._refs
        evicted = self._lowest(missing) if self._idle_kept else [pop(last=False)[0] for _ in range(missing)]
        for sequence_hash in evicted:
            del refs[sequence_hash]
        if not self.host_blocks:
            for sequence_hash in evicted:
                del self._parents[sequence_hash]
            self._forget_priorities(evicted)
            self._recorder.removed(evicted, Tier.DEVICE)
            return
        if self._kept:
            # What hangs off these has no more than their priority (rule 5), so nothing of it is on the host.
            dropped = [each for each in evicted if self._kept.get(each, USUAL)[0] < MOVED_FROM_PRIORITY]
            if dropped:
                gone = frozenset(dropped)
                evicted = [each for each in evicted if each not in gone]
                for sequence_hash in dropped:
                    del self._parents[sequence_hash]
                self._forget_priorities(dropped)
                self._recorder.removed(dropped, Tier.DEVICE)
                if not evicted:
                    return
        host = self._host
        for sequence_hash in evicted:
            host[sequence_hash] = None
        self._recorder.moved(self._links(evicted), Tier.DEVICE, Tier.HOST)
        if len(host) > self.host_blocks:
            dropped = [host.popitem(last=False)[0] for _ in range(len(host) - self.host_blocks)]
            for sequence_hash in dropped:
                del self._parents[sequence_hash]
            self._forget_priorities(dropped)
            self._recorder.removed(dropped, Tier.HOST)

    def _lowest(self, count: int) -> list[int]:
        """Take so many idle blocks, those of the lowest priority and of one priority the oldest."""
        self._lapse()
        taken: list[int] = []
        for priority in sorted({RETENTION_DEFAULT, *self._idle_kept}):
            idle: OrderedDict[int, int] | OrderedDict[int, None]
            idle = self._idle if priority == RETENTION_DEFAULT else self._idle_kept[priority]
            found = [idle.popitem(last=False)[0] for _ in range(min(count - len(taken), len(idle)))]
            taken += found
            if priority != RETENTION_DEFAULT:
                self._idle_kept_count -= len(found)
                if not idle:
                    del self._idle_kept[priority]
        return taken

    def _forget_priorities(self, hashes: Iterable[int]) -> None:
        if self._kept:
            for sequence_hash in hashes:
                self._kept.pop(sequence_hash, None)


def _longer(one: Kept, other: Kept) -> Kept:
    """Return what is at least both: a priority up to the usual one never lapses, so a higher one alone says when."""
    if one[0] <= RETENTION_DEFAULT or other[0] <= RETENTION_DEFAULT:
        return one if one[0] >= other[0] else other
    lapses = None if one[1] is None or other[1] is None else max(one[1], other[1])
    return max(one[0], other[0]), lapses
