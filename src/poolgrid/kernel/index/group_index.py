"""Where prompts can be resumed on workers whose models have several KV groups: sliding windows, states.

Rules
    1. Group 0, full attention, is ``PrefixIndex``'s: how many leading blocks a worker holds. The others are here. They
       need less than all blocks (``KvGroup``), so each block is noted by itself, whatever else is held: a sequence hash
       names its whole path.
    2. A prompt can be resumed behind a block where every group of the worker can: the deepest such place is the
       worker's overlap. A group whose needs are not known can be resumed nowhere.
    3. An engine computes at least the last token of a prompt, so ``deepest`` limits the places that count: it matters
       only here, where the place before may be out of reach.
    4. An engine whose drafting layers make it compute the last of the blocks that it holds again resumes so many blocks
       before (``GroupsReported.recomputed_blocks``): full attention must hold them, windows where these have drafting
       layers too, states need not.
    5. An engine whose hashes look ahead (``GroupsReported.following_tokens``) resumes a prompt behind a block only
       where all groups hold it with the tokens behind it.
    6. A block is held while it lies on any tier. Full attention alone decides which tier a reuse comes from.
    7. At most ``blocks_max`` blocks; beyond it the oldest go, and are counted. Dropped workers are swept a slice at a
       time with all else of the index.
    8. A worker that reported no groups costs one test of a mask; a pool without any, one of an empty dict.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from operator import and_
from typing import Final

from poolgrid.kernel.index.following_tokens import FollowingTokens
from poolgrid.kernel.index.intrusive_lru import IntrusiveLru, LruEntry
from poolgrid.kernel.index.sharded_map import SHARD_ENTRIES, ShardedMap
from poolgrid.kernel.wire.events import FOLLOWED_GROUP, GroupsReported, KvGroup
from poolgrid.kernel.wire.hashing import child_hash
from poolgrid.kernel.wire.identifiers import Tier

FIRST_PLACES: Final = 64
"""Places that are looked at first, from the deepest on: nearly all prompts are resumed there. Then twice as many, and
so on, each about a quarter of a microsecond."""

CLEARED_COSTS: Final = 3
"""Entries that could be looked at while one is taken out of its map and links."""

_FOLLOWED: Final = KvGroup(0)
"""Where blocks are that are named with the tokens behind them."""

ALL: Final = -1
"""The mask that every worker is in."""

Depths = list[tuple[int, int]]
"""Of ``PrefixIndex.find``: leading blocks and the workers with them, deepest first."""


class GroupBlock(LruEntry):
    """A block on one tier and its holders there, in a group of one kind."""

    sequence_hash: int
    mask: int
    place: tuple[KvGroup, Tier]


class GroupIndex:
    """The blocks of all groups but full attention, by what the groups need."""

    def __init__(self, blocks_max: int) -> None:
        self.reported: dict[GroupsReported, int] = {}
        """The workers of each report, as a mask; empty = no worker has several groups."""
        self.evicted_blocks = 0
        self._blocks_max = blocks_max
        self._places: dict[tuple[KvGroup, Tier], ShardedMap[GroupBlock]] = {}
        self._ages: IntrusiveLru[GroupBlock] = IntrusiveLru()

    def __del__(self) -> None:
        while self._ages.discard_newest() is not None:
            pass
        self._ages.close()

    def __len__(self) -> int:
        return self._ages.entries

    def report_of(self, bit: int) -> GroupsReported | None:
        return next((report for report, mask in self.reported.items() if mask & bit), None)

    @property
    def following_tokens(self) -> int:
        """Return how many tokens behind a block the hashes of any worker cover."""
        return max((report.following_tokens for report in self.reported), default=0)

    def report(self, bit: int, report: GroupsReported | None) -> None:
        """Take a worker's groups; ``None`` or an empty report = full attention alone, as all engines have it."""
        for known in [known for known, mask in self.reported.items() if mask & bit]:
            self.reported[known] &= ~bit
            if not self.reported[known]:
                del self.reported[known]
        if report is None:
            return
        is_plain = report.has_full_attention and not report.groups
        if not is_plain or report.recomputed_blocks or report.following_tokens:
            self.reported[report] = self.reported.get(report, 0) | bit

    def store(self, bit: int, group: int, hashes: Iterable[int], tier: Tier) -> None:
        """Note blocks of a group; those of a group that was not reported are not taken."""
        place = self._place(bit, group, tier)
        if place is None:
            return
        held, ages = self._places.get(place), self._ages
        if held is None:
            held = self._places[place] = ShardedMap(SHARD_ENTRIES)
        for sequence_hash in hashes:
            block = held.get(sequence_hash)
            if block is None:
                block = held[sequence_hash] = GroupBlock(sequence_hash, bit, place)
                ages.append(block)
            else:
                block.mask |= bit
        while ages.entries > self._blocks_max and (oldest := ages.oldest) is not None:
            self._clear(oldest, oldest.mask)
            self.evicted_blocks += 1

    def remove(self, bit: int, group: int, hashes: Iterable[int], tier: Tier) -> None:
        place = self._place(bit, group, tier)
        held = None if place is None else self._places.get(place)
        if held is None:
            return
        for sequence_hash in hashes:
            block = held.get(sequence_hash)
            if block is not None and block.mask & bit:
                self._clear(block, bit)

    def _place(self, bit: int, group: int, tier: Tier) -> tuple[KvGroup, Tier] | None:
        report = self.report_of(bit)
        if report is not None and group == FOLLOWED_GROUP and report.following_tokens:
            return _FOLLOWED, tier
        return None if report is None or group > len(report.groups) else (report.groups[group - 1], tier)

    def _clear(self, block: GroupBlock, bits: int) -> None:
        block.mask &= ~bits
        if not block.mask:
            del self._places[block.place][block.sequence_hash]
            self._ages.remove(block)

    # Where prompts can be resumed

    def resumable(
        self,
        path: Sequence[int],
        found: Depths,
        live: int,
        deepest: int | None,
        following: FollowingTokens | None = None,
    ) -> Depths:
        """Return full attention's result for a path (``found``), corrected for the workers with several groups.

        ``deepest`` is the last place that counts for these; ``following`` are the tokens behind the prompt's blocks.
        """
        several = 0
        at: dict[int, int] = {}
        limit = len(path) if deepest is None else min(deepest, len(path))
        for report, mask in self.reported.items():
            several |= mask
            depths = [(depth, mask & holders) for depth, holders in found if mask & holders]
            if not report.has_full_attention and mask & live:
                depths = [(len(path), mask & live)]
            # With one group alone engines look up no more than they may reuse; with several, what is recomputed too.
            most = len(path) if len(report.groups) + report.has_full_attention > 1 else limit
            again = report.recomputed_blocks
            depths = [(min(depth, most) - again, holders) for depth, holders in depths if min(depth, most) > again]
            if depths and all(group.needed_blocks for group in report.groups):
                self._resume(report, path, depths, limit, following, at)
        for depth, holders in found:
            if holders & ~several:
                at[depth] = at.get(depth, 0) | holders & ~several
        return sorted(at.items(), reverse=True)

    def _resume(
        self,
        report: GroupsReported,
        path: Sequence[int],
        depths: Depths,
        limit: int,
        following: FollowingTokens | None,
        at: dict[int, int],
    ) -> None:
        """Enter workers at the deepest place, at most as deep as full attention, where all groups can be resumed."""
        end, places = min(depths[0][0], limit), FIRST_PLACES
        count = 0 if following is None or following.count < report.following_tokens else report.following_tokens
        waiting = passed = 0
        while end > 0:
            begin = max(0, end - places)
            able = [ALL] * (end - begin)
            for group in report.groups:
                # A state is that of one place; windows are looked up as full attention is, and cut with it.
                is_longer = group.needed_blocks > 1 and report.recomputes_windows
                again = -(-report.recomputed_blocks // group.stride_blocks) if is_longer else 0
                able = list(map(and_, able, self._able(group, path, begin, end, again)))
            for depth in range(end, begin, -1):
                while passed < len(depths) and depths[passed][0] >= depth:
                    waiting |= depths[passed][1]
                    passed += 1
                resumed = able[depth - begin - 1] & waiting
                if resumed and count:
                    tokens = following.behind(depth, count)  # type: ignore[union-attr]
                    name = child_hash(tokens, path[depth - 1])
                    resumed &= self._holders(_FOLLOWED, [name])[0] if tokens else 0
                if resumed:
                    at[depth] = at.get(depth, 0) | resumed
                    waiting ^= resumed
                    if not waiting and passed == len(depths):
                        return
            end, places = begin, 2 * places

    def _able(self, group: KvGroup, path: Sequence[int], begin: int, end: int, again: int = 0) -> list[int]:
        """Return, for each depth behind ``begin`` up to ``end``, the workers whose group can be resumed there.

        ``again`` of the group's blocks are computed again, so it must hold them behind the depth.
        """
        stride, needed = group.stride_blocks, group.needed_blocks + again
        places = end - begin
        begin, end = begin + again * stride, min(len(path), end + again * stride)
        if end <= begin:
            return [0] * places
        # In blocks of the group: at the depths first to last, which need those from first - needed on.
        first, last = begin // stride + 1, end // stride
        if last < first:
            return [0] * places
        needed = min(needed, last)  # all that there are
        masks = [ALL] * max(0, needed - first) + self._holders(
            group, path[(max(1, first - needed + 1) * stride) - 1 : last * stride : stride]
        )
        masks = _covered(masks, needed)
        able = masks
        if stride > 1:
            able = [0] * (end - begin)
            able[first * stride - begin - 1 :: stride] = masks
        return able + [0] * (places - len(able))

    def _holders(self, group: KvGroup, blocks: Sequence[int]) -> list[int]:
        found = [0] * len(blocks)
        for tier in Tier:
            held = self._places.get((group, tier))
            if held is not None and len(held):
                shards, shift = held.shards, held.shift
                found = [
                    mask if (block := shards[each >> shift].get(each)) is None else mask | block.mask
                    for mask, each in zip(found, blocks, strict=True)
                ]
        return found

    # Sweeping

    def begin_sweep(self) -> None:
        self._ages.begin_walk()

    def sweep(self, dead: int, entries: int) -> int:
        """Look at that many blocks; return what of this number is left over once the sweep is done."""
        while entries > 0 and (block := self._ages.step()) is not None:
            entries -= 1
            if block.mask & dead:
                self._clear(block, dead)
                entries -= CLEARED_COSTS
        return entries

    def discard(self, entries: int) -> int:
        """Free that many blocks of an index that is not used any more; return what of this number is left over."""
        for held in self._places.values():
            entries = held.discard(entries)
        while entries > 0 and self._ages.discard_newest() is not None:
            entries -= 1
        return entries

    def size_bytes(self) -> int:
        return sum(held.size_bytes() for held in self._places.values()) + 88 * len(self)


def _covered(masks: list[int], needed: int) -> list[int]:
    """Return, for each place that has ``needed`` masks from there on, what is in all of these."""
    covered = 1
    while covered < min(needed, FIRST_PLACES):
        # Every mask with the next, those two with the next two, and so on.
        step = min(covered, needed - covered)
        masks = list(map(and_, masks, masks[step:]))
        covered += step
    if covered == needed:
        return masks
    # Of a long window: in pieces as long as what is left of it, each from its beginning on and from its end back.
    width = needed - covered + 1
    ahead: list[int] = []
    back: list[int] = []
    for at in range(0, len(masks), width):
        piece = masks[at : at + width]
        ahead += accumulate(piece, and_)
        back += [*accumulate(reversed(piece), and_)][::-1]
    return list(map(and_, back, ahead[width - 1 :]))
