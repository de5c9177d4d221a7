"""A policy that a drill needs: load counts for nothing, so that all requests with one prefix meet on one worker."""

from __future__ import annotations

from poolgrid.kernel.decision.policy import Candidates, Choice, RoutingRequest, lowest


class CacheAlone:
    """Chooses by what workers hold, and by nothing else."""

    name = "cache-alone"
    needs_overlap = True

    def choose(self, request: RoutingRequest, candidates: Candidates) -> Choice:
        """Choose the worker that holds most of the prompt on its device."""
        costs = -candidates.device_overlap
        row, reason = lowest(costs, request)
        return Choice(row, reason, costs)
