"""Tests of many small cases in one: each parametrized case costs pytest and xdist 5 ms, often more than its work."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, cast


def for_each(names: str, values: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test once for each value, and report every case that fails; for tests that change nothing."""
    cases = list(values)
    listed = names.split(", ")

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        assert not inspect.iscoroutinefunction(test), "a coroutine would never be awaited: parametrize the test"

        def every_case(**others: Any) -> None:
            failures: list[Exception] = []
            for case in cases:
                given = dict(zip(listed, case, strict=True)) if len(listed) > 1 else {names: case}
                try:
                    test(**others, **given)
                except Exception as error:
                    error.add_note(f"in the case {given!r}"[:500])
                    failures.append(error)
            assert cases, "there are no cases"
            if failures:
                raise ExceptionGroup(f"{len(failures)} of {len(cases)} cases failed", failures)

        def every_case_of(self: object, **others: Any) -> None:
            every_case(self=self, **others)

        signature = inspect.signature(test)
        left = [each for name, each in signature.parameters.items() if name not in listed]
        whole: Any = every_case_of if "self" in signature.parameters else every_case
        whole.__name__, whole.__doc__, whole.__module__ = test.__name__, test.__doc__, test.__module__
        whole.__signature__ = signature.replace(parameters=left)
        return cast("Callable[..., None]", whole)

    return decorate
