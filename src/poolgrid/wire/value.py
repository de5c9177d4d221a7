"""What is equal when all its parts are, whoever made it."""

from __future__ import annotations

from typing import Any


class Value:  # noqa: PLW1641 - nobody looks one up
    """A value, which nobody changes. Not a struct: what is asked for so often is a plain place in memory where it is
    compiled."""

    __slots__ = ()

    def parts(self) -> tuple[Any, ...]:
        raise NotImplementedError

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Value) and type(self) is type(other) and self.parts() == other.parts()

    def __repr__(self) -> str:
        return f"{type(self).__name__}{self.parts()}"
