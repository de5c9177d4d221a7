"""When the cyclic garbage collector runs in a process that serves requests.

A request makes a few hundred objects and almost no cycles: reference counting frees them. With Python's default of 700
objects the collector runs every few requests and finds nothing, about 4 % of a router's time; and each of its rare full
runs is a pause that clients see. It sees nothing of a kept decision, and of a run of the index only its array.
"""

from __future__ import annotations

import gc

YOUNG_OBJECTS = 1000
"""Objects made and not freed between two young collections. Ten times as many cost the same, in pauses of 30 ms."""

YOUNG_COLLECTIONS = 10
"""Young collections between two of the middle generation, of at most 14 ms."""

MIDDLE_COLLECTIONS = 1000
"""Middle collections between two full ones: one in ten million objects. Cycles are rare: little waits for it."""


def collect_rarely() -> None:
    """Have the collector run less often from now on."""
    gc.set_threshold(YOUNG_OBJECTS, YOUNG_COLLECTIONS, MIDDLE_COLLECTIONS)


def suspend() -> None:
    """Look for no garbage while a program is imported: a tenth of the CPU that a process takes to start."""
    gc.disable()


def resume() -> None:
    """Look for garbage again, but never in what was made since ``suspend``: it lives as long as the process."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


def settle() -> None:
    """Take everything that lives now out of the collector's sight, and have it run less often from now on.

    Called once the process is ready: code, settings, models and the state of the pool live as long as it does.
    """
    gc.collect()
    gc.freeze()
    collect_rarely()
