"""A routing decision on the span of the choice: facts as attributes, the terms of each candidate's cost as events."""

from __future__ import annotations

from poolgrid.router.core.decision import Decision
from poolgrid.runtime.tracing.record import SpanRecord

CANDIDATES_MAX = 16
"""Candidates whose terms are told, the chosen one and the cheapest others; ``/v1/decisions`` has them all."""


def tell_decision(span: SpanRecord, decision: Decision) -> None:
    """Put a decision on a span."""
    told = decision.explanation()
    span.attributes |= {
        "poolgrid.worker": told.worker,
        "poolgrid.stage": told.stage,
        "poolgrid.policy": told.policy,
        "poolgrid.decision.reason": told.reason,
        "poolgrid.decision.attempt": told.attempt,
        "poolgrid.candidates": told.candidates,
        "poolgrid.filtered": len(told.filtered),
        "poolgrid.isl": told.isl,
        "poolgrid.overlap_blocks": told.overlap_blocks,
        "poolgrid.block_size": told.block_size,
        "poolgrid.journal_offset": told.offset,
        "poolgrid.behind_records": told.behind_records,
    }
    if told.cost is not None:
        span.attributes["poolgrid.cost"] = told.cost
    rows = sorted(told.rows, key=lambda row: (not row.chosen, row.cost if row.cost is not None else 0.0))
    for row in rows[:CANDIDATES_MAX]:
        span.event(
            "candidate",
            span.began_ms,
            {
                "poolgrid.worker": row.worker,
                "poolgrid.chosen": row.chosen,
                "poolgrid.overlap_blocks": row.device_overlap_blocks
                + row.host_overlap_blocks
                + row.disk_overlap_blocks,
                "poolgrid.active_prefill_tokens": row.active_prefill_tokens,
                "poolgrid.active_blocks": row.active_blocks,
                "poolgrid.requests": row.requests,
                **({} if row.cost is None else {"poolgrid.cost": row.cost}),
                **{f"poolgrid.cost.{name}": value for name, value in row.terms.items()},
            },
        )
