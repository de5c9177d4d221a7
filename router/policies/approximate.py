"""The policy ``approximate``: the cost of ``kv`` over the router's own choices, for engines without events."""

from __future__ import annotations

from poolgrid.router.core.approximate_index import ApproximateIndex
from poolgrid.router.core.cost import CostWeights
from poolgrid.router.core.policy import APPROXIMATE_TTL_MS, KvAware, PolicyOptions
from poolgrid.router.core.prefix_index import PrefixIndex


class Approximate(KvAware):
    """As ``kv``, but the index is what was sent where, believed for ``approximate_ttl_ms``."""

    def __init__(
        self, weights: CostWeights | None = None, temperature: float = 0.0, ttl_ms: float = APPROXIMATE_TTL_MS
    ) -> None:
        super().__init__(weights, temperature)
        self._ttl_ms = ttl_ms

    @classmethod
    def configured(cls, options: PolicyOptions) -> Approximate:
        return cls(options.weights, options.temperature, options.approximate_ttl_ms)

    def observer(self, index: PrefixIndex) -> ApproximateIndex:
        return ApproximateIndex(index, self._ttl_ms)
