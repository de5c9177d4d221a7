"""Every task of every process is started here, so that none dies unobserved.

Rules
    1. *Supervised* tasks run in the background. One that raises is logged with its place; then it starts again, with a
       growing pause and a bound, or the process ends in order, as its starter said. Whoever watches the process
       (systemd, Kubernetes, ``poolgrid up``) starts it again.
    2. *Owned* tasks have somebody who awaits them, and who gets what they raise.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from dataclasses import dataclass
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
"""Ends the process in order; set by ``runtime.lifecycle`` for everything that it runs."""


def owned(work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
    """Start a task that the caller, or somebody it tells, awaits or cancels."""
    return asyncio.get_running_loop().create_task(work, name=name)


def supervised(
    work: Callable[[], Coroutine[Any, Any, None]], name: str, restart: Restart | None = None
) -> asyncio.Task[None]:
    """Start a background task; without ``restart`` its failure is the end of the process."""
    return asyncio.get_running_loop().create_task(_supervise(work, name, restart), name=name)


async def _supervise(work: Callable[[], Coroutine[Any, Any, None]], name: str, restart: Restart | None) -> None:
    clock = asyncio.get_running_loop().time
    failures: deque[float] = deque()
    while True:
        try:
            await work()
            return
        except Exception as error:
            now_s = clock()
            failures.append(now_s)
            while failures and restart is not None and failures[0] < now_s - restart.period_s:
                failures.popleft()
            if restart is None or (restart.limit is not None and len(failures) > restart.limit):
                log.critical("task %r failed: this process ends", name, exc_info=error)
                end = on_fatal.get()
                if end is None:
                    raise
                end(name, error)
                return
            pause_s = min(restart.pause_max_s, restart.pause_s * 2 ** min(len(failures) - 1, 30))
            log.error("task %r failed: it starts again in %.1f s", name, pause_s, exc_info=error)
            await asyncio.sleep(pause_s)
