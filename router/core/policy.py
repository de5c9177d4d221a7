"""How a worker is chosen: the protocol that anyone may implement, and the policies that come with poolgrid.

A policy is asked with at least one candidate and returns the row it chose, a short reason code, and the terms that led
to it. It must be a function of its arguments and its own counted state: no clock, no global randomness. Ties and
samples come from the request id, so the same events and requests give the same decisions, bit for bit.

A policy of your own is a class with ``name``, ``needs_overlap`` and ``choose``; start the router with
``--policy package.module:ClassName``. See ``docs/policies.md``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import msgspec
import numpy as np

from poolgrid.router.core.candidates import Candidates, Column, FewCandidates, FloatArray, RoutingRequest
from poolgrid.router.core.cost import CostFormula, CostWeights, cost_formula, softmax_weights
from poolgrid.wire.hashing import stable_u64
from poolgrid.wire.identifiers import Stage

_TIE_SEED = 1
_SAMPLE_SEED = 2
_RANDOM_SEED = 3


class Choice(msgspec.Struct, frozen=True, gc=False):
    """A policy's answer: a row of the candidates, why, and the numbers behind it."""

    row: int
    reason: str
    costs: Column | None = None
    """What was minimised, per row; ``None`` for policies without a cost."""
    terms: Mapping[str, Column] = {}
    """Named parts of the cost, per row."""


class Policy(Protocol):
    """Chooses a worker.

    One that counts also has ``checkpoint() -> int`` and ``restore(count)``, so that a replay can begin in the middle.
    """

    @property
    def name(self) -> str:
        """Return the name under which decisions and metrics show this policy."""
        ...

    @property
    def needs_overlap(self) -> bool:
        """Tell whether the overlap columns must be filled in; they are 0 otherwise."""
        ...

    def choose(self, request: RoutingRequest, candidates: Candidates) -> Choice:
        """Choose one of at least one candidates."""
        ...


def lowest(costs: FloatArray, tie_key: str) -> tuple[int, str]:
    """Return the row of the lowest cost and ``cheapest``, or a tie broken by ``tie_key`` and ``tie``."""
    ties = np.flatnonzero(costs == costs.min())
    if len(ties) == 1:
        return int(ties[0]), "cheapest" if len(costs) > 1 else "only"
    return int(ties[stable_u64(tie_key, _TIE_SEED) % len(ties)]), "tie"


class KvAware:
    """Least work left: uncached prefill, queued prefill and decode load, weighed by ``poolgrid.router.core.cost``."""

    name = "kv"
    needs_overlap = True

    def __init__(self, weights: CostWeights | None = None, temperature: float = 0.0) -> None:
        if not 0.0 <= temperature <= 1000.0:
            raise ValueError(f"making a kv policy: temperature is {temperature}, allowed are 0 to 1000")
        self.weights = weights if weights is not None else CostWeights()
        self.temperature = temperature

    def choose(self, request: RoutingRequest, candidates: Candidates) -> Choice:
        """Choose the lowest cost, or sample by cost when the temperature is above 0.

        A decode worker computes no prompt, so in that stage there is neither prefill nor credit for overlap.
        """
        isl, queued = request.isl, candidates.prefill_tokens
        device, host, disk = candidates.device_overlap, candidates.host_overlap, candidates.disk_overlap
        if request.stage is Stage.DECODE:
            isl, queued = 0, np.zeros(len(candidates))
            device = host = disk = queued
        cost: CostFormula[FloatArray] = cost_formula(self.weights, isl, request.block_size, request.blocks, np.maximum)
        credit, prefill, decode, costs = cost(queued, candidates.active_blocks, device, host, disk)
        terms = {"overlap_credit": credit, "adjusted_prefill": prefill, "potential_decode_blocks": decode}
        if self.temperature > 0.0 and len(costs) > 1:
            shares = np.cumsum(softmax_weights(costs, self.temperature))
            point = stable_u64(request.drawn_by, _SAMPLE_SEED) / 2**64
            row = min(int(np.searchsorted(shares, point, side="right")), len(costs) - 1)
            return Choice(row, "sampled", costs, terms)
        row, reason = lowest(costs, request.tie_key)
        return Choice(row, reason, costs, terms)

    def choose_of_few(self, request: RoutingRequest, few: FewCandidates) -> Choice:
        """Choose as ``choose`` does at temperature 0, bit for bit, without arrays."""
        isl, queued, device, host, disk = (
            request.isl, few.prefill_tokens, few.device_overlap, few.host_overlap, few.disk_overlap,
        )  # fmt: skip
        if request.stage is Stage.DECODE:
            isl, queued = 0, (0.0,) * len(few)
            device = host = disk = queued
        cost: CostFormula[float] = cost_formula(self.weights, isl, request.block_size, request.blocks, max)
        rows = map(cost, queued, few.active_blocks, device, host, disk)
        credits, prefills, decoded, costs = zip(*rows, strict=True)
        terms = {"overlap_credit": credits, "adjusted_prefill": prefills, "potential_decode_blocks": decoded}
        least = min(costs)
        row = costs.index(least)
        count = costs.count(least)
        if count == 1:
            return Choice(row, "cheapest" if len(costs) > 1 else "only", costs, terms)
        for _ in range(stable_u64(request.tie_key, _TIE_SEED) % count):
            row = costs.index(least, row + 1)
        return Choice(row, "tie", costs, terms)


class LeastLoaded:
    """Fewest active requests; among equals, fewest tokens waiting for prefill."""

    name = "least-loaded"
    needs_overlap = False

    def choose(self, request: RoutingRequest, candidates: Candidates) -> Choice:
        """Choose the worker with the fewest requests."""
        queued = candidates.prefill_tokens
        costs = candidates.requests + queued / (1.0 + queued.max())
        row, reason = lowest(costs, request.tie_key)
        return Choice(row, reason, costs, {"requests": candidates.requests})


class RoundRobin:
    """Each worker in turn, in the order of their keys."""

    name = "round-robin"
    needs_overlap = False

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, request: RoutingRequest, candidates: Candidates) -> Choice:
        """Choose the next worker."""
        row = self._turn % len(candidates)
        self._turn += 1
        return Choice(row, "turn")

    def checkpoint(self) -> int:
        """Return what was counted."""
        return self._turn

    def restore(self, turn: int) -> None:
        """Go on from what another one had counted."""
        self._turn = turn


class Random:
    """Any worker, drawn from the request id."""

    name = "random"
    needs_overlap = False

    def choose(self, request: RoutingRequest, candidates: Candidates) -> Choice:
        """Draw a worker."""
        return Choice(stable_u64(request.drawn_by, _RANDOM_SEED) % len(candidates), "drawn")


POLICY_NAMES = ("kv", "approximate", "round-robin", "random", "least-loaded")
"""Policies that ``--policy`` knows by name; ``approximate`` is ``kv`` over the router's own choices."""


def make_policy(name: str, weights: CostWeights | None = None, temperature: float = 0.0) -> Policy:
    """Return one of the policies that come with poolgrid."""
    if name in ("kv", "approximate"):
        return KvAware(weights, temperature)
    if name == "round-robin":
        return RoundRobin()
    if name == "random":
        return Random()
    if name == "least-loaded":
        return LeastLoaded()
    raise ValueError(f"choosing a policy: {name!r} is unknown, allowed are {', '.join(POLICY_NAMES)}")
