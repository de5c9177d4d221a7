"""What operators are shown of a queue; the same of both routers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class QueueView:
    """A queue at one moment."""

    requests: int
    """Requests that wait, those that must go on elsewhere included."""
    requests_max: int
    prompt_tokens: int
    prompt_tokens_max: int
    retry_after_s: float | None
    """When a client that is refused now should come back; ``None`` while no rate is known."""
    refused: Mapping[str, int]
    """Requests that the router refused since it started, by reason code."""

    @property
    def fill(self) -> float:
        """Return how full it is, from 0 to 1: the larger share of its two bounds."""
        bounds = ((self.requests, self.requests_max), (self.prompt_tokens, self.prompt_tokens_max))
        return max(min(1.0, used / bound) if bound else float(used > 0) for used, bound in bounds)
