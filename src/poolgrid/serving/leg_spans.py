"""The spans of a request's legs, made of what happens to them. Pure, and only for requests whose traces are kept.

A leg's span begins when it is sent, and ends with its worker's part in it: its last delta, or whatever took it from
that worker. The span of a leg that replaces a lost one is linked to it.
"""

from __future__ import annotations

from poolgrid.process.tracing.record import SpanKind, TraceRecord
from poolgrid.serving.legs import (
    Effect,
    PlaceNext,
    RecordFailure,
    ReleaseLeg,
    WorkerOvercommitted,
    WorkerReported,
)
from poolgrid.serving.request_machine import RequestMachine
from poolgrid.wire.identifiers import STAGE_WORD, Stage, WorkerKey
from poolgrid.wire.requests import FinishReason
from poolgrid.wire.trace_context import TraceContext

KEPT = (FinishReason.PREFILLED, FinishReason.ENCODED)
"""What a leg ends with whose result is kept for the next one."""


def begin_leg(
    trace: TraceRecord, machine: RequestMachine, worker: WorkerKey, stage: Stage, pool: str = ""
) -> TraceContext:
    """Begin the span of the leg that is about to be sent; return the context for its worker."""
    plan = machine.plan
    span = trace.begin(f"leg {STAGE_WORD[stage]}", SpanKind.CLIENT)
    span.attributes |= {
        "poolgrid.stage": STAGE_WORD[stage],
        "poolgrid.worker": str(worker),
        "poolgrid.dispatch_id": plan.next_dispatch_id,
        "poolgrid.output_tokens_before": machine.delivery.tokens,
    }
    if pool:
        span.attributes["poolgrid.pool"] = pool
    lost = trace.lost.pop(machine.request.request_id, None)
    if lost is not None:
        span.links.append(lost.place)
    trace.open[plan.next_dispatch_id] = span
    return trace.context(span)


def follow_legs(trace: TraceRecord, machine: RequestMachine, effects: tuple[Effect, ...]) -> None:
    """Take note of what follows from an event, before it is carried out."""
    moves = next((effect for effect in effects if isinstance(effect, PlaceNext) and effect.moved), None)
    left, failed = ("", "") if moves is None else (moves.after.id, "refused")
    for effect in effects:
        match effect:
            case RecordFailure(dispatch, event):
                left, failed = dispatch.id, event.value
            case WorkerOvercommitted(dispatch):
                left, failed = dispatch.id, "crowded"
            case _:
                pass
    for effect in effects:
        match effect:
            case WorkerReported():
                _reported(trace, effect)
            case ReleaseLeg(dispatch):
                is_left = dispatch.id == left
                span = trace.close(dispatch.id, failed if is_left else "")
                if span is not None and is_left and moves is not None:
                    trace.lost[machine.request.request_id] = span
            case _:
                pass
    if moves is not None:
        trace.root.event(
            "moved",
            trace.now_ms(),
            {
                "poolgrid.worker": str(moves.after.worker),
                "poolgrid.cause": failed,
                "poolgrid.output_tokens_before": machine.delivery.tokens,
            },
        )


def _reported(trace: TraceRecord, report: WorkerReported) -> None:
    span = trace.open.get(report.dispatch.id)
    if span is None:
        return
    delta = report.delta
    if not span.events and (delta.token_ids or delta.cached_tokens is not None):
        span.event("first output", trace.now_ms())
    if delta.cached_tokens is not None:
        span.attributes["poolgrid.cached_tokens"] = delta.cached_tokens
    if delta.finish_reason is not None:
        span.attributes["poolgrid.finish_reason"] = delta.finish_reason.value
    if delta.finish_reason in KEPT:
        trace.close(report.dispatch.id)
