"""What a router's two ways to a pool's journal have in common: a reader without sockets, its time, and the listener.

A follower's ``_carry_out`` does what its reader asks for and ends with ``_settle``, which says that the router is live
and has the reader woken when something is due.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from typing import Any, Generic, Protocol, TypeVar

from poolgrid.consolidator.core.feed_reader import FeedState
from poolgrid.consolidator.ports import PoolListener
from poolgrid.process.clock import Clock
from poolgrid.wire.events import JournalRecord

log = logging.getLogger(__name__)


class JournalReader(Protocol):
    """Decides what is asked and what is delivered; synchronous, with the time as an argument."""

    @property
    def state(self) -> FeedState:
        """Return whether it is syncing, filling a hole, or live."""

    @property
    def next_offset(self) -> int:
        """Return the offset of the next record."""

    @property
    def behind(self) -> int:
        """Return how much, at least, is missing of what is known to be there."""

    holes: int
    snapshots: int

    def resync(self, now_ms: float) -> list[Any]:
        """Begin anew with a snapshot."""

    def tick(self, now_ms: float) -> list[Any]:
        """Do what is due."""

    def due_ms(self) -> float | None:
        """Return when something is due."""


R = TypeVar("R", bound=JournalReader)


class JournalFollower(ABC, Generic[R]):
    """Calls a listener as the consolidator would, had it been in this process."""

    def __init__(self, reader: R, listener: PoolListener, clock: Clock) -> None:
        self._reader = reader
        self._listener = listener
        self._clock = clock
        self._timer: asyncio.TimerHandle | None = None
        self._synced = asyncio.Event()
        self._closed = False

    @property
    def state(self) -> FeedState:
        """Return whether we are syncing, filling a hole, or live."""
        return self._reader.state

    @property
    def next_offset(self) -> int:
        return self._reader.next_offset

    def behind(self) -> int:
        return self._reader.behind

    @property
    def holes(self) -> int:
        return self._reader.holes

    @property
    def snapshots(self) -> int:
        return self._reader.snapshots

    def resync(self) -> None:
        """Ask for a snapshot: the listener could not use what it got. May be called from inside the listener."""
        asyncio.get_running_loop().call_soon(self._resync)

    def _resync(self) -> None:
        if not self._closed:
            self._carry_out(self._reader.resync(self._clock.monotonic_ms()))

    async def wait_synced(self) -> None:
        """Wait until the listener has had its first snapshot and we are live."""
        await self._synced.wait()

    @abstractmethod
    def _carry_out(self, effects: list[Any]) -> None:
        """Do what the reader asks for, and ``_settle``."""

    def _settle(self) -> None:
        if self._reader.state is FeedState.LIVE:
            self._synced.set()
        due_ms = self._reader.due_ms()
        if due_ms is None or self._closed:
            self._stop_timer()
            return
        loop = asyncio.get_running_loop()
        when_s = loop.time() + max(0.001, (due_ms - self._clock.monotonic_ms()) / 1000)
        # It mostly moves away: then the timer stays, finds nothing due, and is set again.
        if self._timer is None or self._timer.when() > when_s:
            self._stop_timer()
            self._timer = loop.call_at(when_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._carry_out(self._reader.tick(self._clock.monotonic_ms()))

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tell(self, records: list[JournalRecord]) -> None:
        try:
            self._listener.on_records(records)
        except Exception:
            # What else is to be done must not wait for it: a question, the timer.
            log.exception("the reader failed on records %d to %d", records[0].offset, records[-1].offset)
