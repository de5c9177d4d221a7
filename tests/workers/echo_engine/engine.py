"""The echo engine itself: one rank, one token a step of every request, no cache."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from poolgrid.kernel.wire.events import (
    AnyEvent,
    BlocksStored,
    LoadReported,
    PrefillCompleted,
    RequestFinished,
    RequestStarted,
)
from poolgrid.kernel.wire.requests import FinishReason, Generate, TokenDelta
from poolgrid.kernel.worker_protocol.engine import EngineReport, RankReport
from poolgrid.kernel.worker_protocol.refusal import BusyError

STEP_S = 0.001


class EchoEngine:
    """``poolgrid.kernel.worker_protocol.engine.Engine`` that answers with the prompt."""

    dp_size = 1
    unhealthy_reason = ""
    is_silent = False

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self._requests: dict[str, Generate] = {}
        self._made: dict[str, int] = {}
        """Tokens of each request that were given out."""
        self._cancelled: set[str] = set()
        self._work = asyncio.Event()

    def observe_health(self, changed: Callable[[], None]) -> None:
        """Nothing ever changes."""

    def describe(self) -> dict[str, object]:
        return {"echoing": len(self._requests)}

    def submit(self, request: Generate) -> None:
        if len(self._requests) >= self._max_requests:
            raise BusyError(f"{len(self._requests)} requests run, allowed are at most {self._max_requests}")
        self._requests[request.request_id] = request
        self._made[request.request_id] = 0
        self._work.set()

    def cancel(self, request_id: str) -> None:
        if request_id in self._requests:
            self._cancelled.add(request_id)

    def load(self, dp_rank: int) -> LoadReported:
        return LoadReported(len(self._requests), 0, 0, 0, 0, 1)

    def resident_blocks(self, dp_rank: int) -> list[BlocksStored]:
        return []

    def restate(self, dp_rank: int) -> list[BlocksStored]:
        return []

    async def run(self, deliver: Callable[[EngineReport], None]) -> None:
        while True:
            if not self._requests:
                self._work.clear()
                await self._work.wait()
            await asyncio.sleep(STEP_S)
            events: list[AnyEvent] = []
            deltas = [self._step(request_id, events) for request_id in list(self._requests)]
            deliver(EngineReport(deltas, {0: RankReport(events, self.load(0))}))

    def _step(self, request_id: str, events: list[AnyEvent]) -> TokenDelta:
        request = self._requests[request_id]
        at = self._made[request_id]
        prompt_tokens = len(request.token_ids) // 4
        if request_id in self._cancelled:
            return self._end(request_id, TokenDelta(request_id, at, b"", FinishReason.CANCELLED), events)
        if not at:
            events += [RequestStarted(request_id, prompt_tokens, 0, 0), PrefillCompleted(request_id)]
        self._made[request_id] = at + 1
        token = request.token_ids[4 * (at % prompt_tokens) :][:4]
        cached = None if at else 0
        if at + 1 < request.sampling.max_tokens:
            return TokenDelta(request_id, at, token, cached_tokens=cached)
        return self._end(request_id, TokenDelta(request_id, at, token, FinishReason.LENGTH, cached), events)

    def _end(self, request_id: str, delta: TokenDelta, events: list[AnyEvent]) -> TokenDelta:
        assert delta.finish_reason is not None
        del self._requests[request_id], self._made[request_id]
        self._cancelled.discard(request_id)
        events.append(RequestFinished(request_id, delta.finish_reason))
        return delta
