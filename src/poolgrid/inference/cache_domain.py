"""Whose a request is, for every cache: nothing that one tenant keeps can be found or pushed out by another."""

from __future__ import annotations

from typing import Final, NamedTuple


class CacheShares(NamedTuple):
    """Among how many tenants caches are divided."""

    tenants: int
    edition: int
    """Grows with every change of the tenants."""


class CacheDomain(NamedTuple):
    """Requests that may find a request's blocks in a cache: those of the same tenant with the same salt."""

    tenant: str
    salt: str
    """As the client wrote it. Salts of one tenant share its part of a cache."""
    shares: CacheShares


WHOLE: Final = CacheShares(1, 0)
"""Without API keys all clients are one tenant."""

EVERYBODY: Final = CacheDomain("", "", WHOLE)
