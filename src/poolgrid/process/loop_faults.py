"""Exceptions in callbacks of the event loop: a loop logs them and continues, and whatever the callback held is lost.

Rules
    1. An exception in a callback of this program ends the process in order, as a failed background task does: the
       requests whose output was lost with it move to other processes.
    2. A callback of one connection can lose no more than that connection. Its exceptions are logged and counted, and
       the limits of the connection end it. Otherwise one client with a malformed request would end the process.
    3. ``OSError`` is logged and counted: it comes from the network, and the callbacks that meet it keep nothing.
    4. Exceptions in callbacks of libraries, and in transports, are logged and counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Any

OWN = "poolgrid."
"""Begins the names of the program's modules."""

OF_ONE_CONNECTION = frozenset(
    {
        "poolgrid.frontend.keep_alive",
        "poolgrid.frontend.stream_head",
        "poolgrid.http.connection",
        "poolgrid.http.exchange",
        "poolgrid.http.http_client",
        "poolgrid.http.request_parser",
    }
)
"""Modules whose callbacks belong to one HTTP connection each."""


class LoopFaults:
    """Handler of a loop's exceptions; ``end`` ends the process, with what failed and its exception."""

    def __init__(self, end: Callable[[str, BaseException], object]) -> None:
        self._end = end
        self.count: Callable[[], None] = _count_nothing
        """Called for each exception."""

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Take what the loop reports."""
        loop.default_exception_handler(context)
        if "handle" not in context:
            return  # a task that nobody awaited, or a transport, which the loop has closed
        self.count()
        error = context.get("exception")
        if not isinstance(error, BaseException) or isinstance(error, OSError):
            return
        module = module_of_callback(error.__traceback__)
        if module and module not in OF_ONE_CONNECTION:
            self._end(f"callback in {module}", error)


def module_of_callback(traceback: TracebackType | None) -> str:
    """Return the first module of this program in a traceback; empty = none of it is this program's."""
    while traceback is not None:
        name = traceback.tb_frame.f_globals.get("__name__", "")
        if isinstance(name, str) and name.startswith(OWN):
            return name
        traceback = traceback.tb_next
    return ""


def _count_nothing() -> None:
    return
