"""How ``KvAware`` chooses among a handful of workers: in plain numbers, which every request can afford."""

from __future__ import annotations

from typing import Final

from poolgrid.router.core.choice import Choice
from poolgrid.router.core.cost import cheapest_of_few
from poolgrid.router.core.cost_weights import CostWeights
from poolgrid.router.core.few_candidates import FewCandidates
from poolgrid.router.core.routing_request import RoutingRequest
from poolgrid.wire.hashing import stable_u64

TIE_SEED: Final = 1
"""Of what breaks ties, whoever chooses."""


def choose_of_few(request: RoutingRequest, few: FewCandidates, weights: CostWeights) -> Choice:
    """Choose as ``KvAware.choose`` does at temperature 0, bit for bit, without arrays."""
    row, count, costs = cheapest_of_few(request, few, weights)
    of_few = (request, few, weights)
    if count == 1:
        return Choice(row, "cheapest" if len(costs) > 1 else "only", costs, of_few=of_few)
    least = costs[row]
    for _ in range(stable_u64(request.tie_key, TIE_SEED) % count):
        row = costs.index(least, row + 1)
    return Choice(row, "tie", costs, of_few=of_few)
