"""What it would cost to serve a request on each worker, in units of blocks.

The field's formula (Dynamo's documentation of its KV router):

    overlap_credit   = device_weight·device + host_weight·host + disk_weight·disk
    adjusted_prefill = max(0, (active_prefill_tokens + isl) / block_size − overlap_credit)
    cost             = prefill_weight·adjusted_prefill + potential_decode_blocks

``potential_decode_blocks`` are the blocks of the worker's active requests plus this request's own. Example: ISL of 10
blocks, nothing queued, overlaps 2, 5 and 8, decode blocks 10, 5 and 9 give the costs 18, 10 and 11: the second wins.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from router.core.candidates import FloatArray


@dataclass(frozen=True, slots=True)
class CostWeights:
    """How much each part of the cost counts; defaults are the field's."""

    prefill_weight: float = 1.0
    """Cost of one block that must be computed."""
    device_weight: float = 1.0
    """Credit for one block already in device memory; 0 ignores caches."""
    host_weight: float = 0.75
    """Credit for one block in host memory only."""
    disk_weight: float = 0.25
    """Credit for one block on disk only."""


def overlap_credit(weights: CostWeights, device: FloatArray, host: FloatArray, disk: FloatArray) -> FloatArray:
    """Return the credit of each worker, in blocks."""
    return weights.device_weight * device + weights.host_weight * host + weights.disk_weight * disk


def adjusted_prefill(prefill_tokens: FloatArray, isl: int, block_size: int, credit: FloatArray) -> FloatArray:
    """Return the blocks each worker would have to compute before this request's first token."""
    return np.maximum(0.0, (prefill_tokens + isl) / block_size - credit)


def softmax_weights(costs: FloatArray, temperature: float) -> FloatArray:
    """Return each worker's probability: softmax over −cost/(max−min)/temperature; equal costs share equally."""
    spread = float(costs.max() - costs.min())
    if spread == 0.0:
        return np.full(len(costs), 1.0 / len(costs))
    logits = (costs.min() - costs) / spread / temperature
    weights: FloatArray = np.exp(logits)
    shares: FloatArray = weights / weights.sum()
    return shares
