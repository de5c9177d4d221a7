"""A routing decision on the span of the choice: facts and cost terms as attributes, other candidates as events."""

from __future__ import annotations

from poolgrid.process.tracing.record import SpanRecord, Value
from poolgrid.router.core.decision import Decision

OTHERS_MAX = 8
"""Further candidates that are told, the cheapest; ``/v1/decisions`` has them all. Each costs some 15 µs to send."""


def tell_decision(span: SpanRecord, decision: Decision) -> None:
    """Put a decision on a span: the chosen worker's terms as attributes, those of others in an event each."""
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
    others = []
    for row in told.rows:
        if row.chosen:
            span.attributes |= {f"poolgrid.cost.{name}": value for name, value in row.terms.items()}
        else:
            others.append(row)
    others.sort(key=lambda row: 0.0 if row.cost is None else row.cost)
    for row in others[:OTHERS_MAX]:
        blocks = row.device_overlap_blocks + row.host_overlap_blocks + row.disk_overlap_blocks
        event: dict[str, Value] = {
            "poolgrid.worker": row.worker,
            "poolgrid.overlap_blocks": blocks,
            "poolgrid.requests": row.requests,
        }
        if row.cost is not None:
            event["poolgrid.cost"] = row.cost
            event["poolgrid.cost.terms"] = " ".join(f"{name}={value:g}" for name, value in row.terms.items())
        span.event("other candidate", span.began_ms, event)
