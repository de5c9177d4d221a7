"""The head of a stream (status line, headers, what its body begins with): sent once, with the first write.

It waits a moment for output, so that a worker that refuses at once is answered with a status of its own.

Comments in a silent stream, so that proxies and clients with a read time-out do not give it up.

One timer per stream, which looks whether anything was written since it last looked: a write costs one assignment.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final

from poolgrid.server.process.tasks import detached

COMMENT: Final = b": keep-alive\n\n"


class KeepAlive:
    """Calls ``write(COMMENT)`` after ``interval_s`` of silence, and again after each further one."""

    def __init__(self, write: Callable[[bytes], Coroutine[Any, Any, None]], interval_s: float) -> None:
        self._write = write
        self._interval_s = interval_s
        self.wrote = False
        """Set by the writer of the stream."""
        self._task: asyncio.Task[None] | None = None
        self._timer = asyncio.get_running_loop().call_later(interval_s, self._look)

    def close(self) -> None:
        self._timer.cancel()
        if self._task is not None:
            self._task.cancel()

    def _look(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._interval_s, self._look)
        # A comment that is still being written waits for the client to read: another would not help.
        if not self.wrote and (self._task is None or self._task.done()):
            self._task = detached(self._write(COMMENT), "comment in a silent stream")
        self.wrote = False


REFUSAL_WAIT_S = 0.1
"""How long the head waits for output: long enough for a worker to refuse, too short to be noticed."""


QUEUE_LOOK_S = 1.0
"""Time between two looks whether a request that waits in the queue for room has a worker."""


class StreamHead:
    """Calls ``start`` before the first write, or after ``REFUSAL_WAIT_S`` when nothing is written until then."""

    def __init__(
        self,
        start: Callable[[], Awaitable[None]],
        write: Callable[[bytes], Awaitable[None]],
        beginning: bytes,
        is_queued: Callable[[], bool] = lambda: False,
    ) -> None:
        """While ``is_queued`` holds no head is sent for the time alone: the request may still be answered 429."""
        self._is_queued = is_queued
        self._start = start
        self._write = write
        self._beginning = beginning
        self._starting = asyncio.Lock()
        self._sent = False
        self._task: asyncio.Task[None] | None = None
        self._timer = asyncio.get_running_loop().call_later(REFUSAL_WAIT_S, self._waited)

    @property
    def is_sent(self) -> bool:
        return self._sent and (self._task is None or self._task.done())

    async def before(self, body: bytes) -> bytes:
        """Start the answer unless it has begun; return ``body`` with the beginning before it the first time.

        What is returned is to be written, for the head leaves with it.
        """
        if not self._sent:
            async with self._starting:
                if not self._sent:
                    await self._start()
                    self._sent = True
                    return self._beginning + body
        return body

    async def settled(self) -> None:
        """Wait until the head is either out or will not be sent by anyone but the caller."""
        self._timer.cancel()
        async with self._starting:
            pass

    def close(self) -> None:
        """Send nothing more by itself; nothing uses it afterwards."""
        self._timer.cancel()
        # Dropped: a task that was cancelled holds the frame it was cancelled in, which holds this.
        task, self._task = self._task, None
        if task is not None:
            task.cancel()

    def _waited(self) -> None:
        if self._sent:
            return
        if self._is_queued():
            self._timer = asyncio.get_running_loop().call_later(QUEUE_LOOK_S, self._waited)
        else:
            self._task = detached(self._alone(), "head of a stream")

    async def _alone(self) -> None:
        # Also when it is empty: the server sends a status line with what comes first of the body.
        await self._write(await self.before(b""))
