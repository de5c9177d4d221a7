"""From an engine's cache events to the wire's: the edge where engine hashes end and sequence hashes begin.

Rules:

1. An engine hash means nothing outside its engine. Sequence hashes are recomputed from the tokens in the events, on
   the parent's; the map from one to the other holds exactly the blocks that the engine holds.
2. A partial block (fewer tokens than a block) and whatever follows it in its event is not for routers; its engine hash
   is kept only to swallow its removal. So are blocks that hang off something unknown, which cannot be named.
3. Only the largest attention window counts: its blocks are the ones that decide about reuse of a whole prefix.
4. ``event_id`` grows by 1. A hole means that the engine dropped events: the map is void, the translation says so
   (``lost``), and ``CacheCleared`` goes out before anything later does.
5. Two engine blocks can have one sequence hash (for instance salted and unsalted, where the engine does not tell the
   salt): it is stored when the first comes to a tier and removed when the last leaves.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from wire.events import BlocksRemoved, BlocksStored, CacheCleared
from wire.hashing import BASE_SEED, TOKEN_BYTES, block_hashes, sequence_hashes
from wire.identifiers import Tier
from workers.core.cache_facts import CacheFacts, chains, stored_chain
from workers.core.engine_events import AnyEngineEvent, Created, Removed, Stored, Updated

TIER_OF_LEVEL = (Tier.DEVICE, Tier.HOST, Tier.DISK)


class _Block(msgspec.Struct, gc=False):
    """What the translator knows of one resident engine block."""

    sequence_hash: int
    parent: int | None
    seed: int
    tier: Tier


class Counts(msgspec.Struct, frozen=True):
    """What did not become a wire event, since the beginning; for metrics."""

    partial_blocks: int
    orphaned_blocks: int
    """Blocks whose parent the engine never named: they cannot be given a sequence hash."""
    multimodal_blocks: int
    """Blocks that depend on more than their tokens, in a form that our hashes do not cover."""
    other_window_events: int
    lost_events: int


class Translation(msgspec.Struct, frozen=True):
    """The wire events of some engine events; ``lost`` engine events are missing from before them."""

    events: list[BlocksStored | BlocksRemoved | CacheCleared]
    lost: int


class EventTranslator:
    """Translates the events of one engine rank; owns the map from engine hashes to sequence hashes.

    The map is bounded by what the engine holds: its whole blocks, plus one entry for each of its partial or
    unnameable blocks until their removal.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._stride = block_size * TOKEN_BYTES
        self._blocks: dict[int, _Block] = {}
        self._swallowed: set[int] = set()
        self._copies: dict[tuple[int, Tier], int] = {}  # only where more than one engine block has a sequence hash
        self._present: dict[Tier, set[int]] = {tier: set() for tier in TIER_OF_LEVEL}
        self._facts = CacheFacts()
        self._next_event_id = 0
        self._window = 0
        self._partial = self._orphaned = self._multimodal = self._other_window = self._lost = 0

    @property
    def resident_blocks(self) -> int:
        """Engine blocks that have a sequence hash."""
        return len(self._blocks)

    @property
    def counts(self) -> Counts:
        """What did not become a wire event."""
        return Counts(self._partial, self._orphaned, self._multimodal, self._other_window, self._lost)

    def translate(self, events: Iterable[AnyEngineEvent]) -> Translation:
        """Return the wire events that say the same, and how many engine events were lost on the way."""
        out: list[BlocksStored | BlocksRemoved | CacheCleared] = []
        lost = 0
        for event in events:
            expected = self._next_event_id
            self._next_event_id = event.event_id + 1
            if event.event_id != expected:
                # Backwards is a restarted engine: as empty as if everything had been lost.
                lost += max(1, event.event_id - expected)
                self._forget()
                out.append(CacheCleared())
            if event.window_size > self._window:
                if self._blocks:
                    # What was said so far was about a window that does not decide.
                    self._forget()
                    out.append(CacheCleared())
                self._window = event.window_size
            if isinstance(event, Created):
                continue
            if event.window_size < self._window:
                self._other_window += 1
                continue
            if isinstance(event, Stored):
                self._store(event)
            elif isinstance(event, Removed):
                self._remove(event)
            else:
                self._update(event)
        self._lost += lost
        out += self._facts.take()
        return Translation(out, lost)

    def restate(self) -> list[BlocksStored]:
        """Return everything that is resident as ``BlocksStored``, parents before children, tier by tier."""
        events: list[BlocksStored] = []
        for tier in TIER_OF_LEVEL:
            present = self._present[tier]
            if not present:
                continue
            links: dict[int, int | None] = {}
            for block in self._blocks.values():
                if block.tier is tier:
                    links.setdefault(block.sequence_hash, block.parent)
            for parent, hashes in chains(links.items()):
                events += stored_chain(parent, hashes, tier)
        return events

    def _forget(self) -> None:
        self._blocks.clear()
        self._swallowed.clear()
        self._copies.clear()
        for present in self._present.values():
            present.clear()
        self._facts = CacheFacts()

    def _store(self, event: Stored) -> None:
        parent: int | None = None
        seed = BASE_SEED if event.hash_seed is None else event.hash_seed
        if event.parent_hash is not None:
            known = self._blocks.get(event.parent_hash)
            if known is None:
                self._orphaned += len(event.blocks)
                self._swallowed.update(block.block_hash for block in event.blocks)
                return
            parent = known.sequence_hash
            seed = known.seed
        whole = 0
        for block in event.blocks:
            if len(block.tokens) != self._stride or block.multimodal:
                break
            whole += 1
        if whole < len(event.blocks):
            if event.blocks[whole].multimodal:
                self._multimodal += len(event.blocks) - whole
            else:
                self._partial += len(event.blocks) - whole
            self._swallowed.update(block.block_hash for block in event.blocks[whole:])
        if not whole:
            return
        tokens = b"".join(block.tokens for block in event.blocks[:whole])
        named = sequence_hashes(block_hashes(tokens, self._block_size, seed), parent)
        run: list[int] = []
        run_parent, run_tier = parent, Tier.DEVICE
        for block, sequence_hash in zip(event.blocks, named, strict=False):
            tier = _tier(block.cache_level)
            again = self._blocks.get(block.block_hash)
            if again is not None and self._depart(again):
                self._flush(run, run_parent, run_tier)
                run, run_parent = [], parent
                self._facts.removed((again.sequence_hash,), again.tier)
            entry = _Block(sequence_hash, parent, seed, tier)
            self._swallowed.discard(block.block_hash)
            self._blocks[block.block_hash] = entry
            if self._arrive(entry):
                if run and run_tier is not tier:
                    self._flush(run, run_parent, run_tier)
                    run, run_parent = [], parent
                run_tier = tier
                run.append(sequence_hash)
            else:
                self._flush(run, run_parent, run_tier)
                run, run_parent = [], sequence_hash
            parent = sequence_hash
        self._flush(run, run_parent, run_tier)

    def _flush(self, run: list[int], parent: int | None, tier: Tier) -> None:
        if run:
            self._facts.stored(parent, run, tier)

    def _remove(self, event: Removed) -> None:
        for engine_hash in event.block_hashes:
            block = self._blocks.pop(engine_hash, None)
            if block is None:
                self._swallowed.discard(engine_hash)
            elif self._depart(block):
                self._facts.removed((block.sequence_hash,), block.tier)

    def _update(self, event: Updated) -> None:
        block = self._blocks.get(event.block_hash)
        if block is None or event.cache_level is None:
            return
        source, target = block.tier, _tier(event.cache_level.new_value)
        if source is target:
            return
        left = self._depart(block)
        block.tier = target
        arrived = self._arrive(block)
        if left and arrived:
            self._facts.moved(((block.sequence_hash, block.parent),), source, target)
        elif arrived:
            self._facts.stored(block.parent, (block.sequence_hash,), target)
        elif left:
            self._facts.removed((block.sequence_hash,), source)

    def _arrive(self, block: _Block) -> bool:
        """Count a block in its tier; say whether its sequence hash was not there before."""
        present = self._present[block.tier]
        if block.sequence_hash not in present:
            present.add(block.sequence_hash)
            return True
        key = (block.sequence_hash, block.tier)
        self._copies[key] = self._copies.get(key, 1) + 1
        return False

    def _depart(self, block: _Block) -> bool:
        """Count a block out of its tier; say whether its sequence hash is gone from there."""
        key = (block.sequence_hash, block.tier)
        copies = self._copies.pop(key, 1)
        if copies > 2:
            self._copies[key] = copies - 1
        if copies > 1:
            return False
        self._present[block.tier].discard(block.sequence_hash)
        return True


def _tier(cache_level: int) -> Tier:
    return TIER_OF_LEVEL[min(max(cache_level, 0), len(TIER_OF_LEVEL) - 1)]
