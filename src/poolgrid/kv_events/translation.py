"""From the events of an engine that publishes itself to the wire's: engine hashes end here, sequence hashes begin.

``EngineTranslator`` recomputes sequence hashes from the tokens. Token ids end here. What cannot be placed (unknown
parent, partial block, other block size, keys that enter the engine's hash and not ours) is ignored and counted, and so
is all that hangs on it.

KV groups:

1. A hybrid model has groups of layers with caches of their own. Groups with equal needs are one group of the wire:
   it holds what all of them hold, as a hit needs all of them. Which there are is learned from stored events, because
   removed events carry the group's number alone: one that has never stored anything is not known yet.
2. Groups that need all blocks of a prefix are group 0. Others are reported (``GroupsReported``) before their blocks. A
   kind that is not known here needs what no event can tell: nothing is promised then.
3. An engine leaves out the blocks of a window or a state that it does not keep, and names the tokens of all. Its hash
   of a prefix is the same in all groups, so what full attention stored at the same time gives the name. Without it a
   block is named by its tokens where none is left out.

An engine may hold a block several times: requests that compute the same prefix at the same time each fill blocks of
their own, and each of them is stored, and later removed, under the same hash. So copies are counted by group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from poolgrid.kv_events.pub import UNKNOWN_KIND, EngineEvent, EngineRemoved, EngineStored
from poolgrid.wire.events import AnyEvent, BlocksRemoved, BlocksStored, CacheCleared, GroupsReported, KvGroup
from poolgrid.wire.hashing import BASE_SEED, TOKEN_BYTES, block_hashes, pack_hashes, sequence_hashes
from poolgrid.wire.identifiers import Tier
from poolgrid.wire.limits import BLOCKS_PER_EVENT_MAX, GROUPS_PER_WORKER_MAX, WINDOW_BLOCKS_MAX

RootSeed = Callable[[bytes], int | None]
"""Returns which seed (LoRA and salt) a chain without a seed of its own was hashed with, by the tokens of its first
block (u32 little-endian); ``None`` = unknown."""

ENGINE_GROUPS_MAX = 64
"""Groups of layers of one engine that are distinguished; models have up to a dozen. More are of no known kind."""

NOT_RESUMABLE = KvGroup(0)
"""Of layers whose kind is not known."""

Named = tuple[Sequence[int], Sequence[int], int | None]
"""Engine hashes, the sequence hashes that they stand for, and the sequence hash of the block before them."""

_Copies = tuple[dict[int, int], dict[int, int], dict[int, int]]
"""By tier: how many copies of each engine hash a group has."""


_Ahead = tuple[dict[int, Named | None], dict[int, int]]
"""What full attention stores in a message: its names by event, and all of them by engine hash."""

_NOTHING_NAMED: _Ahead = ({}, {})


@dataclass(slots=True)
class _WireGroup:
    """One group of the wire: the engine's groups that have the same needs."""

    number: int
    needs: KvGroup | None
    """``None`` = all blocks."""
    members: dict[int | None, _Copies] = field(default_factory=dict)

    def others_of(self, member: _Copies, tier: Tier) -> list[dict[int, int]]:
        return [copies[tier] for copies in self.members.values() if copies is not member]


class EngineTranslator:
    """Engine hashes of one PUB engine, and the sequence hashes they stand for."""

    def __init__(self, block_size: int, blocks_max: int, root_seed: RootSeed | None = None) -> None:
        self._block_size = block_size
        self._root_seed = root_seed
        self._blocks_max = blocks_max
        self._known: dict[int, int] = {}
        self._seeds: dict[int, int] = {}
        """Seed by engine hash, where it is not the base seed."""
        self._groups: dict[KvGroup | None, _WireGroup] = {}
        self._group_of: dict[int | None, _WireGroup] = {}
        """By the engine's number."""
        self._only: _Copies | None = None
        """What the engine holds, where full attention is its only group."""
        self._report: GroupsReported | None = None
        self._is_reported = True
        """Whether readers know it, as far as they still know anything."""
        self.ignored_blocks = 0
        self.other_block_size = 0
        """Tokens in a block of the last stored event whose blocks have another size; 0 = none had."""

    def __len__(self) -> int:
        return len(self._known)

    def clear(self) -> None:
        """Forget every engine hash; the groups are the model's, and are reported again."""
        self._is_reported = False
        self._report = None
        self._forget()

    def _forget(self) -> None:
        self._known.clear()
        self._seeds.clear()
        for group in self._groups.values():
            group.members = {number: ({}, {}, {}) for number in group.members}
        self._find_only()

    def _find_only(self) -> None:
        full = self._groups.get(None)
        is_only = len(self._group_of) == 1 and full is not None and self._is_reported
        self._only = next(iter(full.members.values())) if is_only and full is not None else None

    def translate(self, events: list[EngineEvent]) -> list[AnyEvent]:
        out: list[AnyEvent] = []
        named = self._look_ahead(events) if len(self._groups) > 1 else _NOTHING_NAMED
        are_met = False
        for event in events if len(events) == 1 else self._chains(events):
            kind = type(event)
            if kind is EngineStored:
                if self._only is not None and event.group in self._group_of:  # type: ignore[union-attr]
                    self._store_only(event, self._only, out)  # type: ignore[arg-type]
                    continue
                group = self._group_of.get(event.group)  # type: ignore[union-attr]
                if (group is None or not self._is_reported) and not are_met:
                    are_met = True  # those of the whole message that can be
                    self._meet_all(events, out)
                    named = self._look_ahead(events) if len(self._groups) > 1 else _NOTHING_NAMED
                    group = self._group_of.get(event.group)  # type: ignore[union-attr]
                if group is not None and group.needs != NOT_RESUMABLE:
                    self._store(event, group, named, out)  # type: ignore[arg-type]
            elif kind is EngineRemoved:
                if self._only is not None and event.group in self._group_of:  # type: ignore[union-attr]
                    self._remove_only(event, self._only, out)  # type: ignore[arg-type]
                else:
                    self._remove(event, out)  # type: ignore[arg-type]
            else:
                self._forget()
                out.append(CacheCleared())
        return out

    def _chains(self, events: list[EngineEvent]) -> Iterator[EngineEvent]:
        """Yield events, those of a chain as one: SGLang has one for each block, and each costs all readers.

        What a chain hangs on must be known, by the events before it: without, parts of it may still have a name.
        """
        end = 0
        while end < len(events):
            begin, end = end, end + 1
            first = events[begin]
            if self._only is not None and isinstance(first, EngineStored):
                if first.parent is None or first.parent in self._known:
                    while end < len(events) and _continues(events[end - 1], events[end]):
                        end += 1
                if end - begin > 1:
                    chain = [each for each in events[begin:end] if isinstance(each, EngineStored)]
                    hashes = [engine_hash for each in chain for engine_hash in each.hashes]
                    token_bytes = b"".join(each.token_bytes for each in chain)
                    first = replace(first, hashes=hashes, token_bytes=token_bytes)
            yield first

    def _look_ahead(self, events: list[EngineEvent]) -> _Ahead:
        """Name what full attention stores in a message: it names the blocks of other groups, in either order."""
        named = {
            id(event): self._name(event)
            for event in events
            if isinstance(event, EngineStored) and event.window_tokens is None
        }
        fresh: dict[int, int] = {}
        for each in named.values():
            if each is not None:
                fresh.update(zip(each[0], each[1], strict=False))
        return named, fresh

    # Groups

    def _meet_all(self, events: list[EngineEvent], out: list[AnyEvent]) -> None:
        """Take in the groups that are seen for the first time, and report all of them."""
        for event in events:
            if isinstance(event, EngineStored) and event.group not in self._group_of:
                self._meet(event, out)
        self._is_reported = True
        self._find_only()
        report = GroupsReported(tuple(needs for needs in self._groups if needs is not None), None in self._groups)
        if report.groups and report != self._report:
            self._report = report
            out.append(report)

    def _meet(self, event: EngineStored, out: list[AnyEvent]) -> None:
        needs = self._needs_of(event)
        group = self._groups.get(needs)
        if group is None:
            others = len(self._groups) - (None in self._groups)
            if needs is not None and others >= GROUPS_PER_WORKER_MAX - 1:
                needs = NOT_RESUMABLE
            group = self._groups.setdefault(needs, _WireGroup(0 if needs is None else others + 1, needs))
        elif needs != NOT_RESUMABLE:
            self._lack(group, out)
        if len(self._group_of) < ENGINE_GROUPS_MAX:
            group.members[event.group] = ({}, {}, {})
            self._group_of[event.group] = group

    def _needs_of(self, event: EngineStored) -> KvGroup | None:
        window = event.window_tokens
        if window is None:
            return None
        stride, rest = divmod(event.block_size, self._block_size)
        if window == UNKNOWN_KIND or rest or event.group is None or len(self._group_of) >= ENGINE_GROUPS_MAX:
            # Smaller blocks than the index's would have to be held in numbers that it does not count.
            return NOT_RESUMABLE
        if not window:
            return KvGroup(1)
        # The token that is computed next sees window - 1 tokens before it.
        needed = max(1, -(-(window - 1) // event.block_size))
        return KvGroup(min(needed, WINDOW_BLOCKS_MAX), min(stride, WINDOW_BLOCKS_MAX))

    def _lack(self, group: _WireGroup, out: list[AnyEvent]) -> None:
        """Take back what a group holds: one that it has besides has nothing yet."""
        for tier in Tier:
            holdings = [copies[tier] for copies in group.members.values()]
            held = [each for each in holdings[0] if all(each in other for other in holdings[1:])]
            for at in range(0, len(held), BLOCKS_PER_EVENT_MAX):
                names = [self._known[each] for each in held[at : at + BLOCKS_PER_EVENT_MAX]]
                out.append(BlocksRemoved(pack_hashes(names), tier, group.number))

    # Names

    def _name(self, event: EngineStored) -> Named | None:
        """Name a chain of whole blocks by its tokens, or count why it has no names."""
        # The tokens of a trailing partial block name nothing that a prompt could share.
        size, hashes = event.block_size, event.hashes
        told, whole = len(hashes), len(event.token_bytes) // (TOKEN_BYTES * size)
        stride = 1
        if size != self._block_size:
            stride, rest = divmod(size, self._block_size)
            if rest or event.window_tokens is None:
                self.other_block_size = size
                whole = told + 1
        parent, seed = event.parent, event.seed
        is_unfit = whole > told
        if not is_unfit and parent is not None:
            if seed is None and self._seeds:
                seed = self._seeds.get(parent)
            parent = self._known.get(parent)
            is_unfit = parent is None
        elif not is_unfit and whole and seed is None and self._root_seed is not None:
            seed = self._root_seed(event.token_bytes[: TOKEN_BYTES * self._block_size])
            is_unfit = seed is None
            seed = None if seed == BASE_SEED else seed
        if is_unfit or len(self._known) + whole > self._blocks_max:
            self.ignored_blocks += told
            return None
        if whole < told:
            self.ignored_blocks += told - whole
            hashes = hashes[:whole]
        own = block_hashes(event.token_bytes, self._block_size, BASE_SEED if seed is None else seed)
        names = sequence_hashes(own, parent)
        if stride > 1:
            names = names[stride - 1 :: stride]
        self._known.update(zip(hashes, names, strict=False))
        if seed is not None:
            self._seeds.update(dict.fromkeys(hashes, seed))
        return hashes, names, parent

    def _recognise(self, event: EngineStored, fresh: Mapping[int, int]) -> Named | None:
        """Name the blocks of a window or a state, as far as full attention has named them."""
        known = self._known
        for each in event.hashes:
            if each not in known and each in fresh:
                known[each] = fresh[each]  # a removal in the same message has taken its name
        found = [each for each in event.hashes if each in known]
        if len(found) == len(event.hashes):
            return found, [known[each] for each in found], None
        if len(event.hashes) * event.block_size * 4 == len(event.token_bytes):
            return self._name(event)
        self.ignored_blocks += len(event.hashes) - len(found)
        return found, [known[each] for each in found], None

    # Blocks

    def _store_only(self, event: EngineStored, copies: _Copies, out: list[AnyEvent]) -> None:
        named = self._name(event)
        if named is None:
            return
        hashes, names, parent = named
        if not hashes:
            return
        tier = event.tier
        on = copies[tier]
        if on.keys().isdisjoint(hashes):
            on.update(dict.fromkeys(hashes, 1))
        else:
            for engine_hash in hashes:
                on[engine_hash] = on.get(engine_hash, 0) + 1
        out.append(BlocksStored(parent, pack_hashes(names), tier))

    def _store(self, event: EngineStored, group: _WireGroup, ahead: _Ahead, out: list[AnyEvent]) -> None:
        if group.needs is None:
            named = ahead[0].get(id(event)) if len(self._groups) > 1 else self._name(event)
        else:
            named = self._recognise(event, ahead[1])
        if named is None or not named[0]:
            return
        hashes, names, parent = named
        member, tier = group.members[event.group], event.tier
        on = member[tier]
        if on.keys().isdisjoint(hashes):
            on.update(dict.fromkeys(hashes, 1))
        else:
            for engine_hash in hashes:
                on[engine_hash] = on.get(engine_hash, 0) + 1
        if len(self._group_of) == 1:
            out.append(BlocksStored(parent, pack_hashes(names), tier, group.number))
            return
        self._known.update(zip(hashes, names, strict=False))  # a removal in the same message may have taken them
        others = group.others_of(member, tier)
        lacking = [any(each not in other for other in others) for each in hashes] if others else ()
        for begin, end in _stretches(lacking, len(hashes)):
            above = names[begin - 1] if begin else parent
            stored = pack_hashes(names[begin:end])
            out.append(BlocksStored(None if group.number else above, stored, tier, group.number))

    def _remove_only(self, event: EngineRemoved, copies: _Copies, out: list[AnyEvent]) -> None:
        tier = event.tier
        on, known = copies[tier], self._known
        others = [held for held in copies if held and held is not on]
        gone: list[int] = []
        for engine_hash in event.hashes:
            count = on.pop(engine_hash, 0)
            if count > 1:
                on[engine_hash] = count - 1
            elif count:
                gone.append(known[engine_hash])
                if not others or not any(engine_hash in held for held in others):
                    del known[engine_hash]
                    if self._seeds:
                        self._seeds.pop(engine_hash, None)
        if gone:
            out.append(BlocksRemoved(pack_hashes(gone), tier))

    def _remove(self, event: EngineRemoved, out: list[AnyEvent]) -> None:
        group = self._group_of.get(event.group)
        if group is None:
            # Some engines number their groups in one kind of event only.
            if event.group is None:
                for each in list(self._group_of):
                    self._remove(replace(event, group=each), out)
            elif None in self._group_of:
                self._remove(replace(event, group=None), out)
            return
        if group.needs == NOT_RESUMABLE:
            return
        member, tier = group.members[event.group], event.tier
        on = member[tier]
        of_tier = group.others_of(member, tier)
        others = [
            held
            for each in self._groups.values()
            for copies in each.members.values()
            for held in copies
            if held is not on
        ]
        gone: list[int] = []
        for engine_hash in event.hashes:
            copies = on.get(engine_hash)
            if copies is None:
                continue
            if copies > 1:
                on[engine_hash] = copies - 1
                continue
            del on[engine_hash]
            if not of_tier or all(engine_hash in held for held in of_tier):
                gone.append(self._known[engine_hash])
            if not any(engine_hash in held for held in others):
                del self._known[engine_hash]
                self._seeds.pop(engine_hash, None)
        if gone:
            out.append(BlocksRemoved(pack_hashes(gone), tier, group.number))


def _continues(before: EngineEvent, event: EngineEvent) -> bool:
    """Tell whether an event stores what follows the whole blocks of the one before."""
    if not isinstance(before, EngineStored) or not isinstance(event, EngineStored) or not before.hashes:
        return False
    return (
        event.parent == before.hashes[-1]
        and event.seed is None
        and before.window_tokens is None
        and event.window_tokens is None
        and (event.tier, event.group, event.block_size) == (before.tier, before.group, before.block_size)
        and len(before.token_bytes) == TOKEN_BYTES * before.block_size * len(before.hashes)
    )


def _stretches(lacking: Sequence[bool], blocks: int) -> Iterator[tuple[int, int]]:
    """Yield where the stretches of blocks begin and end that nothing lacks."""
    begin = 0
    for at, is_lacking in enumerate(lacking):
        if is_lacking:
            if begin < at:
                yield begin, at
            begin = at + 1
    if begin < blocks:
        yield begin, blocks
