"""What a policy answers: the row that it chose, and why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, final

from poolgrid.router.core.candidates import Column
from poolgrid.router.core.cost_weights import CostWeights
from poolgrid.router.core.few_candidates import FewCandidates
from poolgrid.router.core.routing_request import RoutingRequest
from poolgrid.router.core.terms_of_few import TermsOfFew

_NO_TERMS: Final[Mapping[str, Column]] = {}

OfFew = tuple[RoutingRequest, FewCandidates, CostWeights]
"""What the terms of a choice among few are worked out from."""


@final
class Choice:
    """A policy's answer: a row of the candidates, why, and the numbers behind it; a value, which nobody changes."""

    # Not a struct: what is asked for so often is a plain place in memory where it is compiled.
    __slots__ = ("_terms", "costs", "of_few", "reason", "row")

    def __init__(
        self,
        row: int,
        reason: str,
        costs: Column | None = None,
        terms: Mapping[str, Column] = _NO_TERMS,
        of_few: OfFew | None = None,
    ) -> None:
        self.row = row
        self.reason = reason
        self.costs = costs
        """What was minimised, per row; ``None`` for policies without a cost."""
        self._terms = terms
        self.of_few = of_few
        """In the place of terms: they are worked out when somebody asks."""

    @property
    def terms(self) -> Mapping[str, Column]:
        return self._terms if self.of_few is None else TermsOfFew(*self.of_few)
