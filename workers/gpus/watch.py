"""Reads the GPUs again and again, in a thread of its own: a driver that hangs holds up nobody but it.

Rules
    1. The thread opens the driver, which may take seconds, reads, and waits; between two readings there are always
       ``interval_ms``, however long one took.
    2. What is shown is the last reading, until it is ``STALE_INTERVALS`` old: a gauge that stands still looks like
       good health, and is taken away instead.
    3. Where nothing can be read the log says so once, and the thread ends.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import NamedTuple, Protocol

from poolgrid.process.clock import Clock
from poolgrid.workers.gpus.nvml import GpusUnavailable
from poolgrid.workers.gpus.reading import GpuReading

log = logging.getLogger(__name__)

STALE_INTERVALS = 4
"""Readings that may fail to come, or be late, before the last one is old."""

STALE_MIN_MS = 10_000.0
"""A reading takes some 20 ms, and a driver under load a second."""

JOIN_TIMEOUT_S = 2.0
"""How long the end waits for a reading that is under way; one that hangs is left behind."""


class GpuReader(Protocol):
    """What reads GPUs."""

    driver: str
    """Version of the driver."""

    def read(self) -> list[GpuReading]:
        """Return what the GPUs are like now."""
        ...

    def close(self) -> None:
        """Let the driver go."""
        ...


class Seen(NamedTuple):
    """The last reading."""

    driver: str
    readings: list[GpuReading]
    read_ms: float
    """When it was complete."""
    took_ms: float


class GpuWatch:
    """Watches the GPUs of one process."""

    def __init__(self, open_reader: Callable[[], GpuReader], interval_ms: float, clock: Clock) -> None:
        """``open_reader`` is called in the thread; raises ``GpusUnavailable``."""
        self._open_reader = open_reader
        self._interval_ms = interval_ms
        self._clock = clock
        self._stop = threading.Event()
        self._seen: Seen | None = None
        self._thread = threading.Thread(target=self._run, name="gpus", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End; waits a moment for a reading that is under way."""
        self._stop.set()
        self._thread.join(JOIN_TIMEOUT_S)

    def seen(self) -> Seen | None:
        """Return the last reading, unless it is old or there is none."""
        seen = self._seen
        if seen is None or self._clock.monotonic_ms() - seen.read_ms > self.stale_ms:
            return None
        return seen

    @property
    def stale_ms(self) -> float:
        """When a reading is old."""
        return max(STALE_MIN_MS, STALE_INTERVALS * self._interval_ms)

    def _run(self) -> None:
        try:
            reader = self._open_reader()
        except GpusUnavailable as why:
            log.info("no metrics of GPUs: %s", why)
            return
        except Exception as error:
            # A driver and a package that do not fit each other fail in many ways; requests are served without it.
            log.warning("no metrics of GPUs: opening the driver failed: %r", error)
            return
        try:
            while not self._stop.is_set():
                self._read(reader)
                self._stop.wait(self._interval_ms / 1000)
        finally:
            reader.close()

    def _read(self, reader: GpuReader) -> None:
        began_ms = self._clock.monotonic_ms()
        try:
            readings = reader.read()
        except Exception as error:
            log.warning("reading the GPUs failed, it is tried again: %r", error)
            return
        now_ms = self._clock.monotonic_ms()
        self._seen = Seen(reader.driver, readings, now_ms, now_ms - began_ms)
