"""What happened, as one hash over everything and the last events in words."""

from __future__ import annotations

from collections import deque

import xxhash

LAST_EVENTS = 400
"""Events kept in words for the report of a failure."""


class Trace:
    """The log of one run: equal hashes mean that two runs were the same, event by event, byte by byte."""

    def __init__(self, keep_all: bool = False) -> None:
        self._hasher = xxhash.xxh3_64()
        self._last: deque[tuple[float, str, str]] = deque(maxlen=None if keep_all else LAST_EVENTS)
        self.events = 0

    def note(self, now_s: float, what: str, details: str, payload: bytes = b"") -> None:
        """Add an event; ``payload`` enters the hash only."""
        self.events += 1
        self._hasher.update(f"{now_s:.9f} {what} {details}".encode())
        self._hasher.update(payload)
        self._last.append((now_s, what, details))

    def digest(self) -> str:
        """Return the hash of everything so far."""
        return self._hasher.hexdigest()

    def lines(self, count: int | None = None) -> list[str]:
        """Return the last events in words."""
        events = list(self._last)[-count:] if count is not None else self._last
        return [f"{1000 * now_s:12.3f} ms  {what:<10} {details}" for now_s, what, details in events]
