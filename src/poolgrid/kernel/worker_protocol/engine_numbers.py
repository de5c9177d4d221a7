"""Validation of the numbers that an engine sends. Pure.

Each dialect validates every number of an answer or of a facts page here, once. The counters, books and wire fields
behind it accept no other values. An invalid statistic is treated as absent. An invalid token makes the answer
unreadable, which ends that one request as broken.
"""

from __future__ import annotations

from typing import Any

from poolgrid.kernel.wire.limits import U32_MAX

UNLIKELY = -9999.0
"""Stands for a log probability that is not reported, as in OpenAI's API."""


def token_of(value: Any) -> int:
    """Return a token id; raises ``ValueError`` for what is none."""
    token_id = count_of(value)
    if token_id is None:
        raise ValueError(f"a token id is {str(value)[:40]}, allowed are integers from 0 to {U32_MAX}")
    return token_id


def count_of(value: Any, least: int = 0) -> int | None:
    """Return a count or size, ``None`` for what is none: another type, negative, or beyond 32 bits."""
    return value if type(value) is int and least <= value <= U32_MAX else None


def logprob_of(value: Any) -> float:
    """Return a log probability; one that is missing, or is none, is ``UNLIKELY``."""
    if type(value) not in (float, int) or not value >= UNLIKELY:  # which NaN is not
        return UNLIKELY
    return 0.0 if value > 0 else float(value)


def digits_of(text: str | None, least: int = 0) -> int | None:
    """Return a count that is written in digits, as labels of metrics have it; ``None`` for what is none."""
    if text is None or len(text) > 10 or not (text.isascii() and text.isdecimal()):
        return None
    return count_of(int(text), least)
