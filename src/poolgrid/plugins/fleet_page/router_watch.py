"""What the fleet page shows beyond what a router keeps anyway, collected from its inputs while there are viewers.

It stands in the place of the log of the router's state and hands everything on to the log that was there. So nothing on
the way of a request knows of it, and without viewers it is not there.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack

import msgspec

from poolgrid.kernel.decision.decision import Decision
from poolgrid.kernel.routing.inputs import Booked, Input, RecordsArrived, Released
from poolgrid.kernel.routing.router_state import InputLog, RouterState
from poolgrid.kernel.routing.working_set import Admission
from poolgrid.kernel.wire.answers import Counts, SecondCounts
from poolgrid.kernel.wire.events import (
    BlocksRemoved,
    BlocksStored,
    JournalRecord,
    PrefillCompleted,
    RequestFinished,
    RequestStarted,
)
from poolgrid.kernel.wire.identifiers import STAGE_WORD, Stage, WorkerKey, dispatch_of
from poolgrid.plugins.fleet_page.conversations import Conversations
from poolgrid.server.process.clock import Clock
from poolgrid.server.process.tasks import Restart, supervised

log = logging.getLogger(__name__)

LEGS_MAX = 8192
"""Legs whose times are kept; a minute of a pool that serves a hundred requests a second. The oldest go first."""

HASH_BYTES = 8


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

    def note(self, event: RequestStarted | PrefillCompleted | RequestFinished, time_ms: int) -> None:
        """Take what its worker reports of it."""
        if type(event) is RequestStarted:
            self.started_ms, self.cached_tokens = time_ms, event.cached_tokens
        elif type(event) is PrefillCompleted:
            self.prefilled_ms = time_ms
        elif type(event) is RequestFinished:
            self.ended_ms, self.end = time_ms, event.reason
            if event.cached_tokens is not None:
                self.cached_tokens = event.cached_tokens


class CacheFlow(msgspec.Struct):
    """Blocks that came to a worker and left it since there are viewers."""

    stored: int = 0
    removed: int = 0


class FleetWatch:
    """Implements ``poolgrid.kernel.routing.router_state.InputLog``, in front of another one."""

    def __init__(self, state: RouterState) -> None:
        self.conversations = Conversations()
        self.legs: OrderedDict[str, Leg] = OrderedDict()
        """By dispatch id, in the order in which they were placed."""
        self.flows: dict[WorkerKey, CacheFlow] = {}
        self.records = 0
        """Records of the journal since there are viewers."""
        self._of_request: OrderedDict[str, str] = OrderedDict()
        """The conversations of requests, for their decode legs."""
        self._state = state
        self._next: InputLog | None = None
        self._broken = False

    def begin(self) -> None:
        self._next, self._state.log = self._state.log, self

    def end(self) -> None:
        if self._state.log is self:
            self._state.log = self._next

    def conversation_of(self, request_id: str) -> str:
        return self._of_request.get(dispatch_of(request_id)[0], "")

    def note(self, given: Input, came: Decision | Admission | None = None) -> None:
        if self._next is not None:
            self._next.note(given, came)
        if self._broken:
            return
        try:
            if type(given) is RecordsArrived:
                for record in given.records:
                    self._record(record)
            elif type(given) is Booked:
                self._booked(given)
            elif type(given) is Released:
                leg = self.legs.get(given.dispatch_id)
                if leg is not None:
                    leg.released = True
        except Exception:
            # A viewer must not end what it watches.
            self._broken = True
            log.exception("the fleet page no longer sees requests and caches: this is a bug")

    def _record(self, record: JournalRecord) -> None:
        self.records += 1
        flow: CacheFlow | None = None
        for event in record.events:
            kind = type(event)
            if kind is BlocksStored or kind is BlocksRemoved:
                if flow is None:
                    flow = self.flows.get(record.worker)
                    if flow is None:
                        flow = self.flows[record.worker] = CacheFlow()
                blocks = len(event.sequence_hashes) // HASH_BYTES  # type: ignore[union-attr]
                if kind is BlocksStored:
                    flow.stored += blocks
                else:
                    flow.removed += blocks
            elif isinstance(event, RequestStarted | PrefillCompleted | RequestFinished):
                leg = self.legs.get(event.request_id)
                if leg is not None:
                    leg.note(event, record.time_ms)

    def _booked(self, given: Booked) -> None:
        decision = given.decision
        request = decision.request
        if request.stage is Stage.WHOLE or request.stage is Stage.PREFILL:
            conversation = self.conversations.turn(request, given.path, decision.time_ms)
            if conversation:
                self._of_request[dispatch_of(request.request_id)[0]] = conversation
                while len(self._of_request) > LEGS_MAX:
                    self._of_request.popitem(last=False)
        self.legs[given.dispatch_id] = Leg(
            given.dispatch_id,
            str(decision.worker),
            STAGE_WORD[request.stage],
            decision.time_ms,
            conversation=self.conversation_of(request.request_id),
            queued_ms=round(decision.queued_ms, 3),
        )
        while len(self.legs) > LEGS_MAX:
            self.legs.popitem(last=False)


INTERVAL_MS = 1000


class ServedSeconds:
    """Differences of totals for each of the last seconds."""

    def __init__(self, read: Callable[[], Sequence[int]], clock: Clock) -> None:
        """``read`` returns totals that only grow."""
        self.since_ms = clock.wall_ms()
        """Nothing is known of the time before."""
        self._read = read
        self._clock = clock
        self._before = read()
        self._seconds = SecondCounts()

    def rows(self) -> dict[str, Counts]:
        """Return the differences by second; seconds without any are left out."""
        return self._seconds.rows()

    def sample(self) -> None:
        """Count what came since the last sample into the second that lies between the two."""
        now = self._read()
        # Tokens that a request gave back make a total smaller.
        more = [max(0, after - before) for after, before in zip(now, self._before, strict=True)]
        self._before = now
        if any(more):
            self._seconds.add(self._clock.wall_ms() - INTERVAL_MS // 2, more)

    async def run(self) -> None:
        while True:
            await asyncio.sleep((INTERVAL_MS - self._clock.wall_ms() % INTERVAL_MS) / 1000)
            self.sample()


def open_served_seconds(opened: AsyncExitStack, read: Callable[[], Sequence[int]], clock: Clock) -> ServedSeconds:
    """Sample ``read`` once a second until the process ends."""
    served = ServedSeconds(read, clock)
    task = supervised(served.run, "seconds of the fleet page", Restart(limit=None))
    opened.callback(task.cancel)
    return served
