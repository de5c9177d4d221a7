"""What a policy looks at and what it answers: the workers that may serve a request, side by side, and a choice."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from poolgrid.wire.identifiers import Stage, WorkerKey, name_of

__all__ = [
    "EXPECTED_MS",
    "OWN_MS",
    "PACE",
    "Candidates",
    "Choice",
    "Column",
    "FloatArray",
    "Forecast",
    "IndexArray",
    "RoutingRequest",
]
"""With the request, since policies look at both."""

FloatArray = NDArray[np.float64]
IndexArray = NDArray[np.intp]

Column = FloatArray | Sequence[float]
"""One number per candidate, as a decision keeps it."""


class Candidates(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Columns of equal length, one row per worker, in the order of worker keys.

    They are arrays, or sequences of numbers for few workers and a policy that compares numbers: walking a few of them
    costs less than an array.
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
    engines: object = None
    """What the policy's observer knows of the workers (``Observer.describe``)."""
    behind: Column | None = None
    """Requests that wait at the router and will be computed behind this one, by worker; ``None`` = none anywhere."""

    def __len__(self) -> int:
        """Return the number of candidates (at least 1 when a policy is asked)."""
        return len(self.workers)


EXPECTED_MS: Final = "expected_ttft_ms"
"""Term of a policy that predicts: the time to the first token that it expects."""

OWN_MS: Final = "own_ms"
PACE: Final = "pace"
"""Terms of a policy that learns: the time of the request's own prompt at pace 1, and the pace that it reckoned with."""

_NO_TERMS: Final[Mapping[str, Column]] = {}


class Forecast(msgspec.Struct, frozen=True, gc=False):
    """What a policy that learns expects of a worker."""

    expected_ms: float
    """Until the first token."""
    own_ms: float
    """What the prompt alone takes there, at pace 1: the delay of the requests behind it."""
    pace: float
    """The worker's speed factor: real times over those of its curve."""
    uncached_tokens: float = 0.0
    """What it would have to compute of the prompt, at least one token; 0 where that is not known."""


class Choice(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A policy's answer: a row of the candidates, why, and the numbers behind it."""

    row: int
    reason: str
    costs: Column | None = None
    """What was minimised, per row; ``None`` for policies without a cost."""
    given_terms: Mapping[str, Column] | Callable[[], Mapping[str, Column]] = _NO_TERMS
    """The parts of the cost, per row, or a function that computes them on demand, which takes less memory."""
    forecast: Forecast | None = None
    """What was expected of the chosen row, for observers that learn; ``None`` if nothing was."""

    @property
    def terms(self) -> Mapping[str, Column]:
        given = self.given_terms
        return given() if callable(given) else given


class RoutingRequest(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """What a policy may know of a request; the decision journal stores it as it is, by the names of the fields."""

    request_id: str
    model: str
    isl: int
    """Prompt tokens."""
    block_size: int
    blocks: int
    """Blocks of the prompt, a partial last one included."""
    priority: int = 0
    stage: Stage = Stage.WHOLE
    """What the chosen worker will be asked to do."""
    media: tuple[int, ...] = ()
    """u64 hashes of its media, in order."""
    media_kinds: tuple[str, ...] = ()
    """Kinds of media that the worker must take."""
    ttft_target_ms: float = 0.0
    """The client's target for its first token; 0 = none."""
    session: str = ""
    """The session that it is a turn of, by which ``Projection.sessions`` knows it; empty = none is known."""
    tenant: int = 0
    """``stable_u64`` of the tenant's name, the other half of the session's key."""
    domain: str = ""
    """What its blocks are hashed with besides the tokens: ``salt`` or ``adapter``; empty for plain text."""
    parent: str = ""
    """The session that it forked from; empty where it did not, or that is not known."""
    is_later: bool | None = None
    """Whether its prompt continues an earlier turn, which one of the workers has computed; ``None`` = not known."""

    @property
    def drawn_by(self) -> str:
        """Return what samples are drawn by: the name that the client chose, the same in every process and run."""
        return name_of(self.request_id)

    @property
    def tie_key(self) -> str:
        """Return what ties are broken by: the name, or the media, so that equal media meet among equal workers."""
        return " ".join(map(str, self.media)) if self.media else name_of(self.request_id)
