"""How many examples a property is tried on: a few in CI, many times as many in `make fuzz` and `make soak`."""

from __future__ import annotations

import os

FACTOR = int(os.environ.get("POOLGRID_EXAMPLES_FACTOR", "1"))


def examples(few: int) -> int:
    """Return how many to try, ``few`` of them in CI."""
    return few * FACTOR
