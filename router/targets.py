"""The latency target that a client asks for, as far as a pool's own router uses it.

A global router reads more of them, and refuses what it cannot read (``poolgrid.global_router.core.choice``). Here a
target only helps to choose between workers, so one that is no number of milliseconds above 0 asks for nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

TTFT_HEADER = "x-ttft-target-ms"
VALUE_CHARS_MAX = 64
"""A number of milliseconds is shorter."""


def ttft_target_ms(hints: Mapping[str, Any]) -> float:
    """Return the target of ``InferenceRequest.hints``, 0 without one; ``nvext`` wins over the header."""
    nvext = hints.get("nvext")
    router = nvext.get("router") if isinstance(nvext, Mapping) else None
    value = router.get("ttft_target") if isinstance(router, Mapping) else None
    if value is None:
        headers = hints.get("headers")
        value = headers.get(TTFT_HEADER) if isinstance(headers, Mapping) else None
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return 0.0
    if isinstance(value, str) and len(value) > VALUE_CHARS_MAX:
        return 0.0
    try:
        target_ms = float(value)
    except (ValueError, OverflowError):
        return 0.0
    return target_ms if math.isfinite(target_ms) and target_ms > 0.0 else 0.0
