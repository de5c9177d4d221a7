"""Reads KV cache events and iteration statistics out of ``LLM``, in a thread of its own.

Rules:

1. Both are synchronous calls to the engine's process, made when a reader asks, without a limit: only this thread waits
   for them. Until the first request an engine answers with nothing. Calls are made with a timeout of 0, always.
2. One turn hands over at most ``events_per_turn`` events, parsed, and continues when they were taken: the taker is
   never behind by more.
3. Between turns the reader pauses: shortly while things happen, longer and longer while nothing does. ``wake`` ends a
   long pause.
4. A reader that fails is tried again, indefinitely.
5. ``silent_ms`` returns for how long the reader has been inside a call: an engine that hangs is seen here first.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from poolgrid.kernel.kv_events.cache_events import AnyEngineEvent, Stored
from poolgrid.kernel.kv_events.trtllm import parse_event
from poolgrid.kernel.wire.errors import DecodeError
from poolgrid.plugins.trtllm.core.statistics import EngineStatistics, parse_statistics
from poolgrid.server.process.clock import Clock

EVENTS = "events"
STATISTICS = "statistics"

END_TIMEOUT_S = 1.0
"""How long the thread may take to end; one that is inside a call is left behind."""


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
class FeedTurn:
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
        self, llm: Any, clock: Clock, limits: FeedLimits, take: Callable[[FeedTurn], None], reads_events: bool = True
    ) -> None:
        self._llm = llm
        self._reads_events = reads_events
        self._clock = clock
        self._limits = limits
        self._take = take
        self._caller = asyncio.get_running_loop()
        self._woken = threading.Event()
        self._taken = threading.Event()
        self._stopped = threading.Event()
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
        self._stopped = threading.Event()
        arguments = (self._ended, self._stopped)
        threading.Thread(target=self._run, args=arguments, name="engine reader", daemon=True).start()
        try:
            await asyncio.shield(self._ended)
        finally:
            self._stopped.set()
            self._taken.set()
            self._woken.set()
            # A call that hangs is left behind with its thread.
            await asyncio.wait({self._ended}, timeout=END_TIMEOUT_S)

    def wake(self) -> None:
        """Say that a request was just submitted: a long pause ends now."""
        self._woken.set()

    def silent_ms(self, now_ms: float) -> float:
        """Return for how long the reader has been inside one call; 0 while it is in none."""
        since_ms = self._since_ms
        return 0.0 if since_ms is None else max(0.0, now_ms - since_ms)

    def _hand_over(self, turn: FeedTurn, ended: asyncio.Future[None]) -> None:
        self.has_begun.set()
        try:
            if not ended.done():
                self._take(turn)
        except Exception as error:
            _settle(ended, error)
        finally:
            self._taken.set()

    # -- in the thread -------------------------------------------------------------------------------------------------

    def _run(self, ended: asyncio.Future[None], stopped: threading.Event) -> None:
        error: BaseException | None = None
        try:
            self._read_turns(ended, stopped)
        except BaseException as failure:
            error = failure
        try:
            self._caller.call_soon_threadsafe(_settle, ended, error)
        except RuntimeError:
            pass  # the loop is closed

    def _read_turns(self, ended: asyncio.Future[None], stopped: threading.Event) -> None:
        limits = self._limits
        pause_ms = limits.pause_min_ms
        found_ms = self._clock.monotonic_ms()
        while not stopped.is_set():
            self._woken.clear()
            turn = FeedTurn()
            if self._reads_events:
                turn.more_events = self._read_events(turn)
            more_statistics = self._read_statistics(turn)
            now_ms = turn.read_ms = self._clock.monotonic_ms()
            self._taken.clear()
            if stopped.is_set():
                return
            self._caller.call_soon_threadsafe(self._hand_over, turn, ended)
            self._taken.wait()
            if turn.more_events or more_statistics:
                stopped.wait(limits.turn_gap_ms / 1e3)
                continue
            if turn.event_count or turn.statistics:
                found_ms = now_ms
                pause_ms = limits.pause_min_ms
            else:
                idle = now_ms - found_ms >= limits.idle_after_ms
                most = limits.idle_pause_max_ms if idle else limits.pause_max_ms
                pause_ms = min(pause_ms * limits.pause_growth, most)
            # The shortest pause is always kept: many requests make no more turns.
            stopped.wait(limits.pause_min_ms / 1e3)
            if pause_ms <= limits.pause_min_ms:
                continue
            if self._woken.wait((pause_ms - limits.pause_min_ms) / 1e3):
                found_ms = self._clock.monotonic_ms()
                pause_ms = limits.pause_min_ms

    def _read_events(self, turn: FeedTurn) -> bool:
        """Read what a turn has room for, and parse it at once: what was read last is still in the processor's cache."""
        limits = self._limits
        blocks = 0

        def add(item: Mapping[str, Any]) -> bool:
            """Take an event; return whether there is room for another."""
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

        return self._drain(turn, EVENTS, self._events, self._llm.get_kv_cache_events, add)

    def _read_statistics(self, turn: FeedTurn) -> bool:
        def add(item: Mapping[str, Any]) -> bool:
            try:
                turn.statistics.append((parse_statistics(item), item))
            except DecodeError as failure:
                turn.dropped.append((STATISTICS, failure))
            return len(turn.statistics) < self._limits.statistics_per_turn

        return self._drain(turn, STATISTICS, self._statistics, self._llm.get_stats, add)

    def _drain(
        self,
        turn: FeedTurn,
        reader: str,
        items: deque[Mapping[str, Any]],
        call: Callable[..., list[Any]],
        add: Callable[[Mapping[str, Any]], bool],
    ) -> bool:
        """Add items while there is room, those of a call if none are left; return whether some remain."""
        try:
            if not items:
                self._since_ms = self._clock.monotonic_ms()
                items.extend(call(timeout=0))
            self._since_ms = None
            while items and add(items.popleft()):
                pass
        except Exception as failure:
            turn.errors[reader] = failure
        finally:
            self._since_ms = None
        return bool(items)


def _settle(ended: asyncio.Future[None], error: BaseException | None) -> None:
    if ended.done():
        return
    if error is None:
        ended.set_result(None)
    else:
        ended.set_exception(error)
