"""What was used last, within a budget: of bytes, or of entries where each counts as one.

Rules
    1. What is kept never takes more than ``budget``; what was used longest ago goes first.
    2. What alone takes more is not kept, and pushes nothing out.
    3. One thread at a time: whoever shares it among threads brings a lock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class BudgetedLru(Generic[K, V]):
    """Values by key; ``size`` says what an entry takes of the budget, the same each time it is asked."""

    def __init__(
        self, budget: int, size: Callable[[K, V], int], on_gone: Callable[[K, V], None] = lambda key, value: None
    ) -> None:
        """``on_gone`` is told of each entry that is pushed out or dropped, not of those that ``clear`` forgets."""
        self.budget = budget
        self.used = 0
        """What is taken of the budget."""
        self._size = size
        self._on_gone = on_gone
        self._kept: OrderedDict[K, V] = OrderedDict()
        self.touch: Callable[[K], None] = self._kept.move_to_end
        """Counts a key that is kept as used now; without a call of ours, for who finds values in another way."""

    def get(self, key: K) -> V | None:
        """Return what is kept under a key; it counts as used now."""
        found = self._kept.get(key)
        if found is not None:
            self._kept.move_to_end(key)
        return found

    def keep(self, key: K, value: V) -> bool:
        """Keep a value in place of what was there; return whether it is kept."""
        size = self._size(key, value)
        if size > self.budget:
            return False
        self.drop(key)
        self._kept[key] = value
        self.used += size
        while self.used > self.budget:
            self.drop(next(iter(self._kept)))
        return True

    def drop(self, key: K) -> None:
        """Forget a key, if it is kept."""
        value = self._kept.pop(key, None)
        if value is not None:
            self.used -= self._size(key, value)
            self._on_gone(key, value)

    def clear(self) -> None:
        """Forget everything."""
        self._kept.clear()
        self.used = 0

    def __contains__(self, key: K) -> bool:
        return key in self._kept

    def __iter__(self) -> Iterator[K]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)
