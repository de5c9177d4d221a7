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

4. A block that is larger than the index's is as many of the index's. Of a group whose blocks are smaller than those of
   full attention, or than the index's, the last within one of these stands for all of them.
5. Where hashes look ahead, a prompt reaches the end of a block only with the tokens that the hash covers behind it. So
   blocks that all groups hold under one hash are told again, named with these tokens (``FOLLOWED_GROUP``).

An engine may hold a block several times: requests that compute the same prefix at the same time each fill blocks of
their own, and each of them is stored, and later removed, under the same hash. So copies are counted by group. Where
hashes look ahead, blocks with the same tokens have several: a name is held while one of its hashes is.

Where requests resume is judged by ``poolgrid.kernel.kv_events.resumptions``: what an engine reports again because it is
reused is no copy, for its removal comes once; and an engine that computes the last block of what it holds again is
reported (``GroupsReported.recomputed_blocks``), in blocks of the index.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from msgspec.structs import replace

from poolgrid.kernel.kv_events.pub import UNKNOWN_KIND, EngineEvent, EngineRemoved, EngineStored
from poolgrid.kernel.kv_events.resumptions import NOT_RESUMABLE, Resumptions, WireGroup
from poolgrid.kernel.wire.events import (
    FOLLOWED_GROUP,
    AnyEvent,
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    GroupsReported,
    KvGroup,
)
from poolgrid.kernel.wire.hashing import BASE_SEED, TOKEN_BYTES, block_hashes, child_hash, pack_hashes, sequence_hashes
from poolgrid.kernel.wire.identifiers import Tier
from poolgrid.kernel.wire.limits import BLOCKS_PER_EVENT_MAX, GROUPS_PER_WORKER_MAX, WINDOW_BLOCKS_MAX

RootSeed = Callable[[bytes, int], int | None]
"""Returns which seed (LoRA and salt) a chain without a seed of its own was hashed with, by the tokens of the engine's
first block (u32 little-endian) and its hash of it; ``None`` = unknown."""

ENGINE_GROUPS_MAX = 64
"""Groups of layers of one engine that are distinguished; models have up to a dozen. More are of no known kind."""

Named = tuple[Sequence[int], Sequence[int], int | None]
"""Engine hashes, the sequence hashes that they stand for, and the sequence hash of the block before them."""

_Ahead = tuple[dict[int, Named | None], dict[int, int], dict[int, tuple[int, ...]]]
"""What full attention stores in a message: its names by event, and all of them and their parts by engine hash."""

_NOTHING_NAMED: _Ahead = ({}, {}, {})


class EngineTranslator:
    """Engine hashes of one PUB engine, and the sequence hashes they stand for."""

    def __init__(
        self, block_size: int, blocks_max: int, root_seed: RootSeed | None = None, drafts: bool = False
    ) -> None:
        """``drafts`` tells whether the engine is known to draft tokens."""
        self.block_size = self._block_size = block_size
        self._root_seed = root_seed
        self._blocks_max = blocks_max
        self._drafts = drafts
        self._known: dict[int, int] = {}
        self._seeds: dict[int, int] = {}
        """Seed by engine hash, where it is not the base seed."""
        self._groups: dict[KvGroup | None, WireGroup] = {}
        self._group_of: dict[int | None, WireGroup] = {}
        """By the engine's number."""
        self._parts: dict[int, tuple[int, ...]] = {}
        """All names of an engine hash, where its block is several of the index's."""
        self._only: WireGroup | None = None
        """Full attention, where it is the engine's only group."""
        self._joined: EngineStored | None = None
        """The last chain of several events: of an engine that has one for each block, which reports no reuse."""
        self._full_size = 0
        """Tokens in the largest block of full attention."""
        self._resumptions = Resumptions(self._groups, self._group_of, block_size)
        self._following_tokens = 0
        """Tokens behind a block that hashes cover; 0 = none, or blocks are of several sizes."""
        self._followed: tuple[dict[int, int], dict[int, int], dict[int, int]] = ({}, {}, {})
        """By tier: names with the tokens behind them of the engine hashes that all groups hold."""
        self._report: GroupsReported | None = None
        self._is_reported = True
        """Whether readers know it, as far as they still know anything."""
        self.ignored_blocks = 0
        self.other_block_size = 0
        """Tokens in a block of the last stored event whose blocks are no multiple of the index's; 0 = none had."""
        self.orphan_stores = 0
        """Stored events whose parent no event has stored."""
        self.cut_stores = 0
        """Stored events without the tokens of more than a last block."""
        self.has_unknown_groups = False
        """Whether there are groups of which it is not known what they need: nothing is promised then."""

    def __len__(self) -> int:
        return len(self._known)

    def clear(self) -> None:
        """Forget every engine hash; the groups are the model's, and are reported again."""
        self._is_reported = False
        self._report = None
        self._resumptions.reset()
        self._forget()

    def _forget(self) -> None:
        self._known.clear()
        self._seeds.clear()
        self._parts.clear()
        self._followed = ({}, {}, {})
        for group in self._groups.values():
            group.members = {number: ({}, {}, {}) for number in group.members}
            group.names = ({}, {}, {})
        self._find_only()

    def _find_only(self) -> None:
        full = self._groups.get(None)
        is_only = len(self._group_of) == 1 and full is not None and self._is_reported
        self._only = full if is_only else None

    def translate(self, events: list[EngineEvent]) -> list[AnyEvent]:
        out: list[AnyEvent] = []
        named = self._look_ahead(events) if len(self._groups) > 1 else _NOTHING_NAMED
        are_met = False
        self._resumptions.begin_message()
        at, count = 0, len(events)
        while at < count:
            event = events[at]
            at += 1
            kind = type(event)
            if kind is EngineStored:
                if self._only is not None and at < count and type(events[at]) is EngineStored:
                    event, at = self._chain(events, at - 1)
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
                    self._store(event, group, named, events, out)  # type: ignore[arg-type]
            elif kind is EngineRemoved:
                self._resumptions.note_removed(event.hashes)  # type: ignore[union-attr]
                if self._only is not None and event.group in self._group_of:  # type: ignore[union-attr]
                    self._remove_only(event, self._only, out)  # type: ignore[arg-type]
                else:
                    self._remove(event, out)  # type: ignore[arg-type]
            else:
                self._forget()
                out.append(CacheCleared())
        return out

    def _chain(self, events: list[EngineEvent], begin: int) -> tuple[EngineEvent, int]:
        """Return a stored event joined with those that continue it, and where the next begins.

        SGLang has one for each block, and each costs all readers. What a chain hangs on must be known, by the events
        before it: without, parts of it may still have a name.
        """
        first, only, end = events[begin], self._only, begin + 1
        if only is None or not isinstance(first, EngineStored) or not _continues(first, events[end]):
            return first, end
        if first.parent is None or first.parent in self._known:
            is_held = _is_held(only, first)
            while end < len(events) and _continues(events[end - 1], events[end]):
                if is_held and not _is_held(only, events[end]):
                    break  # copies, or a report of what is reused, end where more is stored
                end += 1
        if end - begin > 1:
            chain = [each for each in events[begin:end] if isinstance(each, EngineStored)]
            hashes = [engine_hash for each in chain for engine_hash in each.hashes]
            token_bytes = b"".join(each.token_bytes for each in chain)
            following = [tokens for each in chain for tokens in each.following]
            self._joined = first = replace(first, hashes=hashes, token_bytes=token_bytes, following=following)
        return first, end

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
        return named, fresh, {each: self._parts[each] for each in fresh if each in self._parts} if self._parts else {}

    # Groups

    def _meet_all(self, events: list[EngineEvent], out: list[AnyEvent]) -> None:
        """Take in the groups that are seen for the first time, and report all of them."""
        stored = [event for event in events if isinstance(event, EngineStored)]
        for event in stored:
            if event.window_tokens is None:
                self._full_size = max(self._full_size, event.block_size)
        for event in sorted(stored, key=lambda event: not event.hashes):
            if event.group not in self._group_of:
                self._meet(event, out)
                self._note_following(event, out)
        self._is_reported = True
        self._find_only()
        self._tell_groups(out)

    def _tell_groups(self, out: list[AnyEvent]) -> None:
        needs, resumed = tuple(filter(None, self._groups)), self._resumptions
        behind = self._following_tokens
        if self._drafts and needs and None in self._groups and not behind:
            resumed.presume()  # with several groups, a place too deep may be far too deep
        again = resumed.recomputed_blocks * max(1, self._full_size // self._block_size)
        report = GroupsReported(
            needs, None in self._groups or not needs, again, not again or resumed.recomputes_windows, behind
        )
        if (needs or again or behind or self._report is not None) and report != self._report:
            self._report = report
            out.append(report)

    def _meet(self, event: EngineStored, out: list[AnyEvent]) -> None:
        needs = self._needs_of(event)
        self.has_unknown_groups = self.has_unknown_groups or needs == NOT_RESUMABLE
        group = self._groups.get(needs)
        if group is None:
            others = len(self._groups) - (None in self._groups)
            if needs is not None and others >= GROUPS_PER_WORKER_MAX - 1:
                needs = NOT_RESUMABLE
            group = self._groups.setdefault(needs, WireGroup(0 if needs is None else others + 1, needs))
        elif needs != NOT_RESUMABLE:
            self._lack(group, out)
        if len(self._group_of) < ENGINE_GROUPS_MAX:
            group.members[event.group] = ({}, {}, {})
            self._group_of[event.group] = group

    def _note_following(self, event: EngineStored, out: list[AnyEvent]) -> None:
        """Take note of the tokens behind a block that a new group's hashes cover, and that it holds none yet."""
        for tier in Tier:
            _tell_removed([*self._followed[tier].values()], tier, FOLLOWED_GROUP, out)
        self._followed = ({}, {}, {})
        count = len(event.following[0]) // TOKEN_BYTES if event.following else 0
        is_first = len(self._group_of) == 1
        is_fit = count <= event.block_size == self._block_size and (is_first or count == self._following_tokens)
        if event.hashes:  # those of a state may all be left out
            self._following_tokens = count if is_fit else 0

    def _needs_of(self, event: EngineStored) -> KvGroup | None:
        window, size = event.window_tokens, event.block_size
        if window is None:
            return None
        unit = max(self._block_size, self._full_size, size)
        stride, rest = divmod(unit, self._block_size)
        is_unfit = window == UNKNOWN_KIND or rest or unit % size or event.group is None
        if is_unfit or len(self._group_of) >= ENGINE_GROUPS_MAX:
            return NOT_RESUMABLE
        if not window:
            return KvGroup(1, stride)
        # The token that is computed next sees window - 1 tokens before it.
        needed = max(1, -(-(-(-(window - 1) // size) * size) // unit))
        return KvGroup(min(needed, WINDOW_BLOCKS_MAX), min(stride, WINDOW_BLOCKS_MAX))

    def _lack(self, group: WireGroup, out: list[AnyEvent]) -> None:
        """Take back what a group holds: one that it has besides has nothing yet."""
        for tier in Tier:
            _tell_removed(list(group.names[tier]), tier, group.number, out)
        group.names = ({}, {}, {})

    # Names

    def _name(self, event: EngineStored) -> Named | None:
        """Name a chain of whole blocks by its tokens, or count why it has no names."""
        # The tokens of a trailing partial block name nothing that a prompt could share.
        size, hashes = event.block_size, event.hashes
        told, whole = len(hashes), len(event.token_bytes) // (TOKEN_BYTES * size)
        self.cut_stores += whole < told - 1
        stride = 1
        if size != self._block_size:
            stride, rest = divmod(size, self._block_size)
            if rest:
                self.other_block_size = size
                whole = told + 1
        parent, seed = event.parent, event.seed
        is_unfit = whole > told
        if not is_unfit and parent is not None:
            if seed is None and self._seeds:
                seed = self._seeds.get(parent)
            parent = self._known.get(parent)
            is_unfit = parent is None
            self.orphan_stores += is_unfit
        elif not is_unfit and whole and seed is None and self._root_seed is not None:
            seed = self._root_seed(event.token_bytes[: TOKEN_BYTES * size], hashes[0])
            is_unfit = seed is None
            seed = None if seed == BASE_SEED else seed
        if is_unfit or stride * (len(self._known) + whole) > self._blocks_max:
            self.ignored_blocks += told
            return None
        if whole < told:
            self.ignored_blocks += told - whole
            hashes = hashes[:whole]
        tokens, base = event.token_bytes, BASE_SEED if seed is None else seed
        if parent is not None and len(tokens) == TOKEN_BYTES * self._block_size:
            names = [child_hash(tokens, parent, base)]  # as an answer grows
        else:
            names = sequence_hashes(block_hashes(tokens, self._block_size, base), parent)
        if stride > 1:
            if event.window_tokens is None:
                parts = (tuple(names[at : at + stride]) for at in range(0, whole * stride, stride))
                self._parts.update(zip(hashes, parts, strict=False))
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
        names = [known[each] for each in found]
        if len(found) == len(event.hashes) or event.block_size < max(self._block_size, self._full_size):
            return found, names, None
        if len(event.hashes) * event.block_size * TOKEN_BYTES == len(event.token_bytes):
            return self._name(event)
        self.ignored_blocks += len(event.hashes) - len(found)
        return found, names, None

    def _names_of(self, engine_hash: int) -> tuple[int, ...]:
        """Return the names of the blocks that an engine's block is in the index."""
        parts = self._parts.get(engine_hash) if self._parts else None
        return (self._known[engine_hash],) if parts is None else parts

    def _forget_hash(self, engine_hash: int) -> None:
        del self._known[engine_hash]
        self._seeds.pop(engine_hash, None)
        self._parts.pop(engine_hash, None)

    # Blocks

    def _store_only(self, event: EngineStored, group: WireGroup, out: list[AnyEvent]) -> None:
        tier = event.tier
        on = group.members[event.group][tier]
        is_one = event is not self._joined
        is_longer = len(event.hashes) > self._resumptions.recomputed_blocks
        if is_one and event.parent is None and is_longer and all(each in on for each in event.hashes):
            self._resumptions.note_report(event)
            return  # what is reused is no copy
        named = self._name(event)
        if named is None:
            return
        hashes, names, parent = named
        if not hashes:
            return
        if is_one and not self._resumptions.is_judged and self._resumptions.judge(event):
            self._tell_groups(out)
        if on.keys().isdisjoint(hashes):
            on.update(dict.fromkeys(hashes, 1))
            new: Sequence[int] = hashes
        else:
            new = [each for each in dict.fromkeys(hashes) if each not in on]
            for each in hashes:
                on[each] = on.get(each, 0) + 1
        if not self._resumptions.is_judged:
            self._resumptions.note_new(new)
        self._hold(new, group.names[tier])
        self._tell_stored(hashes, names, parent, tier, group, out)
        if self._following_tokens and event.following:
            self._tell_followed(event, new, out)

    def _store(
        self,
        event: EngineStored,
        group: WireGroup,
        ahead: _Ahead,
        events: Sequence[EngineEvent],
        out: list[AnyEvent],
    ) -> None:
        if event.parent is None and event.hashes and self._resumptions.is_report(event, events):
            return
        if group.needs is None:
            named = ahead[0].get(id(event)) if len(self._groups) > 1 else self._name(event)
        else:
            named = self._recognise(event, ahead[1])
        if named is None or not named[0]:
            return
        hashes, names, parent = named
        member, tier = group.members[event.group], event.tier
        on = member[tier]
        new = [each for each in dict.fromkeys(hashes) if each not in on]
        if not self._resumptions.is_judged:
            if group.needs is None and self._resumptions.judge(event):
                self._tell_groups(out)
            self._resumptions.note_new(new)
        for each in hashes:
            on[each] = on.get(each, 0) + 1
        known = self._known
        if len(self._group_of) > 1:
            # A removal in the same message may have taken them.
            known.update(zip(hashes, names, strict=False))
            if ahead[2]:
                self._parts.update((each, ahead[2][each]) for each in hashes if each in ahead[2])
        others = group.others_of(member, tier)
        self._hold([each for each in new if all(each in other for other in others)], group.names[tier])
        lacking = [any(each not in other for other in others) for each in hashes] if others else ()
        for begin, end in _stretches(lacking, len(hashes)):
            above = names[begin - 1] if begin else parent
            self._tell_stored(hashes[begin:end], names[begin:end], above, tier, group, out)
        if self._following_tokens and event.following:
            self._tell_followed(event, new, out)

    def _tell_followed(self, event: EngineStored, new: Sequence[int], out: list[AnyEvent]) -> None:
        """Tell with the tokens behind them those of the blocks that are new in a group which all groups hold now."""
        tier, known, followed = event.tier, self._known, self._followed[event.tier]
        held = [copies[tier] for group in self._groups.values() for copies in group.members.values()]
        whole = {each for each in new if all(each in copies for copies in held)}
        behind = zip(event.hashes, event.following, strict=False)
        told = {each: child_hash(tokens, known[each]) for each, tokens in behind if each in whole}
        followed.update(told)
        names = [*told.values()]
        parts = (names[at : at + BLOCKS_PER_EVENT_MAX] for at in range(0, len(names), BLOCKS_PER_EVENT_MAX))
        out.extend(BlocksStored(None, pack_hashes(part), tier, FOLLOWED_GROUP) for part in parts)

    def _tell_unfollowed(self, hashes: Sequence[int], tier: Tier, out: list[AnyEvent]) -> None:
        """Take back those of the blocks that a group does not hold any more."""
        followed = self._followed[tier]
        gone = [followed.pop(each) for each in hashes if each in followed]
        _tell_removed(gone, tier, FOLLOWED_GROUP, out)

    def _hold(self, new: Sequence[int], held: dict[int, int]) -> None:
        """Count the names of engine hashes that are held from now on."""
        names = list(map(self._known.__getitem__, new))
        if self._parts:
            names = [name for each in new for name in self._names_of(each)]
        ones = dict.fromkeys(names, 1)
        if len(ones) == len(names) and held.keys().isdisjoint(ones):
            held.update(ones)
            return
        for name in names:
            held[name] = held.get(name, 0) + 1

    def _let_go(self, engine_hash: int, held: dict[int, int], gone: list[int]) -> None:
        """Note that an engine hash is not held any more; its names are gone with the last that has them."""
        for name in self._names_of(engine_hash):
            left = held.get(name, 0) - 1
            if left > 0:
                held[name] = left
            elif not left:
                del held[name]
                gone.append(name)

    def _tell_stored(
        self,
        hashes: Sequence[int],
        names: Sequence[int],
        parent: int | None,
        tier: Tier,
        group: WireGroup,
        out: list[AnyEvent],
    ) -> None:
        if self._parts and group.needs is None:
            names = [name for each in hashes for name in self._names_of(each)]
        for at in range(0, len(names), BLOCKS_PER_EVENT_MAX):
            above = None if group.number else names[at - 1] if at else parent
            out.append(BlocksStored(above, pack_hashes(names[at : at + BLOCKS_PER_EVENT_MAX]), tier, group.number))

    def _remove_only(self, event: EngineRemoved, group: WireGroup, out: list[AnyEvent]) -> None:
        copies, tier = group.members[event.group], event.tier
        on, held, known, parts, seeds = copies[tier], group.names[tier], self._known, self._parts, self._seeds
        device, host, disk = copies
        gone: list[int] = []
        for engine_hash in event.hashes:
            count = on.pop(engine_hash, 0)
            if count > 1:
                on[engine_hash] = count - 1
            elif count:
                name = known[engine_hash]
                if parts or held[name] > 1:
                    self._let_go(engine_hash, held, gone)
                else:  # nearly always: without a call
                    del held[name]
                    gone.append(name)
                if not (engine_hash in device or engine_hash in host or engine_hash in disk):
                    if parts or seeds:
                        self._forget_hash(engine_hash)
                    else:
                        del known[engine_hash]
        _tell_removed(gone, tier, group.number, out)
        if self._following_tokens:
            self._tell_unfollowed([each for each in event.hashes if each not in on], tier, out)

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
                self._let_go(engine_hash, group.names[tier], gone)
            if not any(engine_hash in held for held in others):
                self._forget_hash(engine_hash)
        _tell_removed(gone, tier, group.number, out)
        if self._following_tokens:
            self._tell_unfollowed([each for each in event.hashes if each not in on], tier, out)


def _tell_removed(gone: Sequence[int], tier: Tier, group: int, out: list[AnyEvent]) -> None:
    for at in range(0, len(gone), BLOCKS_PER_EVENT_MAX):
        part = gone[at : at + BLOCKS_PER_EVENT_MAX]
        out.append(BlocksRemoved(pack_hashes(part), tier, group))


def _is_held(only: WireGroup, event: EngineEvent) -> bool:
    """Return whether full attention, the only group, holds what a stored event begins with."""
    if not isinstance(event, EngineStored) or not event.hashes or event.group not in only.members:
        return False
    return event.hashes[0] in only.members[event.group][event.tier]


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
