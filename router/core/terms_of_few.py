"""The terms of a choice among a handful of workers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from poolgrid.router.core.candidates import Column
from poolgrid.router.core.cost import costs_of, rows_of_few
from poolgrid.router.core.cost_weights import CostWeights
from poolgrid.router.core.few_candidates import FewCandidates
from poolgrid.router.core.routing_request import RoutingRequest

KV_TERMS = ("overlap_credit", "adjusted_prefill", "potential_decode_blocks")
"""In the order of ``costs_of``."""


class TermsOfFew(Mapping[str, Column]):
    """The terms of a choice of ``KvAware`` among few, worked out again when somebody asks: hardly anybody does, and as
    numbers they would be half of what a decision takes."""

    __slots__ = ("_few", "_request", "_weights")

    def __init__(self, request: RoutingRequest, few: FewCandidates, weights: CostWeights) -> None:
        self._request = request
        self._few = few
        self._weights = weights

    def __getitem__(self, name: str) -> Column:
        if name not in KV_TERMS:
            raise KeyError(name)
        place = KV_TERMS.index(name)
        request = self._request
        isl, rows = rows_of_few(request, self._few)
        costs = costs_of(rows, self._weights, isl, request.block_size, request.blocks)
        return tuple(float(row[place]) for row in costs)

    def __iter__(self) -> Iterator[str]:
        return iter(KV_TERMS)

    def __len__(self) -> int:
        return len(KV_TERMS)
