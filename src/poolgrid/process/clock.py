"""Where shells read time. Cores never do: they take it as an argument."""

from __future__ import annotations

from time import monotonic_ns, time_ns
from typing import Final, Protocol, final

# A compiled module looks up what it imports at each use, and these many times a request.
_monotonic_ns: Final = monotonic_ns
_time_ns: Final = time_ns


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
        return _time_ns() // 1_000_000

    def monotonic_ms(self) -> float:
        """Return milliseconds that only grow."""
        return _monotonic_ns() / 1e6
