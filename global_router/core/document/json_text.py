"""Bytes to plain JSON values, within the bounds of a document."""

from __future__ import annotations

import math
from typing import Any, TypeGuard

from poolgrid.global_router.core.document.problems import Problem
from poolgrid.wire.strict_json import read_strictly

DOCUMENT_BYTES_MAX = 8 * 1024 * 1024
"""The largest grid (``CELLS_MAX`` cells with names of 100 characters) takes 7 MB."""

DEPTH_MAX = 16
"""A document is six levels deep."""


def read_json(text: bytes | str) -> tuple[Any, list[Problem]]:
    """Return the value of a JSON text, arrays as lists, and its problems; the value is ``None`` if it is no JSON.

    Numbers that are not finite are kept for whoever says what was expected there.
    """
    value, faults = read_strictly(text, bytes_max=DOCUMENT_BYTES_MAX, depth_max=DEPTH_MAX)
    return value, [Problem(*fault) for fault in faults]


def is_integer(value: Any) -> TypeGuard[int]:
    """Tell whether a JSON value is an integer; ``true`` and ``1.0`` are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_finite_number(value: Any) -> TypeGuard[float]:
    """Tell whether a JSON value is a number that a float can hold; booleans, NaN and infinities are none."""
    if isinstance(value, float):
        return math.isfinite(value)
    return is_integer(value) and -(2**53) <= value <= 2**53
