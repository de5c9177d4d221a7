"""Builds the wire's cache events from single facts, in order, with neighbours joined.

Rules: facts never overtake each other; removals that follow each other on one tier become one ``BlocksRemoved``; moves
that follow each other become one ``BlocksStored`` per chain on the new tier, then one ``BlocksRemoved`` on the old.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from poolgrid.kernel.wire.events import AnyEvent, BlocksRemoved, BlocksStored, CacheCleared, GroupsReported
from poolgrid.kernel.wire.hashing import hash_array, pack_hashes
from poolgrid.kernel.wire.identifiers import Tier
from poolgrid.kernel.wire.limits import BLOCKS_PER_EVENT_MAX
from poolgrid.kernel.wire.requests import Generate, KvRetention, RetainedTokens

CacheEvent = BlocksStored | BlocksRemoved
RestatedEvent = BlocksStored | GroupsReported
"""Event that reports a whole cache."""
CACHE_EVENTS = frozenset({BlocksStored, BlocksRemoved})
"""For readers that look for something else in a step's events, nearly all of which are these."""


def stored_chain(parent: int | None, hashes: Sequence[int], tier: Tier) -> list[BlocksStored]:
    """Return the events that report a chain as stored, split where one event would break its limit."""
    if len(hashes) <= BLOCKS_PER_EVENT_MAX:
        return [BlocksStored(parent, pack_hashes(hashes), tier)] if hashes else []
    events = []
    for at in range(0, len(hashes), BLOCKS_PER_EVENT_MAX):
        events.append(BlocksStored(parent, pack_hashes(hashes[at : at + BLOCKS_PER_EVENT_MAX]), tier))
        parent = hashes[min(at + BLOCKS_PER_EVENT_MAX, len(hashes)) - 1]
    return events


def chains(links: Iterable[tuple[int, int | None]]) -> list[tuple[int | None, list[int]]]:
    """Group ``(sequence_hash, parent)`` links into chains of neighbours, each ``(parent, hashes in order)``.

    Neighbours may come parents first or children first; the order of the chains is that of their first link.
    """
    grouped: list[tuple[int | None, list[int]]] = []
    run: list[tuple[int, int | None]] = []
    direction = 0  # 1 = parents first, -1 = children first, 0 = not known yet

    def close() -> None:
        ordered = run[::-1] if direction < 0 else run
        grouped.append((ordered[0][1], [link[0] for link in ordered]))

    for link in links:
        if run:
            last = run[-1]
            if direction >= 0 and link[1] is not None and link[1] == last[0]:
                direction = 1
                run.append(link)
                continue
            if direction <= 0 and last[1] is not None and last[1] == link[0]:
                direction = -1
                run.append(link)
                continue
            close()
        run = [link]
        direction = 0
    if run:
        close()
    return grouped


class CacheFacts:
    """Collects facts about blocks and hands them over as wire events."""

    def __init__(self) -> None:
        self._events: list[CacheEvent | GroupsReported] = []
        self._removed: list[int] = []
        self._removed_tier = Tier.DEVICE
        self._moved: list[tuple[int, int | None]] = []
        self._moved_tiers = (Tier.DEVICE, Tier.HOST)

    def stored(self, parent: int | None, hashes: Sequence[int], tier: Tier) -> None:
        if self._removed or self._moved:
            self._close()
        self._events += stored_chain(parent, hashes, tier)

    def stored_one(self, parent: int | None, sequence_hash: int, tier: Tier) -> None:
        """Note one new block: what ``stored`` does with a chain of one, in a fraction of the time."""
        if self._removed or self._moved:
            self._close()
        self._events.append(BlocksStored(parent, sequence_hash.to_bytes(8, "little"), tier))

    def removed(self, hashes: Iterable[int], tier: Tier) -> None:
        if self._moved or (self._removed and self._removed_tier is not tier):
            self._close()
        self._removed_tier = tier
        self._removed.extend(hashes)

    def removed_one(self, sequence_hash: int, tier: Tier) -> None:
        if self._moved or (self._removed and self._removed_tier is not tier):
            self._close()
        self._removed_tier = tier
        self._removed.append(sequence_hash)

    def moved(self, links: Iterable[tuple[int, int | None]], source: Tier, target: Tier) -> None:
        """Note blocks, each with its parent, that went from one tier to another."""
        if self._removed or (self._moved and self._moved_tiers != (source, target)):
            self._close()
        self._moved_tiers = (source, target)
        self._moved.extend(links)

    def append(self, event: CacheEvent | GroupsReported) -> None:
        self._close()
        self._events.append(event)

    def take(self) -> list[CacheEvent | GroupsReported]:
        self._close()
        events, self._events = self._events, []
        return events

    def _close(self) -> None:
        if self._removed:
            self._append_removed(self._removed, self._removed_tier)
            self._removed = []
        if self._moved:
            source, target = self._moved_tiers
            for parent, hashes in chains(self._moved):
                self._events += stored_chain(parent, hashes, target)
            self._append_removed([sequence_hash for sequence_hash, _ in self._moved], source)
            self._moved = []

    def _append_removed(self, hashes: list[int], tier: Tier) -> None:
        if len(hashes) <= BLOCKS_PER_EVENT_MAX:
            self._events.append(BlocksRemoved(pack_hashes(hashes), tier))
            return
        for at in range(0, len(hashes), BLOCKS_PER_EVENT_MAX):
            self._events.append(BlocksRemoved(pack_hashes(hashes[at : at + BLOCKS_PER_EVENT_MAX]), tier))


class ReportedBlocks:
    """The blocks of one rank by KV group and tier, each with its parent, as reported: to be reported again."""

    def __init__(self) -> None:
        self._groups: GroupsReported | None = None
        self._held: dict[Tier, dict[int, int | None]] = {tier: {} for tier in Tier}
        self._of_groups: dict[tuple[int, Tier], dict[int, int | None]] = {}

    def __bool__(self) -> bool:
        return any(self._held.values()) or any(self._of_groups.values())

    def count_on(self, tier: Tier) -> int:
        return len(self._held[tier])

    def apply(self, events: Iterable[AnyEvent]) -> None:
        for event in events:
            if type(event) is BlocksStored:
                held = self._of_group(event)
                hashes = hash_array(event.sequence_hashes)
                held.update(zip(hashes, (event.parent, *hashes[:-1]), strict=True))
            elif type(event) is BlocksRemoved:
                held = self._of_group(event)
                for sequence_hash in hash_array(event.sequence_hashes):
                    held.pop(sequence_hash, None)
            elif type(event) is CacheCleared:
                for held in (*self._held.values(), *self._of_groups.values()):
                    held.clear()
            elif type(event) is GroupsReported:
                self._groups = event

    def _of_group(self, event: BlocksStored | BlocksRemoved) -> dict[int, int | None]:
        return self._of_groups.setdefault((event.group, event.tier), {}) if event.group else self._held[event.tier]

    def restate(self) -> list[RestatedEvent]:
        """Return all of it: the groups, then parents before children, tier by tier."""
        events: list[RestatedEvent] = [] if self._groups is None else [self._groups]
        places = {(0, tier): held for tier, held in self._held.items()} | self._of_groups
        for (group, tier), held in places.items():
            for parent, hashes in chains(held.items()):
                events += [
                    BlocksStored(each.parent, each.sequence_hashes, tier, group)
                    for each in stored_chain(parent, hashes, tier)
                ]
        return events


RETURN_PRIORITY: Final = 50
"""Above blocks of which nothing is asked (35), below the most that a client can ask for (100)."""


def retention_of(request: Generate) -> KvRetention | None:
    """Return what a request asks of its engine; ``None`` = nothing.

    ``Generate.retention`` decides where it is given. Without it the prompt stays until its session's next turn is
    expected
    (``SessionTurn.return_ms``), and the part that the client has kept (``keep_tokens``) for the longer of both times.
    """
    turn = request.turn
    if request.retention is not None or turn is None or not (turn.return_ms or turn.keep_tokens):
        return request.retention
    kept, return_ms = (turn.keep_tokens if turn.keep_ms > turn.return_ms else 0), turn.return_ms
    ranges = (RetainedTokens(0, kept, RETURN_PRIORITY, turn.keep_ms),) if kept else ()
    if not return_ms:
        return KvRetention(ranges)
    return KvRetention((*ranges, RetainedTokens(kept, None, RETURN_PRIORITY, return_ms)), RETURN_PRIORITY, return_ms)
