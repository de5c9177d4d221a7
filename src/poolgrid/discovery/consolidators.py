"""Which consolidator of a namespace a process is connected to, of those that have all the endpoints it needs.

Rules
    1. A process stays with the consolidator that answers it, whatever is registered besides: an entry alone moves no
       process that is connected.
    2. When that connection is lost the others are tried, the latest life first, each for ``PATIENCE_MS``; then all
       again. An endpoint without an entry counts only as long as it answers, or while there is no other.
    3. Two consolidators of one namespace are a mistake or an attack. The log names both entries: as an error
       where the other one is the later life.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from poolgrid.discovery.discovery import Discovery
from poolgrid.discovery.ports import Scope
from poolgrid.process.clock import Clock
from poolgrid.wire.names import parse_name

log = logging.getLogger(__name__)

PATIENCE_MS = 5000.0
"""How long a consolidator may take to answer for the first time before another one is tried."""


class DiscoveredConsolidator:
    """Follows a consolidator by its name; ``on_move`` gets where it is now, endpoint by endpoint.

    When its entry is gone it is taken to be where it was: it comes back, or another one follows it.
    """

    def __init__(
        self,
        names: Discovery,
        addresses: Sequence[str],
        on_move: Callable[[list[str]], None],
        answers: Callable[[], bool | None],
        clock: Clock,
    ) -> None:
        """``addresses`` are ``dyn://`` names of endpoints of one component.

        ``answers``: whether the consolidator that was moved to last answers now; ``None`` = it was not asked.
        """
        self._names = names
        self._wanted = [parse_name(address) for address in addresses]
        self._on_move = on_move
        self._answers = answers
        self._clock = clock
        self._where: list[str] = []
        self._has_answered = False
        self._moved_ms = 0.0
        self._tried: list[list[str]] = []
        """Since one has answered."""
        self._others: list[str] = []
        """Entries that were named in the log."""

    def start(self) -> None:
        first = self._wanted[0]
        self._names.follow(Scope(first.namespace, first.component), self.look)
        self._names.after_each_look(self.look)

    def look(self) -> None:
        """Move if the connection is lost and there is another consolidator."""
        first = self._wanted[0]
        found = [
            (each.key, [each.endpoints[name.endpoint] for name in self._wanted])
            for each in reversed(self._names.registry.instances(first.namespace, first.component))
            if all(name.endpoint in each.endpoints for name in self._wanted)
        ]
        places = [where for _, where in found]
        answers = self._answers() if self._where else False
        if answers:
            self._has_answered, self._tried = True, []
            self._report_others(found)
        elif self._is_to_move(places, answers):
            self._move(places)

    def _is_to_move(self, places: list[list[str]], answers: bool | None) -> bool:
        if all(where == self._where for where in places):
            return False
        if self._where not in places:
            return True
        waited_ms = self._clock.monotonic_ms() - self._moved_ms
        return answers is False and (self._has_answered or waited_ms >= PATIENCE_MS)

    def _move(self, places: list[list[str]]) -> None:
        others = [where for where in places if where != self._where]
        self._tried.append(self._where)
        untried = [where for where in others if where not in self._tried]
        if not untried:
            untried, self._tried = others, []
        self._where = untried[0]
        self._has_answered = False
        self._moved_ms = self._clock.monotonic_ms()
        log.info("%s is at %s", self._wanted[0], self._where[0])
        self._on_move(self._where)

    def _report_others(self, found: list[tuple[str, list[str]]]) -> None:
        own = next((at for at, (_, where) in enumerate(found) if where == self._where), None)
        others = [key for key, where in found if where != self._where]
        if others == self._others:
            return
        self._others = others
        if not others:
            return
        is_later = own is None or found[0][1] != self._where
        log.log(
            logging.ERROR if is_later else logging.WARNING,
            "%s: connected to %s (entry %s), and %s is registered as well at %s: this process stays where it is "
            "connected; a namespace has one consolidator, remove the entry that is wrong",
            self._wanted[0],
            self._where[0],
            "none any more" if own is None else found[own][0],
            ", ".join(others[:4]),
            ", ".join(where[0] for _, where in found if where != self._where)[:400],
        )
