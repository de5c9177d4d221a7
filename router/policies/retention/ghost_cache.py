"""What a worker's cache would hold: in granules, with priorities or without, for the same requests.

Two ghosts of one worker differ in nothing but the priorities, so what one finds more than the other is due to these.
They evict as TensorRT-LLM does: the lowest priority first, of one priority what lies idle longest, and what a request
holds never. A priority above the usual one lapses; what lapsed counts as one of the newest.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from itertools import repeat

import msgspec

from poolgrid.wire.requests import RETENTION_DEFAULT

Kept = tuple[int, int, int]
"""Granules, and the priority and duration in ms (0 = for ever) of each of them."""


class GhostState(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """All that a ghost is, as values."""

    capacity: int
    refs: dict[int, int]
    idle: list[tuple[int, list[int]]]
    """By priority, as they were first used: granules, that which lies longest first."""
    priority: dict[int, tuple[int, int]]
    lapses: list[tuple[float, int, Sequence[int]]]
    made: int


class GhostCache:
    """One cache of ``capacity`` granules."""

    __slots__ = ("_idle", "_lapses", "_made", "_priority", "_refs", "capacity")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._refs: dict[int, int] = {}
        self._idle: dict[int, OrderedDict[int, None]] = {RETENTION_DEFAULT: OrderedDict()}
        """By priority, what nobody holds, that which lies longest first."""
        self._priority: dict[int, tuple[int, int]] = {}
        """Of granules with another priority than the usual one: it, and the number of the release that gave it."""
        self._lapses: list[tuple[float, int, Sequence[int]]] = []
        """A heap: when a release's priority lapses, its number, and the granules that it was for."""
        self._made = 0

    def __len__(self) -> int:
        return len(self._refs)

    def begin(self, granules: Sequence[int], now_ms: float) -> int:
        """Hold a prompt, and return how many of its leading granules were there."""
        refs, idle, priority = self._refs, self._idle, self._priority
        found = 0
        for granule in granules:
            held = refs.get(granule)
            if held is None:
                break
            found += 1
            if not held:
                own = priority.get(granule)
                del idle[RETENTION_DEFAULT if own is None else own[0]][granule]
            refs[granule] = held + 1
        fresh = granules[found:]
        if fresh:
            if not refs.keys().isdisjoint(fresh):
                self._drop([granule for granule in fresh if granule in refs])
            self._make_room(len(fresh), now_ms)
            refs.update(dict.fromkeys(fresh, 1))
        return found

    def end(self, granules: Sequence[int], kept: Sequence[Kept], now_ms: float) -> None:
        """Let go of a prompt; ``kept`` says, from its front, how long its granules stay."""
        refs, priorities = self._refs, self._priority
        at = len(granules)
        for count, priority, duration_ms in reversed(kept):
            self._made += 1
            idle = self._idle.get(priority)
            if idle is None:
                idle = self._idle[priority] = OrderedDict()
            for granule in reversed(granules[at - count : at]):
                held = refs[granule] = refs[granule] - 1
                if priority != RETENTION_DEFAULT:
                    priorities[granule] = (priority, self._made)
                elif granule in priorities:
                    del priorities[granule]
                if not held:
                    idle[granule] = None
            if duration_ms:
                heappush(self._lapses, (now_ms + duration_ms, self._made, granules[at - count : at]))
            at -= count
        if len(self._lapses) > 2 * self.capacity + 64:
            self._lapses = [lapse for lapse in self._lapses if any(map(self._holds, lapse[2], repeat(lapse[1])))]
            heapify(self._lapses)

    def add_spent(self, granule: int, priority: int, now_ms: float) -> None:
        """Add an idle granule that nobody will ask for."""
        self._make_room(1, now_ms)
        self._refs[granule] = 0
        if priority != RETENTION_DEFAULT:
            self._priority[granule] = (priority, 0)
        self._idle.setdefault(priority, OrderedDict())[granule] = None

    def state(self) -> GhostState:
        """Return a copy of all of it."""
        return GhostState(
            self.capacity,
            dict(self._refs),
            [(priority, list(idle)) for priority, idle in self._idle.items()],
            dict(self._priority),
            list(self._lapses),
            self._made,
        )

    @classmethod
    def of_state(cls, state: GhostState) -> GhostCache:
        """Return a ghost that goes on from what another one was."""
        ghost = cls(state.capacity)
        ghost._refs = dict(state.refs)
        ghost._idle = {priority: OrderedDict.fromkeys(granules) for priority, granules in state.idle}
        ghost._priority = dict(state.priority)
        ghost._lapses = list(state.lapses)
        ghost._made = state.made
        return ghost

    def _holds(self, granule: int, made: int) -> bool:
        """Tell whether an idle granule still has the priority that this release gave it."""
        own = self._priority.get(granule)
        return own is not None and own[1] == made and self._refs.get(granule) == 0

    def _drop(self, granules: Sequence[int]) -> None:
        """Forget idle granules whose beginning has gone: nobody can find them."""
        for granule in granules:
            own = self._priority.pop(granule, None)
            del self._idle[RETENTION_DEFAULT if own is None else own[0]][granule], self._refs[granule]

    def _make_room(self, count: int, now_ms: float) -> None:
        lapses, refs, priorities = self._lapses, self._refs, self._priority
        while lapses and lapses[0][0] <= now_ms:
            _, made, granules = heappop(lapses)
            for granule in reversed(granules):
                if self._holds(granule, made):
                    del self._idle[priorities.pop(granule)[0]][granule]
                    self._idle[RETENTION_DEFAULT][granule] = None
        missing = len(refs) + count - self.capacity
        if missing <= 0:
            return
        for priority in sorted(self._idle):
            idle = self._idle[priority]
            while idle and missing > 0:
                granule = idle.popitem(last=False)[0]
                del refs[granule]
                priorities.pop(granule, None)
                missing -= 1
            if missing <= 0:
                return
