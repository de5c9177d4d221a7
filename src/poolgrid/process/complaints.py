"""Complaints about what peers send: one line in the log per peer and period, with the number of those left out.

A peer decides how often it sends what cannot be read, and on a plane without CURVE any process is a peer. A line for
each would fill a disk, and hide what matters.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass

from poolgrid.process.clock import Clock

PERIOD_MS = 10_000.0
"""Between two complaints about one peer: often enough to see that it continues."""

PEERS_MAX = 256
"""Peers that are remembered. One that connects again for each frame pushes others out; the log's own limit then
holds."""


@dataclass(slots=True)
class _Said:
    at_ms: float
    left_out: int = 0


class Complaints:
    """Log lines of one receiver about its peers."""

    def __init__(self, log: logging.Logger, clock: Clock) -> None:
        self._log = log
        self._clock = clock
        self._said: OrderedDict[str, _Said] = OrderedDict()

    def about(self, peer: str, what: object) -> None:
        """Log that a message of ``peer`` was dropped and why, unless it was logged a moment ago."""
        self.note(peer, "a message from %s was dropped: %s%s", peer, what)

    def note(self, about: str, line: str, *what: object, level: int = logging.WARNING) -> None:
        """Log a line about something, unless there was one about it a moment ago.

        The line's last ``%s`` is for how many were left out since.
        """
        now_ms = self._clock.monotonic_ms()
        said = self._said.get(about)
        if said is not None and now_ms - said.at_ms < PERIOD_MS:
            said.left_out += 1
            return
        more = f" (and {said.left_out} more since the last line about it)" if said is not None and said.left_out else ""
        self._said[about] = _Said(now_ms)
        self._said.move_to_end(about)
        if len(self._said) > PEERS_MAX:
            self._said.popitem(last=False)
        self._log.log(level, line, *what, more)


def shown_peer(identity: bytes) -> str:
    """Return how a peer's routing id, which it may have chosen itself, is written in the log."""
    return f"peer {identity[:16].hex()}"
