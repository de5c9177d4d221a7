"""Which requests' traces are kept. Pure, but for the randomness that it is given.

A process that is called with a trace keeps it when its caller does (W3C's ``sampled`` flag): a trace is whole or not
there. Of requests without a trace, a share is kept, drawn from the trace's id, so that all who go by the id draw alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from poolgrid.wire.trace_context import SAMPLED, TracePlace

ID_HALF = 1 << 64
"""A trace's id is drawn by its lower half, as OpenTelemetry does."""


class TraceSampling(NamedTuple):
    """What is kept."""

    ratio: float
    """Share of traces that begin here, from 0 to 1."""
    follows_callers: bool = True
    """Whether a caller's flag decides where there is a caller; else the share holds for its traces too."""


class Sampler:
    """Draws for one process."""

    def __init__(self, sampling: TraceSampling, bits: Callable[[int], int]) -> None:
        """``bits`` returns so many random bits."""
        self.sampling = sampling
        self._bits = bits
        self._bound = round(sampling.ratio * ID_HALF)

    def draw(self, caller: TracePlace | None) -> tuple[int, int] | None:
        """Return the trace id and flags of a request whose trace is kept; ``None`` for any other."""
        if caller is not None:
            kept = caller.is_sampled if self.sampling.follows_callers else caller.trace_id % ID_HALF < self._bound
            return (caller.trace_id, caller.flags | SAMPLED) if kept else None
        lower = self._bits(64)
        if lower >= self._bound:
            return None
        return (self._bits(64) or 1) << 64 | lower, SAMPLED

    def span_id(self) -> int:
        return self._bits(64) or 1
