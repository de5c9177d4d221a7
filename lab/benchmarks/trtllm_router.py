"""The score of TensorRT-LLM's own KV router (``serve/kv_cache_router``, 1.4 line) as policies to compare with.

    poolgrid simulate --agents 60 --workers 8 --policy kv,lab.benchmarks.trtllm_router:InstanceScore,round-robin

``InstanceScore`` chooses an instance: matched blocks less a quarter of its requests; ties go round robin. ``RankScore``
is what it offers within an instance and engines use for their attention-DP ranks: no rank above twice the mean load, no
match below a tenth of the prompt, and load as a share of all. Written from these facts; upstream's load reports are
periodic, here both see the router's own books, which flatters them.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from poolgrid.kernel.decision.policy import Candidates, Choice, RoutingRequest

LOAD_WEIGHT = 0.25
FAIR_SHARE = 2.0
MATCH_RATE = 0.1


class _RoundRobinTies:
    """Takes the best score; each tie in turn."""

    needs_overlap: ClassVar[bool] = True

    def __init__(self) -> None:
        self._turn = 0

    def best(self, scores: NDArray[np.float64]) -> Choice:
        rows = np.flatnonzero(scores == scores.max())
        row = int(rows[self._turn % len(rows)])
        self._turn += 1
        return Choice(row, "tie" if len(rows) > 1 else "cheapest", -scores)

    def checkpoint(self) -> int:
        return self._turn

    def restore(self, turn: int) -> None:
        self._turn = turn


class InstanceScore(_RoundRobinTies):
    """Matched blocks less a quarter of the requests that run and wait."""

    name = "trtllm-instance"

    def choose(self, request: RoutingRequest, candidates: Candidates) -> Choice:
        held = candidates.device_overlap + candidates.host_overlap + candidates.disk_overlap
        return self.best(held - LOAD_WEIGHT * candidates.requests)


class RankScore(_RoundRobinTies):
    """Matched tokens less a quarter of the share of the load, in tokens of this prompt."""

    name = "trtllm-rank"

    def choose(self, request: RoutingRequest, candidates: Candidates) -> Choice:
        held = (candidates.device_overlap + candidates.host_overlap + candidates.disk_overlap) * request.block_size
        load = candidates.prefill_tokens + candidates.active_blocks * request.block_size
        eligible = load <= FAIR_SHARE * max(float(load.mean()), 1.0)
        if not eligible.any():
            eligible[:] = True
        if held[eligible].max() <= MATCH_RATE * max(request.isl, 1):
            held = np.zeros_like(held)
        share = load / max(float(load[eligible].sum()), 1.0)
        return self.best(np.where(eligible, held - LOAD_WEIGHT * share * request.isl, -np.inf))
