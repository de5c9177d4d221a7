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

from dataclasses import dataclass

import numpy as np

from router.core.candidates import FloatArray


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


def overlap_credit(weights: CostWeights, device: FloatArray, host: FloatArray, disk: FloatArray) -> FloatArray:
    """Return the credit of each worker, in blocks."""
    return weights.device_weight * device + weights.host_weight * host + weights.disk_weight * disk


def adjusted_prefill(
    weights: CostWeights, prefill_tokens: FloatArray, isl: int, block_size: int, credit: FloatArray
) -> FloatArray:
    """Return the blocks each worker would have to compute before this request's first token, its queue weighted."""
    return np.maximum(0.0, (weights.queue_weight * prefill_tokens + isl) / block_size - credit)


def softmax_weights(costs: FloatArray, temperature: float) -> FloatArray:
    """Return each worker's probability: softmax over −cost/(max−min)/temperature; equal costs share equally."""
    spread = float(costs.max() - costs.min())
    if spread == 0.0:
        return np.full(len(costs), 1.0 / len(costs))
    logits = (costs.min() - costs) / spread / temperature
    weights: FloatArray = np.exp(logits)
    shares: FloatArray = weights / weights.sum()
    return shares


FIELD_WEIGHTS = CostWeights(queue_weight=1.0, decode_weight=1.0)
"""The weights with which the cost is the field's."""
