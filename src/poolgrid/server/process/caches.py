"""Caches within a budget, of bytes or of entries: the entry that was used longest ago goes first.

Rules
    1. What is kept never takes more than the budget. What alone takes more is not kept, and pushes nothing out.
    2. One thread at a time uses a ``BudgetedLru``; threads that share one bring a lock.
    3. ``TenantCaches`` divides one budget equally among all the tenants there are, not those that are active: what is
       found, kept or evicted for a tenant depends on its own requests alone, in every order of events.
    4. Parts are made at their first use. A new edition of the tenants (one was added or removed) begins with empty
       caches; what still comes from an older edition keeps nothing. Threads may use it at once.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")
C = TypeVar("C")

Shares = tuple[int, int]
"""How many tenants share a budget, and the edition of that number (``inference.cache_domain.CacheShares``)."""


class BudgetedLru(Generic[K, V]):
    """Values by key; ``size`` returns what an entry takes of the budget, the same each time it is asked."""

    def __init__(
        self, budget: int, size: Callable[[K, V], int], on_evict: Callable[[K, V], None] = lambda key, value: None
    ) -> None:
        """``on_evict`` is called for each entry that is pushed out or dropped, not of those that ``clear`` forgets."""
        self.budget = budget
        self.used = 0
        """What is taken of the budget."""
        self._size = size
        self._on_evict = on_evict
        self._kept: OrderedDict[K, V] = OrderedDict()
        self.touch: Callable[[K], None] = self._kept.move_to_end
        """Counts a key that is kept as used now; without a look-up, for callers that find values in another way."""

    def get(self, key: K) -> V | None:
        """Return what is kept under a key; it counts as used now."""
        found = self._kept.get(key)
        if found is not None:
            self._kept.move_to_end(key)
        return found

    def keep(self, key: K, value: V) -> bool:
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
        value = self._kept.pop(key, None)
        if value is not None:
            self.used -= self._size(key, value)
            self._on_evict(key, value)

    def clear(self) -> None:
        self._kept.clear()
        self.used = 0

    def __contains__(self, key: K) -> bool:
        return key in self._kept

    def __iter__(self) -> Iterator[K]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)


class TenantCaches(Generic[C]):
    """Caches by tenant; ``make`` returns an empty one of so many bytes at most."""

    def __init__(
        self, budget_bytes: int, make: Callable[[int], C], on_forget: Callable[[C], None] = lambda cache: None
    ) -> None:
        """``on_forget`` is called for each cache that a new edition of the tenants ends."""
        self._budget = budget_bytes
        self._make = make
        self._on_forget = on_forget
        self._shares: Shares = (1, 0)
        self._parts: dict[str, C] = {}
        self._lock = threading.Lock()

    def of(self, tenant: str, shares: Shares | None) -> C | None:
        """Return a tenant's cache; ``None`` where nothing is to be kept (no ``shares``, or those of an old edition)."""
        if shares is self._shares:
            part = self._parts.get(tenant)
            if part is not None:
                return part
        return None if shares is None else self._begun(tenant, shares)

    def clear(self) -> None:
        with self._lock:
            self._forget()

    def __iter__(self) -> Iterator[C]:
        return iter(list(self._parts.values()))

    def _begun(self, tenant: str, shares: Shares) -> C | None:
        with self._lock:
            if shares[1] < self._shares[1]:
                return None
            if shares != self._shares:
                self._forget()
            self._shares = shares
            part = self._parts.get(tenant)
            if part is None and len(self._parts) < shares[0]:
                part = self._parts[tenant] = self._make(self._budget // shares[0])
            return part

    def _forget(self) -> None:
        ended, self._parts = self._parts, {}
        for part in ended.values():
            self._on_forget(part)
