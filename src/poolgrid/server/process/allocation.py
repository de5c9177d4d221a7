"""Memory of large bodies and media goes back to the system when they are freed.

Large blocks
------------

glibc's ``malloc`` gives a large block its own mapping, which ends with it, but only until one was freed: from then on
it takes blocks of up to that size, 32 MiB at most, from its heap, where a small object that came later keeps all below
it. A router that had served a few images of 24 MB kept hundreds of megabytes. A fixed threshold keeps large
blocks apart; a block pays for it with the page faults of a fresh mapping, about a tenth of a millisecond for each MiB.

What came in pieces
-------------------
A body or a file that arrives in pieces of 64 KiB lies in the heap, and what came later lies between them. When they are
freed the heap is mostly holes, which ``malloc`` keeps: 150 MB of them after a few files of 24 MB. A thread therefore
gives holes back once a minute, and soon after the process has grown: some large bodies are then over. That locks the
heap, 40 ms for 70 MB of holes in a router that serves 2,000 long prompts a second.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from pathlib import Path

LARGE_BLOCK_BYTES = 2 * 1024 * 1024
"""From this size on a block has a mapping of its own. Ordinary requests are smaller, and do not pay."""

KEPT_BYTES = 16 * 1024 * 1024
"""What may stay free at the end of the heap: a busy process would otherwise ask for the same pages again and again."""

TRIM_INTERVAL_S = 60.0
"""Between two times that holes are given back, whatever the process holds."""

LOOK_INTERVAL_S = 5.0
"""Between two looks at what the process holds: a large body is read and answered within it."""

GROWTH_BYTES = 32 * 1024 * 1024
"""Growth since holes were last given back after which that is done at the next look: one body of the largest size."""

ATTEMPTS = 4
"""Times after growth: the bodies of the first look may still be read, and are over by the last."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_STATM = Path("/proc/self/statm")
_OF_THE_OPERATOR = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")


def return_large_blocks() -> bool:
    """Have freed large blocks returned; False where the C library has no such setting, or it is set already."""
    if any(name in os.environ for name in _OF_THE_OPERATOR):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    told = (mallopt(_M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES), mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES))
    return all(told)


def resident_bytes() -> int:
    """Return the resident memory of this process; 0 where ``/proc`` is absent."""
    try:
        pages = int(_STATM.read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


class TrimSchedule:
    """When to give holes back: once a minute, and a few times after the process has grown."""

    def __init__(self, now_s: float, held_bytes: int) -> None:
        self._trimmed_s = now_s
        self._held_bytes = held_bytes
        self._attempts = 0

    def is_due(self, now_s: float, held_bytes: int) -> bool:
        return now_s - self._trimmed_s >= TRIM_INTERVAL_S or held_bytes - self._held_bytes >= GROWTH_BYTES

    def note(self, now_s: float, held_bytes: int) -> None:
        """Note what the process holds after that; what several attempts do not return is in use."""
        self._trimmed_s = now_s
        self._attempts += 1
        if held_bytes - self._held_bytes < GROWTH_BYTES or self._attempts == ATTEMPTS:
            self._held_bytes = held_bytes
            self._attempts = 0


def keep_heap_trimmed() -> bool:
    """Give holes back from now on, in a thread; False where the C library does not do that."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is None:
        return False
    stopped = threading.Event()  # never set: the thread ends with its process

    def trim_repeatedly() -> None:
        schedule = TrimSchedule(time.monotonic(), resident_bytes())
        while not stopped.wait(LOOK_INTERVAL_S):
            if schedule.is_due(time.monotonic(), resident_bytes()):
                malloc_trim(0)
                schedule.note(time.monotonic(), resident_bytes())

    threading.Thread(target=trim_repeatedly, name="heap trimmer", daemon=True).start()
    return True
