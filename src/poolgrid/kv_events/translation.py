"""From the events of an engine that publishes itself to the wire's: engine hashes end here, sequence hashes begin.

``EngineTranslator`` recomputes sequence hashes from the tokens. Token ids end here. What cannot be placed (unknown
parent, partial block, other block size, keys that enter the engine's hash and not ours) is ignored and counted, and so
is all that hangs on it. A hybrid model has groups of layers with caches of their own. Only full attention stands for
prefixes; which groups are others is learned from their stored events, because removed events carry the group's number
alone.

An engine may hold a block several times: requests that compute the same prefix at the same time each fill blocks of
their own, and each of them is stored, and later removed, under the same hash. So copies are counted by group, and a
block is gone when a group that had it has lost its last copy: a hit needs all groups of full attention.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from poolgrid.kv_events.pub import EngineEvent, EngineRemoved, EngineStored
from poolgrid.wire.events import AnyEvent, BlocksRemoved, BlocksStored, CacheCleared
from poolgrid.wire.hashing import BASE_SEED, block_hashes, pack_hashes, sequence_hashes
from poolgrid.wire.identifiers import Tier

RootSeed = Callable[[bytes], int | None]
"""Says which seed (LoRA and salt) a chain was hashed with that does not say it itself, by the tokens of its first block
(u32 little-endian); ``None`` = nobody knows."""

GROUPS_MAX = 64
"""Groups of layers that are told apart; models have a handful."""

FULL_GROUPS_MAX = 8
"""Groups of full attention whose copies are counted; each may hold all blocks."""


_Copies = dict[int | None, dict[int, int]]
_Lost = dict[int, set[int | None]]


class EngineTranslator:
    """Engine hashes of one PUB engine, and the sequence hashes they stand for."""

    def __init__(self, block_size: int, blocks_max: int, root_seed: RootSeed | None = None) -> None:
        self._block_size = block_size
        self._root_seed = root_seed
        self._blocks_max = blocks_max
        self._known: dict[int, int] = {}
        self._seeds: dict[int, int] = {}
        """Seed by engine hash, where it is not the base seed."""
        self._on: tuple[_Copies, _Copies, _Copies] = ({}, {}, {})
        """By tier and group: copies of each engine hash."""
        self._lost: tuple[_Lost, _Lost, _Lost] = ({}, {}, {})
        """By tier: the groups that have lost an engine hash, which others still hold."""
        self._other_groups: set[int] = set()
        self.ignored_blocks = 0
        self.other_block_size = 0
        """Tokens in a block of the last stored event whose blocks have another size; 0 = none had."""

    def __len__(self) -> int:
        return len(self._known)

    def clear(self) -> None:
        """Forget every engine hash."""
        self._known.clear()
        self._seeds.clear()
        for groups in self._on:
            groups.clear()
        for lost in self._lost:
            lost.clear()

    def translate(self, events: list[EngineEvent]) -> list[AnyEvent]:
        """Return the same events in sequence hashes."""
        out: list[AnyEvent] = []
        for event in events:
            if isinstance(event, EngineStored):
                self._store(event, out)
            elif isinstance(event, EngineRemoved):
                self._remove(event, out)
            else:
                self.clear()
                out.append(CacheCleared())
        return out

    def _store(self, event: EngineStored, out: list[AnyEvent]) -> None:
        if not event.full_attention:
            if event.group is not None and len(self._other_groups) < GROUPS_MAX:
                self._other_groups.add(event.group)
            return
        # Whole blocks only: the tokens of a trailing partial block name nothing that a prompt could share.
        whole = len(event.token_bytes) // (4 * event.block_size)
        hashes = event.hashes[:whole]
        parent: int | None = None
        seed = event.seed
        unfit = event.block_size != self._block_size or whole > len(event.hashes)
        if not unfit and event.parent is not None:
            parent = self._known.get(event.parent)
            unfit = parent is None
            if seed is None:
                seed = self._seeds.get(event.parent)
        elif not unfit and hashes and seed is None and self._root_seed is not None:
            told = self._root_seed(event.token_bytes[: 4 * event.block_size])
            unfit = told is None
            seed = None if told == BASE_SEED else told
        groups = self._on[event.tier]
        unfit = unfit or (event.group not in groups and len(groups) >= FULL_GROUPS_MAX)
        if event.block_size != self._block_size:
            self.other_block_size = event.block_size
        if unfit or len(self._known) + len(hashes) > self._blocks_max:
            self.ignored_blocks += len(event.hashes)
            return
        self.ignored_blocks += len(event.hashes) - len(hashes)
        if not hashes:
            return
        own = block_hashes(event.token_bytes, event.block_size, BASE_SEED if seed is None else seed)
        names = sequence_hashes(own, parent)
        self._known.update(zip(hashes, names, strict=True))
        if seed is not None:
            self._seeds.update(dict.fromkeys(hashes, seed))
        tier = event.tier
        on = groups.setdefault(event.group, {})
        if on.keys().isdisjoint(hashes):
            on.update(dict.fromkeys(hashes, 1))
        else:
            for engine_hash in hashes:
                on[engine_hash] = on.get(engine_hash, 0) + 1
        if self._lost[tier]:
            self._found(event.group, hashes, names, parent, tier, out)
        else:
            out.append(BlocksStored(parent, pack_hashes(names), tier))

    def _found(
        self,
        group: int | None,
        hashes: Sequence[int],
        names: Sequence[int],
        parent: int | None,
        tier: Tier,
        out: list[AnyEvent],
    ) -> None:
        """Report the blocks that no group lacks any more, each stretch of them."""
        lost = self._lost[tier]
        begin = 0
        for at, engine_hash in enumerate(hashes):
            lacking = lost.get(engine_hash)
            if lacking is None:
                continue
            lacking.discard(group)
            if not lacking:
                del lost[engine_hash]
                continue
            if begin < at:
                out.append(BlocksStored(names[begin - 1] if begin else parent, pack_hashes(names[begin:at]), tier))
            begin = at + 1
        if begin < len(hashes):
            out.append(BlocksStored(names[begin - 1] if begin else parent, pack_hashes(names[begin:]), tier))

    def _remove(self, event: EngineRemoved, out: list[AnyEvent]) -> None:
        if event.group in self._other_groups:
            return
        tier = event.tier
        groups, lost = self._on[tier], self._lost[tier]
        group = event.group
        if group not in groups:
            # Some engines number their groups in one kind of event only.
            if group is None:
                for each in list(groups):
                    self._remove(replace(event, group=each), out)
                return
            if None not in groups:
                return
            group = None
        on = groups[group]
        others = [held for other in self._on for held in other.values() if held is not on]
        of_tier = [held for held in groups.values() if held is not on]
        gone: list[int] = []
        for engine_hash in event.hashes:
            copies = on.get(engine_hash)
            if copies is None:
                continue
            if copies > 1:
                on[engine_hash] = copies - 1
                continue
            del on[engine_hash]
            lacking = lost.get(engine_hash)
            if lacking is None:
                gone.append(self._known[engine_hash])
            if any(engine_hash in held for held in of_tier):
                if lacking is None:
                    lost[engine_hash] = {group}
                else:
                    lacking.add(group)
                continue
            if lacking is not None:
                del lost[engine_hash]
            if not any(engine_hash in held for held in others):
                del self._known[engine_hash]
                self._seeds.pop(engine_hash, None)
        if gone:
            out.append(BlocksRemoved(pack_hashes(gone), tier))
