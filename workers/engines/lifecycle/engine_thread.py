"""One thread for every call of an engine's library that may block, with an event loop of its own.

Rules:

1. The library is imported, and its engine made, called and shut down, in this thread and no other: MPI and CUDA bind
   what they do to a thread, and asynchronous results to an event loop.
2. A call that does not return stops this thread, and nobody else. ``beat`` asks for a sign of life; ``silent_ms`` says
   for how long none has come.
3. The thread never keeps the process alive: one that hangs is left behind at the end.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from poolgrid.process.tasks import owned

log = logging.getLogger(__name__)

T = TypeVar("T")


class EngineThread:
    """The thread of one engine; made on the event loop that everything is told to."""

    def __init__(self, name: str = "engine") -> None:
        self._caller = asyncio.get_running_loop()
        self._loop = asyncio.new_event_loop()
        self._asked_ms: float | None = None
        """When the sign of life was asked for that has not come."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    # -- from the caller's loop ----------------------------------------------------------------------------------------

    def post(self, call: Callable[..., object], *arguments: Any) -> None:
        """Have a call made in the thread, after what was posted before; nobody waits for it."""
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
        """Ask for a sign of life, unless one is due: what ``look`` returns in the thread is given to ``seen`` here."""
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
        """Let the thread end when it has done what was posted."""
        self.post(self._loop.stop)

    # -- from the thread -----------------------------------------------------------------------------------------------

    def tell(self, call: Callable[..., object], *arguments: Any) -> None:
        """Have a call made on the caller's loop; without one any more, nothing happens."""
        try:
            self._caller.call_soon_threadsafe(call, *arguments)
        except RuntimeError:
            log.debug("nobody is there to be told any more")

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
