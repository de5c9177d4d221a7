"""The books of an engine server's requests: each rank's load and progress, and what the next report will say.

Loads are the worker's own. What others send to the server is found by comparing them with the engine's own figures.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from msgspec import structs

from poolgrid.wire.events import (
    AnyEvent,
    LoadReported,
    PrefillCompleted,
    RequestFinished,
    RequestProgressed,
    RequestStarted,
)
from poolgrid.wire.hashing import pack_tokens
from poolgrid.wire.identifiers import Stage
from poolgrid.wire.limits import TEXT_CHARS_MAX
from poolgrid.wire.requests import FinishReason, Generate, TokenDelta
from poolgrid.workers.engines.lifecycle.health import ProgressMonitor, Stall
from poolgrid.workers.engines.lifecycle.rank_load import RankLoad, ReportBuffer
from poolgrid.workers.engines.server.core.calls import Call, Failure, ServerAnswerPiece
from poolgrid.workers.engines.server.core.engine_figures import ForeignLoad
from poolgrid.workers.engines.server.server_client import AnswerStream

PREFILLED = FinishReason.PREFILLED

LIFE_FACTOR = 10.0
"""Heartbeats without a token count for so many times the progress time-out: then a rank is stalled all the same."""

PREFILL_TOKENS_PER_S_MIN = 250.0
"""Slowest rate assumed for an engine that computes a prompt without a sign of progress."""


@dataclass(slots=True, eq=False)
class ServerRequest:
    """A request that the server has, or is about to get."""

    request: Generate
    call: Call
    prompt_tokens: int
    answer: AnswerStream = field(init=False)
    exchange: asyncio.Task[None] | None = None
    taken: int = 0
    """Tokens that were reported."""
    last_piece: ServerAnswerPiece | None = None
    """The piece with the finish reason: it goes out with the request's last delta."""
    cached_tokens: int | None = None
    cached_is_reported: bool = False
    deadline_ms: float = 0.0
    """When its kept KV is given up."""

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def rank(self) -> int:
        return self.request.routing.dp_rank

    @property
    def leaves_kv(self) -> bool:
        return self.request.stage is Stage.PREFILL and self.request.sampling.max_tokens > 1

    @property
    def transfers(self) -> bool:
        return self.request.stage is Stage.DECODE


class RequestLedger:
    """The books of all ranks; times come as arguments."""

    def __init__(
        self,
        dp_size: int,
        block_size: int,
        total_blocks: int,
        progress_timeout_ms: float,
        tells_reuse_first: bool,
        cached_blocks: Callable[[int], int],
        is_behind: Callable[[int], bool],
        lose: Callable[[Exception], None],
    ) -> None:
        """``cached_blocks`` tells what a rank's cache holds, ``is_behind`` whether its reports may stand behind a
        replay; ``lose`` gets what a report was lost by."""
        self.report = ReportBuffer(self.load, lose, steps=1)
        self._timeout_ms = progress_timeout_ms
        self._tells_reuse_first = tells_reuse_first
        self._cached_blocks = cached_blocks
        self._is_behind = is_behind
        self.loads = [RankLoad(block_size) for _ in range(dp_size)]
        for load in self.loads:
            load.assume_total_blocks(total_blocks)
        self._progress = [ProgressMonitor(progress_timeout_ms) for _ in range(dp_size)]
        self._foreign = [ForeignLoad() for _ in range(dp_size)]
        self._cache_ms = [0.0] * dp_size
        """When the last cache event of each rank came."""

    def load(self, dp_rank: int) -> LoadReported:
        load = self.loads[dp_rank].report(self._cached_blocks(dp_rank))
        foreign = self._foreign[dp_rank].count
        return structs.replace(load, foreign_requests=foreign) if foreign else load

    def booked(self) -> list[int]:
        """Return how many requests of each rank are on the books."""
        return [load.requests for load in self.loads]

    def compare(self, figures: Sequence[int] | None, *booked: Sequence[int]) -> None:
        """Compare what the engine has, by rank, with what was on the books around that; ``None`` = it is not known."""
        for rank, foreign in enumerate(self._foreign):
            changed = (
                foreign.forget() if figures is None else foreign.observe(figures[rank], [each[rank] for each in booked])
            )
            if changed:
                self.report.rank(rank)
                self.report.flush_soon()

    def enter(self, active: ServerRequest, now_ms: float) -> None:
        self.loads[active.rank].entered(active.request_id, active.prompt_tokens, computes=not active.transfers)
        self._progress[active.rank].entered(active.request_id, active.transfers, now_ms)

    def grow(
        self,
        active: ServerRequest,
        piece: ServerAnswerPiece,
        now_ms: float,
        finish: FinishReason | None = None,
        params: bytes | None = None,
    ) -> None:
        """Report a piece's tokens, the last ones with the finish reason."""
        cached = None
        if not active.cached_is_reported and active.cached_tokens is not None:
            active.cached_is_reported = True
            cached = active.cached_tokens
        position = active.taken
        if piece.tokens or finish is PREFILLED:
            self._book(active, len(piece.tokens), now_ms)
        self.report.pending.deltas.append(
            TokenDelta(
                active.request_id,
                position,
                pack_tokens(piece.tokens),
                finish,
                cached,
                logprobs=piece.logprobs,
                disaggregated_params=params,
                prompt_logprobs=piece.prompt_logprobs,
            )
        )

    def _book(self, active: ServerRequest, fresh: int, now_ms: float) -> None:
        request_id = active.request_id
        active.taken += fresh
        self._progress[active.rank].moved(request_id, now_ms)
        began, blocks = self.loads[active.rank].grew(request_id, active.prompt_tokens + max(1, active.taken))
        events = self.report.rank(active.rank)
        if began:
            known = active.cached_tokens
            # What the router expects stands in for what only the end of the answer tells.
            cached = min(active.request.routing.overlap_tokens, active.prompt_tokens) if known is None else known
            events.append(
                RequestStarted(request_id, active.prompt_tokens, cached, blocks or 0, cached_later=known is None)
            )
            events.append(PrefillCompleted(request_id, self._is_behind(active.rank)))
            if not active.transfers:
                self.report.pending.prefill_tokens += active.prompt_tokens - cached
            fresh -= 1
        elif blocks is not None:
            events.append(RequestProgressed(request_id, blocks))
        self.report.pending.decode_tokens += max(0, fresh)

    def end(
        self,
        active: ServerRequest,
        reason: FinishReason,
        now_ms: float,
        piece: ServerAnswerPiece | None = None,
        failure: Failure | None = None,
    ) -> None:
        """Report a request's last delta, with its last piece or how it failed. A prefilled one stays on the books."""
        request_id = active.request_id
        if piece is not None:
            self.grow(active, piece, now_ms, reason, piece.params)
            self._progress[active.rank].ended(request_id, now_ms)
        else:
            self._progress[active.rank].given_up(request_id, now_ms)
            delta = TokenDelta(request_id, active.taken, b"", reason)
            if failure is not None:
                delta = structs.replace(
                    delta,
                    error=failure.reason[:TEXT_CHARS_MAX],
                    refusal=failure.kind,
                    retry_after_ms=failure.retry_after_ms,
                    unknown_model=failure.unknown_model,
                )
            self.report.pending.deltas.append(delta)
        if reason is PREFILLED:
            self.loads[active.rank].keep(request_id)
            self.report.rank(active.rank)
            return
        self.loads[active.rank].left(request_id)
        # An estimate stood in for it at the beginning.
        later = None if piece is None or self._tells_reuse_first else active.cached_tokens
        self.report.rank(active.rank).append(RequestFinished(request_id, reason, later))

    def release(self, active: ServerRequest, reason: FinishReason) -> None:
        """Take a prefilled request off the books."""
        request_id = active.request_id
        self.loads[active.rank].left(request_id)
        self.report.pending.released.append(request_id)
        self.report.pending.expired += reason is FinishReason.EXPIRED
        self.report.rank(active.rank).append(RequestFinished(request_id, reason, active.cached_tokens))

    def cache_changed(self, dp_rank: int, events: Sequence[AnyEvent], now_ms: float) -> None:
        self._cache_ms[dp_rank] = now_ms
        self.report.rank(dp_rank).extend(events)

    # -- progress ------------------------------------------------------------------------------------------------------

    def silent_ms(self, now_ms: float) -> float:
        return max(each.silent_ms(now_ms) for each in self._progress)

    def stall(self, active: Collection[ServerRequest], now_ms: float) -> str:
        """Return what has not moved for too long; empty = nothing."""
        for dp_rank, monitor in enumerate(self._progress):
            stall = monitor.stall(now_ms)
            if stall is None or not stall.certain:
                continue
            if not (stall.total and self._lives(dp_rank, active, stall, now_ms)):
                return stall.reason
        return ""

    def _lives(self, dp_rank: int, active: Collection[ServerRequest], stall: Stall, now_ms: float) -> bool:
        """Return whether a rank without output is at work: on a long prompt, or its events or answers show it."""
        life_ms, prompt_tokens = self._cache_ms[dp_rank], 0
        for each in active:
            if each.rank == dp_rank:
                life_ms = max(life_ms, each.answer.now_ms)
                if not each.taken:
                    prompt_tokens = max(prompt_tokens, each.prompt_tokens)
        if now_ms - life_ms <= self._timeout_ms and stall.silent_ms <= LIFE_FACTOR * self._timeout_ms:
            return True
        return stall.silent_ms <= self._timeout_ms + prompt_tokens / PREFILL_TOKENS_PER_S_MIN * 1e3

    def lives_since(self, active: Collection[ServerRequest], since_ms: float) -> bool:
        """Return whether anything came from the server after a time: of an answer, or of its cache."""
        return max(*self._cache_ms, *(each.answer.now_ms for each in active), 0.0) > since_ms
