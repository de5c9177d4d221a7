"""Current registrations: a fold of what was seen where they are kept. Pure; time is an argument.

Rules
    1. A look brings all entries that there are. One that is missing from it is gone at once: its process took it back,
       or its keeper let it end.
    2. An entry counts for its lease after it was last renewed: after its mark was first seen, or had changed. Marks
       are compared with each other and never with a clock, so that a clock that jumps ends no lease. What is seen for
       the first time is as old as its keeper reports; keepers that end leases themselves report 0.
    3. While nothing can be looked at, every process keeps the name it has: what could not be seen is not known to be
       gone. After such a time each has a whole lease again.
    4. An entry that cannot be read is refused, with its name, its field and its value, and keeps no other from
       being taken. At most ``INSTANCES_MAX`` of a component are taken; of further ones the newest lives are left out,
       so that what is known stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from poolgrid.kernel.wire.addresses import EndpointName
from poolgrid.kernel.wire.registration import Registration, RegistrationRefused, decode_registration

INSTANCES_MAX = 8192
"""Processes of one component of a namespace: twice the workers that a consolidator takes."""

REFUSED_MAX = 256
"""Refusals that are kept, with their words; more are counted."""


class Seen(NamedTuple):
    """An entry as a look found it."""

    key: str
    data: bytes
    mark: int = 0
    """Changes whenever the entry is renewed."""
    age_ms: float = 0.0
    """How long ago it was renewed, by its keeper; 0 where the keeper itself ends leases."""


@dataclass(slots=True)
class _Entry:
    registration: Registration
    data: bytes
    mark: int
    renewed_ms: float


class Registry:
    """The names that are taken."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self._live: dict[str, Registration] = {}
        self.refused: dict[str, str] = {}
        """Why entries were refused, by their name."""
        self.refused_count = 0

    def look(self, seen: Iterable[Seen], now_ms: float) -> bool:
        """Take in all that there is; return whether a process came, went or moved."""
        entries: dict[str, _Entry] = {}
        counts: dict[str, int] = {}
        refused: dict[str, str] = {}
        self.refused_count = 0
        # Who is known first, then the older lives: what came last is left out where there are too many.
        for each in sorted(seen, key=lambda one: (one.key not in self._entries, one.key)):
            known = self._entries.get(each.key)
            if known is not None and known.data == each.data:
                registration = known.registration
            else:
                try:
                    registration = decode_registration(each.key, each.data)
                except RegistrationRefused as error:
                    self._refuse(refused, each.key, str(error))
                    continue
            component = each.key.rpartition(".")[0]
            counts[component] = counts.get(component, 0) + 1
            if counts[component] > INSTANCES_MAX:
                why = f"the entry {each.key!r} is one more than {INSTANCES_MAX} of {component}, which are taken"
                self._refuse(refused, each.key, why)
                continue
            if known is None:
                renewed_ms = now_ms - max(0.0, each.age_ms)
            else:
                renewed_ms = known.renewed_ms if known.mark == each.mark else now_ms
            entries[each.key] = _Entry(registration, each.data, each.mark, renewed_ms)
        self._entries = entries
        self.refused = refused
        return self.expire(now_ms)

    def _refuse(self, refused: dict[str, str], key: str, why: str) -> None:
        self.refused_count += 1
        if len(refused) < REFUSED_MAX:
            refused[key] = why

    def expire(self, now_ms: float) -> bool:
        """End the leases that are over; return whether a process came, went or moved since this was last asked."""
        live = {
            key: entry.registration
            for key, entry in self._entries.items()
            if now_ms - entry.renewed_ms < entry.registration.lease_ms
        }
        changed = live != self._live
        self._live = live
        return changed

    def looked_again(self, now_ms: float) -> None:
        """Give every process that has a name a whole lease: none could be looked at for a while."""
        for key in self._live:
            self._entries[key].renewed_ms = now_ms

    def instances(self, namespace: str | None = None, component: str | None = None) -> list[Registration]:
        """Return who has a name now, by namespace, component and life; of all where none is given."""
        return [
            self._live[key]
            for key in sorted(self._live)
            if namespace in (None, self._live[key].namespace) and component in (None, self._live[key].component)
        ]

    def addresses(self, name: EndpointName) -> list[str]:
        """Return where an endpoint listens, the latest life first."""
        found = self.instances(name.namespace, name.component)
        return [each.endpoints[name.endpoint] for each in reversed(found) if name.endpoint in each.endpoints]


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
