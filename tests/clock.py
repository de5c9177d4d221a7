"""Time that passes when a test says so."""

from __future__ import annotations

BEGAN_MS = 1_700_000_000_000


class HandClock:
    """A clock that stands until a test moves it; it read 0 at the Unix time ``BEGAN_MS``."""

    def __init__(self, now_ms: float = 0.0) -> None:
        self.now_ms = now_ms

    def monotonic_ms(self) -> float:
        return self.now_ms

    def wall_ms(self) -> int:
        return BEGAN_MS + int(self.now_ms)
