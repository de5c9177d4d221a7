"""A rate limit: a bucket that fills at a rate up to its size, and from which requests take. Pure: times are arguments.

Rules
    1. Whoever asks for at most what is in the bucket gets it. Whoever asks for more than the bucket can hold gets it
       when the bucket is full; the bucket then owes the rest, and nobody gets anything until that is made up for.
    2. ``charge`` takes what was used already (output tokens); it may leave a debt too.
    3. A bucket holds one minute's worth: a client that was quiet may use its minute at once.
"""

from __future__ import annotations


class TokenBucket:
    """One limit of one tenant; ``per_minute`` may change at any time."""

    __slots__ = ("_at_ms", "_level", "_size")

    def __init__(self, per_minute: int, now_ms: float) -> None:
        self._size = float(per_minute)
        self._level = float(per_minute)
        self._at_ms = now_ms

    def resize(self, per_minute: int, now_ms: float) -> None:
        """Use another rate from now on; what was used stays used."""
        self._fill(now_ms)
        self._level += per_minute - self._size
        self._size = float(per_minute)

    def wait_s(self, amount: float, now_ms: float) -> float:
        """Return how long it takes until ``amount`` may be taken; 0.0 = now."""
        self._fill(now_ms)
        missing = min(amount, self._size) - self._level
        return max(0.0, missing / self._size * 60.0)

    def charge(self, amount: float, now_ms: float) -> None:
        """Take ``amount``, whatever is there; a negative one gives back."""
        self._fill(now_ms)
        self._level = min(self._size, self._level - amount)

    def _fill(self, now_ms: float) -> None:
        elapsed_ms = now_ms - self._at_ms
        if elapsed_ms > 0:
            self._level = min(self._size, self._level + elapsed_ms / 60_000.0 * self._size)
            self._at_ms = now_ms
