"""Costs in blocks: the field's formula, to compare with, and its weights with which ``kv`` decided before costs were in
milliseconds, to replay recordings of then.

The field's formula (Dynamo's documentation of its KV router), with two weights it does not have:

    overlap_credit   = device_weight·device + host_weight·host + disk_weight·disk
    adjusted_prefill = max(0, (queue_weight·active_prefill_tokens + isl) / block_size − overlap_credit)
    cost             = prefill_weight·adjusted_prefill + decode_weight·potential_decode_blocks

``potential_decode_blocks`` are the blocks of the worker's active requests plus this request's own. With both new
weights at 1 it is the field's, to the digit: ISL of 10 blocks, nothing queued, overlaps 2, 5 and 8, decode blocks 10, 5
and 9 give the costs 18, 10 and 11, and the second wins. The former
defaults are lower: on real conversations a full weight trades far more reuse than the balance is worth.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

import numpy as np

from poolgrid.router.core.candidates import Candidates, Choice, Column, FloatArray, RoutingRequest
from poolgrid.router.core.policy import PolicyOptions, lowest
from poolgrid.wire.hashing import stable_u64
from poolgrid.wire.identifiers import Stage

TERMS: Final = ("overlap_credit", "adjusted_prefill", "potential_decode_blocks")
"""In the order of ``costs_of``."""

Number = TypeVar("Number", float, FloatArray)
"""One worker's number, or the numbers of all workers."""


@dataclass(frozen=True, slots=True)
class CostWeights:
    """How much each part of the cost counts."""

    prefill_weight: float = 1.0
    """Cost of one block that must be computed."""
    queue_weight: float = 0.25
    """How much the prompt tokens of others, still to be computed on the worker, count against it."""
    decode_weight: float = 0.02
    """Cost of one block of the worker's active requests."""
    device_weight: float = 1.0
    """Credit for one block already in device memory; 0 ignores caches."""
    host_weight: float = 0.75
    """Credit for one block in host memory only."""
    disk_weight: float = 0.25
    """Credit for one block on disk only."""


def costs_of(
    rows: Iterable[tuple[Number, Number, Number, Number, Number]],
    weights: CostWeights,
    isl: int,
    block_size: int,
    blocks: int,
) -> list[tuple[Number, Number, Number, Number]]:
    """Return the overlap credit, adjusted prefill, potential decode blocks and cost of each row, all in blocks.

    A row is a worker's prefill tokens, active blocks, and overlap in blocks on device, host and disk; or the columns of
    all workers, as one row. Both do the same IEEE operations in the same order: the results are the same bit for bit.
    """
    queue_weight, prefill_weight, decode_weight = weights.queue_weight, weights.prefill_weight, weights.decode_weight
    device_weight, host_weight, disk_weight = weights.device_weight, weights.host_weight, weights.disk_weight
    costs: list[tuple[Number, Number, Number, Number]] = []
    for prefill_tokens, active_blocks, device, host, disk in rows:
        credit = device_weight * device + host_weight * host + disk_weight * disk
        left = (queue_weight * prefill_tokens + isl) / block_size - credit
        # max(0, left), to the bit: doubling and halving lose nothing. It is the same operator for numbers and columns.
        prefill = (left + abs(left)) / 2.0
        decode = active_blocks + blocks
        costs.append((credit, prefill, decode, prefill_weight * prefill + decode_weight * decode))
    return costs


def cost_columns(request: RoutingRequest, candidates: Candidates, weights: CostWeights) -> tuple[Column, ...]:
    """Return the terms and the cost of every candidate, as columns of the candidates' kind.

    A decode worker computes no prompt, so in that stage there is neither prefill nor credit for overlap.
    """
    isl = request.isl
    queued, device = candidates.prefill_tokens, candidates.device_overlap
    host, disk = candidates.host_overlap, candidates.disk_overlap
    if request.stage is Stage.DECODE:
        isl = 0
        queued = device = host = disk = np.zeros(len(candidates))
    columns = (queued, candidates.active_blocks, device, host, disk)
    if not isinstance(candidates.prefill_tokens, np.ndarray):
        rows = costs_of(zip(*columns, strict=True), weights, isl, request.block_size, request.blocks)
        return tuple(zip(*rows, strict=True))
    [terms] = costs_of([columns], weights, isl, request.block_size, request.blocks)
    return terms


def softmax_weights(costs: FloatArray, temperature: float) -> FloatArray:
    """Return each worker's probability: softmax over −cost/(max−min)/temperature; equal costs share equally."""
    spread = float(costs.max() - costs.min())
    if spread == 0.0:
        return np.full(len(costs), 1.0 / len(costs))
    logits = (costs.min() - costs) / spread / temperature
    weights: FloatArray = np.exp(logits)
    shares: FloatArray = weights / weights.sum()
    return shares


_SAMPLE_SEED: Final = 2

FIELD_WEIGHTS: Final = CostWeights(queue_weight=1.0, decode_weight=1.0)
"""The weights with which the cost is the field's."""


class WeightedCost:
    """The lowest weighted sum of uncached prefill, queued prefill and decode load, or a sample by it."""

    name = "kv"
    needs_overlap = True
    compares_numbers = True

    def __init__(self, weights: CostWeights | None = None, temperature: float = 0.0) -> None:
        self.weights = weights if weights is not None else CostWeights()
        self.temperature = temperature

    def choose(self, request: RoutingRequest, candidates: Candidates) -> Choice:
        """Choose the lowest cost, or sample by cost when the temperature is above 0."""
        costs = cost_columns(request, candidates, self.weights)[-1]
        terms = partial(_terms, request, candidates, self.weights)
        if self.temperature > 0.0 and len(costs) > 1:
            shares = np.cumsum(softmax_weights(np.asarray(costs), self.temperature))
            point = stable_u64(request.drawn_by, _SAMPLE_SEED) / 2**64
            row = min(int(np.searchsorted(shares, point, side="right")), len(costs) - 1)
            return Choice(row, "sampled", costs, terms)
        row, reason = lowest(costs, request)
        return Choice(row, reason, costs, terms)


def _terms(request: RoutingRequest, candidates: Candidates, weights: CostWeights) -> dict[str, Column]:
    """Return the terms of a choice, worked out again: they are rarely asked for, and are half of what it takes."""
    return dict(zip(TERMS, cost_columns(request, candidates, weights), strict=False))


class FieldCost(WeightedCost):
    """The field's formula, whatever weights there were."""

    name = "field"

    @classmethod
    def configured(cls, options: PolicyOptions) -> FieldCost:
        return cls(FIELD_WEIGHTS)
