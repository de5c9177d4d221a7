"""When the legs of requests did what, as the journal tells it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from poolgrid.wire.events import JournalRecord, PrefillCompleted, RequestFinished, RequestStarted

RECORDS_MAX = 200_000
"""Records read for the legs of one request: minutes of a busy pool. What is later is not found."""


class Leg(msgspec.Struct):
    """One dispatch and when what happened to it: Unix milliseconds, ``None`` for what has not happened yet.

    The first is by the router's clock, the others by the worker's.
    """

    dispatch_id: str
    worker: str
    stage: str
    placed_ms: int | None = None
    """When its worker was chosen."""
    started_ms: int | None = None
    """When the engine scheduled it."""
    prefilled_ms: int | None = None
    """When its first token existed."""
    ended_ms: int | None = None
    end: str = ""
    """Why it ended, in the worker's word."""
    released: bool = False
    """Whether the router has taken it off its books."""
    cached_tokens: int | None = None
    conversation: str = ""
    queued_ms: float = 0.0
    """How long the request waited for a worker with room before this one was chosen: in the router's queue, or in that
    of the global router before it."""

    @property
    def status(self) -> str:
        if self.ended_ms is not None:
            return self.end
        if self.released:
            return "released"
        if self.prefilled_ms is not None:
            return "output"
        return "placed" if self.started_ms is None else "prefill"


def note_event(leg: Leg, event: object, time_ms: int) -> None:
    """Take what a worker reports of one of its requests."""
    if type(event) is RequestStarted:
        leg.started_ms, leg.cached_tokens = time_ms, event.cached_tokens
    elif type(event) is PrefillCompleted:
        leg.prefilled_ms = time_ms
    elif type(event) is RequestFinished:
        leg.ended_ms, leg.end = time_ms, event.reason
        if event.cached_tokens is not None:
            leg.cached_tokens = event.cached_tokens


def fill(legs: Sequence[Leg], records: Iterable[JournalRecord]) -> None:
    """Fill in the journal's times of legs; stops once all have ended."""
    by_id = {leg.dispatch_id: leg for leg in legs}
    open_legs = len(by_id)
    for number, record in enumerate(records):
        if not open_legs or number >= RECORDS_MAX:
            return
        for event in record.events:
            if type(event) is RequestStarted or type(event) is PrefillCompleted or type(event) is RequestFinished:
                leg = by_id.get(event.request_id)
                if leg is not None:
                    note_event(leg, event, record.time_ms)
                    open_legs -= type(event) is RequestFinished
