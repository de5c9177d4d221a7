"""How much each part of the cost counts (``poolgrid.router.core.cost``)."""

from __future__ import annotations

from dataclasses import dataclass


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


FIELD_WEIGHTS = CostWeights(queue_weight=1.0, decode_weight=1.0)
"""The weights with which the cost is the field's."""
