"""What it would cost to serve a request on each worker, in units of blocks.

The field's formula (Dynamo's documentation of its KV router), with two weights it does not have:

    overlap_credit   = device_weight·device + host_weight·host + disk_weight·disk
    adjusted_prefill = max(0, (queue_weight·active_prefill_tokens + isl) / block_size − overlap_credit)
    cost             = prefill_weight·adjusted_prefill + decode_weight·potential_decode_blocks

``potential_decode_blocks`` are the blocks of the worker's active requests plus this request's own. With both new
weights at 1 it is the field's, to the digit: ISL of 10 blocks, nothing queued, overlaps 2, 5 and 8, decode blocks 10, 5
and 9 give the costs 18, 10 and 11, and the second wins. The defaults are lower because on real conversations a full
weight trades far more reuse than the balance is worth (measured in ``docs/decisions/0002-cost-weights.md``).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import numpy as np

from poolgrid.router.core.cost_weights import CostWeights
from poolgrid.router.core.few_candidates import FewCandidates
from poolgrid.router.core.routing_request import RoutingRequest
from poolgrid.router.core.step_curve import FloatArray
from poolgrid.wire.identifiers import Stage

_DECODE: Final = Stage.DECODE


Numbers = Any
"""One worker's number, or the numbers of all workers: both know the same operators. A type variable for the two is what
mypyc cannot compile."""

Rows = Iterable[tuple[Numbers, Numbers, Numbers, Numbers, Numbers]]
"""Of each worker its prefill tokens, active blocks, and overlap in blocks on device, host and disk."""


def costs_of(
    rows: Rows,
    weights: CostWeights,
    isl: float,
    block_size: int,
    blocks: int,
) -> list[tuple[Numbers, Numbers, Numbers, Numbers]]:
    """Return what a request would cost on each worker, by the formula above.

    A row is a worker's prefill tokens, active blocks, and overlap in blocks on device, host and disk. What is returned
    of it is its overlap credit, adjusted prefill, potential decode blocks and cost, all in blocks. Columns of workers
    may stand in the place of numbers, as one row of columns. The results are the same bit for bit, because both do the
    same IEEE operations in the same order.
    """
    queue_weight, prefill_weight, decode_weight = weights.queue_weight, weights.prefill_weight, weights.decode_weight
    device_weight, host_weight, disk_weight = weights.device_weight, weights.host_weight, weights.disk_weight
    costs: list[tuple[Numbers, Numbers, Numbers, Numbers]] = []
    for prefill_tokens, active_blocks, device, host, disk in rows:
        credit = device_weight * device + host_weight * host + disk_weight * disk
        left = (queue_weight * prefill_tokens + isl) / block_size - credit
        # max(0, left), to the bit: doubling and halving lose nothing. It is the same operator for numbers and columns.
        prefill = (left + abs(left)) / 2.0
        decode = active_blocks + blocks
        costs.append((credit, prefill, decode, prefill_weight * prefill + decode_weight * decode))
    return costs


def rows_of_few(request: RoutingRequest, few: FewCandidates) -> tuple[float, Rows]:
    """Return the prompt tokens and the rows that ``costs_of`` takes, of a handful of workers; one that decodes computes
    no prompt, and no overlap counts."""
    if request.stage is _DECODE:
        none = (0.0,) * len(few.workers)
        return 0.0, zip(none, few.active_blocks, none, none, none, strict=True)
    device, host, disk = few.device_overlap, few.host_overlap, few.disk_overlap
    return float(request.isl), zip(few.prefill_tokens, few.active_blocks, device, host, disk, strict=True)


def cheapest_of_few(request: RoutingRequest, few: FewCandidates, weights: CostWeights) -> tuple[int, int, list[float]]:
    """Return the first of the cheapest among a handful of workers, how many cost the same, and what each costs.

    The formula of ``costs_of`` stands here once more, bit for bit the same, because numbers whose kind is known need no
    objects between the steps where this is compiled.
    """
    isl, rows = rows_of_few(request, few)
    block_size = float(request.block_size)
    blocks = float(request.blocks)
    queue_weight: float = weights.queue_weight
    prefill_weight: float = weights.prefill_weight
    decode_weight: float = weights.decode_weight
    device_weight: float = weights.device_weight
    host_weight: float = weights.host_weight
    disk_weight: float = weights.disk_weight
    costs: list[float] = []
    cheapest = count = 0
    least = 0.0
    prefill_tokens: float
    active_blocks: float
    device: float
    host: float
    disk: float
    for row, (prefill_tokens, active_blocks, device, host, disk) in enumerate(rows):
        credit = device_weight * device + host_weight * host + disk_weight * disk
        left = (queue_weight * prefill_tokens + isl) / block_size - credit
        prefill = (left + abs(left)) / 2.0
        decode = active_blocks + blocks
        cost = prefill_weight * prefill + decode_weight * decode
        costs.append(cost)
        if count == 0 or cost < least:
            least, cheapest, count = cost, row, 1
        elif cost == least:
            count += 1
    return cheapest, count, costs


def softmax_weights(costs: FloatArray, temperature: float) -> FloatArray:
    """Return each worker's probability: softmax over −cost/(max−min)/temperature; equal costs share equally."""
    spread = float(costs.max() - costs.min())
    if spread == 0.0:
        return np.full(len(costs), 1.0 / len(costs))
    logits = (costs.min() - costs) / spread / temperature
    weights: FloatArray = np.exp(logits)
    shares: FloatArray = weights / weights.sum()
    return shares
