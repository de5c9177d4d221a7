"""Whose something is that a client may ask for again: a response, an image, a video."""

from __future__ import annotations

from typing import NamedTuple

from poolgrid.server.frontend.access.tenants import Caller


class Owner(NamedTuple):
    """Whose something is."""

    name: str
    owners: int
    """Among how many the budget is divided."""


def owner_of(caller: Caller | None, isolated: bool) -> Owner | None:
    """Return whose the things of a caller are; ``None`` when clients are to be distinguished and cannot be."""
    if caller is not None:
        return Owner(caller.tenant, caller.account.cache_shares.tenants)
    return None if isolated else Owner("", 1)
