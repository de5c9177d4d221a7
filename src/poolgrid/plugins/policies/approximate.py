"""The policy ``approximate``: the cost of ``kv`` over the router's own choices, for engines without events."""

from __future__ import annotations

from poolgrid.kernel.decision.policy import APPROXIMATE_TTL_MS, PolicyOptions
from poolgrid.kernel.index.prefix_index import PrefixIndex
from poolgrid.kernel.projection.approximate_index import ApproximateIndex
from poolgrid.kernel.routing.kv_policy import KvAware


class Approximate(KvAware):
    """As ``kv``, but the index is built from the router's own choices, each trusted for ``approximate_ttl_ms``."""

    name = "approximate"

    def __init__(self, ttl_ms: float = APPROXIMATE_TTL_MS) -> None:
        super().__init__()
        self._ttl_ms = ttl_ms

    @classmethod
    def configured(cls, options: PolicyOptions) -> Approximate:
        return cls(options.approximate_ttl_ms)

    def index_observer(self, index: PrefixIndex) -> ApproximateIndex:
        return ApproximateIndex(index, self._ttl_ms)
