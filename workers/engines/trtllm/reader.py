"""Reads KV cache events and iteration statistics out of ``LLM``, in a thread of its own.

Rules:

1. From 1.2 on both are synchronous calls to the engine's process, made when a reader asks, without a limit: only this
   thread waits for them. Until the first request such a version answers with nothing; an older one, which has queues,
   raises ``AssertionError``. That tells the two apart, so the first request waits until it was asked (``has_begun``).
   Calls are made with a timeout of 0, always.
2. An older version is read by its asynchronous readers, without ever waiting: with a longer timeout a reader is *done*
   on expiry and gives nothing more until the next request, as a synchronous one always is. That nothing is there is
   told by ``asyncio.QueueEmpty``, sometimes by ``TimeoutError`` or ``IndexError`` (a late notification).
3. One turn hands over at most ``events_per_turn`` events, parsed, and goes on when they were taken: who takes them is
   never behind by more.
4. Between turns the reader pauses: shortly while things happen, longer and longer while nothing does. ``wake`` ends a
   long pause.
5. A reader that fails is tried again, for ever.
6. ``silent_ms`` says for how long the reader has been inside a call: an engine that hangs is seen here first.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncIterable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from poolgrid.kv_events.cache_events import AnyEngineEvent, Stored
from poolgrid.kv_events.trtllm import parse_event
from poolgrid.process.clock import Clock
from poolgrid.process.tasks import owned
from poolgrid.wire.errors import DecodeError
from poolgrid.workers.engines.trtllm.core.statistics import EngineStatistics, parse_statistics

log = logging.getLogger(__name__)

NOTHING_THERE = (asyncio.QueueEmpty, TimeoutError, IndexError)
"""How an asynchronous reader with a timeout of 0 says that it has nothing."""

EVENTS = "events"
STATISTICS = "statistics"

END_TIMEOUT_S = 1.0
"""How long the thread may take to end; one that is inside a call is left behind."""


class Readable(Protocol):
    """What the reader uses of ``LLM``."""

    def get_kv_cache_events(self, timeout: float | None = 2) -> list[dict[str, Any]]:
        """Return the events that there are."""
        ...

    def get_kv_cache_events_async(self, timeout: float | None = 2) -> AsyncIterable[dict[str, Any]]:
        """Return the events as they come."""
        ...

    def get_stats(self, timeout: float | None = 2) -> list[dict[str, Any]]:
        """Return the statistics that there are."""
        ...

    def get_stats_async(self, timeout: float | None = 2) -> AsyncIterable[dict[str, Any]]:
        """Return the statistics as they come."""
        ...


@dataclass(frozen=True, slots=True)
class FeedLimits:
    """How often and how much is read."""

    pause_min_ms: float = 5.0
    """Between two turns while something happens: below the time of an engine step, so that lag stays below a step."""
    pause_max_ms: float = 20.0
    """While the engine worked less than ``idle_after_ms`` ago: events are never later than this plus one turn."""
    pause_growth: float = 1.5
    """Factor from one turn that found nothing to the next."""
    idle_after_ms: float = 1000.0
    """An engine that said nothing for so long is idle."""
    idle_pause_max_ms: float = 200.0
    """Between two turns of an idle engine: its last events come late, and there is no other sign of them."""
    events_per_turn: int = 256
    """Then others have their turn: 1 to 3 ms of our work. The rest is handed over after ``turn_gap_ms``."""
    blocks_per_turn: int = 1024
    """The same for events with many blocks (an event of a long prompt has thousands)."""
    turn_gap_ms: float = 1.0
    """Between two turns when there is more to read: threads of the engine that wait for the interpreter get it, which a
    turn of the loop alone does not see to. 256 events per turn then are about 100,000 a second."""
    statistics_per_turn: int = 256
    """Iterations whose statistics are read in one turn; the engine keeps 1000."""
    failing_clears_ms: float = 5000.0
    """How long reading events may fail before the ranks are cleared: well below the time that a cache turns over."""


@dataclass(slots=True)
class Turn:
    """What one turn brought."""

    events: list[AnyEngineEvent] = field(default_factory=list)
    statistics: list[tuple[EngineStatistics, Mapping[str, Any]]] = field(default_factory=list)
    """As they were read too."""
    dropped: list[tuple[str, DecodeError]] = field(default_factory=list)
    """What could not be understood, by reader."""
    errors: dict[str, Exception] = field(default_factory=dict)
    """Readers that failed, by name."""
    event_count: int = 0
    """Events, with those that were dropped."""
    more_events: bool = False
    read_ms: float = 0.0


class EngineReader:
    """The reader of one ``LLM``; made on the event loop that turns are handed to."""

    def __init__(
        self, llm: Any, clock: Clock, limits: FeedLimits, take: Callable[[Turn], None], reads_events: bool = True
    ) -> None:
        self._llm: Readable = llm
        self._reads_events = reads_events
        self._clock = clock
        self._limits = limits
        self._take = take
        self._caller = asyncio.get_running_loop()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._reading: asyncio.Task[None] | None = None
        self._woken: asyncio.Event | None = None
        self._pausing = False
        self._requested = False
        self._by_calls: bool | None = None
        """Whether events come by synchronous calls; ``None`` = nobody has asked yet."""
        self._events: deque[Mapping[str, Any]] = deque()
        self._statistics: deque[Mapping[str, Any]] = deque()
        """What a call brought and has not been handed over."""
        self._since_ms: float | None = None
        self._ended: asyncio.Future[None] = self._caller.create_future()
        self.has_begun = asyncio.Event()
        """Set after the first turn."""

    # -- from the caller's loop ----------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Read until cancelled; raises what ``take`` raises. It may be run again after its end."""
        self._ended = self._caller.create_future()
        self._loop = self._reading = None
        threading.Thread(target=self._run, name="engine reader", daemon=True).start()
        try:
            await asyncio.shield(self._ended)
        except asyncio.CancelledError:
            self._post(self._stop)
            # A call that hangs is left behind with its thread.
            await asyncio.wait({self._ended}, timeout=END_TIMEOUT_S)
            raise

    def wake(self) -> None:
        """Say that a request was just submitted: a long pause ends now."""
        self._requested = True
        if self._pausing and self._woken is not None:
            self._pausing = False
            self._post(self._woken.set)

    def silent_ms(self, now_ms: float) -> float:
        """Return for how long the reader has been inside one call; 0 while it is in none."""
        since_ms = self._since_ms
        return 0.0 if since_ms is None else max(0.0, now_ms - since_ms)

    def _post(self, call: Callable[[], object]) -> None:
        if self._loop is not None:
            try:
                self._loop.call_soon_threadsafe(call)
            except RuntimeError:
                pass  # it has ended

    def _taken(self, turn: Turn, loop: asyncio.AbstractEventLoop, done: asyncio.Event) -> None:
        self.has_begun.set()
        try:
            self._take(turn)
        except Exception as error:
            if not self._ended.done():
                self._ended.set_exception(error)
            self._post(self._stop)
        try:
            loop.call_soon_threadsafe(done.set)
        except RuntimeError:
            pass

    def _end(self, error: BaseException | None) -> None:
        if self._ended.done():
            return
        if error is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(error)

    # -- in the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            with asyncio.Runner() as runner:
                self._loop = runner.get_loop()
                runner.run(self._read())
        except asyncio.CancelledError:
            pass
        except BaseException as failure:
            error = failure
        try:
            self._caller.call_soon_threadsafe(self._end, error)
        except RuntimeError:
            pass  # nobody is there any more

    def _stop(self) -> None:
        if self._reading is not None:
            self._reading.cancel()

    async def _read(self) -> None:
        self._woken = asyncio.Event()
        self._reading = owned(self._read_for_ever(), "engine reader")
        await self._reading

    async def _read_for_ever(self) -> None:
        limits = self._limits
        loop = asyncio.get_running_loop()
        pause_ms = limits.pause_min_ms
        found_ms = self._clock.monotonic_ms()
        while True:
            turn = Turn()
            await self._read_events(turn)
            more_statistics = await self._read_statistics(turn)
            now_ms = turn.read_ms = self._clock.monotonic_ms()
            done = asyncio.Event()
            self._caller.call_soon_threadsafe(self._taken, turn, loop, done)
            await done.wait()
            if turn.more_events or more_statistics:
                await asyncio.sleep(limits.turn_gap_ms / 1e3)
                continue
            if turn.event_count or turn.statistics:
                found_ms = now_ms
                pause_ms = limits.pause_min_ms
            else:
                idle = now_ms - found_ms >= limits.idle_after_ms
                most = limits.idle_pause_max_ms if idle else limits.pause_max_ms
                pause_ms = min(pause_ms * limits.pause_growth, most)
            if await self._pause(pause_ms):
                found_ms = self._clock.monotonic_ms()
                pause_ms = limits.pause_min_ms

    async def _pause(self, pause_ms: float) -> bool:
        """Wait; say whether ``wake`` ended it. The shortest pause is always kept: many requests make no more turns."""
        assert self._woken is not None
        shortest = self._limits.pause_min_ms
        await asyncio.sleep(shortest / 1e3)
        if pause_ms <= shortest:
            return False
        self._woken.clear()
        self._pausing = True
        try:
            async with asyncio.timeout((pause_ms - shortest) / 1e3):
                await self._woken.wait()
        except TimeoutError:
            return False
        finally:
            self._pausing = False
        return True

    async def _read_events(self, turn: Turn) -> None:
        """Read what a turn has room for, and parse it at once: what was read last is still in the processor's cache."""
        limits = self._limits
        blocks = 0

        def add(item: Mapping[str, Any]) -> bool:
            """Take an event; say whether there is room for another."""
            nonlocal blocks
            turn.event_count += 1
            try:
                event = parse_event(item)
            except DecodeError as failure:
                turn.dropped.append((EVENTS, failure))
            else:
                turn.events.append(event)
                if type(event) is Stored:
                    blocks += len(event.blocks)
            return turn.event_count < limits.events_per_turn and blocks < limits.blocks_per_turn

        try:
            if not self._reads_events:
                # How an engine gives out events is how it gives out statistics; there are none of the former.
                await self._come_by_calls(turn)
                self._events.clear()
            elif self._events or await self._come_by_calls(turn):
                if not self._events:
                    self._events.extend(self._called(self._llm.get_kv_cache_events))
                turn.more_events = self._hand(self._events, add)
            elif self._by_calls is False:
                turn.more_events = await self._drain(self._llm.get_kv_cache_events_async, add)
        except AssertionError as failure:
            # The queue does not exist before the first request, and never where events are not enabled.
            if self._requested:
                turn.errors[EVENTS] = failure
        except Exception as failure:
            turn.errors[EVENTS] = failure

    async def _come_by_calls(self, turn: Turn) -> bool:
        """Return whether events come by synchronous calls; asks the engine once, before its first request."""
        if self._by_calls is None:
            try:
                self._events.extend(self._called(self._llm.get_kv_cache_events))
            except AssertionError:
                self._by_calls = False
            else:
                self._by_calls = True
        return self._by_calls

    async def _read_statistics(self, turn: Turn) -> bool:
        limits = self._limits

        def add(item: Mapping[str, Any]) -> bool:
            try:
                turn.statistics.append((parse_statistics(item), item))
            except DecodeError as failure:
                turn.dropped.append((STATISTICS, failure))
            return len(turn.statistics) < limits.statistics_per_turn

        try:
            if self._by_calls:
                if not self._statistics:
                    self._statistics.extend(self._called(self._llm.get_stats))
                return self._hand(self._statistics, add)
            return await self._drain(self._llm.get_stats_async, add)
        except Exception as failure:
            turn.errors[STATISTICS] = failure
            return False

    def _called(self, call: Callable[..., list[Any]]) -> list[Any]:
        """Make a synchronous call, which may not come back."""
        self._since_ms = self._clock.monotonic_ms()
        try:
            return call(timeout=0)
        finally:
            self._since_ms = None

    @staticmethod
    def _hand(items: deque[Mapping[str, Any]], add: Callable[[Mapping[str, Any]], bool]) -> bool:
        """Add items while there is room; say whether some are left."""
        while items and add(items.popleft()):
            pass
        return bool(items)

    async def _drain(
        self, call: Callable[..., AsyncIterable[dict[str, Any]]], add: Callable[[Mapping[str, Any]], bool]
    ) -> bool:
        """Add what an asynchronous reader has while there is room; say whether there may be more."""
        self._since_ms = self._clock.monotonic_ms()
        try:
            async for item in call(timeout=0):
                if not add(item):
                    return True
        except NOTHING_THERE:
            pass
        finally:
            self._since_ms = None
        return False
