"""Which consolidator of a namespace is the one: the latest that has all the endpoints that are asked for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from poolgrid.naming.names import Names
from poolgrid.naming.ports import Scope
from poolgrid.wire.names import parse_name

log = logging.getLogger(__name__)


class NamedConsolidator:
    """Follows a consolidator by its name; ``on_move`` is told where it is now, endpoint by endpoint.

    When its name is gone it is taken to be where it was: it comes back, or another one follows it.
    """

    def __init__(self, names: Names, addresses: Sequence[str], on_move: Callable[[list[str]], None]) -> None:
        """``addresses`` are ``dyn://`` names of endpoints of one component."""
        self._names = names
        self._wanted = [parse_name(address) for address in addresses]
        self._on_move = on_move
        self._where: list[str] = []
        self._several = 0

    def start(self) -> None:
        """Look from now on."""
        first = self._wanted[0]
        self._names.follow(Scope(first.namespace, first.component), self._look)

    def _look(self) -> None:
        first = self._wanted[0]
        found = [
            [each.endpoints[name.endpoint] for name in self._wanted]
            for each in self._names.registry.instances(first.namespace, first.component)
            if all(name.endpoint in each.endpoints for name in self._wanted)
        ]
        if len(found) > 1 and len(found) != self._several:
            log.warning("%d processes are registered as %s; the latest is taken", len(found), self._wanted[0])
        self._several = len(found)
        if found and found[-1] != self._where:
            self._where = found[-1]
            log.info("%s is at %s", first, self._where[0])
            self._on_move(self._where)
