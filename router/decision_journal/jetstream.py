"""A router's decisions in a JetStream stream of its own, ``poolgrid-POOL=decisions=ROUTER``.

It has a connection of its own: what becomes of the decisions is nothing to the router. The servers remove what is too
much or too old. A dot in a router's id is ``=`` in the name of its stream.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import threading
from contextlib import AsyncExitStack

from poolgrid.consolidator.adapters.jetstream import DUPLICATE_WINDOW_S, JetStreamMessages, ThreadedMessages
from poolgrid.consolidator.settings import ConsolidatorSettings
from poolgrid.consolidator.stream.ports import StreamUnavailable
from poolgrid.nats.nats_connection import NatsConnection, NatsUnavailable, NatsUnusable
from poolgrid.process.clock import Clock
from poolgrid.process.tasks import detached
from poolgrid.router.core.router_state import RouterState
from poolgrid.router.decision_journal.opening import make_recorder
from poolgrid.router.decision_journal.recorder import DecisionRecorder
from poolgrid.router.decision_journal.stream_segments import StreamSegments, begins_unit
from poolgrid.router.settings import RouterSettings

log = logging.getLogger(__name__)

START_S = 2.0
"""How long the first write waits for the connection; what is decided after that is lost until there is one."""

SEGMENTS_MIN = 8
"""Segments that a stream holds at least, so that what the servers remove is at most an eighth more than is too much."""


class JetStreamDecisions(JetStreamMessages):
    """The stream of one router."""

    def __init__(self, connection: NatsConnection, router: str, bytes_max: int = 0, age_ms: int = 0) -> None:
        """The bounds are for who writes."""
        pool = connection.pool
        name = router.replace(".", "=")
        super().__init__(
            connection, f"poolgrid-{pool}=decisions={name}", f"poolgrid.{pool}.decisions.{name}", begins_unit
        )
        self._bytes_max = bytes_max
        self._age_s = age_ms / 1000

    async def open(self) -> None:
        """Make the stream, or bring what is there up to the settings; on as many servers as the pool's journal."""
        from nats.js import api
        from nats.js.errors import NotFoundError

        journal = f"poolgrid-{self._connection.pool}"
        try:
            found = await self._asked(f"asking for stream {journal}", self._connection.jetstream.stream_info(journal))
        except NotFoundError:
            raise StreamUnavailable(f"making stream {self.name}: the pool has no journal yet") from None
        await self._ensure(
            api.StreamConfig(
                name=self.name,
                description="decisions of a poolgrid router",
                subjects=[f"{self._subjects}.>"],
                retention=api.RetentionPolicy.LIMITS,
                storage=api.StorageType.FILE,
                discard=api.DiscardPolicy.OLD,
                max_bytes=self._bytes_max,
                max_age=self._age_s,
                num_replicas=found.config.num_replicas,
                duplicate_window=min(DUPLICATE_WINDOW_S, self._age_s),
                allow_direct=True,
            )
        )


async def routers_with_decisions(connection: NatsConnection) -> list[str]:
    """Return the ids of the routers of a pool whose decisions are in streams."""
    prefix = f"poolgrid-{connection.pool}=decisions="
    names: list[str] = []
    while True:
        question = {"subject": f"poolgrid.{connection.pool}.decisions.>", "offset": len(names)}
        try:
            connection.check()
            answer = await connection.asked(
                "asking for streams of decisions",
                connection.client.request(
                    "$JS.API.STREAM.NAMES", json.dumps(question).encode(), timeout=connection.timeout_s
                ),
            )
        except NatsUnavailable as error:
            raise StreamUnavailable(str(error)) from error
        said = json.loads(answer.data)
        found = [str(name) for name in said.get("streams") or []]
        names += found
        if not found or len(names) >= int(said.get("total", 0)):
            return sorted(name.removeprefix(prefix).replace("=", ".") for name in names if name.startswith(prefix))


class ThreadedDecisions(ThreadedMessages):
    """``stream_segments.DecisionStream`` for threads."""

    def __init__(self, decisions: JetStreamDecisions, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(decisions, loop)
        self._decisions = decisions
        self.connected = threading.Event()
        """Set once the connection is opened; it may be lost since."""
        self._start_s = START_S

    async def connect(self) -> None:
        """Connect, however long the servers take; until then nothing is written."""
        try:
            await self._decisions.connection.open()
        except (NatsUnusable, OSError) as error:
            log.error("decisions are not recorded: %s", error)
        else:
            self.connected.set()

    def open(self) -> None:
        """Make what is not there yet."""
        # What is decided meanwhile waits for the recorder; a router that has just begun connects within a moment.
        start_s, self._start_s = self._start_s, 0.0
        if not self.connected.wait(start_s):
            raise StreamUnavailable(f"opening stream {self.name}: there is no connection to NATS yet")
        self._wait(self._decisions.open())

    def close(self) -> None:
        """Do nothing: the connection is its owner's."""


def open_stream_recorder(
    opened: AsyncExitStack, settings: RouterSettings, data: ConsolidatorSettings, state: RouterState, clock: Clock
) -> DecisionRecorder:
    """Return the recorder of a router whose decisions are kept in a stream; the connection ends with ``opened``."""
    connection = NatsConnection(settings, f"poolgrid decisions of {settings.router_id}", clock)
    bytes_max = settings.decision_stream_bytes
    decisions = JetStreamDecisions(connection, settings.router_id, bytes_max, data.retention_ms)
    stream = ThreadedDecisions(decisions, asyncio.get_running_loop())
    connecting = detached(stream.connect(), "connection for decisions")
    opened.push_async_callback(connection.close)
    opened.callback(connecting.cancel)
    segments = StreamSegments(stream, os.urandom(8).hex())
    return make_recorder(segments, settings, min(data.segment_bytes, bytes_max // SEGMENTS_MIN), state, clock)
