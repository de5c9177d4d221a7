"""A rate limit: a bucket that fills at a rate up to its size, and from which requests take. Pure: times are arguments.

Rules
    1. Whoever asks for at most what is in the bucket gets it. Whoever asks for more than the bucket can hold gets it
       when the bucket is full; the bucket then owes the rest, and nobody gets anything until that is made up for.
    2. ``charged`` takes what was used already (output tokens); it may leave a debt too.
    3. A bucket holds one minute's worth: a client that was quiet may use its minute at once.
"""

from __future__ import annotations

from typing import NamedTuple

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
