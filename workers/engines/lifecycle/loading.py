"""Starts and ends an engine in its thread: both take long, and neither can be interrupted.

Rules:

1. Whoever stops waiting for an engine leaves it to its thread, which shuts it down as soon as it exists; the process
   does not end before that. An engine that is left behind keeps the GPU.
2. The end of an engine is waited for at most ``SHUTDOWN_TIMEOUT_S``: a broken one may never answer, and the process
   must end for its supervisor to start it again.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from poolgrid.workers.engines.lifecycle.engine_thread import EngineThread

log = logging.getLogger(__name__)

SHUTDOWN_TIMEOUT_S = 60.0
"""How long the end of an engine is waited for: it frees the GPUs and ends its processes."""

T = TypeVar("T")


class _Handover(Generic[T]):
    """What the thread made, until somebody takes it or nobody will."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: list[T] = []
        self._abandoned = False

    def give(self, made: T) -> bool:
        """Leave what was made; say whether anybody will take it."""
        with self._lock:
            if not self._abandoned:
                self._made.append(made)
            return not self._abandoned

    def abandon(self) -> list[T]:
        """Take what was made, and nothing from now on."""
        with self._lock:
            self._abandoned = True
            made, self._made = self._made, []
            return made


async def start_engine(thread: EngineThread, make: Callable[[], T], shut_down: Callable[[T], None]) -> T:
    """Return what ``make`` makes in the thread; raises what it raises.

    Cancelled, ``shut_down`` gets it as soon as it exists.
    """
    handover: _Handover[T] = _Handover()
    over = threading.Event()

    def work() -> None:
        try:
            made = make()
            if not handover.give(made):
                log.warning("nobody waits for the engine any more: shutting it down")
                _shut_down(shut_down, made)
        finally:
            over.set()

    try:
        await thread.call(work)
    except asyncio.CancelledError:
        made = handover.abandon()
        for each in made:
            await end_engine(thread, each, shut_down)
        if not made:
            # Not a daemon, as the engine's thread is one: it holds the process until the engine is gone.
            threading.Thread(target=over.wait, name="engine start").start()
        raise
    (engine,) = handover.abandon()
    return engine


async def end_engine(thread: EngineThread, engine: T, shut_down: Callable[[T], None]) -> None:
    """Shut an engine down in its thread; returns when it is done, or is given up."""
    try:
        async with asyncio.timeout(SHUTDOWN_TIMEOUT_S):
            await thread.call(lambda: _shut_down(shut_down, engine))
    except TimeoutError:
        log.error("the engine did not end within %.0f s and is left behind", SHUTDOWN_TIMEOUT_S)


def _shut_down(shut_down: Callable[[T], None], engine: Any) -> None:
    try:
        shut_down(engine)
    except Exception:
        log.exception("shutting the engine down failed")
