"""A history of runs knows of every granule what one that keeps each by itself knows."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poolgrid.router.policies.retention.prefix_history import PrefixHistory, PrefixRun
from tests.examples import examples

PATHS = st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=7).map(tuple), max_size=30)


def names(path: tuple[int, ...]) -> list[int]:
    """Return names of which each stands for all before it."""
    return [int("".join(map(str, path[: depth + 1]))) for depth in range(len(path))]


def visit(history: PrefixHistory, granules: list[int], now_ms: float) -> list[tuple[int, int, float]]:
    """Let a prompt come; return of each granule that was known how often it had come, and when last."""
    found = history.find(granules)
    known = [(granule, run.visits, run.last_ms) for _, run, size in found for granule in run.granules[:size]]
    if found and found[-1][2] < len(found[-1][1].granules):
        number, _, size = found[-1]
        found[-1] = (number, history.cut(number, size), size)
    chain: list[tuple[int | None, PrefixRun]] = [
        (number, PrefixRun(run.granules, run.visits + 1, now_ms)) for number, run, _ in found
    ]
    if len(known) < len(granules):
        chain.append((None, PrefixRun(tuple(granules[len(known) :]), 1, now_ms)))
    history.note(chain)
    return known


@dataclass
class Naive:
    """Keeps each granule by itself."""

    seen: dict[int, tuple[int, float]] = field(default_factory=dict)

    def visit(self, granules: list[int], now_ms: float) -> list[tuple[int, int, float]]:
        known = []
        for granule in granules:
            if granule not in self.seen:
                break
            known.append((granule, *self.seen[granule]))
        for granule in granules:
            self.seen[granule] = (self.seen.get(granule, (0, 0.0))[0] + 1, now_ms)
        return known


@settings(max_examples=examples(30))
@given(PATHS)
def test_it_knows_of_each_granule_how_often_it_came_and_when_last(paths: list[tuple[int, ...]]) -> None:
    history, naive = PrefixHistory(), Naive()
    for at, path in enumerate(paths):
        assert visit(history, names(path), float(at)) == naive.visit(names(path), float(at))
    assert len(history) == len(naive.seen)
    assert sum(len(run.granules) for run in history.runs()) == len(naive.seen)


@settings(max_examples=examples(30))
@given(PATHS, st.integers(1, 12))
def test_what_is_forgotten_is_never_the_beginning_of_what_is_known(
    paths: list[tuple[int, ...]], granules_max: int
) -> None:
    history = PrefixHistory(granules_max)
    for at, path in enumerate(paths):
        visit(history, names(path), float(at))
        assert len(history) <= granules_max
        known = {granule for run in history.runs() for granule in run.granules}
        assert all(granule < 10 or granule // 10 in known for granule in known)


@settings(max_examples=examples(33))
@given(PATHS)
def test_a_history_that_was_restored_goes_on_alike(paths: list[tuple[int, ...]]) -> None:
    history, other = PrefixHistory(6), PrefixHistory(6)
    half = len(paths) // 2
    for at, path in enumerate(paths[:half]):
        visit(history, names(path), float(at))
    other.restore(history.runs())
    for at, path in enumerate(paths[half:]):
        assert visit(history, names(path), 100.0 + at) == visit(other, names(path), 100.0 + at)
    assert history.runs() == other.runs()


def test_a_history_has_room_for_one_at_least() -> None:
    with pytest.raises(ValueError, match="granules_max is 0"):
        PrefixHistory(0)
