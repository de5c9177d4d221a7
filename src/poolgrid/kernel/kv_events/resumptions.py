"""Where requests resume, as far as an engine's stored events show it: reports of reuse, and what is computed again.

Three rules:

1. What is stored from the root on is a report of what a request reuses where all of it is held and the engine could
   have resumed behind some block of it: then it would compute none of what is before (vLLM's ``kv_cache_report_mode``).
2. An engine whose drafting layers make it compute the last block of what it holds again shows that: what full attention
   stores behind a parent begins with blocks that all groups hold, and more follow; or it begins with the first block of
   a prompt, which alone is held. Every engine computes the last block of a prompt, so a chain that ends with such a
   block is judged by what comes next.
3. Windows must hold that block too, unless a request resumed before one that full attention held and a window did not:
   then the drafting layers are all of full attention.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from poolgrid.kernel.kv_events.pub import EngineEvent, EngineStored
from poolgrid.kernel.wire.events import KvGroup
from poolgrid.kernel.wire.identifiers import Tier

RESUMPTIONS_MAX = 64
"""Resumptions by which it is judged whether an engine computes the last block again: it does always, or never."""

RECOMPUTED_SHARE = 4
"""How many times as often it must have done so as not: a request may be told to reuse nothing, whatever the engine."""

PREFILL_MESSAGES = 2
"""Messages within which the next part of a prompt is stored; an answer fills a block in more, drafts included."""

RECENT_ENDS = 1024
"""Stored events whose last block may be continued by the request that filled it."""

NOT_RESUMABLE = KvGroup(0)
"""Of layers whose kind is not known."""

Copies = tuple[dict[int, int], dict[int, int], dict[int, int]]
"""By tier: how many copies of each engine hash a group has, or how many engine hashes stand for each name."""


@dataclass(slots=True)
class WireGroup:
    """One group of the wire: the engine's groups that have the same needs."""

    number: int
    needs: KvGroup | None
    """``None`` = all blocks."""
    members: dict[int | None, Copies] = field(default_factory=dict)
    names: Copies = field(default_factory=lambda: ({}, {}, {}))
    """How many engine hashes that all members hold stand for each name."""

    def others_of(self, member: Copies, tier: Tier) -> list[dict[int, int]]:
        return [copies[tier] for copies in self.members.values() if copies is not member]


class Resumptions:
    """What is known of them in one life of an engine."""

    def __init__(
        self, groups: Mapping[KvGroup | None, WireGroup], group_of: Mapping[int | None, WireGroup], block_size: int
    ) -> None:
        """``groups`` are those of the wire by their needs, ``group_of`` the same by the engine's numbers."""
        self._groups = groups
        self._group_of = group_of
        self._block_size = block_size
        self.reset()

    def reset(self) -> None:
        """Begin another life: it may be that of another engine."""
        self.recomputed_blocks = 0
        """Last blocks of what is held that the engine computes again."""
        self.recomputes_windows = True
        """Whether windows must hold these too."""
        self.is_judged = False
        """Whether that is settled."""
        self._recomputed = 0
        """Resumptions before a block that could have been reused."""
        self._resumed = 0
        """Those behind all that could be reused."""
        self._is_presumed = False
        """Whether the first of the former was presumed."""
        self._fresh: set[int] = set()
        """Engine hashes that a group has stored in this message for the first time."""
        self._removed: set[int] = set()
        """Those that left in this message: a request may have found them, and taken their places itself."""
        self._ends: OrderedDict[int | None, tuple[int, int]] = OrderedDict()
        """The last engine hashes of the latest stored events, oldest first: in which message they came, and how many
        requests have stored and not continued them."""
        self._messages = 0
        self._doubts: dict[int, int] = {}
        """In which message a chain ended with a block that may be the last of a prompt, which is always computed."""
        self._reports: dict[int, tuple[bool, set[int | None]]] = {}
        """What was stored from the root on in this message, by its last engine hash: whether it is a report of what is
        reused, and the groups that had theirs."""

    def begin_message(self) -> None:
        self._reports.clear()
        if self.is_judged:
            return
        self._fresh.clear()
        self._removed.clear()
        self._messages += 1
        if self._doubts:
            since = self._messages - PREFILL_MESSAGES
            self._doubts = {each: told for each, told in self._doubts.items() if told >= since}

    def note_new(self, new: Sequence[int]) -> None:
        """Take note of what a group did not hold before this message."""
        self._fresh.update(new)

    def note_removed(self, hashes: Sequence[int]) -> None:
        """Take note of what left in this message."""
        if not self.is_judged:
            self._removed.update(hashes)

    # Reports

    def is_report(self, event: EngineStored, events: Sequence[EngineEvent]) -> bool:
        """Return whether a store from the root on is a report of what is reused, of which each group has one.

        It is where all of it is held and the engine could have resumed behind some block of it: then it computes none.
        """
        end = event.hashes[-1]
        judged = self._reports.get(end)
        if judged is None or event.group in judged[1]:
            whole = event
            if event.window_tokens is not None and None in self._groups:
                same = (each for each in events if isinstance(each, EngineStored) and each.parent is None)
                found = (each for each in same if each.window_tokens is None and each.hashes[-1:] == [end])
                whole = next(found, event)
            is_whole = whole.window_tokens is None or None not in self._groups
            judged = self._reports[end] = (is_whole and self._could_have_resumed_within(whole), set())
        judged[1].add(event.group)
        if judged[0]:
            self.note_report(event)
        return judged[0]

    def note_report(self, event: EngineStored) -> None:
        """Take note of a report: its request continues behind it, and so does one that computed all that was held."""
        if not self.is_judged:
            self._note_end(event.hashes[-1])

    def _could_have_resumed_within(self, event: EngineStored) -> bool:
        hashes, tier, again = event.hashes, event.tier, self.recomputed_blocks
        full = self._groups.get(None)
        if full is not None and any(each not in copies[tier] for copies in full.members.values() for each in hashes):
            return False
        others = [each for each in self._groups.values() if each.needs not in (None, NOT_RESUMABLE)]
        return any(
            all(self._is_resumable(each, event, end) for each in others) for end in range(len(hashes) - again, 0, -1)
        )

    def _is_resumable(self, group: WireGroup, event: EngineStored, end: int) -> bool:
        """Return whether a group holds what it needs behind so many blocks of an event."""
        needs = group.needs
        assert needs is not None, "full attention has no needs of its own"
        step = needs.stride_blocks * self._block_size // event.block_size
        if not step or end % step:
            return False
        needed, last = needs.needed_blocks, end
        if needed > 1 and self.recomputes_windows:
            needed, last = needed + self.recomputed_blocks, end + self.recomputed_blocks * step
        below = event.hashes[max(0, last - needed * step) : last][step - 1 :: step]
        return last <= len(event.hashes) and all(
            each in copies[event.tier] for each in below for copies in group.members.values()
        )

    # What is computed again

    def presume(self) -> None:
        """Count a first resumption before a block that could have been reused, unless one behind all is known.

        Such an engine sends a message for each step: what an answer does not continue in time, another request does.
        """
        self._is_presumed = True
        if not self._resumed:
            self._recomputed, self.recomputed_blocks = max(1, self._recomputed), 1

    def judge(self, event: EngineStored) -> bool:
        """Look where a request resumed, by what full attention stores; return whether what is known of it changed."""
        if event.tier is not Tier.DEVICE:
            return False
        hashes, parent, before = event.hashes, event.parent, (self.recomputed_blocks, self.recomputes_windows)
        told, requests = self._ends.pop(parent, (0, 0))
        if requests > 1:
            self._ends[parent] = told, requests - 1
        # An answer takes a message for each token at most until it fills the next block.
        recent = self._messages - (PREFILL_MESSAGES if len(hashes) > 1 else event.block_size)
        is_continued = requests > 0 and told >= recent
        self._note_end(hashes[-1])
        more = hashes[:-1]
        if parent is None:
            self._recomputed += self._begins_again(event)
        elif (more and self._could_have_resumed(event, more)) or self._doubts.pop(parent, None) is not None:
            self._recomputed += 1
        elif not is_continued and self._could_have_resumed(event, hashes):
            self._doubts[hashes[-1]] = self._messages
        elif not (is_continued if self._is_presumed else requests) and hashes[0] not in self._removed:
            full = self._groups[None].members.values()
            self._resumed += all(hashes[0] not in copies[event.tier] for copies in full)
        if parent is not None and not is_continued:
            self.recomputes_windows = self.recomputes_windows and not self._windows_lack(event)
        self.is_judged = self._recomputed + self._resumed >= RESUMPTIONS_MAX
        self.recomputed_blocks = int(self._recomputed > RECOMPUTED_SHARE * self._resumed)
        return (self.recomputed_blocks, self.recomputes_windows) != before

    def _begins_again(self, event: EngineStored) -> bool:
        """Return whether a prompt is computed from its beginning, of which the first block alone could be reused."""
        first, *more = event.hashes[:2]
        if not more or not self._removed.isdisjoint(event.hashes[:2]):
            return False
        full = self._groups[None].members.values()
        return all(more[0] not in copies[event.tier] for copies in full) and self._could_have_resumed(event, [first])

    def _windows_lack(self, event: EngineStored) -> bool:
        """Return whether a request resumed before a block that full attention held and a window did not."""
        engine_hash = event.hashes[0]
        full = self._groups[None].members.values()
        if engine_hash in self._removed or any(engine_hash not in copies[event.tier] for copies in full):
            return False
        return any(
            engine_hash in self._fresh
            or any(engine_hash not in copies[event.tier] for copies in group.members.values())
            for group in self._groups.values()
            if group.needs is not None and group.needs.needed_blocks > 1
        )

    def _note_end(self, engine_hash: int) -> None:
        _, requests = self._ends.pop(engine_hash, (0, 0))
        self._ends[engine_hash] = self._messages, requests + 1
        if len(self._ends) > RECENT_ENDS:
            self._ends.popitem(last=False)

    def _could_have_resumed(self, event: EngineStored, hashes: Sequence[int]) -> bool:
        """Return whether all groups held what they need behind some block of a chain before it was stored."""
        tier = event.tier
        states: list[Mapping[int, int]] = []
        windows: list[Mapping[int, int]] = []
        for group in self._groups.values():
            if group.needs == NOT_RESUMABLE:
                return False
            held = [copies[tier] for copies in group.members.values()]
            # Where a request resumed windows are whole: behind that place each block more is enough.
            (states if group.needs is not None and group.needs.needed_blocks == 1 else windows).extend(held)
        for engine_hash in hashes:
            if engine_hash in self._fresh or any(engine_hash not in held for held in windows):
                return False
            if all(engine_hash in held for held in states):
                return True
        return False
