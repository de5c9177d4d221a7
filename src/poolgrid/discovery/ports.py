"""Where registrations are kept: the one port of all backends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from poolgrid.discovery.registry import Seen
from poolgrid.wire.registration import Registration

LOOK_S = 0.5
"""Between two looks where they cost next to nothing: a started process is found half a second later."""


class DiscoveryUnavailable(OSError):
    """Registrations cannot be read or written for now."""


class Scope(NamedTuple):
    """Whose registrations are of interest; empty = of all."""

    namespace: str = ""
    component: str = ""

    def holds(self, namespace: str, component: str) -> bool:
        return self.namespace in ("", namespace) and self.component in ("", component)


class RegistrationStore(Protocol):
    """Keeps registrations for their leases."""

    kind: str
    """What operators call it: the value of the setting ``names``."""
    where: str
    """Where it is, for people."""
    writable: bool
    """Whether processes register there themselves; where they do not, another system registers them."""
    look_s: float
    """Between two looks."""

    async def open(self) -> None:
        """Reach it; raises ``ValueError`` or ``OSError`` when it cannot be used at all."""
        ...

    async def look(self, scopes: Sequence[Scope]) -> list[Seen]:
        """Return every entry of some scopes; raises ``DiscoveryUnavailable``."""
        ...

    async def write(self, registration: Registration, data: bytes) -> None:
        """Write an entry, or renew it; raises ``DiscoveryUnavailable``."""
        ...

    async def remove(self, key: str) -> None:
        """Take an entry back; raises ``DiscoveryUnavailable``."""
        ...

    async def close(self) -> None: ...
