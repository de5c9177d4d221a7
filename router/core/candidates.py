"""What a policy looks at and what it answers: the workers that may serve a request, side by side, and a choice."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from poolgrid.router.core.routing_request import RoutingRequest
from poolgrid.wire.identifiers import WorkerKey

__all__ = ["EXPECTED_MS", "Candidates", "Choice", "Column", "FloatArray", "IndexArray", "RoutingRequest"]
"""With the request, since policies look at both."""

FloatArray = NDArray[np.float64]
IndexArray = NDArray[np.intp]

Column = FloatArray | Sequence[float]
"""One number per candidate, as a decision keeps it."""


class Candidates(msgspec.Struct, frozen=True, eq=False):
    """Columns of equal length, one row per worker, in the order of worker keys.

    They are arrays for every policy but ``KvAware``, which compares few workers as sequences of floats: walking a few
    of them costs less than an array.
    """

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
    engines: Any = None
    """What the policy's observer knows of the workers (``Observer.describe``)."""
    behind: FloatArray | None = None
    """Requests that wait at the router and will be computed behind this one, by worker; ``None`` = none anywhere."""

    def __len__(self) -> int:
        """Return the number of candidates (at least 1 when a policy is asked)."""
        return len(self.workers)


EXPECTED_MS: Final = "expected_ttft_ms"
"""Term of a policy that predicts: the time to the first token that it expects."""

_NO_TERMS: Final[Mapping[str, Column]] = {}


class Choice(msgspec.Struct, frozen=True, eq=False):
    """A policy's answer: a row of the candidates, why, and the numbers behind it."""

    row: int
    reason: str
    costs: Column | None = None
    """What was minimised, per row; ``None`` for policies without a cost."""
    given_terms: Mapping[str, Column] | Callable[[], Mapping[str, Column]] = _NO_TERMS
    """The parts of the cost, per row, or what works them out when somebody asks, which takes less memory."""

    @property
    def terms(self) -> Mapping[str, Column]:
        given = self.given_terms
        return given() if callable(given) else given
