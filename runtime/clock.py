"""Where shells read time. Cores never do: they take it as an argument."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A source of wall-clock and monotonic time."""

    def wall_ms(self) -> int:
        """Return Unix time in milliseconds (for people and records; may jump)."""
        ...

    def monotonic_ms(self) -> float:
        """Return milliseconds that only grow (for leases, timeouts and latencies)."""
        ...


class SystemClock:
    """The machine's clock."""

    def wall_ms(self) -> int:
        """Return Unix time in milliseconds."""
        return time.time_ns() // 1_000_000

    def monotonic_ms(self) -> float:
        """Return milliseconds that only grow."""
        return time.monotonic_ns() / 1e6
