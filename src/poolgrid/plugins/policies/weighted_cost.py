"""The cost of the field's KV-aware routers, in blocks, to compare with (Dynamo's documentation of its KV router).

    overlap_credit   = device + 0.75 · host + 0.25 · disk
    adjusted_prefill = max(0, (active_prefill_tokens + isl) / block_size − overlap_credit)
    cost             = adjusted_prefill + potential_decode_blocks

``potential_decode_blocks`` are the blocks of the worker's active requests plus this request's own. It is the field's to
the digit: ISL of 10 blocks, nothing queued, overlaps 2, 5 and 8, decode blocks 10, 5 and 9 give the costs 18, 10 and
11, and the second wins.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from poolgrid.kernel.decision.policy import Candidates, Choice, RoutingRequest, lowest
from poolgrid.kernel.wire.identifiers import Stage

HOST_CREDIT: Final = 0.75
DISK_CREDIT: Final = 0.25


class FieldCost:
    """The lowest sum of uncached prefill, queued prefill and decode load."""

    name = "field"
    needs_overlap = True

    def choose(self, request: RoutingRequest, candidates: Candidates) -> Choice:
        """Choose the lowest cost; a decode worker computes no prompt, so there it is that of its blocks alone."""
        credit = (
            candidates.device_overlap + HOST_CREDIT * candidates.host_overlap + DISK_CREDIT * candidates.disk_overlap
        )
        prefill = np.maximum(0.0, (candidates.prefill_tokens + request.isl) / request.block_size - credit)
        if request.stage is Stage.DECODE:
            credit = prefill = np.zeros(len(candidates))
        decode = candidates.active_blocks + request.blocks
        costs = prefill + decode
        row, reason = lowest(costs, request)
        terms = {"overlap_credit": credit, "adjusted_prefill": prefill, "potential_decode_blocks": decode}
        return Choice(row, reason, costs, terms)
