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
gives holes back once a minute. That locks the heap, 40 ms for 70 MB of holes in a router that
serves 2,000 long prompts a second: less than a thousandth of the time.
"""

from __future__ import annotations

import ctypes
import os
import threading

LARGE_BLOCK_BYTES = 2 * 1024 * 1024
"""From this size on a block has a mapping of its own. Ordinary requests are smaller, and do not pay."""

KEPT_BYTES = 16 * 1024 * 1024
"""What may stay free at the end of the heap: a busy process would otherwise ask for the same pages again and again."""

TRIM_INTERVAL_S = 60.0
"""Between two times that holes are given back."""

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


def keep_heap_trimmed() -> bool:
    """Give holes back from now on, in a thread; False where the C library does not do that."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is None:
        return False
    stopped = threading.Event()  # never set: the thread ends with its process

    def trim_repeatedly() -> None:
        while not stopped.wait(TRIM_INTERVAL_S):
            malloc_trim(0)

    threading.Thread(target=trim_repeatedly, name="heap trimmer", daemon=True).start()
    return True
