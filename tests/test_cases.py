"""A test of many cases in one runs all of them and names those that fail."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from tests.cases import for_each


def test_every_case_runs_and_those_that_fail_are_named(tmp_path: Path) -> None:
    @for_each("number, limit", [(1, 2), (3, 2), (0, 2), (4, 2)])
    def small(tmp_path: Path, number: int, limit: int) -> None:
        (tmp_path / str(number)).touch()
        assert number < limit

    assert list(inspect.signature(small).parameters) == ["tmp_path"], "what is left are fixtures"
    with pytest.raises(ExceptionGroup, match="2 of 4 cases failed") as raised:
        small(tmp_path=tmp_path)

    notes = [each.__notes__ for each in raised.value.exceptions]
    assert notes == [[f"in the case {{'number': {number}, 'limit': 2}}"] for number in (3, 4)]
    assert len(list(tmp_path.iterdir())) == 4


def test_coroutine_is_refused_which_would_pass_unawaited() -> None:
    async def test(number: int) -> None: ...

    with pytest.raises(AssertionError, match="never be awaited"):
        for_each("number", [1])(test)  # type: ignore[arg-type]


def test_no_cases_are_a_failure() -> None:
    with pytest.raises(AssertionError, match="there are no cases"):
        for_each("number", [])(lambda number: None)()
