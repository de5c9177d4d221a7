"""How an engine or a worker refuses a request: a class for each ``poolgrid.wire.requests.RefusalKind``.

Validation of the numbers that an engine sends. Pure.

Each dialect validates every number of an answer or of a facts page here, once. The counters, books and wire fields
behind it accept no other values. An invalid statistic is treated as absent. An invalid token makes the answer
unreadable, which ends that one request as broken.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from poolgrid.wire.errors import WireError
from poolgrid.wire.limits import U32_MAX
from poolgrid.wire.requests import RefusalKind


class RefusedError(WireError):
    """A request cannot be taken, here or elsewhere: it is wrong in a way that its client cannot change."""

    kind: RefusalKind | None = None
    """What the router may do next; ``None`` = nothing, the request has failed."""
    retry_after_ms: int | None = None
    booked_tokens: int | None = None
    unknown_model = False

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


class BusyError(RefusedError):
    """There is no room now; another worker may have some. ``retry_after_ms``: for how long, where that is known."""

    kind = RefusalKind.BUSY

    def __init__(self, reason: str, retry_after_ms: int | None = None) -> None:
        super().__init__(reason)
        self.retry_after_ms = retry_after_ms


class DrainingError(RefusedError):
    """This worker takes nothing new before it leaves."""

    kind = RefusalKind.DRAINING


class CrowdedError(RefusedError):
    """Other routers sent the rank more than the one that chose it knew; ``booked_tokens`` is the truth."""

    kind = RefusalKind.CROWDED

    def __init__(self, reason: str, booked_tokens: int) -> None:
        super().__init__(reason)
        self.booked_tokens = booked_tokens


class UnableError(RefusedError):
    """This worker lacks what the request asks for; another one may have it."""

    kind = RefusalKind.CANNOT_DO


class UnknownModelError(UnableError):
    """This worker does not serve the model or adapter that the request names."""

    unknown_model = True


class UnsupportedError(RefusedError):
    """No worker of this kind does what the request asks for, or takes the value: its client must change it."""

    kind = RefusalKind.INVALID


class BrokenError(RefusedError):
    """Something that should have worked has failed here; another worker may succeed."""

    kind = RefusalKind.BROKEN


UNLIKELY = -9999.0
"""Stands for a log probability that is not reported, as in OpenAI's API."""

TokenId = Annotated[int, Meta(ge=0, le=U32_MAX)]
"""A token of an answer."""

TokenCount = Annotated[int, Meta(ge=0, le=U32_MAX)]
"""How many tokens there are, where the rest of an answer means nothing without."""


def token_of(value: Any) -> int:
    """Return a token id; raises ``ValueError`` for what is none."""
    token_id = count_of(value)
    if token_id is None:
        raise ValueError(f"a token id is {str(value)[:40]}, allowed are integers from 0 to {U32_MAX}")
    return token_id


def count_of(value: Any, least: int = 0) -> int | None:
    """Return a count or size, ``None`` for what is none: another type, negative, or beyond 32 bits."""
    return value if type(value) is int and least <= value <= U32_MAX else None


def cached_of(usage: Any) -> int | None:
    """Return how much of a prompt was reused by an answer's ``usage`` in OpenAI's form; ``None`` = not reported."""
    details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
    return count_of(details.get("cached_tokens")) if isinstance(details, dict) else None


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
