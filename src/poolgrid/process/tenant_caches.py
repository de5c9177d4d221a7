"""A cache for each tenant, each with an equal part of one budget: nothing that one keeps can be told by another.

Rules
    1. A tenant's part is ``budget // tenants``, of all the tenants there are, not of those that are active: what is
       found, kept or evicted for a tenant depends on its own requests alone, in every order of events.
    2. Parts are made at their first use and never larger than that, so all of them together keep to the budget.
    3. A new edition of the tenants (one was added or removed) begins with empty caches. What still comes from an older
       edition keeps nothing.
    4. Threads may use it at once.

Within a tenant, what it keeps is told apart by salts: an entry is found by requests of its own salt only. Salts of one
tenant share its part, so one salt's use can push out what another kept.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Final, Generic, NamedTuple, TypeVar

C = TypeVar("C")


class CacheShares(NamedTuple):
    """Among how many tenants caches are divided."""

    tenants: int
    edition: int
    """Grows with every change of who they are."""


class CacheDomain(NamedTuple):
    """Who may find what a request leaves in a cache: requests of the same tenant with the same salt."""

    tenant: str
    salt: str
    """As the client wrote it."""
    shares: CacheShares


WHOLE: Final = CacheShares(1, 0)
"""Without API keys all clients are one tenant."""

EVERYBODY: Final = CacheDomain("", "", WHOLE)


class TenantCaches(Generic[C]):
    """Caches by tenant; ``make`` returns an empty one of so many bytes at most."""

    def __init__(
        self, budget_bytes: int, make: Callable[[int], C], on_forget: Callable[[C], None] = lambda cache: None
    ) -> None:
        """``on_forget`` is told of each cache that a new edition of the tenants ends."""
        self._budget = budget_bytes
        self._make = make
        self._on_forget = on_forget
        self._shares = WHOLE
        self._parts: dict[str, C] = {}
        self._lock = threading.Lock()

    def of(self, tenant: str, shares: CacheShares | None) -> C | None:
        """Return a tenant's cache; ``None`` where nothing is to be kept (no ``shares``, or those of an old edition)."""
        if shares is self._shares:
            part = self._parts.get(tenant)
            if part is not None:
                return part
        return None if shares is None else self._begun(tenant, shares)

    def clear(self) -> None:
        """End every cache."""
        with self._lock:
            self._forget()

    def __iter__(self) -> Iterator[C]:
        return iter(list(self._parts.values()))

    def _begun(self, tenant: str, shares: CacheShares) -> C | None:
        with self._lock:
            if shares.edition < self._shares.edition:
                return None
            if shares != self._shares:
                self._forget()
            self._shares = shares
            part = self._parts.get(tenant)
            if part is None and len(self._parts) < shares.tenants:
                part = self._parts[tenant] = self._make(self._budget // shares.tenants)
            return part

    def _forget(self) -> None:
        ended, self._parts = self._parts, {}
        for part in ended.values():
            self._on_forget(part)
