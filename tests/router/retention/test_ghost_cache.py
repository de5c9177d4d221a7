"""A ghost holds what a cache that evicts by priority would hold, and one without priorities is LRU."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from poolgrid.router.policies.retention.ghost_cache import GhostCache, Kept
from poolgrid.wire.requests import RETENTION_DEFAULT
from tests.examples import examples

LEVELS = st.lists(st.sampled_from(((90, 50), (60, 20), (35, 0), (20, 0))), min_size=1, max_size=3)
WORK = st.lists(
    st.tuples(st.lists(st.integers(1, 2), min_size=1, max_size=5).map(tuple), LEVELS, st.integers(0, 30)), max_size=25
)


def names(path: tuple[int, ...]) -> list[int]:
    return [int("".join(map(str, path[: depth + 1]))) for depth in range(len(path))]


@dataclass
class Naive:
    """Says of each granule by itself what holds for it, and looks through all of them."""

    capacity: int
    held: dict[int, int] = field(default_factory=dict)
    level: dict[int, tuple[int, float | None]] = field(default_factory=dict)
    idle: list[int] = field(default_factory=list)
    """What became idle first, first; what lapses becomes idle anew."""

    def evict_for(self, count: int, now_ms: float) -> None:
        due = [granule for granule in self.idle if (until := self.level[granule][1]) is not None and until <= now_ms]
        # In the order of their ends, and of equal ends in that in which they became idle.
        for granule in sorted(due, key=lambda granule: self.level[granule][1] or 0.0):
            self.idle.remove(granule)
            self.level[granule] = (RETENTION_DEFAULT, None)
            self.idle.append(granule)
        while self.idle and len(self.held) + count > self.capacity:
            gone = min(self.idle, key=lambda granule: (self.level[granule][0], self.idle.index(granule)))
            self.idle.remove(gone)
            del self.held[gone]

    def begin(self, granules: list[int], now_ms: float) -> int:
        found = 0
        while found < len(granules) and granules[found] in self.held:
            found += 1
        for granule in granules[:found]:
            self.held[granule] += 1
            if granule in self.idle:
                self.idle.remove(granule)
        if granules[found:]:
            self.evict_for(len(granules) - found, now_ms)
        for granule in granules[found:]:
            self.held[granule] = 1
        return found

    def end(self, granules: list[int], levels: list[tuple[int, int]], now_ms: float) -> None:
        for granule, (priority, duration_ms) in zip(reversed(granules), reversed(levels), strict=True):
            self.held[granule] -= 1
            self.level[granule] = (priority, now_ms + duration_ms if duration_ms else None)
            if not self.held[granule]:
                self.idle.append(granule)


@settings(max_examples=examples(30))
@given(WORK, st.integers(3, 12), st.booleans())
def test_a_ghost_finds_what_a_naive_cache_finds(
    work: list[tuple[tuple[int, ...], list[tuple[int, int]], int]], capacity: int, by_priority: bool
) -> None:
    ghost, naive = GhostCache(capacity), Naive(capacity)
    now_ms = 0.0
    strongest: dict[int, tuple[int, int]] = {}
    for path, levels, passed in work:
        now_ms += passed
        granules = names(path)
        each = sorted((levels * len(path))[: len(path)], reverse=True) if by_priority else [(35, 0)] * len(path)
        # As whoever says priorities makes sure of: none rises along a prompt, none falls below what hangs off it.
        lowest = (0, 0)
        for at in range(len(path) - 1, -1, -1):
            there = strongest.get(granules[at], (0, 0))
            lowest = (max(lowest[0], each[at][0], there[0]), max(lowest[1], each[at][1], there[1]))
            each[at] = strongest[granules[at]] = (lowest[0], lowest[1] if lowest[0] > 35 else 0)
        assert ghost.begin(granules, now_ms) == naive.begin(granules, now_ms)
        kept: list[Kept] = [(1, priority, duration_ms) for priority, duration_ms in each]
        ghost.end(granules, kept, now_ms)
        naive.end(granules, each, now_ms)
        assert len(ghost) == len(naive.held)


def test_what_a_request_holds_stays_and_what_nobody_asks_for_takes_room() -> None:
    ghost = GhostCache(3)
    assert ghost.begin([1, 12], 0.0) == 0
    ghost.add_spent(-1, RETENTION_DEFAULT, 0.0)
    assert ghost.begin([2], 1.0) == 0, "the one that nobody asks for made room"
    assert ghost.begin([1, 12], 2.0) == 2
    for _ in range(2):
        ghost.end([1, 12], [(2, RETENTION_DEFAULT, 0)], 3.0)
    ghost.end([2], [(1, 80, 0)], 3.0)
    ghost.add_spent(-2, 10, 4.0)
    assert len(ghost) == 3
    assert ghost.begin([1], 5.0) == 1, "the end of a prompt goes before its beginning"


def test_a_beginning_that_has_gone_takes_what_hung_off_it_with_it() -> None:
    ghost = GhostCache(3)
    ghost.begin([1, 12], 0.0)
    # Against the rule: the beginning is to go first.
    ghost.end([1, 12], [(1, 20, 0), (1, 80, 0)], 0.0)
    ghost.begin([2, 22], 1.0)
    ghost.end([2, 22], [(2, 90, 0)], 1.0)
    assert ghost.begin([1, 12], 2.0) == 0
    ghost.end([1, 12], [(2, 35, 0)], 3.0)
    assert ghost.begin([1, 12], 4.0) == 2
