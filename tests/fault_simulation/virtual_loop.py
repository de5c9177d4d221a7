"""An asyncio event loop whose time is virtual and whose order is a function of what was scheduled.

Rules

1. Nothing takes time but waiting. When nothing is ready, time jumps to the next timer.
2. Every callback belongs to the machine life (``Life``) in whose context it was scheduled. A life that has ended runs
   nothing any more: that is ``kill -9``. A life that is paused runs its callbacks when the pause is over: that is a
   long collection, a stopped container, a reader that does not read.
3. ``run_in_executor`` runs its function a little later in virtual time, as a thread would have; a dead life's threads
   end with it.
4. There is no input but the program itself: callbacks run in the order of their time and then of their scheduling, and
   no set, hash or clock enters.
"""

from __future__ import annotations

import asyncio
import contextvars
from asyncio import Handle, TimerHandle
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from heapq import heappop, heappush
from random import Random
from typing import Any, TypeVar, cast

T = TypeVar("T")

THREAD_DELAY_MAX_S = 0.010
"""Longest time after which a thread's work is done, mostly."""

WAITS_ON_THE_WAY_OUT_MAX = 20
"""How often a task that is closed may wait for something before it has ended."""

SLOW_THREAD_SHARE = 0.1
SLOW_THREAD_DELAY_MAX_S = 0.2
"""Some take longer: a disk that syncs slowly."""


class Life:
    """One life of a process on a machine: what its callbacks and sockets belong to."""

    def __init__(self, machine: str, kind: str, number: int) -> None:
        self.machine = machine
        self.kind = kind
        self.number = number
        self.dead = False
        self.paused_until_s = 0.0
        self.tasks: set[asyncio.Task[Any]] = set()
        """Strong references: what a dead life left unfinished must not be collected at some moment of its own."""

    def __str__(self) -> str:
        return f"{self.machine}#{self.number}"


LIFE: contextvars.ContextVar[Life | None] = contextvars.ContextVar("LIFE", default=None)


class _Over(BaseException):
    """Ends a task of a run that is over; ``close`` would leave what it waits for on its way out to the collector."""


class StillBusy(Exception):
    """More callbacks ran than a run can need: something turns in circles."""


class VirtualLoop(asyncio.AbstractEventLoop):
    """As much of an event loop as the services use."""

    def __init__(self, rng: Random, callbacks_max: int = 3_000_000) -> None:
        self._rng = rng
        self._now_s = 0.0
        self._ready: deque[Handle] = deque()
        self._timers: list[tuple[float, int, Handle]] = []
        self._scheduled = 0
        self._readers: dict[int, tuple[Callable[..., None], tuple[Any, ...], contextvars.Context]] = {}
        self._closed = False
        self._running = False
        self._callbacks_left = callbacks_max
        self._thread_s: float | None = None
        """What the thread's work that is being done has taken so far; ``None`` on the loop itself."""
        self.failures: list[str] = []
        """Exceptions that nobody caught."""

    # -- time ----------------------------------------------------------------------------------------------------------

    def time(self) -> float:
        """Return virtual seconds since the beginning."""
        return self._now_s

    def run_until(self, until_s: float, done: Callable[[], bool] = lambda: False) -> bool:
        """Run what is due up to ``until_s``, or until ``done``; say whether it was done."""
        asyncio._set_running_loop(self)
        self._running = True
        ready = self._ready
        timers = self._timers
        try:
            while True:
                while ready:
                    handle = ready.popleft()
                    if handle._cancelled:
                        continue
                    life: Life | None = handle._context.get(LIFE)  # type: ignore[attr-defined]
                    if life is not None:
                        if life.dead:
                            continue
                        if life.paused_until_s > self._now_s:
                            self._push(life.paused_until_s, handle)
                            continue
                    self._callbacks_left -= 1
                    if self._callbacks_left < 0:
                        raise StillBusy(f"still busy at {self._now_s:.3f} s: more callbacks than a run can need")
                    handle._run()
                if done():
                    return True
                if not timers or timers[0][0] > until_s:
                    self._now_s = max(self._now_s, until_s)
                    return done()
                self._now_s = max(self._now_s, timers[0][0])
                while timers and timers[0][0] <= self._now_s:
                    ready.append(heappop(timers)[2])
        finally:
            self._running = False
            asyncio._set_running_loop(None)

    # -- callbacks -----------------------------------------------------------------------------------------------------

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> Handle:
        """Run a callback in this turn."""
        handle = Handle(callback, args, self, context)
        if not self._closed:
            self._ready.append(handle)
        return handle

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> Handle:
        """Run a callback in this turn; there are no threads."""
        return self.call_soon(callback, *args, context=context)

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> TimerHandle:
        """Run a callback after a delay in seconds."""
        return self.call_at(self._now_s + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> TimerHandle:
        """Run a callback at a time."""
        handle = TimerHandle(when, callback, args, self, context)
        self._push(when, handle)
        return handle

    def _push(self, when_s: float, handle: Handle) -> None:
        if not self._closed:
            self._scheduled += 1
            heappush(self._timers, (when_s, self._scheduled, handle))

    def _timer_handle_cancelled(self, handle: TimerHandle) -> None:
        pass

    # -- tasks, futures, threads ---------------------------------------------------------------------------------------

    def create_future(self) -> asyncio.Future[Any]:
        """Return a future of this loop."""
        return asyncio.Future(loop=self)

    def create_task(  # type: ignore[override]
        self,
        coro: Coroutine[Any, Any, T],
        *,
        name: str | None = None,
        context: contextvars.Context | None = None,
    ) -> asyncio.Task[T]:
        """Run a coroutine in the life that asks for it."""
        task = asyncio.Task(coro, loop=self, name=name, context=context)
        life = LIFE.get()
        if life is not None:
            life.tasks.add(task)
            task.add_done_callback(life.tasks.discard)
        return task

    def spawn(self, life: Life, coro: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Begin a task of a life from outside."""
        context = contextvars.copy_context()
        context.run(LIFE.set, life)
        task: asyncio.Task[T] = context.run(self.create_task, coro)
        return task

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """Do a thread's work a little later, at one moment."""
        future: asyncio.Future[T] = self.create_future()

        def work() -> None:
            self._thread_s = 0.0
            try:
                result = func(*args)
            except Exception as error:
                self._deliver(_settle, future, error, None)
            else:
                self._deliver(_settle, future, None, result)

        slow = self._rng.random() < SLOW_THREAD_SHARE
        delay_s = self._rng.uniform(0.0, SLOW_THREAD_DELAY_MAX_S if slow else THREAD_DELAY_MAX_S)
        self.call_later(delay_s, work)
        return future

    def spend(self, seconds: float) -> None:
        """Take time, as a call does that waits for a device: of a thread; where the loop waits the run has failed."""
        if self._thread_s is not None:
            self._thread_s += seconds
            return
        life = LIFE.get()
        if life is not None:
            life.paused_until_s = max(life.paused_until_s, self._now_s) + seconds
            self.failures.append(f"the event loop of {life} waited {1000 * seconds:.0f} ms for a disk")

    def _deliver(self, settle: Callable[..., None], *args: Any) -> None:
        """End a thread's work once its time has passed."""
        spent_s, self._thread_s = self._thread_s, None
        if spent_s:
            self.call_later(spent_s, settle, *args)
        else:
            settle(*args)

    # -- readers -------------------------------------------------------------------------------------------------------

    def add_reader(  # type: ignore[override]
        self, fd: Any, callback: Callable[..., Any], *args: Any
    ) -> None:
        """Call back when ``signal`` says that a socket has news."""
        self._readers[fd] = (callback, args, contextvars.copy_context())

    def remove_reader(self, fd: Any) -> bool:
        """Stop calling back."""
        return self._readers.pop(fd, None) is not None

    def signal(self, fd: int) -> None:
        """Wake who reads a socket."""
        reader = self._readers.get(fd)
        if reader is not None:
            self.call_soon(reader[0], *reader[1], context=reader[2])

    # -- the rest of an event loop -------------------------------------------------------------------------------------

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Keep an exception that nobody caught; a run with one has failed."""
        if self._closed or not str(context.get("message")).startswith(("Exception in callback", "Task exception")):
            return
        error = context.get("exception")
        words = f"{context.get('message')}: {error!r}"
        trace = error.__traceback__ if isinstance(error, BaseException) else None
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        if trace is not None:
            words += f" at {trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
        self.failures.append(words)

    def get_debug(self) -> bool:
        """Return False."""
        return False

    def is_running(self) -> bool:
        """Say whether callbacks run now."""
        return self._running

    def is_closed(self) -> bool:
        """Say whether the loop has ended."""
        return self._closed

    def close(self, lives: Iterable[Life] = ()) -> None:
        """End: nothing that is still waiting runs any more, and unfinished tasks of ``lives`` are closed now."""
        self._closed = True
        asyncio._set_running_loop(self)
        try:
            for life in lives:
                for task in list(life.tasks):
                    task._log_destroy_pending = False  # type: ignore[attr-defined]
                    # What it does on its way out no longer matters, but it has to be out: it may wait there, too.
                    for _ in range(WAITS_ON_THE_WAY_OUT_MAX):
                        try:
                            cast(Coroutine[Any, Any, Any], task.get_coro()).throw(_Over())
                        except (Exception, asyncio.CancelledError, _Over):
                            break
        finally:
            asyncio._set_running_loop(None)
        self._ready.clear()
        self._timers.clear()
        self._readers.clear()


def _settle(future: asyncio.Future[Any], error: Exception | None, result: Any) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
