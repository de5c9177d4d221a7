"""Memory of large bodies and media goes back to the system when they are freed.

Large blocks
------------

glibc's ``malloc`` gives a large block its own mapping, which ends with it, but only until one was freed: from then on
it takes blocks of up to that size, 32 MiB at most, from its heap, where a small object that came later keeps all below
it. A router that had served a few images of 24 MB went on holding hundreds of megabytes. A fixed threshold keeps large
blocks apart; a block pays for it with the page faults of a fresh mapping, about a tenth of a millisecond for each MiB.

What came in pieces
-------------------
A body or a file that arrives in pieces of 64 KiB lies in the heap, and what came later lies between them. When they are
freed the heap is mostly holes, which ``malloc`` keeps: 150 MB of them after a few files of 24 MB. A thread therefore
has holes given back when they are a good part of what the process holds.

Both asking ``malloc`` for its holes and giving them back keep everybody else out of the heap: 12 and 40 ms for 70 MB of
them in a router that serves 2,000 long prompts a second. So neither is done more often than it must be:

1. ``malloc`` is not asked while about as much is resident as at the last time, for ``LOOK_ANYWAY_S``.
2. A busy process needs most of its holes again at once. Its holes are given back every ``BUSY_INTERVAL_S`` at most,
   those of an idle process at the next look.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

LARGE_BLOCK_BYTES = 2 * 1024 * 1024
"""From this size on a block has a mapping of its own. Ordinary requests are smaller, and do not pay."""

KEPT_BYTES = 16 * 1024 * 1024
"""What may stay free at the end of the heap: a busy process would otherwise ask for the same pages again and again."""

HOLES_BYTES_MAX = 12 * 1024 * 1024
"""Holes, and growth of what is held beyond what is in use, from which on holes are given back: a tenth of what a router
holds when nothing has happened yet."""

LOOK_INTERVAL_S = 5.0
"""Between two looks at what is resident, which take some microseconds."""

LOOK_ANYWAY_S = 15.0
"""How long what ``malloc`` said of its holes is believed while what is resident stays the same: what was in use then
and is none now is given back within 20 s."""

BUSY_INTERVAL_S = 60.0
"""Between two times that a busy process gives its holes back: 40 ms of a minute are less than a thousandth."""

IDLE_CPU_SHARE = 0.5
"""Of one core: a process that used less since the last look has the time to give holes back."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_OF_THE_OPERATOR = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")


def return_large_blocks() -> bool:
    """Have freed large blocks returned; False where the C library cannot be told, or the environment has told it."""
    if any(name in os.environ for name in _OF_THE_OPERATOR):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    told = (mallopt(_M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES), mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES))
    return all(told)


class _Mallinfo2(ctypes.Structure):
    """What glibc tells of its heaps, 2.33 or newer (mallinfo(3))."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


class Heap(NamedTuple):
    """What one look finds."""

    resident_bytes: int
    in_use_bytes: int
    """What was asked of ``malloc`` and not given back, with and without mappings of its own."""
    hole_bytes: int
    """What was given back and lies between what is in use, resident or not."""

    @property
    def beside_bytes(self) -> int:
        """Return what is resident beside what is in use: code, stacks, other allocators' memory, and resident holes."""
        return self.resident_bytes - self.in_use_bytes


class HeapTrimmer:
    """Has the holes of the heap given back once they have grown by more than ``HOLES_BYTES_MAX``.

    ``malloc`` does not say which holes are resident: those that were given back still count. What is resident beside
    what is in use grows with the others alone, also when large blocks were in use at the last look and are no more.
    """

    def __init__(
        self, resident_bytes: Callable[[], int], ask: Callable[[], Heap], trim: Callable[[], object], now_s: float
    ) -> None:
        """``ask`` and ``trim`` keep others out of the heap, ``resident_bytes`` does not."""
        self._resident_bytes = resident_bytes
        self._ask = ask
        self._trim = trim
        self._floor_bytes = self._asked(now_s).beside_bytes
        """Least that was resident beside what was in use, since something was last given back."""
        self._given_back_s = self._looked_s = now_s
        self._looked_cpu_s = 0.0

    def look(self, now_s: float, cpu_s: float) -> bool:
        """Give back what is worth it; return whether it did. ``cpu_s`` is the CPU time of the process until now."""
        is_idle = cpu_s - self._looked_cpu_s < IDLE_CPU_SHARE * (now_s - self._looked_s)
        self._looked_s, self._looked_cpu_s = now_s, cpu_s
        has_changed = abs(self._resident_bytes() - self._asked_at_bytes) >= HOLES_BYTES_MAX
        if not has_changed and now_s < self._ask_anyway_s:
            return False
        found = self._asked(now_s)
        if found.beside_bytes - self._floor_bytes < HOLES_BYTES_MAX or found.hole_bytes < HOLES_BYTES_MAX:
            self._floor_bytes = min(self._floor_bytes, found.beside_bytes)
            return False
        if not is_idle and now_s < self._given_back_s + BUSY_INTERVAL_S:
            return False
        self._trim()
        self._floor_bytes = self._asked(now_s).beside_bytes
        self._given_back_s = now_s
        return True

    def _asked(self, now_s: float) -> Heap:
        """Ask, and note what was resident then, and when to ask in any case."""
        found = self._ask()
        self._asked_at_bytes, self._ask_anyway_s = found.resident_bytes, now_s + LOOK_ANYWAY_S
        return found


def keep_heap_trimmed() -> bool:
    """Look for holes from now on, in a thread; False where the C library cannot tell of them or give them back."""
    library = ctypes.CDLL(None)
    mallinfo2, malloc_trim = getattr(library, "mallinfo2", None), getattr(library, "malloc_trim", None)
    if mallinfo2 is None or malloc_trim is None or not _STATM.exists():
        return False
    mallinfo2.restype = _Mallinfo2

    def ask() -> Heap:
        told = mallinfo2()
        return Heap(_resident_bytes(), int(told.uordblks) + int(told.hblkhd), int(told.fordblks))

    trimmer = HeapTrimmer(_resident_bytes, ask, lambda: malloc_trim(0), time.monotonic())

    stopped = threading.Event()  # never set: the thread ends with its process
    threading.Thread(
        target=look_repeatedly,
        args=(lambda: trimmer.look(time.monotonic(), time.process_time()), lambda: stopped.wait(LOOK_INTERVAL_S)),
        name="heap trimmer",
        daemon=True,
    ).start()
    return True


def look_repeatedly(look: Callable[[], object], stopped: Callable[[], bool]) -> None:
    """Look until ``stopped``, which waits; a look that finds no file descriptor free is made again later."""
    while not stopped():
        with suppress(OSError):
            look()


_STATM = Path("/proc/self/statm")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def _resident_bytes() -> int:
    return int(_STATM.read_bytes().split()[1]) * _PAGE_BYTES
