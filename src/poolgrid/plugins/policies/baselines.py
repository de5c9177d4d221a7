"""Policies to compare with: LMetric's product, and those that look at no cache."""

from __future__ import annotations

import numpy as np

from poolgrid.kernel.decision.policy import Candidates, Choice, RoutingRequest, lowest
from poolgrid.kernel.wire.hashing import stable_u64

_RANDOM_SEED = 3


class Lmetric:
    """New tokens times batch size, the product that LMetric's authors propose in the place of a weighted sum.

    New tokens are those of this prompt that the worker does not hold, and all that it has accepted and not computed.
    The batch is the worker's requests with this one, so that an idle worker's product still depends on the prompt.
    """

    name = "lmetric"
    needs_overlap = True

    def choose(self, request: RoutingRequest, candidates: Candidates) -> Choice:
        """Choose the smallest product; blocks on any tier count as held."""
        held = candidates.device_overlap + candidates.host_overlap + candidates.disk_overlap
        new = np.maximum(0.0, request.isl - held * request.block_size) + candidates.prefill_tokens
        batch = candidates.requests + 1.0
        costs = new * batch
        row, reason = lowest(costs, request)
        return Choice(row, reason, costs, {"new_tokens": new, "batch": batch})


class LeastLoaded:
    """Fewest active requests; among equals, fewest tokens waiting for prefill."""

    name = "least-loaded"
    needs_overlap = False

    def choose(self, request: RoutingRequest, candidates: Candidates) -> Choice:
        queued = candidates.prefill_tokens
        costs = candidates.requests + queued / (1.0 + queued.max())
        row, reason = lowest(costs, request)
        return Choice(row, reason, costs, {"requests": candidates.requests})


class RoundRobin:
    """Each worker in turn, in the order of their keys."""

    name = "round-robin"
    needs_overlap = False

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, request: RoutingRequest, candidates: Candidates) -> Choice:
        row = self._turn % len(candidates)
        self._turn += 1
        return Choice(row, "turn")

    def checkpoint(self) -> int:
        return self._turn

    def restore(self, turn: int) -> None:
        self._turn = turn


class Random:
    """Any worker, drawn from the request id."""

    name = "random"
    needs_overlap = False

    def choose(self, request: RoutingRequest, candidates: Candidates) -> Choice:
        return Choice(stable_u64(request.drawn_by, _RANDOM_SEED) % len(candidates), "drawn")
