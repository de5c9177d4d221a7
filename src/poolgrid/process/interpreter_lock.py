"""The interpreter's lock, which one thread holds at a time.

A thread that computes for long keeps the lock for a whole switch interval each time the event loop has let go of it,
which the loop does a dozen times for a short request. So threads that work through much in steps let the others have it
now and then.
"""

from __future__ import annotations

import threading

BREATH_S = 0.0001
"""How long a thread stands back. Shorter, and it would have the lock again before a waiting thread was awake."""

_NEVER = threading.Event()


def breathe() -> None:
    """Let other threads run Python; for threads other than the event loop's."""
    _NEVER.wait(BREATH_S)
