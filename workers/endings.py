"""A worker's drain, and how legs end that neither the engine nor their router ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass

import msgspec

from poolgrid.kernel.wire.events import RequestFinished
from poolgrid.kernel.wire.limits import TEXT_CHARS_MAX
from poolgrid.kernel.wire.requests import FinishReason, RefusalKind, TokenDelta
from poolgrid.kernel.worker_protocol.engine import EngineReport

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
        """Turn the engine's ``cancelled`` into what it means here: continue elsewhere."""
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


log = logging.getLogger(__name__)

HAND_OVER_TIMEOUT_S = 1.0
"""How long the engine may take to end cancelled requests at the end of a drain."""


class WorkerDrain:
    """The drain of one worker, on its event loop; nothing before the first order.

    It begins with the first order and cannot be taken back. The earliest end of all orders holds. At its end each
    request that is left continues on another worker: the engine is ordered to end them, and has
    ``HAND_OVER_TIMEOUT_S`` for it; then routers get the report without it.
    """

    def __init__(
        self,
        worker_id: str,
        allowed_ms: float,
        requests: Collection[str],
        empty: asyncio.Event,
        end: Callable[[str, Ending], None],
        refuse_all: Callable[[str, RefusalKind], None],
    ) -> None:
        """``empty`` is set while there are no ``requests``; ``end`` ends one so that it continues elsewhere, and
        ``refuse_all`` reports it to routers, past the engine."""
        self.is_on = False
        self._allowed_ms = allowed_ms
        self._requests = requests
        self._empty = empty
        self._end = end
        self._refuse_all = refuse_all
        self._handed_over = Ending(
            f"worker {worker_id} ended before the request did", FinishReason.MIGRATED, RefusalKind.DRAINING
        )
        self._ends_s = float("inf")
        """When what is left is handed over, by the loop's clock."""
        self._timer: asyncio.TimerHandle | None = None

    def order(self, timeout_ms: float | None) -> bool:
        """Have it end within ``timeout_ms``, or the worker's own time; return whether it begins with that."""
        loop = asyncio.get_running_loop()
        allowed_ms = self._allowed_ms if timeout_ms is None else timeout_ms
        begins, self.is_on = not self.is_on, True
        if begins:
            log.info("draining: %d requests, at most %.0f ms", len(self._requests), allowed_ms)
        ends_s = loop.time() + allowed_ms / 1e3
        if ends_s < self._ends_s:
            self._ends_s = ends_s
            self._set_timer(allowed_ms / 1e3, self._hand_over)
        return begins

    @property
    def word(self) -> str:
        """``draining``, or ``drained`` once nothing is left."""
        return "drained" if self._empty.is_set() else "draining"

    async def over(self) -> None:
        await self._empty.wait()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _set_timer(self, delay_s: float, then: Callable[[], None]) -> None:
        self.close()
        self._timer = asyncio.get_running_loop().call_later(delay_s, then)

    def _hand_over(self) -> None:
        self._ends_s = float("-inf")  # no later order sets the timer again
        if self._empty.is_set():
            return
        log.warning("the drain timed out: handing over %d requests", len(self._requests))
        self._set_timer(HAND_OVER_TIMEOUT_S, self._hand_over_without_engine)
        for request_id in list(self._requests):
            self._end(request_id, self._handed_over)

    def _hand_over_without_engine(self) -> None:
        if not self._empty.is_set():
            self._refuse_all(self._handed_over.error, self._handed_over.kind)
            self._empty.set()
