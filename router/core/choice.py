"""What a policy answers: the row that it chose, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from poolgrid.router.core.candidates import Column, FewCandidates, RoutingRequest
from poolgrid.router.core.cost import costs_of_few
from poolgrid.router.core.cost_weights import CostWeights

KV_TERMS = ("overlap_credit", "adjusted_prefill", "potential_decode_blocks")
"""In the order of ``costs_of``."""


class Choice(msgspec.Struct, frozen=True, gc=False):
    """A policy's answer: a row of the candidates, why, and the numbers behind it."""

    row: int
    reason: str
    costs: Column | None = None
    """What was minimised, per row; ``None`` for policies without a cost."""
    terms: Mapping[str, Column] = {}
    """Named parts of the cost, per row."""


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
        return tuple(row[place] for row in costs_of_few(self._request, self._few, self._weights))

    def __iter__(self) -> Iterator[str]:
        return iter(KV_TERMS)

    def __len__(self) -> int:
        return len(KV_TERMS)
