"""Comments in a silent stream, so that proxies and clients with a read time-out do not give it up.

One timer per stream, which looks whether anything was written since it last looked: a write costs one assignment.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final

from poolgrid.process.tasks import detached

COMMENT: Final = b": keep-alive\n\n"

KEEP_ALIVE_S: Final = 15.0
"""Silence of a stream after which it carries a comment; read time-outs are 30 s and more."""


class KeepAlive:
    """Calls ``write(COMMENT)`` after ``interval_s`` of silence, and again after each further one."""

    def __init__(self, write: Callable[[bytes], Coroutine[Any, Any, None]], interval_s: float) -> None:
        self._write = write
        self._interval_s = interval_s
        self.wrote = False
        """Set by whoever writes to the stream."""
        self._task: asyncio.Task[None] | None = None
        self._timer = asyncio.get_running_loop().call_later(interval_s, self._look)

    def close(self) -> None:
        """Write nothing more."""
        self._timer.cancel()
        if self._task is not None:
            self._task.cancel()

    def _look(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._interval_s, self._look)
        # A comment that is still being written waits for the client to read: another would not help.
        if not self.wrote and (self._task is None or self._task.done()):
            self._task = detached(self._write(COMMENT), "comment in a silent stream")
        self.wrote = False
