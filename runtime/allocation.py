"""Memory of large bodies and media goes back to the system when they are freed.

glibc's ``malloc`` gives a large block its own mapping, which ends with it, but only until one was freed: from then on
it takes blocks of up to that size, 32 MiB at most, from its heap, where a small object that came later keeps all below
it. A router that had served a few images of 24 MB went on holding hundreds of megabytes. A fixed threshold keeps large
blocks apart; a block pays for it with the page faults of a fresh mapping, about a tenth of a millisecond for each MiB.
"""

from __future__ import annotations

import ctypes
import os

LARGE_BLOCK_BYTES = 2 * 1024 * 1024
"""From this size on a block has a mapping of its own. Ordinary requests are smaller, and do not pay."""

KEPT_BYTES = 16 * 1024 * 1024
"""What may stay free at the end of the heap: a busy process would otherwise ask for the same pages again and again."""

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
