"""Starts and ends an engine beside the event loop: both take long, and neither can be interrupted.

Rules:

1. An engine is made in a thread of its own. Whoever stops waiting for it leaves it to that thread, which shuts it down
   as soon as it exists; the process does not end before that. An engine that is left behind keeps the GPU.
2. An engine is shut down in a thread of its own too, and waited for at most ``SHUTDOWN_TIMEOUT_S``: a broken one may
   never answer, and the process must end for its supervisor to start it again.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

log = logging.getLogger(__name__)

SHUTDOWN_TIMEOUT_S = 60.0
"""How long the end of an engine is waited for: it frees the GPUs and ends its MPI processes."""

T = TypeVar("T")


class _Handover(Generic[T]):
    """What a thread made, until somebody takes it or nobody will."""

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


async def start_engine(make: Callable[[], T], shut_down: Callable[[T], None]) -> T:
    """Return what ``make`` makes; raises what it raises. Cancelled, ``shut_down`` gets it as soon as it exists."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    handover: _Handover[T] = _Handover()

    def tell(error: BaseException | None) -> None:
        if ready.done():
            return
        if error is None:
            ready.set_result(None)
        else:
            ready.set_exception(error)

    def work() -> None:
        made: T | None = None
        error: BaseException | None = None
        try:
            made = make()
        except BaseException as failure:
            error = failure
        taken = made is None or handover.give(made)
        if taken:
            try:
                loop.call_soon_threadsafe(tell, error)
                return
            except RuntimeError:  # the loop is closed: nobody waits
                handover.abandon()
        if made is not None:
            log.warning("nobody waits for the engine any more: shutting it down")
            _shut_down(shut_down, made)

    # Not a daemon: the process must not end between the engine's birth and its end.
    threading.Thread(target=work, name="engine start").start()
    try:
        await ready
    except asyncio.CancelledError:
        for made in handover.abandon():
            await end_engine(made, shut_down)
        raise
    (made,) = handover.abandon()
    return made


async def end_engine(engine: T, shut_down: Callable[[T], None]) -> None:
    """Shut an engine down; returns when it is done, or is given up."""
    loop = asyncio.get_running_loop()
    done = asyncio.Event()

    def work() -> None:
        _shut_down(shut_down, engine)
        try:
            loop.call_soon_threadsafe(done.set)
        except RuntimeError:
            pass  # the loop is closed: it was given up

    threading.Thread(target=work, name="engine end", daemon=True).start()
    try:
        async with asyncio.timeout(SHUTDOWN_TIMEOUT_S):
            await done.wait()
    except TimeoutError:
        log.error("the engine did not end within %.0f s and is left behind", SHUTDOWN_TIMEOUT_S)


def _shut_down(shut_down: Callable[[T], None], engine: Any) -> None:
    try:
        shut_down(engine)
    except Exception:
        log.exception("shutting the engine down failed")
