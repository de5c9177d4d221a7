"""A budget is kept to whatever is kept, used and dropped, as by a list that is sorted by use."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from poolgrid.process.budgeted_lru import BudgetedLru

BUDGET = 10
steps = st.lists(st.tuples(st.sampled_from(["keep", "get", "drop", "clear"]), st.integers(0, 5), st.integers(1, 12)))


@given(steps)
def test_it_keeps_what_a_naive_list_keeps(steps: list[tuple[str, int, int]]) -> None:
    gone: list[tuple[int, int]] = []
    lru: BudgetedLru[int, int] = BudgetedLru(BUDGET, lambda key, size: size, lambda key, size: gone.append((key, size)))
    naive: list[tuple[int, int]] = []
    left: list[tuple[int, int]] = []
    for what, key, size in steps:
        there = [entry for entry in naive if entry[0] == key]
        if what == "get":
            assert lru.get(key) == (there[0][1] if there else None)
            naive = [entry for entry in naive if entry[0] != key] + there
        elif what == "drop":
            lru.drop(key)
            naive = [entry for entry in naive if entry[0] != key]
            left += there
        elif what == "clear":
            lru.clear()
            naive = []
        else:
            assert lru.keep(key, size) == (size <= BUDGET)
            if size <= BUDGET:
                naive = [*(entry for entry in naive if entry[0] != key), (key, size)]
                left += there
                while sum(each for _, each in naive) > BUDGET:
                    left.append(naive.pop(0))
        assert [(each, lru._kept[each]) for each in lru] == naive
        assert lru.used == sum(each for _, each in naive) <= BUDGET
        assert len(lru) == len(naive)
        assert gone == left
