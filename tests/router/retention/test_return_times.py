"""What is kept is what brings most hits for its room, and as much of it as fits."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from poolgrid.router.policies.retention.return_times import (
    BINS,
    EDGES_MS,
    SHORTEST_MS,
    RetentionPlan,
    ReturnTimes,
    bin_of,
)
from tests.examples import examples


@given(st.floats(0.0, 1e8))
def test_a_time_is_in_the_first_bin_that_ends_after_it(gap_ms: float) -> None:
    found = bin_of(gap_ms)
    naive = next((at for at, edge_ms in enumerate(EDGES_MS) if gap_ms <= edge_ms * (1 + 1e-9)), BINS - 1)
    assert found == naive
    assert bin_of(0.0) == bin_of(SHORTEST_MS) == 0


def seen(*kinds: tuple[int, int, float], for_ms: float = 600_000.0) -> ReturnTimes:
    """Return the times of kinds that came so often and of which so many returned, each after so long."""
    times = ReturnTimes(len(kinds), len(kinds))
    times.age(0.0)
    for kind, (visits, returns, gap_ms) in enumerate(kinds):
        times.note_visit(kind, visits)
        if returns:
            times.note_return(kind, gap_ms, returns)
    times.age(for_ms)
    return times


def test_with_room_for_all_everything_that_returns_is_kept() -> None:
    plan = seen((10_000, 5_000, 60_000.0), (10_000, 100, 300_000.0)).plan(1e9)
    assert plan.keep.keys() == {0, 1}
    assert plan.keep[0].duration_ms >= 60_000
    assert plan.keep[1].duration_ms >= 300_000


def test_with_little_room_what_returns_more_often_for_its_room_goes_first() -> None:
    times = seen((10_000, 5_000, 60_000.0), (10_000, 5_000, 600_000.0), (10_000, 0, 0.0))
    plan = times.plan(1_200.0)
    assert 0 in plan.keep
    assert 1 not in plan.keep
    assert 2 not in plan.keep
    wide = times.plan(1e9)
    assert wide.keep[0].worth > wide.keep[1].worth


def test_of_what_does_not_fit_whole_a_share_of_the_prompts_is_kept() -> None:
    plan = seen((60_000, 30_000, 60_000.0)).plan(2_000.0)
    assert not plan.keep
    assert plan.more
    assert 0.0 < plan.share < 1.0
    assert plan.of(plan.share / 2) is plan.more
    assert plan.of(plan.share) is plan.keep


@settings(max_examples=examples(20))
@given(
    kinds=st.lists(
        st.tuples(st.integers(0, 100_000), st.floats(0.0, 1.0), st.floats(0.0, 4_000_000.0)), min_size=1, max_size=6
    ),
    room=st.floats(1.0, 1e6),
)
def test_what_is_kept_fits_and_more_room_never_keeps_less(kinds: list[tuple[int, float, float]], room: float) -> None:
    times = seen(*((visits, int(visits * share), gap_ms) for visits, share, gap_ms in kinds))

    def demand(plan: RetentionPlan) -> float:
        """As much room as what is kept can take at most: all of it for all of its time."""
        per_ms = {kind: times.visits[kind] / times.weight_ms for kind in plan.keep}
        return sum(per_ms[kind] * keep.duration_ms * (1.0 - keep.returns) for kind, keep in plan.keep.items())

    small, large = times.plan(room), times.plan(room * 4.0)
    # At a price of 1 nothing is cheap enough, and what brings a hit each second is kept all the same.
    assert small.price == 1.0 or demand(small) <= room * 1.001
    assert large.price <= small.price * 1.001
    assert small.keep.keys() <= large.keep.keys()
    assert 0.0 <= small.share <= 1.0
    for keep in small.keep.values():
        assert keep.worth >= 0.999
        assert 0.0 < keep.returns <= 1.0
