"""What one tenant has used, and whether it may use more.

The figures are in a *cell*: of this process alone (``OwnCell``), or of several that share a port
(``poolgrid.frontend.access.shared_cells``). A tenant without limits never touches its cell. Rates come with each call,
so that changed ones count from then on; what was used stays used. Times are arguments.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple, Protocol

from poolgrid.frontend.access.key_file import Tenant

MINUTE_MS = 60_000.0

GRAIN_MS = 1.0
"""Waits below this are none: it is what the rounding of a million charges adds up to after half a year of uptime."""


class Bucket(NamedTuple):
    """One limit of one tenant at one time."""

    full_at_ms: float = 0.0
    """When it is full if nobody takes anything until then; a time in the past means full."""
    per_minute: float = 0.0
    """Its rate, and its size; 0.0 = nobody took anything yet."""

    def used(self, now_ms: float) -> float:
        return max(0.0, self.full_at_ms - now_ms) / MINUTE_MS * self.per_minute

    def resized(self, per_minute: float, now_ms: float) -> Bucket:
        """Return the bucket with another rate from now on; what was used stays used."""
        if per_minute == self.per_minute:
            return self
        return Bucket(now_ms + self.used(now_ms) / per_minute * MINUTE_MS, per_minute)

    def wait_s(self, amount: float, now_ms: float) -> float:
        """Return how long it takes until ``amount`` may be taken; 0.0 = now."""
        missing = min(amount, self.per_minute) - (self.per_minute - self.used(now_ms))
        wait_ms = missing / self.per_minute * MINUTE_MS
        return wait_ms / 1000 if wait_ms > GRAIN_MS else 0.0

    def charged(self, amount: float, now_ms: float) -> Bucket:
        """Return the bucket without ``amount``, whatever is there; a negative one gives back."""
        full_at_ms = max(now_ms, self.full_at_ms) + amount / self.per_minute * MINUTE_MS
        return Bucket(full_at_ms, self.per_minute)


class Rate(IntEnum):
    """The buckets of a tenant; the value is the place in its cell."""

    REQUESTS = 0
    TOKENS = 1


class Cell(Protocol):
    """Where a tenant's figures are. Everything but ``lock`` is called between ``lock`` and ``unlock`` only."""

    def lock(self, now_ms: float) -> None:
        """Have the cell for oneself; nobody keeps it for longer than a few calls."""
        ...

    def unlock(self) -> None:
        """Let others have it."""
        ...

    def bucket(self, rate: Rate) -> Bucket:
        """Return a bucket as it is."""
        ...

    def store(self, rate: Rate, bucket: Bucket) -> None:
        """Replace a bucket."""
        ...

    def elsewhere(self) -> int:
        """Return the requests in flight in other processes."""
        ...

    def publish(self, in_flight: int) -> None:
        """Tell other processes how many requests are in flight in this one."""
        ...


class OwnCell:
    """The cell of a process that is alone."""

    __slots__ = ("_buckets",)

    def __init__(self) -> None:
        self._buckets = [Bucket() for _ in Rate]

    def lock(self, now_ms: float) -> None:
        """Do nothing: all is done from one event loop."""

    def unlock(self) -> None:
        """Do nothing."""

    def bucket(self, rate: Rate) -> Bucket:
        return self._buckets[rate]

    def store(self, rate: Rate, bucket: Bucket) -> None:
        self._buckets[rate] = bucket

    def elsewhere(self) -> int:
        """Return 0: there is no other process."""
        return 0

    def publish(self, in_flight: int) -> None:
        """Do nothing: nobody asks."""


class Verdict(NamedTuple):
    """Whether a request may begin: it was counted when there was room and nothing to wait for."""

    in_flight: int
    """Requests in flight before it; where they are not limited, those of this process."""
    wait_s: float
    """Time until the next request is due; 0.0 = now."""
    is_full: bool = False
    """Whether it would have been one too many at a time."""
    share: int | None = None
    """How many this router may have in flight, where that is a part of what all routers may; ``None`` = all of it."""


class Meter:
    """The figures of one tenant; what is left in flight in this process is kept here, whatever the limits."""

    __slots__ = ("_cell", "_shown", "in_flight")

    def __init__(self, cell: Cell) -> None:
        self.in_flight = 0
        """Requests in flight in this process."""
        self._cell = cell
        self._shown = False
        """Whether other processes are told of them: only a limit makes them ask."""

    def use(self, rules: Tenant, now_ms: float) -> None:
        """Go by new rules: a limit of the requests in flight counts those that began before it too."""
        shown = rules.concurrent_requests is not None
        if shown != self._shown:
            self._shown = shown
            if self.in_flight:
                self._cell.lock(now_ms)
                try:
                    self._cell.publish(self.in_flight if shown else 0)
                finally:
                    self._cell.unlock()

    def begin(self, rules: Tenant, now_ms: float) -> Verdict:
        """Count a request in, unless it would be one too many at a time or in its minute."""
        limit, per_minute = rules.concurrent_requests, rules.requests_per_minute
        if limit is None and per_minute is None:
            self.in_flight += 1
            return Verdict(self.in_flight - 1, 0.0)
        cell = self._cell
        cell.lock(now_ms)
        try:
            there = self.in_flight + (cell.elsewhere() if limit is not None else 0)
            if limit is not None and there >= limit:
                return Verdict(there, 0.0, True)
            wait_s = 0.0 if per_minute is None else self._take(Rate.REQUESTS, 1, per_minute, now_ms)
            if wait_s == 0.0:
                self.in_flight += 1
                if self._shown:
                    cell.publish(self.in_flight)
            return Verdict(there, wait_s)
        finally:
            cell.unlock()

    def end(self, rules: Tenant, output_tokens: int, now_ms: float) -> None:
        """Count a request out, and charge its output."""
        self.in_flight -= 1
        charged = rules.tokens_per_minute is not None and output_tokens > 0
        if not charged and not self._shown:
            return
        cell = self._cell
        cell.lock(now_ms)
        try:
            if self._shown:
                cell.publish(self.in_flight)
            if charged:
                self._charge(rules, output_tokens, now_ms)
        finally:
            cell.unlock()

    def standing(self, rules: Tenant, now_ms: float) -> list[tuple[Rate, Bucket, float]]:
        """Return the bucket of each rate that is limited, as it is now; nothing is looked at where none is."""
        limits = (rules.requests_per_minute, rules.tokens_per_minute)
        if limits == (None, None):
            return []
        self._cell.lock(now_ms)
        try:
            return [
                (rate, self._cell.bucket(rate).resized(limit, now_ms), now_ms)
                for rate, limit in zip(Rate, limits, strict=True)
                if limit is not None
            ]
        finally:
            self._cell.unlock()

    def take_tokens(self, rules: Tenant, tokens: int, now_ms: float) -> float:
        """Take tokens and return 0.0; or take nothing, and return in how many seconds they are due."""
        if rules.tokens_per_minute is None:
            return 0.0
        self._cell.lock(now_ms)
        try:
            return self._take(Rate.TOKENS, tokens, rules.tokens_per_minute, now_ms)
        finally:
            self._cell.unlock()

    def give_back_tokens(self, rules: Tenant, tokens: int, now_ms: float) -> None:
        """Undo ``take_tokens``."""
        if rules.tokens_per_minute is not None and tokens > 0:
            self._cell.lock(now_ms)
            try:
                self._charge(rules, -tokens, now_ms)
            finally:
                self._cell.unlock()

    def _take(self, rate: Rate, amount: float, per_minute: int, now_ms: float) -> float:
        bucket = self._cell.bucket(rate).resized(per_minute, now_ms)
        wait_s = bucket.wait_s(amount, now_ms)
        if wait_s == 0.0:
            self._cell.store(rate, bucket.charged(amount, now_ms))
        return wait_s

    def _charge(self, rules: Tenant, tokens: int, now_ms: float) -> None:
        per_minute = rules.tokens_per_minute
        assert per_minute is not None, "only a limit is charged"
        bucket = self._cell.bucket(Rate.TOKENS).resized(per_minute, now_ms)
        self._cell.store(Rate.TOKENS, bucket.charged(tokens, now_ms))
