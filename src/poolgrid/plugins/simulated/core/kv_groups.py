"""KV groups of a simulated hybrid model besides full attention: sliding windows, and states at checkpoints.

Each group has blocks of its own, half as many as full attention, and evicts the oldest. A window keeps every block
that is computed, a state those at multiples of its interval and the last of each chunk. A prefix is reused where every
group can be resumed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from poolgrid.kernel.wire.events import BlocksRemoved, BlocksStored, GroupsReported, KvGroup
from poolgrid.kernel.wire.hashing import pack_hashes
from poolgrid.kernel.wire.identifiers import Tier
from poolgrid.kernel.worker_protocol.cache_facts import CacheEvent, CacheFacts

Link = tuple[int, int | None]
"""A block's sequence hash and its parent's."""


class CacheRecorder:
    """Keeps wire events until they are taken."""

    def __init__(self) -> None:
        self._facts = CacheFacts()

    def stored(
        self,
        parent: int | None,
        hashes: Sequence[int],
        tokens: Callable[[], bytes],
        block_size: int,
        seed: int,
        media: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        """Note a chain of new device blocks. A recorder that says more than wire events do needs the rest: ``tokens``
        returns their token ids, and may not be called later; ``media`` are the hashes of the media that touch them, by
        position in the chain.
        """
        self._facts.stored(parent, hashes, Tier.DEVICE)

    def removed(self, hashes: Sequence[int], tier: Tier) -> None:
        self._facts.removed(hashes, tier)

    def moved(self, links: Sequence[Link], source: Tier, target: Tier) -> None:
        self._facts.moved(links, source, target)

    def tell(self, event: CacheEvent | GroupsReported) -> None:
        """Note an event about KV groups other than full attention."""
        self._facts.append(event)

    def take(self) -> list[CacheEvent | GroupsReported]:
        return self._facts.take()


GROUP_BLOCKS_SHARE = 2
"""Full attention has this many times the blocks of another group: enough that each evicts what the other keeps."""


class SimulatedGroup(NamedTuple):
    """One group: a window of so many tokens, or a state that is kept every so many tokens."""

    kind: str
    tokens: int

    def needs(self, block_size: int) -> KvGroup:
        return KvGroup(max(1, -(-(self.tokens - 1) // block_size)) if self.kind == "window" else 1)


def parse_groups(text: str) -> tuple[SimulatedGroup, ...]:
    """Read groups as ``window:1024 state:512``; raises ``ValueError``."""
    groups = []
    for word in text.split():
        kind, _, tokens = word.partition(":")
        if kind not in ("window", "state") or not tokens.isdecimal() or not 1 <= int(tokens) < 2**32:
            raise ValueError(f"kv_groups has {word!r}: allowed are window:TOKENS and state:TOKENS, separated by spaces")
        groups.append(SimulatedGroup(kind, int(tokens)))
    return tuple(groups)


class GroupCaches:
    """The blocks of all groups."""

    def __init__(
        self, groups: Sequence[SimulatedGroup], block_size: int, total_blocks: int, recorder: CacheRecorder
    ) -> None:
        self._block_size = block_size
        self._blocks_max = max(1, total_blocks // GROUP_BLOCKS_SHARE)
        self._recorder = recorder
        # Groups with equal needs are one, which keeps what all of them keep: the largest interval's blocks.
        by_needs: dict[KvGroup, SimulatedGroup] = {}
        for group in groups:
            known = by_needs.setdefault(group.needs(block_size), group)
            by_needs[group.needs(block_size)] = max(known, group, key=lambda each: each.tokens)
        self._groups = [(needs, group, OrderedDict[int, None]()) for needs, group in by_needs.items()]
        recorder.tell(GroupsReported(tuple(by_needs)))

    def store(self, hashes: Sequence[int], start: int, end: int) -> None:
        for number, (_, group, held) in enumerate(self._groups, 1):
            if group.kind == "window":
                kept = list(hashes[start:end])
            else:
                ends = range(start, end)
                kept = [hashes[at] for at in ends if at == end - 1 or not (at + 1) * self._block_size % group.tokens]
            fresh = [each for each in kept if each not in held]
            for each in kept:
                held[each] = None
                held.move_to_end(each)
            gone = [held.popitem(last=False)[0] for _ in range(len(held) - self._blocks_max)]
            if fresh:
                self._recorder.tell(BlocksStored(None, pack_hashes(fresh), Tier.DEVICE, number))
            if gone:
                self._recorder.tell(BlocksRemoved(pack_hashes(gone), Tier.DEVICE, number))

    def resumable(self, hashes: Sequence[int], depth: int) -> int:
        """Return the deepest place up to ``depth`` blocks at which every group has what it needs."""
        while depth and not all(
            all(each in held for each in hashes[max(0, depth - needs.needed_blocks) : depth])
            for needs, _, held in self._groups
        ):
            depth -= 1
        return depth
