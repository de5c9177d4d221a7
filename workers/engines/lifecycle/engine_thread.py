"""One thread for every call of an engine's library that may block, with an event loop of its own.

Rules:

1. The library is imported, and its engine made, called and shut down, in this thread and no other: MPI and CUDA bind
   what they do to a thread, and asynchronous results to an event loop.
2. A call that does not return stops this thread alone. ``beat`` asks for a heartbeat; ``silent_ms`` says
   for how long none has come.
3. The thread never keeps the process alive: one that hangs is left behind at the end.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from poolgrid.server.process.tasks import owned

log = logging.getLogger(__name__)

T = TypeVar("T")


class EngineThread:
    """The thread of one engine; made on the event loop that gets all results."""

    def __init__(self, name: str = "engine") -> None:
        self._caller = asyncio.get_running_loop()
        self._loop = asyncio.new_event_loop()
        self._asked_ms: float | None = None
        """When the heartbeat was asked for that has not come."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    # -- from the caller's loop ----------------------------------------------------------------------------------------

    def post(self, call: Callable[..., object], *arguments: Any) -> None:
        """Have a call made in the thread, after what was posted before; no caller waits for it."""
        try:
            self._loop.call_soon_threadsafe(call, *arguments)
        except RuntimeError:
            log.debug("the engine's thread has ended: %r is not called", call)

    async def call(self, call: Callable[[], T]) -> T:
        """Return what a call in the thread returns; raises what it raises."""
        answer: asyncio.Future[T] = self._caller.create_future()

        def work() -> None:
            try:
                made = call()
            except BaseException as error:
                self.tell(_fail, answer, error)
            else:
                self.tell(_answer, answer, made)

        self.post(work)
        return await answer

    async def run(self, work: Callable[[], Coroutine[Any, Any, T]], name: str) -> T:
        """Return what a coroutine in the thread returns; raises what it raises. Cancelled, it is cancelled there."""
        answer: asyncio.Future[T] = self._caller.create_future()
        tasks: list[asyncio.Task[T]] = []

        def ended(task: asyncio.Task[T]) -> None:
            if task.cancelled():
                self.tell(answer.cancel)
                return
            error = task.exception()
            if error is None:
                self.tell(_answer, answer, task.result())
            else:
                self.tell(_fail, answer, error)

        def begin() -> None:
            if not answer.cancelled():
                tasks.append(owned(work(), name))
                tasks[0].add_done_callback(ended)

        def cancel() -> None:
            for task in tasks:
                task.cancel()

        self.post(begin)
        try:
            return await answer
        except asyncio.CancelledError:
            self.post(cancel)
            raise

    def beat(self, now_ms: float, look: Callable[[], T], seen: Callable[[T], object]) -> None:
        """Ask for a heartbeat, unless one is due: what ``look`` returns in the thread is given to ``seen`` here."""
        if self._asked_ms is not None:
            return
        self._asked_ms = now_ms

        def answered(what: T) -> None:
            self._asked_ms = None
            seen(what)

        self.post(lambda: self.tell(answered, look()))

    def silent_ms(self, now_ms: float) -> float:
        """Return for how long the thread has not answered; 0 while it does."""
        return 0.0 if self._asked_ms is None else max(0.0, now_ms - self._asked_ms)

    def end(self) -> None:
        self.post(self._loop.stop)

    # -- from the thread -----------------------------------------------------------------------------------------------

    def tell(self, call: Callable[..., object], *arguments: Any) -> None:
        """Have a call made on the caller's loop; without one any more, nothing happens."""
        try:
            self._caller.call_soon_threadsafe(call, *arguments)
        except RuntimeError:
            log.debug("no receiver")

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()


def _answer(answer: asyncio.Future[T], value: T) -> None:
    if not answer.done():
        answer.set_result(value)


def _fail(answer: asyncio.Future[Any], error: BaseException) -> None:
    if not answer.done():
        answer.set_exception(error)


SHUTDOWN_TIMEOUT_S = 60.0
"""How long the end of an engine is waited for: it frees the GPUs and ends its processes."""


class _Handover(Generic[T]):
    """What the thread made, until it is taken or discarded."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: list[T] = []
        self._abandoned = False

    def give(self, made: T) -> bool:
        """Leave what was made; return whether a caller will take it."""
        with self._lock:
            if not self._abandoned:
                self._made.append(made)
            return not self._abandoned

    def abandon(self) -> list[T]:
        with self._lock:
            self._abandoned = True
            made, self._made = self._made, []
            return made


async def start_engine(thread: EngineThread, make: Callable[[], T], shut_down: Callable[[T], None]) -> T:
    """Return what ``make`` makes in the thread; raises what it raises.

    Cancelled, ``shut_down`` gets it as soon as it exists, and the process does not end before that: an engine that is
    left behind keeps the GPU.
    """
    handover: _Handover[T] = _Handover()
    over = threading.Event()

    def work() -> None:
        try:
            made = make()
            if not handover.give(made):
                log.warning("no start waits for the engine any more: shutting it down")
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
