"""What the groups of layers hold that do not need a whole prefix: attention windows, and states.

Rules:

1. The engine's group with the largest window, of several the one with the lowest number, is full attention:
   ``EventTranslator``'s. Another is known by its window and its number, and needs

   ====================================  ================================================================
   a smaller window                      the blocks that the next token sees
   the largest window, another number    the last block: without full attention's block before it the
                                         engine keeps none, and a state stands for all that comes before
   a negative window                     the last block: the first cache manager's mark of states
   no window                             what no event can tell: nothing is promised
   ====================================  ================================================================

2. Groups with equal needs are one group of the wire: it holds what all of them hold, on the slowest of their tiers.
3. Full attention gives the names: it holds every block that any other group holds. Events of other groups may come
   first, so what has no name yet waits for it.
4. After a loss nothing is claimed until the engine stores or moves it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from poolgrid.kernel.kv_events.cache_events import AnyEngineEvent, Removed, Stored, Updated
from poolgrid.kernel.wire.events import BlocksRemoved, BlocksStored, GroupsReported, KvGroup
from poolgrid.kernel.wire.hashing import TOKEN_BYTES, pack_hashes
from poolgrid.kernel.wire.identifiers import Tier
from poolgrid.kernel.wire.limits import BLOCKS_PER_EVENT_MAX, GROUPS_PER_WORKER_MAX, WINDOW_BLOCKS_MAX

EngineGroup = tuple[int, int | None]
"""Window and number of a group of layers."""

WAITING_MAX = 1024
"""Blocks of a group without a name; beyond it the oldest are not claimed. Events of one step name each other."""

ENGINE_GROUPS_MAX = 64
"""Groups of layers that are told apart; models have up to a dozen. Of more nothing is promised."""

NOT_RESUMABLE = KvGroup(0)

TIER_OF_LEVEL = (Tier.DEVICE, Tier.HOST, Tier.DISK)

NameOf = Callable[[int], int | None]
"""Returns the sequence hash of an engine hash; ``None`` = full attention has not named it."""

_Change = tuple[type[BlocksStored] | type[BlocksRemoved], int, Tier]


class _WireGroup:
    """The engine's groups that have the same needs."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.members: dict[EngineGroup, dict[int, Tier]] = {}
        """Where each member has each engine hash."""
        self.told: dict[int, tuple[int, Tier]] = {}
        """Name and tier, by engine hash, of what all of them have."""


class OtherGroups:
    """All groups of one rank but full attention."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._largest = 0
        self._groups: dict[KvGroup, _WireGroup] = {}
        self._group_of: dict[EngineGroup, _WireGroup] = {}
        self._waiting: dict[tuple[EngineGroup, int], Tier] = {}
        self._told = GroupsReported(())
        self._changes: list[tuple[_Change, list[int]]] = []

    @property
    def report(self) -> GroupsReported:
        return GroupsReported(tuple(self._groups))

    def begin(self, largest: int) -> None:
        """Forget which groups there are; full attention's window is ``largest``."""
        self._largest = largest
        self._groups, self._group_of = {}, {}
        self.clear()

    def meet(self, groups: Iterable[EngineGroup]) -> None:
        """Take in the groups besides full attention of which some are not known yet."""
        for engine_group in groups:
            if engine_group in self._group_of:
                continue
            needs = self._needs_of(engine_group[0])
            if len(self._group_of) >= ENGINE_GROUPS_MAX:
                self._groups.setdefault(NOT_RESUMABLE, _WireGroup(len(self._groups) + 1))
                continue
            if needs not in self._groups and len(self._groups) >= GROUPS_PER_WORKER_MAX - 1:
                needs = NOT_RESUMABLE
            group = self._groups.setdefault(needs, _WireGroup(len(self._groups) + 1))
            self._group_of[engine_group] = group
            group.members[engine_group] = {}
            for engine_hash, (name, _) in list(group.told.items()):
                self._settle(group, engine_hash, name)

    def _needs_of(self, window: int) -> KvGroup:
        if not window:
            return NOT_RESUMABLE
        if window < 0 or window == self._largest:
            return KvGroup(1)
        # The token that is computed next sees window - 1 tokens before it.
        return KvGroup(min(max(1, -(-(window - 1) // self._block_size)), WINDOW_BLOCKS_MAX))

    def clear(self) -> None:
        self._waiting.clear()
        self._changes = []
        for group in self._groups.values():
            group.told.clear()
            for held in group.members.values():
                held.clear()

    def take(
        self, events: Iterable[AnyEngineEvent], name_of: NameOf
    ) -> list[GroupsReported | BlocksStored | BlocksRemoved]:
        """Return the equivalent wire events, the groups before their blocks where readers do not know them."""
        for event in events:
            engine_group = (event.window_size, event.layer_group_id)
            # An event without a number, where groups have some, is about all of them.
            is_of_all = event.layer_group_id is None and engine_group not in self._group_of
            for each in self._group_of if is_of_all else (engine_group,):
                if each in self._group_of:
                    self._apply(event, each, name_of)
        for (engine_group, engine_hash), tier in list(self._waiting.items()):
            name = name_of(engine_hash)
            if name is not None:
                self._place(engine_group, engine_hash, name, tier)
        out: list[GroupsReported | BlocksStored | BlocksRemoved] = []
        report = self.report
        if report != self._told:
            self._told = report
            out.append(report)
        changes, self._changes = self._changes, []
        for (kind, number, tier), names in changes:
            out += (_stored if kind is BlocksStored else _removed)(number, tier, names)
        return out

    def restate(self) -> list[GroupsReported | BlocksStored]:
        out: list[GroupsReported | BlocksStored] = [self.report] if self._groups else []
        for group in self._groups.values():
            for tier in Tier:
                names = [name for name, on in group.told.values() if on is tier]
                out += _stored(group.number, tier, names)
        return out

    # Blocks

    def _apply(self, event: AnyEngineEvent, engine_group: EngineGroup, name_of: NameOf) -> None:
        if isinstance(event, Stored):
            for block in event.blocks:
                if len(block.tokens) == self._block_size * TOKEN_BYTES:
                    self._arrive(engine_group, block.block_hash, tier_of(block.cache_level), name_of)
        elif isinstance(event, Updated):
            if event.cache_level is not None:
                self._arrive(engine_group, event.block_hash, tier_of(event.cache_level.new_value), name_of)
        elif isinstance(event, Removed):
            group = self._group_of[engine_group]
            for engine_hash in event.block_hashes:
                self._waiting.pop((engine_group, engine_hash), None)
                if group.members[engine_group].pop(engine_hash, None) is not None and engine_hash in group.told:
                    self._settle(group, engine_hash, group.told[engine_hash][0])

    def _arrive(self, engine_group: EngineGroup, engine_hash: int, tier: Tier, name_of: NameOf) -> None:
        name = name_of(engine_hash)
        if name is not None:
            self._place(engine_group, engine_hash, name, tier)
            return
        self._waiting[engine_group, engine_hash] = tier
        if len(self._waiting) > WAITING_MAX:
            del self._waiting[next(iter(self._waiting))]

    def _place(self, engine_group: EngineGroup, engine_hash: int, name: int, tier: Tier) -> None:
        self._waiting.pop((engine_group, engine_hash), None)
        group = self._group_of[engine_group]
        group.members[engine_group][engine_hash] = tier
        self._settle(group, engine_hash, name)

    def _settle(self, group: _WireGroup, engine_hash: int, name: int) -> None:
        """Note what changed for readers: all members have the block, or no longer do, or it is on another tier."""
        tiers = [held.get(engine_hash) for held in group.members.values()]
        tier = None if None in tiers else max(tiers)  # type: ignore[type-var]
        before = group.told.pop(engine_hash, None)
        if tier is not None:
            group.told[engine_hash] = (name, tier)
        if before is not None and before[1] is tier:
            return
        if tier is not None:
            self._note((BlocksStored, group.number, tier), name)
        if before is not None:
            self._note((BlocksRemoved, group.number, before[1]), name)

    def _note(self, change: _Change, name: int) -> None:
        if self._changes and self._changes[-1][0] == change:
            self._changes[-1][1].append(name)
        else:
            self._changes.append((change, [name]))


def tier_of(cache_level: int) -> Tier:
    """Return the tier of a cache level of the engine."""
    if not cache_level:
        return Tier.DEVICE
    return TIER_OF_LEVEL[min(max(cache_level, 0), len(TIER_OF_LEVEL) - 1)]


def _stored(number: int, tier: Tier, names: list[int]) -> Iterator[BlocksStored]:
    for at in range(0, len(names), BLOCKS_PER_EVENT_MAX):
        yield BlocksStored(None, pack_hashes(names[at : at + BLOCKS_PER_EVENT_MAX]), tier, number)


def _removed(number: int, tier: Tier, names: list[int]) -> Iterator[BlocksRemoved]:
    for at in range(0, len(names), BLOCKS_PER_EVENT_MAX):
        yield BlocksRemoved(pack_hashes(names[at : at + BLOCKS_PER_EVENT_MAX]), tier, number)
