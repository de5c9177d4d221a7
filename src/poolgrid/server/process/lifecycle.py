"""The life of a process: run a service until SIGINT or SIGTERM asks it to stop, then let it end in order.

A service: ``main(stop)`` runs until it is done or ``stop`` is set. The first
signal sets ``stop``; a second one cancels the main task, so that a drain need not be waited for.
A background task that fails for good (``poolgrid.server.process.tasks``) sets ``stop`` too, and so does an exception in
a callback of the event loop (``poolgrid.server.process.lifecycle``). The process then ends with an error.

Exceptions in callbacks of the event loop: a loop logs them and continues, and whatever the callback held is lost.

Rules
    1. An exception in a callback of this program ends the process in order, as a failed background task does: the
       requests whose output was lost with it move to other processes.
    2. A callback of one connection can lose no more than that connection. Its exceptions are logged and counted, and
       the limits of the connection end it. Otherwise one client with a malformed request would end the process.
    3. ``OSError`` is logged and counted: it comes from the network, and the callbacks that meet it keep nothing.
    4. Exceptions in callbacks of libraries, and in transports, are logged and counted.

What every process exports about itself: its version, its clock, what its event loop has on its hands, CPU and
memory.

The place of a process among those that share an HTTP port (``--http-workers``).

The parent makes a private directory and passes each child its place (``GROUP_VARIABLE``). A child that is started again
gets the same place. The children share the port, and the responses that are kept on disk; all else each has for itself.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector

from poolgrid import __version__
from poolgrid.server.process.instruments import Counter, Gauge
from poolgrid.server.process.tasks import end_process, on_fatal, owned

OWN = "poolgrid."
"""Begins the names of the program's modules."""

OF_ONE_CONNECTION = frozenset(
    {
        "poolgrid.server.frontend.stream_head",
        "poolgrid.server.http.client_probe",
        "poolgrid.server.http.guard",
        "poolgrid.server.http.http_client",
        "poolgrid.server.http.request_framing",
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
        loop.default_exception_handler(context)
        if "handle" not in context:
            return  # a task that was never awaited, or a transport, which the loop has closed
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


log = logging.getLogger(__name__)


class TaskFailed(RuntimeError):
    """A background task that the process cannot do without has failed."""


async def _supervise(main: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    fatal: list[TaskFailed] = []

    def on_failure(name: str, error: BaseException) -> None:
        failed = TaskFailed(f"background task {name!r} failed: {type(error).__name__}: {error}")
        failed.__cause__ = error
        fatal.append(failed)
        stop.set()

    async def whole() -> None:
        await main(stop)

    on_fatal.set(on_failure)
    context = contextvars.copy_context()

    def on_loop_fault(name: str, error: BaseException) -> None:
        # uvloop calls its handler in the context of the callback, which may be that of one worker of several.
        if on_fatal.get() is None:
            context.run(end_process, name, error)
        else:
            end_process(name, error)

    loop.set_exception_handler(LoopFaults(on_loop_fault))
    task = owned(whole(), "main")

    def on_signal(name: str) -> None:
        if stop.is_set():
            log.warning("received %s again: ending without waiting", name)
            task.cancel()
        else:
            log.info("received %s: stopping", name)
            stop.set()

    if threading.current_thread() is threading.main_thread():  # no other gets signals
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, on_signal, number.name)
    try:
        await task
    except asyncio.CancelledError:
        if not stop.is_set():
            raise
    if fatal:
        raise fatal[0]


def run(main: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    """Run ``main(stop)`` on a fresh event loop (uvloop where it exists) with signals wired to ``stop``."""
    if sys.platform != "win32":
        import uvloop

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_supervise(main))
    else:
        with asyncio.Runner() as runner:
            runner.run(_supervise(main))


class LoopMetrics:
    """The instruments of the running event loop, registered in ``registry``; made on that loop."""

    def __init__(self, registry: CollectorRegistry) -> None:
        loop = asyncio.get_running_loop()
        tasks = Gauge(
            "poolgrid_event_loop_tasks",
            "Running tasks of the event loop: about a dozen, and one per HTTP request in flight. Growth "
            "without load is a leak: report it.",
            registry=registry,
        )
        Gauge(
            "poolgrid_build_info",
            "1, with the versions of poolgrid and Python as labels. Two versions mean an upgrade in progress "
            "or an incomplete one.",
            ["version", "python"],
            registry=registry,
        ).labels(__version__, platform.python_version()).set(1)
        Gauge(
            "poolgrid_wall_clock_seconds",
            "Unix time of the process's host at the scrape. The difference to the time of the scrape is the "
            "clock error; a few milliseconds are normal.",
            registry=registry,
        ).set_function(time.time)
        faults = Counter(
            "poolgrid_event_loop_faults_total",
            "Exceptions in callbacks of the event loop. Each is a bug with a traceback in the log. Outside of "
            "a client's connection it ends the process, which its supervisor restarts.",
            registry=registry,
        )
        handler = loop.get_exception_handler()
        if isinstance(handler, LoopFaults):
            handler.count = faults.inc
        ProcessCollector(registry=registry)
        # Scrapes run in other threads, which ``all_tasks`` allows for.
        tasks.set_function(lambda: float(len(asyncio.all_tasks(loop))))


GROUP_VARIABLE = "POOLGRID_PROCESS_GROUP"
"""Set by the parent: ``DIRECTORY:INDEX:SIZE``."""


@dataclass(frozen=True, slots=True)
class GroupPlace:
    """Which process of a group this is."""

    directory: Path
    index: int
    size: int

    @classmethod
    def from_environment(cls) -> GroupPlace | None:
        """Return the place that the parent gave this process; ``None`` when it is alone."""
        value = os.environ.get(GROUP_VARIABLE)
        if not value:
            return None
        directory, index, size = value.rsplit(":", 2)
        return cls(Path(directory), int(index), int(size))

    def to_environment(self) -> str:
        return f"{self.directory}:{self.index}:{self.size}"
