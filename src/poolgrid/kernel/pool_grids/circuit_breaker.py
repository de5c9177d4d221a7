"""A circuit breaker per pool: a pool that fails is left alone, then tried by a few requests, then used again.

Rules
    1. *closed*: everything passes. Within ``window_ms``, ``failures_to_open`` failures that are also at least
       ``failure_share`` of the results open it.
    2. *open*: nothing passes for ``open_ms``, which doubles with each opening in a row, up to ``open_max_ms``.
    3. *half-open*, from then on: at most ``probes`` requests are in flight at a time. ``successes_to_close``
       successes in a row close it and reset the doubling; one failure opens it again.
    4. Every admission has a ticket; its result counts only in the state it was given in, so an answer that comes
       late, from before the opening, neither closes nor opens anything. A probe without a result after
       ``probe_timeout_ms`` has failed.
    5. Every change is returned as a ``BreakerStep``.
    6. A breaker lives as long as the connection to its pool. Other settings (``use``) hold from the next result on;
       state, results and tickets stay.

Time is monotonic milliseconds, given as an argument; an earlier time than before is taken as the time before.
"""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from poolgrid.kernel.pool_grids.grid_document import CircuitBreakerSettings

RESULTS_MAX = 1024
"""Results kept of a window; beyond, the oldest are forgotten early. More of them would not change the share."""


class BreakerState(StrEnum):
    """What a breaker lets through."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


@dataclass(frozen=True, slots=True)
class BreakerStep:
    """A change of state."""

    time_ms: float
    before: BreakerState
    after: BreakerState
    reason: str

    def explanation(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Ticket:
    """An admission; give it back with the result."""

    generation: int
    number: int
    probe: bool


class CircuitBreaker:
    """The breaker of one pool."""

    def __init__(self, settings: CircuitBreakerSettings) -> None:
        self._settings = settings
        self._state = BreakerState.CLOSED
        self._now_ms = float("-inf")
        self._generation = 0
        self._number = 0
        self._results: deque[tuple[float, bool]] = deque()
        self._failures = 0
        self._open_until_ms = 0.0
        self._open_ms = float(settings.open_ms)
        self._probes: dict[int, float] = {}
        """Deadline of each probe in flight, by ticket number."""
        self._successes = 0
        self._steps: list[BreakerStep] = []

    @property
    def state(self) -> BreakerState:
        return self._state

    def use(self, settings: CircuitBreakerSettings) -> None:
        """Apply other settings: what is open stays open, at most as long as they allow."""
        self._settings = settings
        self._open_ms = min(self._open_ms, float(settings.open_max_ms))
        if self._state is BreakerState.CLOSED:
            self._open_ms = float(settings.open_ms)
        elif self._state is BreakerState.OPEN:
            self._open_until_ms = min(self._open_until_ms, self._now_ms + settings.open_max_ms)

    def advance(self, now_ms: float) -> list[BreakerStep]:
        self._pass(now_ms)
        return self._taken()

    def would_admit(self, now_ms: float) -> bool:
        """Return whether ``admit`` would give a ticket at ``now_ms``; changes nothing."""
        now = max(now_ms, self._now_ms)
        if self._state is BreakerState.CLOSED:
            return True
        if self._state is BreakerState.OPEN:
            return now >= self._open_until_ms
        return len(self._probes) < self._settings.probes and all(now < deadline for deadline in self._probes.values())

    def retry_after_ms(self, now_ms: float) -> float:
        """Return how long the breaker stays open; 0 when it is not."""
        if self._state is not BreakerState.OPEN:
            return 0.0
        return max(0.0, self._open_until_ms - max(now_ms, self._now_ms))

    def admit(self, now_ms: float) -> tuple[Ticket | None, list[BreakerStep]]:
        """Return a ticket for a request, or ``None`` when it must go elsewhere."""
        self._pass(now_ms)
        ticket = None
        if self._state is BreakerState.CLOSED:
            ticket = self._ticket(probe=False)
        elif self._state is BreakerState.HALF_OPEN and len(self._probes) < self._settings.probes:
            ticket = self._ticket(probe=True)
            self._probes[ticket.number] = self._now_ms + self._settings.probe_timeout_ms
        return ticket, self._taken()

    def succeeded(self, ticket: Ticket, now_ms: float) -> list[BreakerStep]:
        self._pass(now_ms)
        if self._counts(ticket):
            if not ticket.probe:
                self._record(True)
            else:
                self._successes += 1
                if self._successes >= self._settings.successes_to_close:
                    self._change(BreakerState.CLOSED, f"{self._successes} probes in a row succeeded")
        return self._taken()

    def failed(self, ticket: Ticket, now_ms: float) -> list[BreakerStep]:
        """Note that the pool failed: unreachable, an error of its own, no answer in time; not: busy."""
        self._pass(now_ms)
        if self._counts(ticket):
            if ticket.probe:
                self._change(BreakerState.OPEN, "a probe failed")
            else:
                self._record(False)
                share = self._failures / len(self._results)
                if self._failures >= self._settings.failures_to_open and share >= self._settings.failure_share:
                    self._change(
                        BreakerState.OPEN,
                        f"{self._failures} of {len(self._results)} requests failed in {self._settings.window_ms} ms",
                    )
        return self._taken()

    def abandoned(self, ticket: Ticket, now_ms: float) -> list[BreakerStep]:
        """Note that a request ended without saying anything of the pool, as when the client went away."""
        self._pass(now_ms)
        self._counts(ticket)
        return self._taken()

    def _ticket(self, probe: bool) -> Ticket:
        self._number += 1
        return Ticket(self._generation, self._number, probe)

    def _counts(self, ticket: Ticket) -> bool:
        """Take a ticket back; return whether its result counts. A probe's counts once."""
        if ticket.generation != self._generation:
            return False
        return self._probes.pop(ticket.number, None) is not None if ticket.probe else True

    def _pass(self, now_ms: float) -> None:
        self._now_ms = max(now_ms, self._now_ms)
        while self._results and self._results[0][0] <= self._now_ms - self._settings.window_ms:
            self._forget()
        if self._state is BreakerState.OPEN and self._now_ms >= self._open_until_ms:
            self._change(BreakerState.HALF_OPEN, "the time of rest is over")
        if self._state is BreakerState.HALF_OPEN and any(
            deadline <= self._now_ms for deadline in self._probes.values()
        ):
            self._change(BreakerState.OPEN, f"a probe had no result after {self._settings.probe_timeout_ms} ms")

    def _record(self, success: bool) -> None:
        self._results.append((self._now_ms, success))
        self._failures += not success
        if len(self._results) > RESULTS_MAX:
            self._forget()

    def _forget(self) -> None:
        _, success = self._results.popleft()
        self._failures -= not success

    def _change(self, after: BreakerState, reason: str) -> None:
        before = self._state
        self._state = after
        self._generation += 1
        self._results.clear()
        self._failures = self._successes = 0
        self._probes.clear()
        if after is BreakerState.CLOSED:
            self._open_ms = float(self._settings.open_ms)
        elif after is BreakerState.OPEN:
            if before is BreakerState.HALF_OPEN:
                self._open_ms = min(2 * self._open_ms, float(self._settings.open_max_ms))
            self._open_until_ms = self._now_ms + self._open_ms
        self._steps.append(BreakerStep(self._now_ms, before, after, reason))

    def _taken(self) -> list[BreakerStep]:
        steps, self._steps = self._steps, []
        return steps
