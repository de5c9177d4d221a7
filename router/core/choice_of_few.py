"""How ``KvAware`` chooses among a handful of workers: in plain numbers, which every request can afford."""

from __future__ import annotations

from typing import Final

from poolgrid.router.core.candidates import FewCandidates, RoutingRequest
from poolgrid.router.core.choice import Choice, TermsOfFew
from poolgrid.router.core.cost import costs_of_few
from poolgrid.router.core.cost_weights import CostWeights
from poolgrid.wire.hashing import stable_u64

TIE_SEED: Final = 1
"""Of what breaks ties, whoever chooses."""


def choose_of_few(request: RoutingRequest, few: FewCandidates, weights: CostWeights) -> Choice:
    """Choose as ``KvAware.choose`` does at temperature 0, bit for bit, without arrays."""
    costs = [cost for _, _, _, cost in costs_of_few(request, few, weights)]
    terms = TermsOfFew(request, few, weights)
    least = min(costs)
    row = costs.index(least)
    count = costs.count(least)
    if count == 1:
        return Choice(row, "cheapest" if len(costs) > 1 else "only", costs, terms)
    for _ in range(stable_u64(request.tie_key, TIE_SEED) % count):
        row = costs.index(least, row + 1)
    return Choice(row, "tie", costs, terms)
