"""The workers that may serve a request, side by side: what a policy looks at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from poolgrid.router.core.routing_request import RoutingRequest
from poolgrid.router.core.step_curve import FloatArray, StepCurve
from poolgrid.wire.identifiers import WorkerKey

__all__ = ["Candidates", "Column", "Engines", "IndexArray", "RoutingRequest"]
"""With the request, since policies look at both."""

IndexArray = NDArray[np.intp]

Column = FloatArray | Sequence[float]
"""One number per candidate, as a record keeps it."""


@dataclass(frozen=True, slots=True)
class Engines:
    """What is known of the candidates' engines, for policies that predict times; rows as in ``Candidates``."""

    curves: tuple[StepCurve, ...]
    """The different step times that there are."""
    curve: IndexArray
    """Whose place in ``curves`` is each worker's."""
    step_tokens: FloatArray
    """Prompt tokens of one step."""
    total_blocks: FloatArray
    paces: FloatArray
    """How much slower each is than its curve says."""
    done_ms: FloatArray
    """Milliseconds at pace 1 by which its queue is shorter than its tokens say, for it is at work."""
    waiting: FloatArray
    """Requests that wait for their first token there."""
    choices_per_ms: float
    """Requests that come, of late."""
    typical_ms: float
    """What a prompt took of them at pace 1, on average."""

    def prompt_ms(self, tokens: FloatArray) -> FloatArray:
        """Return how long each would take at pace 1 to compute so many prompt tokens: one number a worker, or a row
        of them for each of several prompts."""
        if len(self.curves) == 1:
            return self.curves[0].prompt_ms(tokens, self.step_tokens)
        times = np.zeros(tokens.shape)
        for place, curve in enumerate(self.curves):
            rows = self.curve == place
            times[..., rows] = curve.prompt_ms(tokens[..., rows], self.step_tokens[rows])
        return times

    def step_ms(self, row: int, tokens: float) -> float:
        """Return how long a step of one of them takes at pace 1 that computes so many prompt tokens."""
        return float(self.curves[self.curve[row]].step_ms(np.array((tokens,)))[0])

    def joined_ms(self, queued: FloatArray, tokens: FloatArray) -> FloatArray:
        """Return how much longer at pace 1 the last step of so many queued tokens takes when others join it.

        A step has room for ``step_tokens``, and all that is in it is there when it ends.
        """
        last = queued - np.floor(queued / self.step_tokens) * self.step_tokens
        full = np.minimum(self.step_tokens, last + tokens)
        return np.where(last > 0.0, self.prompt_ms(full) - self.prompt_ms(last), 0.0)

    def decode_ms(self, active_blocks: FloatArray) -> FloatArray:
        """Return how long a decode step of each takes at pace 1 while so many blocks are active."""
        shares = active_blocks / self.total_blocks
        if len(self.curves) == 1:
            return self.curves[0].decode_ms(shares)
        times = np.zeros(len(shares))
        for place, curve in enumerate(self.curves):
            rows = self.curve == place
            times[rows] = curve.decode_ms(shares[rows])
        return times


@dataclass(frozen=True, slots=True)
class Candidates:
    """Columns of equal length, one row per worker, in the order of worker keys."""

    workers: tuple[WorkerKey, ...]
    prefill_tokens: FloatArray
    """Prompt tokens accepted and not yet computed."""
    active_blocks: FloatArray
    """Blocks of active requests."""
    requests: FloatArray
    """Active requests, waiting ones included."""
    device_overlap: FloatArray
    """Leading blocks of the prompt already in device memory."""
    host_overlap: FloatArray
    disk_overlap: FloatArray
    engines: Engines | None = None
    """Given to policies that say ``needs_paces``."""
    behind: FloatArray | None = None
    """Requests that wait at the router and will be computed behind this one, by worker; ``None`` = none anywhere."""

    def __len__(self) -> int:
        """Return the number of candidates (at least 1 when a policy is asked)."""
        return len(self.workers)
