"""Which encode worker computes the embeddings of a request: the one that had the same media before, unless it is busy.

Rendezvous hashing of the request's first medium over the workers gives every medium an order of preference that needs
no memory, is the same in every router, and changes for few media when a worker comes or goes. The first worker in that
order is taken whose load is within ``LOAD_BOUND`` of the average: equal media meet, and a popular picture does not pile
up (consistent hashing with bounded loads, Mirrokni, Thorup and Zadimoghaddam 2016). The first medium counts, because a
conversation sends its earlier ones again with every turn.
"""

from __future__ import annotations

import math

import numpy as np

from poolgrid.router.core.candidates import Candidates, Choice
from poolgrid.router.core.routing_request import RoutingRequest
from poolgrid.wire.hashing import stable_u64

LOAD_BOUND = 1.25
"""A worker is passed over above this multiple of the average load; the paper's own choice for video servers."""


class MediaAffinity:
    """The policy of encode legs, whatever policy the router has for the others."""

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
