"""The time of what a router has booked: entries that no worker confirms end, and what workers said of others ends soon.

The clock is read here; what an entry is worth, and for how long, is the ledger's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from poolgrid.process.clock import Clock
from poolgrid.router.core.inputs import Expired, Overcommitted
from poolgrid.router.core.router_state import RouterState
from poolgrid.wire.identifiers import WorkerKey


class Reservations:
    """Expires a router's entries in the load ledger."""

    def __init__(self, state: RouterState, clock: Clock, under_way: Callable[[], set[str]]) -> None:
        """``under_way`` names the dispatches that this router knows to be on their workers: they do not expire."""
        self._state = state
        self._clock = clock
        self._under_way = under_way
        self._crowding_timer: asyncio.TimerHandle | None = None

    def expire(self) -> None:
        """Let go of what was due and is not under way."""
        self._state.apply(Expired(self._clock.monotonic_ms(), self._under_way()))

    def crowded(self, worker: WorkerKey, dispatch_id: str, booked_tokens: int) -> None:
        """Take note of what a worker has promised to others; it holds for a moment, until their events come."""
        now_ms = self._clock.monotonic_ms()
        self._state.apply(Overcommitted(worker, dispatch_id, booked_tokens, now_ms))
        self._await_crowding_end(now_ms)

    @property
    def awaits_crowding_end(self) -> bool:
        """Tell whether some worker's word of others is still to run out."""
        return self._crowding_timer is not None

    def stop(self) -> None:
        """Expire nothing any more."""
        if self._crowding_timer is not None:
            self._crowding_timer.cancel()

    def _await_crowding_end(self, now_ms: float) -> None:
        """Look when the next such entry is due: what a worker said of others must not outlive their events."""
        due_ms = self._state.projection.ledger.crowding_ends_ms()
        if self._crowding_timer is None and due_ms is not None:
            wait_s = max(0.001, (due_ms - now_ms) / 1000)
            self._crowding_timer = asyncio.get_running_loop().call_later(wait_s, self._end_crowding)

    def _end_crowding(self) -> None:
        self._crowding_timer = None
        self.expire()
        self._await_crowding_end(self._clock.monotonic_ms())
