"""Every task of every process is started here, so that none dies unobserved.

Rules
    1. *Supervised* tasks run in the background. One that raises, or ends without being cancelled, is logged with its
       place; then it starts again, with a growing pause and a bound, or the process ends in order, as its starter
       chose. The manager of the process (systemd, Kubernetes, ``poolgrid up``) starts it again.
    2. *Owned* tasks have a task that awaits them and gets what they raise.
    3. *Detached* tasks belong to something that may cancel them and never awaits them. What they raise is logged with
       its place at once: it is a bug, since such a task deals with what it expects.
    4. The starter of a task keeps it: an event loop alone does not.

``asyncio.TaskGroup`` is the other way to own tasks. ``tests/test_architecture.py`` bans the bare ones.

Work in bulk on an event loop: a slice in each of its turns, for all who ask.

A token waits for up to two turns of the loop: until its frame is read, and until the task runs that writes it. What is
else is done (taking in workers' blocks, publishing them, snapshots, freeing memory) comes in slices of about a
millisecond. Where several such jobs were running, each did a slice in every turn, and tokens waited for all of
them. Here they have the turns one after the other.

Rules
    1. The first task that asks has the first slice; one that asks again has it after all others.
    2. Slices are done in one turn of the loop until ``SLICE_MS`` are over, by a clock, and one at least: what takes a
       moment does not need a turn for itself.
    3. A task has a turn for itself, as its length is unknown here.
    4. ``busy`` is true when a task asked in this turn or waits. When none does, a task with little to do may do it at
       once.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from poolgrid.server.process.clock import Clock

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Restart:
    """How often a supervised task may fail before its process ends, and how long it pauses after each failure."""

    limit: int | None = 5
    """Failures within ``period_s`` after which the process ends; ``None`` = never: it is tried at the longest pause."""
    period_s: float = 60.0
    """A task that fails once a minute is a nuisance, one that fails faster does not work."""
    pause_s: float = 0.1
    """Before the first restart; doubles with each failure of the period."""
    pause_max_s: float = 5.0


on_fatal: ContextVar[Callable[[str, BaseException], None] | None] = ContextVar("on_fatal", default=None)
"""Ends the process in order; set by ``poolgrid.server.process.lifecycle`` for everything that it runs. A group of
workers sets it for each worker, to end that worker only."""


def owned(work: Coroutine[Any, Any, T], name: str, loop: asyncio.AbstractEventLoop | None = None) -> asyncio.Task[T]:
    """Start a task that the caller, or a task it hands it to, awaits.

    A caller that has the running loop may pass it: until Python 3.12 each question for it is a system call.
    """
    return (loop or asyncio.get_running_loop()).create_task(work, name=name)


def detached(work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    """Start a task that is not awaited; the caller may cancel it. It costs a callback more than a bare one."""
    task = asyncio.get_running_loop().create_task(work, name=name)
    task.add_done_callback(_log_failure)
    return task


def end_process(name: str, error: BaseException) -> bool:
    """Have the process end in order, because something that it cannot do without has failed.

    Returns whether the process will end: outside of ``poolgrid.server.process.lifecycle`` it does not.
    """
    log.critical("task %r failed: what it is part of ends", name, exc_info=error)
    end = on_fatal.get()
    if end is None:
        return False
    end(name, error)
    return True


def supervised(
    work: Callable[[], Coroutine[Any, Any, None]], name: str, restart: Restart | None = None
) -> asyncio.Task[None]:
    """Start a background task; without ``restart`` its failure is the end of the process."""
    return asyncio.get_running_loop().create_task(_supervise(work, name, restart), name=name)


async def unless(stop: asyncio.Event, work: Coroutine[Any, Any, T], name: str) -> T | None:
    """Return what ``work`` returns, or ``None`` when ``stop`` is set first: ``work`` is then cancelled, and has ended.

    Raises what ``work`` raises.
    """
    task = owned(work, name)
    stopping = owned(stop.wait(), f"the end of {name}")
    try:
        await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        await cancel_all([task, stopping])


async def cancel_all(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel tasks, and wait until all have ended; what one of them raises meanwhile is logged."""
    ending = [task for task in tasks if not task.done()]
    for task in ending:
        task.cancel()
    if ending:
        await asyncio.wait(ending)
    for task in ending:
        _log_failure(task)


@contextmanager
def keep_cancellation() -> Iterator[None]:
    """End the running task at the end of the block if it was cancelled within, also where a library lost that.

    ``asyncio.wait_for`` does until Python 3.12 when what it waits for is there in the same turn: it returns that, and a
    caller that waits for the task's end waits without end.
    """
    task = asyncio.current_task()
    assert task is not None, "only a task is cancelled"
    before = task.cancelling()
    try:
        yield
    except asyncio.CancelledError:
        raise
    except Exception:
        if task.cancelling() > before:
            raise asyncio.CancelledError from None
        raise
    if task.cancelling() > before:
        raise asyncio.CancelledError


def wait_from_thread(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T], name: str, timeout_s: float) -> T:
    """Have work done on a loop and wait for it in this thread; raises what it raises.

    Raises ``TimeoutError`` when it takes longer. It continues then, and what it raises is logged.
    """
    future = asyncio.run_coroutine_threadsafe(work, loop)
    try:
        return future.result(timeout_s)
    except TimeoutError:
        if not future.done():
            future.add_done_callback(partial(_log_late_failure, name))
        raise


def _log_failure(task: asyncio.Task[Any]) -> None:
    error = None if task.cancelled() else task.exception()
    if error is not None:
        log.error("task %r failed: this is a bug", task.get_name(), exc_info=error)


def _log_late_failure(name: str, future: Future[Any]) -> None:
    error = None if future.cancelled() else future.exception()
    if error is not None:
        log.error("task %r failed, after its last waiter had left", name, exc_info=error)


async def _supervise(work: Callable[[], Coroutine[Any, Any, None]], name: str, restart: Restart | None) -> None:
    clock = asyncio.get_running_loop().time
    failures: deque[float] = deque()
    while True:
        try:
            await work()
            return
        except (Exception, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and _is_asked_to_end():
                raise
            now_s = clock()
            failures.append(now_s)
            while failures and restart is not None and failures[0] < now_s - restart.period_s:
                failures.popleft()
            if restart is None or (restart.limit is not None and len(failures) > restart.limit):
                if not end_process(name, error):
                    raise
                return
            pause_s = min(restart.pause_max_s, restart.pause_s * 2 ** min(len(failures) - 1, 30))
            log.error("task %r failed: it starts again in %.1f s", name, pause_s, exc_info=error)
            await asyncio.sleep(pause_s)


def _is_asked_to_end() -> bool:
    """Return whether this task was cancelled, and not only what it waits for."""
    task = asyncio.current_task()
    assert task is not None, "supervision runs in a task"
    return task.cancelling() > 0


BREATH_S = 0.0001
"""How long a thread stands back. Shorter, and it would have the lock again before a waiting thread was awake."""

_NEVER = threading.Event()


def breathe() -> None:
    """Let other threads run Python; for threads other than the event loop's.

    A thread that computes for long keeps the interpreter's lock for a switch interval each time the event loop has
    released it, which the loop does a dozen times for a short request.
    """
    _NEVER.wait(BREATH_S)


SLICE_MS = 1.0
"""As long as slices are; a token comes every 5 to 30 milliseconds from an engine."""


MESSAGES_PER_TURN = 64
"""Messages handed over before the loop gets its turn again: a flood of one server costs others some milliseconds."""

TURN_S = 0.001
"""Time after which the loop gets its turn, however few messages that were: a frame of a worker may hold the tokens of
hundreds of requests."""

WITHOUT_A_CLOCK = 2
"""So few messages are handed over without asking for the time; mostly there are no more."""


class BulkWork:
    """The turns of one event loop, for all that can wait."""

    def __init__(self, clock: Clock) -> None:
        self.busy = False
        self._clock = clock
        self._waiting: deque[Callable[[], object] | asyncio.Future[None]] = deque()

    def soon(self, slice_: Callable[[], object]) -> None:
        """Have a slice done in one of the next turns; what it raises is for the loop to tell."""
        self._waiting.append(slice_)
        self._begin()

    async def turn(self) -> None:
        """Wait for a turn of one's own, which lasts to the next wait."""
        mine = asyncio.get_running_loop().create_future()
        self._waiting.append(mine)
        self._begin()
        await mine

    def _begin(self) -> None:
        if not self.busy:
            self.busy = True
            asyncio.get_running_loop().call_soon(self._run)

    def _run(self) -> None:
        waiting = self._waiting
        if not waiting:
            self.busy = False
            return
        loop = asyncio.get_running_loop()
        monotonic_ms = self._clock.monotonic_ms
        ends_ms = monotonic_ms() + SLICE_MS
        try:
            for _ in range(len(waiting)):
                next_one = waiting.popleft()
                if isinstance(next_one, asyncio.Future):
                    if next_one.done():
                        continue  # its task was cancelled
                    next_one.set_result(None)
                    # The task runs in the next turn; the one after that is another's.
                    loop.call_soon(loop.call_soon, self._run)
                    return
                next_one()
                if monotonic_ms() >= ends_ms:
                    break
        except BaseException:
            loop.call_soon(self._run)
            raise
        loop.call_soon(self._run)
