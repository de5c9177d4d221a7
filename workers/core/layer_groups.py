"""The blocks of an engine's other groups of layers, told as KV groups of the wire (decision 0084).

Some engines keep sliding windows apart from full attention, and each of their events names the group
of layers that it is about. A prompt can be resumed only where every group can.

Rules:

1. A group with a window needs the blocks of the last ``window - 1`` tokens before a place. Groups with equal needs are
   one group of the wire, which holds what all of them hold.
2. An engine hash is the same in all groups. The group that counts gives a block its sequence hash, so a block of
   another group is told only while that one has it too. Nothing can be resumed at any other.
3. After a loss nothing of another group is claimed until the engine stores it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from poolgrid.kv_events.cache_events import Removed, Stored, Updated
from poolgrid.wire.events import BlocksRemoved, BlocksStored, GroupsReported, KvGroup
from poolgrid.wire.hashing import pack_hashes
from poolgrid.wire.identifiers import Tier
from poolgrid.wire.limits import BLOCKS_PER_EVENT_MAX, GROUPS_PER_WORKER_MAX

SequenceHash = Callable[[int], int | None]
"""Returns the sequence hash of an engine hash; ``None`` = the group that counts has no such block."""

GroupEvent = BlocksStored | BlocksRemoved | GroupsReported


class LayerGroups:
    """What the other groups of one engine rank hold; bounded by what the engine holds."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._held: dict[int, dict[int, Tier]] = {}
        """By group of layers: where its blocks are, by engine hash."""
        self._members: dict[KvGroup, list[int]] = {}
        """The groups of layers of each group of the wire, in the order of its numbers."""
        self._told: dict[KvGroup, dict[int, tuple[int, Tier]]] = {}
        """What routers know of each: sequence hash and tier, by engine hash."""
        self._copies: dict[tuple[KvGroup, int, Tier], int] = {}
        """Told engine blocks of one sequence hash, where it is more than one."""
        self._reported = 0
        self._touched: dict[int, None] = {}

    def meet(self, group: int, window: int) -> None:
        """Take in a group of layers; one too many makes the worker unresumable, which is never too much."""
        if group in self._held:
            return
        needs = KvGroup(max(1, -(-(window - 1) // self._block_size)))
        if needs not in self._members and len(self._members) >= GROUPS_PER_WORKER_MAX - 1:
            needs = KvGroup(0)
        self._held[group] = {}
        self._members.setdefault(needs, []).append(group)
        self._told.setdefault(needs, {})
        self.touch(self._told[needs])  # what the others of it hold, it lacks

    def take(self, group: int, event: Stored | Removed | Updated) -> None:
        """Take what happened to blocks of a group."""
        held = self._held[group]
        if type(event) is Stored:
            for block in event.blocks:
                held[block.block_hash] = _tier(block.cache_level)
                self._touched[block.block_hash] = None
        elif type(event) is Removed:
            for engine_hash in event.block_hashes:
                if held.pop(engine_hash, None) is not None:
                    self._touched[engine_hash] = None
        elif type(event) is Updated and event.cache_level is not None and event.block_hash in held:
            held[event.block_hash] = _tier(event.cache_level.new_value)
            self._touched[event.block_hash] = None

    def remove(self, engine_hashes: Iterable[int]) -> None:
        """Take that blocks are gone from all groups."""
        for engine_hash in engine_hashes:
            for held in self._held.values():
                held.pop(engine_hash, None)

    def touch(self, engine_hashes: Iterable[int]) -> None:
        """Note blocks that the group that counts got or lost."""
        self._touched.update(dict.fromkeys(engine_hashes))

    def forget(self) -> None:
        """Claim nothing any more, because it is not known what is held."""
        for held in self._held.values():
            held.clear()
        for told in self._told.values():
            told.clear()
        self._copies.clear()
        self._touched.clear()

    def settle(self, name: SequenceHash) -> list[GroupEvent]:
        """Return what routers must be told since the last call."""
        out: list[GroupEvent] = []
        if self._reported != len(self._members):
            self._reported = len(self._members)
            out.append(self._report())
        touched, self._touched = self._touched, {}
        for number, (needs, members) in enumerate(self._members.items(), 1):
            told, holdings = self._told[needs], [self._held[each] for each in members]
            gone: dict[Tier, list[int]] = {}
            come: dict[Tier, list[int]] = {}
            for engine_hash in touched:
                tiers = [held[engine_hash] for held in holdings if engine_hash in held]
                sequence_hash = name(engine_hash) if len(tiers) == len(holdings) else None
                before = told.pop(engine_hash, None)
                now = None if sequence_hash is None else (sequence_hash, max(tiers))
                if now is not None:
                    told[engine_hash] = now
                if before == now:
                    continue
                if before is not None and not self._count(needs, before, -1):
                    gone.setdefault(before[1], []).append(before[0])
                if now is not None and self._count(needs, now, 1) == 1:
                    come.setdefault(now[1], []).append(now[0])
            for tier, hashes in gone.items():
                out += [BlocksRemoved(each, tier, number) for each in _packed(hashes)]
            for tier, hashes in come.items():
                out += [BlocksStored(None, each, tier, number) for each in _packed(hashes)]
        return out

    def restate(self) -> list[BlocksStored | GroupsReported]:
        """Return the groups, and all that is told of their blocks."""
        out: list[BlocksStored | GroupsReported] = [self._report()]
        for number, told in enumerate(self._told.values(), 1):
            for tier in Tier:
                held = dict.fromkeys(sequence_hash for sequence_hash, at in told.values() if at is tier)
                out += [BlocksStored(None, each, tier, number) for each in _packed(list(held))]
        return out

    def _report(self) -> GroupsReported:
        return GroupsReported(tuple(self._members))

    def _count(self, needs: KvGroup, block: tuple[int, Tier], change: int) -> int:
        """Return how many told engine blocks have this sequence hash on this tier now."""
        key = (needs, *block)
        copies = self._copies.pop(key, 0) + change
        if copies:
            self._copies[key] = copies
        return copies


def _tier(level: int) -> Tier:
    return (Tier.DEVICE, Tier.HOST, Tier.DISK)[min(max(level, 0), 2)]


def _packed(hashes: list[int]) -> list[bytes]:
    most = BLOCKS_PER_EVENT_MAX
    return [pack_hashes(hashes[at : at + most]) for at in range(0, len(hashes), most)]
