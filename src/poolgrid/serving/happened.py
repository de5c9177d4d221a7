"""What can happen to a request on its workers."""

from __future__ import annotations

from enum import StrEnum


class Happened(StrEnum):
    """What can happen to a leg, or to the request."""

    OUTPUT = "output"
    """Tokens in their place, or word that the leg has begun."""
    PREFILLED = "prefilled"
    """The prompt is computed, and another worker is to go on."""
    ENCODED = "encoded"
    """The images are encoded."""
    FINISHED = "finished"
    """Its last token, or an error that no other worker can mend."""
    BUSY = "refused: busy"
    """Its worker has no room."""
    DRAINING = "refused: draining"
    """Its worker takes nothing new, or hands over what it has at its drain timeout."""
    CROWDED = "refused: crowded"
    """Its worker has promised more to other routers than this one knew."""
    CANNOT_DO = "refused: cannot do"
    """Its worker lacks what the request asks for."""
    BROKEN = "refused: broken"
    """Its worker failed at what it should have done."""
    OUT_OF_PLACE = "output out of place"
    """Its stream has a hole or a repetition, or ends as another leg's would."""
    CANCELLED = "cancelled by the worker"
    """Its worker gave it up without being asked."""
    LOST = "worker lost"
    """Its connection broke, or it fell silent."""
    LEFT = "worker left"
    """It left the pool, or its lease ended there."""
    CLIENT_LEFT = "client left"
    """Whoever asked for the answer is gone."""
    NOWHERE = "no worker for the next leg"
    """None can serve it, or none had room before the deadline."""
    SHUTDOWN = "shutdown"
    """The router ends."""
