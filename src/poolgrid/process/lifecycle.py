"""The life of a process: run a service until SIGINT or SIGTERM asks it to stop, then let it end in order.

A service: ``main(stop)`` runs until it is done or ``stop`` is set. The first
signal sets ``stop``; a second one cancels the main task, for whoever does not want to wait for a drain.
A background task that fails for good (``poolgrid.process.tasks``) sets ``stop`` too, and so does an exception in a
callback of the event loop (``poolgrid.process.loop_faults``). The process then ends with an error.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import signal
import sys
from collections.abc import Awaitable, Callable

from poolgrid.process.loop_faults import LoopFaults
from poolgrid.process.tasks import end_process, on_fatal, owned

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
    context = contextvars.copy_context()  # the loop calls its handler in a context of its own
    loop.set_exception_handler(LoopFaults(lambda name, error: context.run(end_process, name, error)))
    task = owned(whole(), "main")

    def on_signal(name: str) -> None:
        if stop.is_set():
            log.warning("received %s again: ending without waiting", name)
            task.cancel()
        else:
            log.info("received %s: stopping", name)
            stop.set()

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
