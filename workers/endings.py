"""How legs end that neither the engine nor their router ends: what the router is told, and what the pool is told."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from poolgrid.wire.events import RequestFinished
from poolgrid.wire.limits import TEXT_CHARS_MAX
from poolgrid.wire.requests import FinishReason, RefusalKind, TokenDelta
from poolgrid.workers.engines.protocol import EngineReport

CANCELLED = FinishReason.CANCELLED


@dataclass(frozen=True, slots=True)
class Ending:
    """What the engine's ``cancelled`` means when it was not the peer who asked for it."""

    error: str
    event_reason: FinishReason
    kind: RefusalKind


class Endings(dict[str, Ending]):
    """The endings of requests that are cancelled so that another worker continues them, by request id."""

    def rewrite(self, report: EngineReport) -> None:
        """Turn the engine's ``cancelled`` into what it means here: go on elsewhere."""
        report.deltas = [
            msgspec.structs.replace(
                delta,
                finish_reason=FinishReason.ERROR,
                error=self[delta.request_id].error[:TEXT_CHARS_MAX],
                refusal=self[delta.request_id].kind,
            )
            if delta.finish_reason is CANCELLED and delta.request_id in self
            else delta
            for delta in report.deltas
        ]
        for rank in report.ranks.values():
            rank.events = [
                RequestFinished(event.request_id, self[event.request_id].event_reason)
                if isinstance(event, RequestFinished) and event.reason == CANCELLED and event.request_id in self
                else event
                for event in rank.events
            ]


def cancelled_delta(request_id: str) -> TokenDelta:
    """Return the only delta of a leg that was cancelled before the engine had it."""
    return TokenDelta(request_id, 0, b"", CANCELLED)


def refused_delta(
    request_id: str,
    error: str,
    kind: RefusalKind | None,
    booked_prefill_tokens: int | None = None,
    retry_after_ms: int | None = None,
    unknown_model: bool = False,
) -> TokenDelta:
    """Return the only delta of a leg that was not taken, or that was given up before its first token."""
    return TokenDelta(
        request_id,
        0,
        b"",
        FinishReason.ERROR,
        error=error[:TEXT_CHARS_MAX],
        refusal=kind,
        booked_prefill_tokens=booked_prefill_tokens,
        retry_after_ms=retry_after_ms,
        unknown_model=unknown_model,
    )
