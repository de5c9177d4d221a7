"""Counts by second: right for the last five minutes whatever the rate, and bounded."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from poolgrid.kernel.wire.answers import SECONDS_KEPT, SecondCounts


@given(st.lists(st.tuples(st.integers(0, 20_000), st.integers(0, 9)), max_size=60))
def test_counts_are_those_of_each_second(requests: list[tuple[int, int]]) -> None:
    counts, naive = SecondCounts(), Counter[int]()
    for time_ms, tokens in requests:
        counts.add(time_ms, (1, tokens, 0))
        naive[time_ms // 1000] += tokens
    assert {int(second): row[1] for second, row in counts.rows().items()} == dict(naive)
    assert sum(row[0] for row in counts.rows().values()) == len(requests)


def test_the_last_five_minutes_are_kept_and_no_more() -> None:
    counts = SecondCounts()
    for second in range(2000):
        for _ in range(3):
            counts.add(second * 1000, (1, 10, 4))
    rows = counts.rows()
    assert len(rows) == SECONDS_KEPT
    assert set(rows) == {str(second) for second in range(2000 - SECONDS_KEPT, 2000)}
    assert set(rows.values()) == {(3, 30, 12)}


@given(st.lists(st.tuples(st.integers(0, 9), st.lists(st.integers(0, 9), min_size=3, max_size=3)), max_size=40))
def test_whole_rows_of_a_second_add_up(rows: list[tuple[int, list[int]]]) -> None:
    counts = SecondCounts()
    naive: dict[str, list[int]] = {}
    for second, row in rows:
        counts.add(second * 1000 + 999, row)
        known = naive.setdefault(str(second), [0, 0, 0])
        naive[str(second)] = [known[at] + row[at] for at in range(3)]
    assert counts.rows() == {second: tuple(row) for second, row in naive.items()}


def test_whole_rows_are_kept_for_five_minutes() -> None:
    counts = SecondCounts()
    for second in range(1000):
        counts.add(second * 1000, (1, 2))
    assert list(counts.rows()) == [str(second) for second in range(1000 - SECONDS_KEPT, 1000)]
