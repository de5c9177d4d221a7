"""How a policy chooses a worker; the one that a router has by itself is ``poolgrid.router.core.kv_policy``.

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from poolgrid.router.core.candidates import Candidates, Column, RoutingRequest
from poolgrid.router.core.candidates import Choice as Choice  # policies of operators have it from here
from poolgrid.router.core.decision import Decision
from poolgrid.router.core.inputs import WorkerWanted
from poolgrid.wire.hashing import stable_u64
from poolgrid.wire.identifiers import Role, WorkerKey

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


class Planner(Protocol):
    """Decides which of the requests that wait at a router go to a worker now."""

    @property
    def is_active(self) -> bool:
        """Return whether requests should wait for the worker that is best for them, now."""
        ...

    def openings(self, model: str, roles: tuple[Role, ...]) -> int:
        """Return how many workers of these roles could be given a request that waits."""
        ...

    def can_plan(self, wanted: WorkerWanted) -> bool:
        """Return whether some worker could serve a request now."""
        ...

    def holds(self, decision: Decision) -> bool:
        """Return whether a new request waits to be planned with others instead of going where a decision sends it."""
        ...

    def plan(self, wanted: Sequence[WorkerWanted]) -> list[tuple[int, Mapping[WorkerKey, int]]]:
        """Return which of some requests for workers of one model go now, in order, and how many are planned behind each
        by worker. At least one; all ask at the same time for workers of the same model and roles."""
        ...


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
