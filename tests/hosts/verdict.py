"""What may become of a request while hosts are cut off and processes are killed; pure.

A client is where a load balancer is: it asks one of the global routers that said a second ago that they are ready, and
another one when there was no connection, or it ended before a byte of an answer. So a request *has a living path* as
long as the global router that took it is neither killed nor cut off: that one reaches another host with a router and a
worker of its pool, whatever else fails.

* A text that is wrong is never excused, and neither is an answer that never ends.
* A connection that broke, and an error of a global router, are excused when it was killed or cut off meanwhile: what
  it answers from a host that is cut off arrives when the host is back.
* A request that no global router takes is not excused: one of them always lives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class Outcome(Enum):
    """What a client saw."""

    RIGHT = "right"
    WRONG = "wrong text"
    ERROR = "error"
    BROKEN = "connection broke"
    REFUSED = "refused by all"
    HUNG = "hung"


@dataclass(frozen=True, slots=True)
class Absence:
    """A global router was out of reach, from a fault on until it was ready again."""

    front: str
    begun_s: float
    ended_s: float


@dataclass(frozen=True, slots=True)
class Asked:
    """One request that a global router took, or that all refused, and what became of it."""

    front: str
    begun_s: float
    ended_s: float
    outcome: Outcome
    said: str = ""
    retries: int = 0


def is_excused(asked: Asked, absences: Sequence[Absence]) -> bool:
    """Return whether a request that was not served rightly had no living path."""
    return asked.outcome in (Outcome.BROKEN, Outcome.ERROR) and any(
        absence.front == asked.front and absence.begun_s <= asked.ended_s and asked.begun_s <= absence.ended_s
        for absence in absences
    )
