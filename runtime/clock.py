"""Where shells read time. Cores never do: they take it as an argument."""

from __future__ import annotations

from time import monotonic_ns, time_ns
from typing import Protocol, final


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
        """Return Unix time in milliseconds."""
        return time_ns() // 1_000_000

    def monotonic_ms(self) -> float:
        """Return milliseconds that only grow."""
        return monotonic_ns() / 1e6
