"""How a policy chooses a worker; the one that a router has by itself is ``poolgrid.kernel.routing.kv_policy``.

A policy looks at the candidates, each with its load and the overlap of the prompt with what it holds, and names one of
them, the number that decided, and why. It must be a function of its arguments and its own counted state: no clock, no
global randomness. Ties and samples come from the request id, so the same events and requests give the same decisions,
bit for bit.

A policy of your own is a class with ``name``, ``needs_overlap`` and ``choose``; start the router with
``--policy package.module:ClassName``, or give it a name in the entry point group ``poolgrid.policies``. See
``docs/policies.md``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from poolgrid.kernel.index.following_tokens import FollowingTokens
from poolgrid.kernel.wire.hashing import stable_u64
from poolgrid.kernel.wire.identifiers import Stage, WorkerKey, name_of

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
    """The parts of the cost, per row, or a function that unpacks them, which take less memory so."""
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
    is_forwarded: bool = False
    """Whether the client's own bytes go to an engine server, which judges the length of the prompt itself."""
    by_text: bool = False
    """Whether ``path`` is made of the prompt's text, because its tokens are not known: no event names such blocks, so
    the router's own choices stand in for the index."""
    following: FollowingTokens | None = None
    """The tokens behind its blocks, where workers have engines whose hashes look ahead."""

    @property
    def drawn_by(self) -> str:
        """Return what samples are drawn by: the name that the client chose, the same in every process and run."""
        return name_of(self.request_id)

    @property
    def tie_key(self) -> str:
        """Return what ties are broken by: the name, or the media, so that equal media meet among equal workers."""
        return " ".join(map(str, self.media)) if self.media else name_of(self.request_id)


_TIE_SEED: Final = 1

APPROXIMATE_TTL_MS: Final = 120_000.0
"""How long a choice counts as cached by a worker that sends no events."""


@dataclass(frozen=True, slots=True)
class PolicyOptions:
    """The settings that a policy may take."""

    approximate_ttl_ms: float = APPROXIMATE_TTL_MS


class Policy(Protocol):
    """Chooses a worker. What a class may have besides these three:

    - ``configured(options)``, a class method: returns a policy with settings. Without it the class is called.
    - ``checkpoint() -> int`` and ``restore(count)``, of one that counts, so that a replay can begin in the middle.
    - ``compares_numbers``: whether few candidates come as sequences of plain numbers in the place of arrays.
    - ``index_observer(index)``: returns an ``ApproximateIndex`` that takes the place of the workers' events.
    - ``observer(index)``: returns an ``Observer`` of what happens to a projection, whose ``describe`` fills in
      ``Candidates.engines``.
    - ``planner(selector)``: returns a ``Planner`` of requests that wait at the router.
    """

    @property
    def name(self) -> str:
        """Return the name under which decisions and metrics show this policy."""
        ...

    @property
    def needs_overlap(self) -> bool:
        """Return whether the overlap columns must be filled in; they are 0 otherwise."""
        ...

    def choose(self, request: RoutingRequest, candidates: Candidates) -> Choice: ...


PLANNED_MAX: Final = 32
"""Requests that are planned together: it takes a millisecond with 8 workers. Others wait their turn."""

HELD_MAX: Final = 256
"""Requests that wait for a better worker. Beyond, those whose turn it is go to workers as they are: waiting is for
choosing well, and the queues of workers are there for more."""

HOLD_LIMIT_MS: Final = 4000.0
"""How long a request waits for a better worker at most: longer than nearly all prompts take, so only in overload
does a request wait that long; and then long prompts would wait without end for shorter ones."""


def lowest(costs: Column, request: RoutingRequest) -> tuple[int, str]:
    """Return the row of the lowest cost and ``cheapest``, or a tie broken by the request's key and ``tie``."""
    values: Sequence[float] = costs.tolist() if isinstance(costs, np.ndarray) else costs
    least = min(values)
    row, equal = values.index(least), values.count(least)
    if equal == 1:
        return row, "cheapest" if len(values) > 1 else "only"
    for _ in range(stable_u64(request.tie_key, _TIE_SEED) % equal):
        row = values.index(least, row + 1)
    return row, "tie"


LOAD_BOUND = 1.25
"""A worker is passed over above this multiple of the average load; the paper's own choice for video servers."""


class MediaAffinity:
    """Which encode worker computes the embeddings of a request: the one that had the same media before, unless it is
    busy.

    Rendezvous hashing of the request's first medium over the workers gives every medium an order of preference that
    needs no memory, is the same in every router, and changes for few media when a worker comes or goes. The first
    worker in that order is taken whose load is within ``LOAD_BOUND`` of the average: equal media meet, and a popular
    image does not pile up (consistent hashing with bounded loads, Mirrokni, Thorup and Zadimoghaddam 2016). The
    first medium counts, because a conversation sends its earlier ones again with every turn.
    """

    name = "media-affinity"
    needs_overlap = False

    def choose(self, request: RoutingRequest, candidates: Candidates) -> Choice:
        """Choose the first worker in the medium's order that is not above its share of the load."""
        key = str(request.media[0]) if request.media else request.drawn_by
        order = sorted(
            range(len(candidates)), key=lambda row: stable_u64(f"{key} {candidates.workers[row]}"), reverse=True
        )
        requests = candidates.requests
        most = math.ceil(LOAD_BOUND * (float(requests.sum()) + 1) / len(candidates))
        place = next(place for place, row in enumerate(order) if requests[row] < most)
        rank = np.zeros(len(candidates))
        rank[order] = np.arange(len(candidates))
        reason = "only" if len(candidates) == 1 else "affinity" if place == 0 else "affinity-busy"
        return Choice(order[place], reason, None, {"requests": requests, "affinity_rank": rank})


class FewestRequests:
    """Which worker serves a task: nothing of one is in a cache, and a worker's other tasks are all its load."""

    name = "fewest-requests"
    needs_overlap = False

    def choose(self, request: RoutingRequest, candidates: Candidates) -> Choice:
        return Choice(*lowest(candidates.requests, request), candidates.requests)
