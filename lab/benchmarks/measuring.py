"""How the benchmarks time things: several repetitions, median, everything else of the process kept quiet."""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

REPETITIONS = 9


def median_us(call: Callable[[], object], number: int, repetitions: int = REPETITIONS) -> float:
    """Return the median time of one call, in microseconds."""
    times = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(repetitions):
            started = time.perf_counter()
            for _ in range(number):
                call()
            times.append((time.perf_counter() - started) / number)
    finally:
        gc.enable()
    return statistics.median(times) * 1e6


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def pin_to_one_cpu() -> int:
    """Pin this process to its last CPU (a thread hop then costs no cross-CPU wake-up); return which."""
    cpu = max(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cpu})
    return cpu
