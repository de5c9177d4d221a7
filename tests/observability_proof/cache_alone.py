"""A policy that a drill needs: load counts for nothing, so that all requests with one prefix meet on one worker."""

from __future__ import annotations

from poolgrid.router.policies.weighted_cost import CostWeights, WeightedCost


class CacheAlone(WeightedCost):
    """Chooses by what workers hold, and by nothing else."""

    name = "cache-alone"

    def __init__(self) -> None:
        super().__init__(CostWeights(queue_weight=0.0, decode_weight=0.0))
