"""What the routers of a pool share: limits of tenants, and responses that clients may continue."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from poolgrid.frontend.access.meter import Meter
from poolgrid.frontend.access.tenants import Tenants
from poolgrid.frontend.responses_api.kept import Store


class Sharing(NamedTuple):
    """The sharing routers, and the kind of sharing."""

    scope: str
    """What routers of one pool agree on, and no others."""
    place: str
    """Where this router answers, if no other process can answer there at the same time; empty = not known."""
    lease_s: int
    replicas: int


class SharedLimits(Protocol):
    """Shares of tenants' limits."""

    on_routers: Callable[[int], None]
    """Called with the number of routers whenever it changes."""

    def meter(self, tenant: str) -> Meter:
        """Return what keeps a tenant's figures."""
        ...

    def start(self, tenants: Callable[[], Tenants]) -> None:
        """Share the limits of some tenants from now on; raises ``ValueError`` when that cannot be done here."""
        ...

    async def first_shares(self) -> None:
        """Wait until others have given this router some of every limit, or for a lease."""
        ...


class SharedState(NamedTuple):
    """What one router shares with the others of its pool."""

    limits: SharedLimits
    responses: Store | None
    """``None`` where none are kept."""
