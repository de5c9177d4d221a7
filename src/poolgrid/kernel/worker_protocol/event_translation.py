"""From an engine's cache events to the wire's: the edge where engine hashes end and sequence hashes begin.

Rules:

1. An engine hash means nothing outside its engine. Sequence hashes are recomputed from the tokens in the events, on
   the parent's; the map from one to the other holds exactly the blocks that the engine holds.
2. A partial block (fewer tokens than a block) and whatever follows it in its event is not for routers; its engine hash
   is kept only to swallow its removal. So are blocks that cannot be named: those that depend on more than their
   tokens, those of an unknown tenant, and those that hang off something unknown.
3. The largest attention window decides about whole prefixes, of several groups of layers with it the one with the
   lowest number. What the others need and hold is ``OtherGroups``'s. The windows are learnt from the ``created`` events
   with which an engine begins. Where those are lost, nothing is named until as many windows have been seen as are
   configured.
4. ``event_id`` grows by 1. A hole means that the engine dropped events: ``CacheCleared`` goes out before anything later
   does, the translation returns how many were lost, and the rank is *incomplete*. An ``event_id`` that went backwards
   is an engine that started over: empty, and complete again. Where a server passes on some of the events only
   (``is_filtered``), a hole means nothing.
5. After a loss blocks are relearned one by one, each on evidence and never on hope. What was named before is
   *remembered*, not claimed: an engine hash stands for the block's content, so its name is as true as ever, but whether
   the block is still there is not known. The engine proves it by storing it again, by moving it to a level, or by
   storing a child on it (the child's request holds the whole prefix, so its ancestors are there too, on the device).
   ``removed`` disproves it. A block that was stored in the hole has no name; it and what hangs off it stay unclaimed
   until the engine evicts and stores them again. So after a loss claims may be missing, but none is wrong.
6. A rank counts as complete again when as many whole blocks have been removed since the loss as the cache has room
   for, and no block with an unknown parent is left. That is no proof: a block from before that has been in use ever
   since, and on which nothing was built, is still missing.
7. Two engine blocks can have one sequence hash (for instance when two tenants' prompts are named alike): it is stored
   when the first comes to a tier and removed when the last leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import Enum

import msgspec

from poolgrid.kernel.kv_events.cache_events import (
    AnyEngineEvent,
    Cleared,
    Created,
    Removed,
    Stored,
    StoredBlock,
    Updated,
)
from poolgrid.kernel.wire.events import BlocksRemoved, BlocksStored, CacheCleared, GroupsReported
from poolgrid.kernel.wire.hashing import BASE_SEED, TOKEN_BYTES, block_hashes, child_hash, sequence_hashes
from poolgrid.kernel.wire.identifiers import Tier
from poolgrid.kernel.worker_protocol.cache_facts import CacheFacts, RestatedEvent, chains, stored_chain
from poolgrid.kernel.worker_protocol.other_groups import TIER_OF_LEVEL, EngineGroup, OtherGroups, tier_of

ENGINE_GROUPS_MAX = 64
"""Groups of layers of one engine that are told apart; models have up to a dozen. Events of others are ignored, and
nothing is promised then."""

UNKNOWN_GROUP: EngineGroup = (0, -1)

REMEMBERED_BLOCKS_MAX = 524_288
"""Names that are kept over a loss (about 100 MB); more than the cache has room for are never kept. Beyond it the oldest
are forgotten: their blocks come back only when the engine stores them again."""

RootSeed = Callable[[StoredBlock], int | None]
"""Returns the seed (LoRA and salt) of the first block of a chain; ``None`` = unknown."""

NameMedia = Callable[[Sequence[StoredBlock]], tuple[StoredBlock, ...]]
"""Finds the media that touch blocks (``media_keys``), as far as they are known."""


class _Block(msgspec.Struct, gc=False):
    """What the translator knows of one engine block."""

    sequence_hash: int
    parent: int | None
    above: int | None
    """Engine hash of the parent."""
    seed: int
    tier: Tier


class _Unnamed(Enum):
    """Why a block has no sequence hash, although its place in the tree is known."""

    PARTIAL = "partial_blocks"
    MULTIMODAL = "multimodal_blocks"
    FOREIGN = "foreign_blocks"


class Counts(msgspec.Struct):
    """What did not become a wire event, since the beginning; for metrics."""

    partial_blocks: int = 0
    orphaned_blocks: int = 0
    """Blocks whose parent the engine never named: they cannot be given a sequence hash."""
    multimodal_blocks: int = 0
    """Blocks that depend on more than their tokens, in a form that our hashes do not cover."""
    foreign_blocks: int = 0
    """Blocks of a LoRA adapter or cache salt that was not announced."""
    lost_events: int = 0
    gaps: int = 0
    """Holes in the event ids: times that events were lost."""
    restarts: int = 0
    """Times that the engine started over."""
    recalled_blocks: int = 0
    """Blocks that came back after a loss because the engine proved that they are there."""


WireEvent = BlocksStored | BlocksRemoved | CacheCleared | GroupsReported


class TranslatedEvents(msgspec.Struct, frozen=True):
    """The wire events of some engine events; ``lost`` engine events are missing from before them."""

    events: list[WireEvent]
    lost: int


class EventTranslator:
    """Translates the events of one engine rank; owns the map from engine hashes to sequence hashes.

    The map is bounded by what the engine holds: its whole blocks, plus one entry for each of its partial or
    unnameable blocks until their removal; after a loss by as much again.

    ``windows`` is the number of different attention windows that are configured. ``reuse_is_on_device`` means that the
    engine brings a block to the device before it builds on it ; without it a child
    does not prove where its ancestors are, and they are not claimed for it.
    """

    def __init__(
        self,
        block_size: int,
        windows: int = 1,
        root_seed: RootSeed | None = None,
        reuse_is_on_device: bool = True,
        name_media: NameMedia | None = None,
        is_filtered: bool = False,
    ) -> None:
        self._block_size = block_size
        self._is_filtered = is_filtered
        self._stride = block_size * TOKEN_BYTES
        self._windows = windows
        self._root_seed = root_seed
        self._reuse_is_on_device = reuse_is_on_device
        self._name_media = name_media
        self._blocks: dict[int, _Block] = {}
        self._remembered: dict[int, _Block] = {}
        self._swallowed: dict[int, _Unnamed] = {}
        self._orphans: set[int] = set()
        self._copies: dict[tuple[int, Tier], int] = {}  # only where more than one engine block has a sequence hash
        self._present: dict[Tier, set[int]] = {tier: set() for tier in TIER_OF_LEVEL}
        self._facts = CacheFacts()
        self._next_event_id = 0
        self._window = 0
        self._group: int | None = None  # the group of layers that counts, where an event has named one
        self._met: set[EngineGroup] = set()
        self._others: OtherGroups | None = None
        """Once there is more than one group."""
        self._later: list[AnyEngineEvent] = []
        self._windows_known = False
        self._capacity = 0
        self._incomplete = False
        self._removed_since_loss = 0
        self.counts = Counts()

    @property
    def resident_blocks(self) -> int:
        return len(self._blocks)

    @property
    def is_incomplete(self) -> bool:
        """Whether the engine may hold whole blocks that are not claimed because events were lost."""
        return self._incomplete

    @property
    def remembered_blocks(self) -> int:
        return len(self._remembered)

    def blocks_on(self, tier: Tier) -> int:
        return len(self._present[tier])

    def translate(self, events: Iterable[AnyEngineEvent]) -> TranslatedEvents:
        """Return the equivalent wire events, and how many engine events were lost on the way."""
        out: list[WireEvent] = []
        lost = 0
        for event in events:
            expected = self._next_event_id
            event_id = event.event_id
            if isinstance(event, Cleared):
                out.append(self.lose())
                self._next_event_id = expected if event_id < 0 else event_id + 1
                continue
            self._next_event_id = event_id + 1
            is_usual = event_id == expected and event.window_size == self._window and self._windows_known
            if is_usual and event.layer_group_id == self._group:
                # The usual case. What follows this comes to the same, by more questions.
                if type(event) is Stored:
                    if len(event.blocks) != 1 or self._incomplete or not self._store_one(event):
                        self._store(event)
                    continue
                if type(event) is Removed:
                    self._remove(event)
                    continue
            if event_id > expected and self._is_filtered:
                self._windows_known = True  # of the largest only
            elif event_id != expected:
                if event_id < expected:
                    self._start_over()
                    lost += event_id
                else:
                    lost += event_id - expected
                if event_id and not self._is_filtered:
                    self._lose()
                out.append(CacheCleared())
            engine_group = (event.window_size, event.layer_group_id)
            if engine_group not in self._met:
                self._meet(engine_group, out)
            is_about_all = event.layer_group_id is None and event.window_size == self._window
            if isinstance(event, Created):
                if not event_id:
                    self._windows_known = True
                if is_about_all or engine_group == (self._window, self._group):
                    self._capacity = sum(event.num_blocks_per_cache_level)
                continue
            if not self._windows_known:
                if len({window for window, _ in self._met}) < self._windows:
                    self._incomplete = True
                    continue
                self._windows_known = True
            if engine_group != (self._window, self._group):
                self._later.append(event)
                if not is_about_all:
                    continue
            if isinstance(event, Stored):
                self._store(event)
            elif isinstance(event, Removed):
                self._remove(event)
            else:
                self._update(event)
        self.counts.lost_events += lost
        if self._others is None:
            self._later.clear()
            out += self._facts.take()
        else:
            later, self._later = self._later, []
            others = self._others.take(later, self._name_of)
            out += [*others[:1], *self._facts.take(), *others[1:]]
        if self._incomplete:
            self._incomplete = bool(self._orphans or not self._capacity or self._removed_since_loss < self._capacity)
        return TranslatedEvents(out, lost)

    def learn_capacity(self, blocks: int) -> None:
        """Take from elsewhere how many blocks all levels have room for, where the engine's own word was lost.

        Without either a rank that lost events stays incomplete until the engine starts over.
        """
        if not self._capacity:
            self._capacity = blocks

    def lose(self) -> CacheCleared:
        """Give up every claim, as its state is unknown; return what to report. Names are remembered."""
        self._lose()
        return CacheCleared()

    def restate(self) -> list[RestatedEvent]:
        """Return everything that is resident, parents before children, tier by tier, the groups first."""
        tiers = [tier for tier in TIER_OF_LEVEL if self._present[tier]]
        others = [] if self._others is None else self._others.restate()
        return [*others, *(event for tier in tiers for event in _chains_on(tier, self._blocks.values()))]

    def _meet(self, engine_group: EngineGroup, out: list[WireEvent]) -> None:
        """Take in a group of layers that is seen for the first time."""
        if len(self._met) >= ENGINE_GROUPS_MAX:
            engine_group = UNKNOWN_GROUP
        self._met.add(engine_group)
        window, number = engine_group
        is_lower = number is not None and (self._group is None or number < self._group)
        if window > self._window or (window == self._window and is_lower):
            if self._blocks:
                # The events so far were about a window, or a group, that does not decide.
                self._forget()
                out.append(CacheCleared())
            self._window, self._group = window, number
            if self._others is not None:
                self._others.begin(window)
        others = {each for each in self._met if each not in ((self._window, self._group), (self._window, None))}
        if others:
            if self._others is None:
                self._others = OtherGroups(self._block_size)
                self._others.begin(self._window)
            self._others.meet(sorted(others, key=str))

    def _name_of(self, engine_hash: int) -> int | None:
        block = self._blocks.get(engine_hash) or self._remembered.get(engine_hash)
        return None if block is None else block.sequence_hash

    def _lose(self) -> None:
        remembered = self._remembered
        for engine_hash, block in self._blocks.items():
            remembered.pop(engine_hash, None)  # what is taken in last is forgotten last
            remembered[engine_hash] = block
        most = min(self._capacity or REMEMBERED_BLOCKS_MAX, REMEMBERED_BLOCKS_MAX)
        for engine_hash in list(remembered)[: max(0, len(remembered) - most)]:
            del remembered[engine_hash]
        self._forget()
        self.counts.gaps += 1
        self._incomplete = True
        self._removed_since_loss = 0

    def _start_over(self) -> None:
        """Be as empty as an engine that has just started."""
        self._forget()
        self._remembered.clear()
        self._window = self._capacity = 0
        self._group = None
        self._met.clear()
        if self._others is not None:
            self._others.begin(0)
        self._windows_known = self._incomplete = False
        self.counts.restarts += 1

    def _forget(self) -> None:
        self._blocks = {}
        self._swallowed.clear()
        self._orphans.clear()
        self._copies.clear()
        for present in self._present.values():
            present.clear()
        self._facts = CacheFacts()
        self._later.clear()
        if self._others is not None:
            self._others.clear()

    def _store_one(self, event: Stored) -> bool:
        """Do what ``_store`` does for the usual event, a new whole block on a known parent, if it is one."""
        block = event.blocks[0]
        above = event.parent_hash
        engine_hash = block.block_hash
        blocks = self._blocks
        if above is None or len(block.tokens) != self._stride or block.multimodal or engine_hash in blocks:
            return False
        known = blocks.get(above)
        if known is None or engine_hash in self._swallowed or self._remembered:
            return False
        parent = known.sequence_hash
        seed = known.seed
        sequence_hash = child_hash(block.tokens, parent, seed)
        tier = tier_of(block.cache_level) if block.cache_level else Tier.DEVICE
        entry = blocks[engine_hash] = _Block(sequence_hash, parent, above, seed, tier)
        if self._arrive(entry):
            self._facts.stored_one(parent, sequence_hash, tier)
        return True

    def _store(self, event: Stored) -> None:
        blocks = event.blocks
        if not blocks:
            return
        if self._name_media is not None and any(block.media_keys for block in blocks):
            blocks = self._name_media(blocks)
        above = event.parent_hash
        parent: int | None = None
        evidence = False
        if above is not None:
            known = self._blocks.get(above)
            if known is None:
                known = self._remembered.get(above)
                if known is None:
                    self._swallow_descendants(above, blocks)
                    return
                evidence = True
            parent = known.sequence_hash
            seed = known.seed
        elif event.hash_seed is not None:
            seed = event.hash_seed
        elif self._root_seed is None:
            seed = BASE_SEED
        else:
            told = self._root_seed(blocks[0]) if self._is_whole(blocks[0]) else BASE_SEED
            if told is None:
                self._swallow(blocks, _Unnamed.FOREIGN)
                return
            seed = told
        whole = 0
        for block in blocks:
            if not self._is_whole(block):
                break
            whole += 1
        if whole < len(blocks):
            self._swallow(blocks[whole:], _Unnamed.MULTIMODAL if blocks[whole].multimodal else _Unnamed.PARTIAL)
        if not whole:
            return
        if evidence and self._reuse_is_on_device:
            assert above is not None
            self._recall_prefix(above)
        tokens = blocks[0].tokens if whole == 1 else b"".join([block.tokens for block in blocks[:whole]])
        media = {place: block.media_hashes for place, block in enumerate(blocks[:whole]) if block.media_hashes}
        named = sequence_hashes(block_hashes(tokens, self._block_size, seed, media), parent)
        run: list[int] = []
        run_parent, run_tier = parent, Tier.DEVICE
        for block, sequence_hash in zip(blocks, named, strict=False):
            tier = tier_of(block.cache_level)
            engine_hash = block.block_hash
            again = self._blocks.get(engine_hash)
            if again is not None and self._depart(again):
                self._flush(run, run_parent, run_tier)
                run, run_parent = [], parent
                self._facts.removed((again.sequence_hash,), again.tier)
            entry = _Block(sequence_hash, parent, above, seed, tier)
            self._swallowed.pop(engine_hash, None)
            self._orphans.discard(engine_hash)
            if self._remembered:
                self._remembered.pop(engine_hash, None)
            self._blocks[engine_hash] = entry
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
            above = engine_hash
        self._flush(run, run_parent, run_tier)

    def _is_whole(self, block: StoredBlock) -> bool:
        return len(block.tokens) == self._stride and not block.multimodal

    def _swallow(self, blocks: Sequence[StoredBlock], why: _Unnamed) -> None:
        setattr(self.counts, why.value, getattr(self.counts, why.value) + len(blocks))
        for block in blocks:
            self._drop_claim(block.block_hash)
            self._swallowed[block.block_hash] = why

    def _swallow_descendants(self, above: int, blocks: tuple[StoredBlock, ...]) -> None:
        """Keep the names of blocks whose parent has no sequence hash, until their removal."""
        why = self._swallowed.get(above)
        if why is not None:
            self._swallow(blocks, why)
            return
        self.counts.orphaned_blocks += len(blocks)
        self._incomplete = True
        for block in blocks:
            self._drop_claim(block.block_hash)
            self._orphans.add(block.block_hash)

    def _drop_claim(self, engine_hash: int) -> None:
        """Forget a block that turned out to be something else."""
        block = self._blocks.pop(engine_hash, None)
        if block is not None and self._depart(block):
            self._facts.removed((block.sequence_hash,), block.tier)
        if self._remembered:
            self._remembered.pop(engine_hash, None)

    def _recall_prefix(self, engine_hash: int) -> None:
        """Claim a remembered block and its remembered ancestors, which the engine has just built on."""
        prefix: list[tuple[int, _Block]] = []
        at: int | None = engine_hash
        while at is not None:
            block = self._remembered.pop(at, None)
            if block is None:
                break
            prefix.append((at, block))
            at = block.above
        for name, block in reversed(prefix):
            self._recall(name, block, Tier.DEVICE)

    def _recall(self, engine_hash: int, block: _Block, tier: Tier) -> None:
        block.tier = tier
        self.counts.recalled_blocks += 1
        self._blocks[engine_hash] = block
        if self._arrive(block):
            self._facts.stored(block.parent, (block.sequence_hash,), tier)

    def _flush(self, run: list[int], parent: int | None, tier: Tier) -> None:
        if run:
            self._facts.stored(parent, run, tier)

    def _remove(self, event: Removed) -> None:
        self._removed_since_loss += len(event.block_hashes)
        for engine_hash in event.block_hashes:
            block = self._blocks.pop(engine_hash, None)
            if block is not None:
                if self._depart(block):
                    self._facts.removed_one(block.sequence_hash, block.tier)
                continue
            if self._swallowed.pop(engine_hash, None) is not None:
                self._removed_since_loss -= 1
            self._orphans.discard(engine_hash)
            self._remembered.pop(engine_hash, None)

    def _update(self, event: Updated) -> None:
        if event.cache_level is None:
            return
        target = tier_of(event.cache_level.new_value)
        block = self._blocks.get(event.block_hash)
        if block is None:
            block = self._remembered.pop(event.block_hash, None)
            if block is not None:
                self._recall(event.block_hash, block, target)
            return
        source = block.tier
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
        """Count a block in its tier; return whether its sequence hash was not there before."""
        present = self._present[block.tier]
        if block.sequence_hash not in present:
            present.add(block.sequence_hash)
            return True
        key = (block.sequence_hash, block.tier)
        self._copies[key] = self._copies.get(key, 1) + 1
        return False

    def _depart(self, block: _Block) -> bool:
        """Count a block out of its tier; return whether its sequence hash is gone from there."""
        if self._copies:
            key = (block.sequence_hash, block.tier)
            copies = self._copies.pop(key, 1)
            if copies > 2:
                self._copies[key] = copies - 1
            if copies > 1:
                return False
        self._present[block.tier].discard(block.sequence_hash)
        return True


def _chains_on(tier: Tier, blocks: Iterable[_Block]) -> list[BlocksStored]:
    links: dict[int, int | None] = {}
    for block in blocks:
        if block.tier is tier:
            links.setdefault(block.sequence_hash, block.parent)
    return [event for parent, hashes in chains(links.items()) for event in stored_chain(parent, hashes, tier)]
