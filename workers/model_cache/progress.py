"""How far the fetching of a model is, as lines of JSON from one process to another."""

from __future__ import annotations

import threading
from collections.abc import Callable

import msgspec

from poolgrid.process.clock import Clock

LINE_MS = 500.0
"""Least time between two lines of the same phase."""


class ProgressLine(msgspec.Struct, frozen=True):
    """One line."""

    phase: str
    """``wait``, ``list``, ``fetch``, ``verify``."""
    bytes: int = 0
    """Done."""
    total_bytes: int = 0
    """To be done in this phase; 0 = not known."""


class ProgressLines:
    """Implements ``poolgrid.workers.model_cache.fetching.Progress``; safe from several threads."""

    def __init__(self, write: Callable[[str], None], clock: Clock) -> None:
        self._write = write
        self._clock = clock
        self._lock = threading.Lock()
        self._now = ProgressLine("")
        self._written_ms = 0.0

    def phase(self, name: str, total_bytes: int) -> None:
        """Write where the work is now."""
        with self._lock:
            self._now = ProgressLine(name, 0, total_bytes)
            self._tell()

    def moved(self, count: int) -> None:
        """Write how far it is, if that was not long ago."""
        with self._lock:
            self._now = ProgressLine(self._now.phase, self._now.bytes + count, self._now.total_bytes)
            is_all = self._now.bytes == self._now.total_bytes
            if is_all or self._clock.monotonic_ms() - self._written_ms >= LINE_MS:
                self._tell()

    def _tell(self) -> None:
        self._written_ms = self._clock.monotonic_ms()
        self._write(msgspec.json.encode(self._now).decode() + "\n")
