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
"""Ends the process in order; set by ``poolgrid.process.lifecycle`` for everything that it runs. A group of workers sets
it for each worker, to end that worker only."""


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

    Returns whether the process will end: outside of ``poolgrid.process.lifecycle`` it does not.
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
