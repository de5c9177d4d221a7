"""The task of one connection: it serves what comes there on the short way, one request after the other.

Rules
    1. A request has no task of its own. The connection has one from its first request on, which waits between two
       requests: making a task, and taking it into Python's list of all tasks, costs as much as hashing a short prompt.
    2. While it serves it is among the tasks of its server, which waits for those when it ends.
    3. Who cancels it cancels the request that it serves. One that was cancelled, and not by who left, is over; the next
       request gets another.
    4. It ends with its connection.
"""

from __future__ import annotations

import asyncio
from typing import Any, final

from poolgrid.http.direct_cycle import CONNECTION, Connection, DirectCycle
from poolgrid.process.tasks import owned


@final
class ConnectionTask:
    """The task of one connection, as soon as there is something to serve."""

    def __init__(self, loop: asyncio.AbstractEventLoop, serving: set[asyncio.Task[Any]]) -> None:
        """``serving`` are the tasks that serve requests of the same server."""
        self._loop = loop
        self._serving = serving
        self._task: asyncio.Task[None] | None = None
        self._next: DirectCycle | None = None
        """What it is to serve, until it does."""
        self._idle: asyncio.Future[None] | None = None
        """What it waits for between two requests."""
        self._ends = False

    def serve(self, cycle: DirectCycle, body: bytes, of_head: dict[str, Any] | None) -> None:
        """Have a request served whose body is whole, behind the one that is being served."""
        connection = Connection(body, cycle.write_now, cycle.answer_now, of_head)
        cycle.connection = connection
        cycle.more_body = False
        cycle.scope["extensions"] = {CONNECTION: connection}
        self._next = cycle
        task = self._task
        if task is None or task.done():
            task = self._task = owned(self._run(), "request", self._loop)
        elif self._idle is not None and not self._idle.done():
            self._idle.set_result(None)
        connection.task = task
        self._serving.add(task)

    def end(self) -> None:
        """The connection is gone: serve nothing more than what is being served."""
        self._ends = True
        if self._idle is not None and not self._idle.done():
            self._idle.set_result(None)

    async def _run(self) -> None:
        task = self._task
        assert task is not None, "set where it is started"
        try:
            while True:
                cycle = self._taken()
                if cycle is not None:
                    await cycle.run_asgi(cycle.endpoint)
                    continue
                self._serving.discard(task)
                if self._ends or task.cancelling():
                    return
                self._idle = self._loop.create_future()
                await self._idle
        finally:
            self._serving.discard(task)

    def _taken(self) -> DirectCycle | None:
        """Return what is to be served now. Not in the loop: what is set to ``None`` there stays so to a type checker,
        whatever is awaited, and where this is compiled the next look at it would be left out."""
        cycle, self._next = self._next, None
        return cycle
