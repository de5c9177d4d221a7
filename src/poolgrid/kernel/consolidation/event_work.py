"""What events cost the readers of a pool, and batches cut into parts that none of them has to do for long.

Rules
    1. The unit is about a microsecond of a router, at most: what events may cost, not what they mostly do.
    2. A batch of more than ``PART_UNITS`` becomes several records, a long chain several events. A single event of other
       kinds is never more than a part.
    3. What a later event of the same batch makes void is left out: blocks before the cache is cleared or restated, and
       all clearing but the last. A first ``SnapshotBegan`` stays: it lets a batch follow a gap.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from poolgrid.kernel.wire.events import (
    AnyEvent,
    BlocksReleased,
    BlocksRemoved,
    BlocksShared,
    BlocksStored,
    CacheCleared,
    SnapshotBegan,
    SnapshotEnded,
)

PART_UNITS: Final = 2048
"""Of one record, which a router applies in one go: a request takes some forty turns of its loop."""

UNITS_PER_MS: Final = 1000

EVENT_UNITS: Final = 8
"""Of any event."""

CLEAR_UNITS: Final = 4096
"""Of one that voids a worker's cache: sessions and requests of it are looked through."""

HASH_BYTES: Final = 8

UNITS_PER_HASH: Final[Mapping[type[Any], int]] = {
    BlocksStored: 1,
    BlocksRemoved: 16,
    BlocksShared: 1,
    BlocksReleased: 1,
}
"""Blocks that go from the middle of others cost ten times as much as those that come."""

_BLOCKS: Final = frozenset(UNITS_PER_HASH)
CLEARS: Final = frozenset((CacheCleared, SnapshotBegan))
"""Events that void all that was known of a worker's blocks."""


def units_of(events: Iterable[AnyEvent]) -> int:
    """Return what events may cost."""
    units = 0
    for event in events:
        kind = type(event)
        units += EVENT_UNITS
        per_hash = UNITS_PER_HASH.get(kind)
        if per_hash is not None:
            units += len(event.sequence_hashes) // HASH_BYTES * per_hash  # type: ignore[union-attr]
        elif kind in CLEARS:
            units += CLEAR_UNITS
    return units


def parts_of(events: list[AnyEvent]) -> list[list[AnyEvent]]:
    """Return the events of a batch as those of the records that it becomes; one list at least."""
    if len(events) > 1 and not CLEARS.isdisjoint(map(type, events)):
        events = _without_void(events)
    if units_of(events) <= PART_UNITS:
        return [events]
    parts: list[list[AnyEvent]] = [[]]
    left = PART_UNITS
    for event in _short(events):
        units = units_of((event,))
        if units > left and parts[-1]:
            parts.append([])
            left = PART_UNITS
        parts[-1].append(event)
        left -= units
    return parts


def _without_void(events: Sequence[AnyEvent]) -> list[AnyEvent]:
    kept: list[AnyEvent] = []
    later: set[type[Any]] = set()
    for event in reversed(events):
        kind = type(event)
        if kind in _BLOCKS:
            is_void = bool(later)
        elif kind in CLEARS:
            is_void = kind in later
        else:
            is_void = kind is SnapshotEnded and SnapshotBegan in later
        if kind in CLEARS:
            later.add(kind)
        if not is_void:
            kept.append(event)
    kept.reverse()
    if type(events[0]) is SnapshotBegan and kept[0] is not events[0]:
        kept.insert(0, events[0])
    return kept


def _short(events: Iterable[AnyEvent]) -> Iterator[AnyEvent]:
    """Yield events, those of many blocks as several of few."""
    for event in events:
        per_hash = UNITS_PER_HASH.get(type(event))
        if per_hash is None:
            yield event
            continue
        packed: bytes = event.sequence_hashes  # type: ignore[union-attr]
        step = (PART_UNITS - EVENT_UNITS) // per_hash * HASH_BYTES
        if len(packed) <= step:
            yield event
            continue
        for at in range(0, len(packed), step):
            piece = packed[at : at + step]
            match event:
                case BlocksStored(parent, _, tier, group):
                    before = parent if not at else int.from_bytes(packed[at - HASH_BYTES : at], "little")
                    yield BlocksStored(before, piece, tier, group)
                case BlocksRemoved(_, tier, group):
                    yield BlocksRemoved(piece, tier, group)
                case _:
                    yield event  # of a source: the consolidator ignores it
                    break
