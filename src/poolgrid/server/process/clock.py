"""Where shells read time. Cores never do: they take it as an argument.

A clock that stands still while its process does: code that judges others by their silence reads this one.

A process that was stopped (SIGSTOP, the migration of a virtual machine, a blocked event loop) finds on waking that
every peer has been silent for as long, and that every timer is late. What others sent meanwhile waits unread in its
sockets. ``AwakeTime`` therefore counts a stretch without a sign of its own life as ``gap_max_ms`` at most; Cassandra's
failure detector ignores a "local pause" in the same way.

Judged by it: leases, links, reservations, pools, questions without an answer, places in queues. A verdict needs a
timeout of several gaps, so sockets have been read before it is reached. Times that people see, and when to send
oneself, go by the ordinary clock.
"""

from __future__ import annotations

import asyncio
import logging
from time import monotonic_ns, time_ns
from typing import Any, Final, Protocol, TypeVar, final


class Clock(Protocol):
    """A source of wall-clock and monotonic time."""

    def wall_ms(self) -> int:
        """Return Unix time in milliseconds (for people and records; may jump)."""
        ...

    def monotonic_ms(self) -> float:
        """Return milliseconds that only grow (for leases, timeouts and latencies)."""
        ...


@final
class SystemClock:
    """The machine's clock."""

    def wall_ms(self) -> int:
        return time_ns() // 1_000_000

    def monotonic_ms(self) -> float:
        """Return milliseconds that only grow."""
        return monotonic_ns() / 1e6


def shared_moment_s(now_s: float, every_s: float) -> float:
    """Return the next of the moments of a loop that all timers with an interval share: one wake-up for all of them.

    It is later by the interval at most, in whole milliseconds.
    """
    every_ms = max(1, round(1000 * every_s))
    return (round(1000 * now_s) // every_ms + 1) * every_ms / 1000


log: Final = logging.getLogger(__name__)

T = TypeVar("T")

BEAT_MAX_MS: Final = 250.0
"""Longest time between two heartbeats: a wake-up of an idle process costs 0.1 ms of CPU."""

BEATS_PER_TIMEOUT: Final = 8
"""Heartbeats within the shortest timeout that is judged."""

BEATS_PER_GAP: Final = 2.0
"""A beat that is late by one beat still counts in full: a loop with much to do is not standing still."""

PAUSE_TOLD_MS: Final = 1000.0
"""Pauses from here on are worth a line in the log."""


class AwakeTime:
    """Milliseconds in which a process ran, out of a monotonic clock's; it must give a heartbeat every beat.

    Reading changes nothing, and costs a comparison: only beats move the state.
    """

    __slots__ = ("_gap_max_ms", "_held", "left_out_ms", "until_ms")

    def __init__(self, gap_max_ms: float, now_ms: float) -> None:
        self._gap_max_ms = gap_max_ms
        self._held = False
        self.until_ms = now_ms + gap_max_ms
        """Up to here the monotonic clock counts; without another beat time awake stands still then."""
        self.left_out_ms = 0.0
        """What did not count so far."""

    def at(self, now_ms: float) -> float:
        """Return the time awake at ``now_ms`` of the monotonic clock, not before the last beat: it never goes back."""
        return (now_ms if now_ms <= self.until_ms else self.until_ms) - self.left_out_ms

    def beat(self, now_ms: float) -> float:
        """Take a heartbeat; return how long the process stood still before it."""
        paused_ms = max(0.0, now_ms - self.until_ms)
        self.left_out_ms += paused_ms
        self.until_ms = now_ms if self._held else now_ms + self._gap_max_ms
        return paused_ms

    def hold(self, now_ms: float) -> None:
        """Count nothing from now on: the process runs and does not listen."""
        self.beat(now_ms)
        self._held = True
        self.until_ms = now_ms

    def go_on(self, now_ms: float) -> None:
        self._held = False
        self.beat(now_ms)


class AwakeClock:
    """``poolgrid.server.process.clock.Clock`` that counts time awake; ``start`` it on the loop that it is about."""

    def __init__(self, clock: Clock, shortest_timeout_ms: float) -> None:
        """Make a clock for judging timeouts from ``shortest_timeout_ms`` on."""
        self._clock = clock
        self._beat_ms = min(BEAT_MAX_MS, max(1.0, shortest_timeout_ms / BEATS_PER_TIMEOUT))
        self._time = AwakeTime(self._beat_ms * BEATS_PER_GAP, clock.monotonic_ms())
        self._timer: asyncio.TimerHandle | None = None
        self._monotonic_ms = clock.monotonic_ms
        self._is_systems = type(clock) is SystemClock
        """Whether time is the machine's: it is asked for several times a request, and read without another call."""

    def start(self) -> AwakeClock:
        """Begin to beat on the running loop; return itself."""
        if self._timer is None:
            self._beat()
        return self

    def stop(self) -> None:
        """Beat no more: the clock stands still soon."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _beat(self) -> None:
        paused_ms = self._time.beat(self._monotonic_ms())
        if paused_ms >= PAUSE_TOLD_MS:
            log.warning(
                "this process was suspended for %.1f s; that time counts against no other process", paused_ms / 1000
            )
        loop = asyncio.get_running_loop()
        self._timer = loop.call_at(shared_moment_s(loop.time(), self._beat_ms / 1000), self._beat)

    def wall_ms(self) -> int:
        return time_ns() // 1_000_000 if self._is_systems else self._clock.wall_ms()

    def monotonic_ms(self) -> float:
        """Return milliseconds that grow while this process is awake."""
        if self._is_systems:
            return self._time.at(monotonic_ns() / 1e6)
        read = self._monotonic_ms  # called at once it would be looked up as a method
        return self._time.at(read())

    def hold(self) -> None:
        """Stand still until ``go_on``: messages of others are not read."""
        self._time.hold(self._monotonic_ms())

    def go_on(self) -> None:
        self._time.go_on(self._monotonic_ms())


async def within(timeout_ms: float, clock: Clock, future: asyncio.Future[T]) -> T:
    """Wait for a future for at most ``timeout_ms`` of a clock; then it fails with ``TimeoutError``.

    Unlike ``asyncio.timeout`` it waits on when the time passed while the process stood still.
    """
    deadline = _Deadline(future, clock, timeout_ms)
    try:
        return await future
    finally:
        deadline.timer.cancel()


class _Deadline:
    """Lets a future fail once a clock has come to a time; looks again when that clock lags behind the loop's."""

    def __init__(self, future: asyncio.Future[Any], clock: Clock, timeout_ms: float) -> None:
        self._future = future
        self._clock = clock
        self._due_ms = clock.monotonic_ms() + timeout_ms
        self.timer = asyncio.get_running_loop().call_later(timeout_ms / 1000, self._look)

    def _look(self) -> None:
        if self._future.done():
            return
        left_ms = self._due_ms - self._clock.monotonic_ms()
        if left_ms > 0:
            self.timer = asyncio.get_running_loop().call_later(max(0.001, left_ms / 1000), self._look)
        else:
            self._future.set_exception(TimeoutError())
