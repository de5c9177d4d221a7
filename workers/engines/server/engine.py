"""An engine server as a worker's engine: its requests are HTTP streams, its cache is what its events say.

Rules:

1. A request is one HTTP exchange. What arrives of all streams within ``GATHER_S`` is one report; first tokens and
   ends go out at once, with what has come. Nothing waits but the task that owns the exchange.
2. A request is cancelled by closing its connection; it is over at once, whatever the server does meanwhile.
3. A request's last delta goes out when its answer is whole: how much was reused may come after the last token.
4. What the server refuses, another worker may be able to do (``CANNOT_DO``). A connection that ends, a stream without
   an end, and an error within an answer are the server's fault: the request moves (``BROKEN``), and the server's health
   is checked. A server without room is left alone for the time that it asks for (``BUSY``).
   An answer ends with its end mark, or a moment after its finish reason, whether or not its connection does.
5. A server that is silent has its requests taken away, each ending as broken.
6. A prefill leg whose KV stays is *kept* until its router reports that it is over, or for ``kv_transfer_timeout_ms``.
   No call can free such KV: the server frees it by its own time-out. Where both legs run at the same time
   (``Call.left_at_once``), the leg is kept during its exchange.
7. Loads are the worker's own books (``lifecycle.rank_load``). Each second the engine's own figures are compared with
   them: what is beyond is load of others.
8. An answer ends at ``max_tokens``, whatever the server sends: the rest is cut off, and the connection closed.
9. An exception while one answer is read ends that request as broken. One in a callback for all of them is not caught:
   it ends the worker (``poolgrid.process.lifecycle``).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from msgspec import structs

from poolgrid.http.http_client import RequestFailed
from poolgrid.process.clock import Clock
from poolgrid.process.log_lines import Complaints
from poolgrid.process.tasks import cancel_all, owned
from poolgrid.wire.events import (
    AnyEvent,
    BlocksStored,
    LoadReported,
)
from poolgrid.wire.identifiers import Stage
from poolgrid.wire.requests import FinishReason, Generate, RefusalKind
from poolgrid.workers.core.cache_facts import RestatedEvent
from poolgrid.workers.core.refusal import BrokenError, BusyError, RefusedError
from poolgrid.workers.engines.protocol import EngineReport
from poolgrid.workers.engines.server.cache_events import CacheEvents
from poolgrid.workers.engines.server.core.calls import Failure, ServerAnswerPiece, ServerDialect, ServerRoom
from poolgrid.workers.engines.server.core.engine_figures import EngineFigures
from poolgrid.workers.engines.server.forward_books import ServerForwardBooks
from poolgrid.workers.engines.server.health import ServerHealth
from poolgrid.workers.engines.server.kinds import HEALTH_PATH
from poolgrid.workers.engines.server.request_ledger import RequestLedger, ServerRequest
from poolgrid.workers.engines.server.server_client import AnswerStream, ServerClient, ServerError
from poolgrid.workers.engines.server.started_server import StartedServer
from poolgrid.workers.metrics import WorkerMetrics

log = logging.getLogger(__name__)

PREFILLED = FinishReason.PREFILLED
CANCELLED = FinishReason.CANCELLED
EXPIRED = FinishReason.EXPIRED
ERROR = FinishReason.ERROR
BROKEN = RefusalKind.BROKEN

SILENT = "the engine server does not do its work"
"""What clients get while it does not; the worker's log and its ``/health`` have the reason."""

FAILED_WORDS = {
    "connect": "the engine server cannot be reached",
    "disconnect": "the engine server closed the connection",
    "stream-cut": "the engine server's answer ended before its end",
    "protocol": "the engine server's answer cannot be read",
}
"""What clients get of an exchange that failed, by its kind."""

GATHER_S = 0.002
"""How long a token may wait for those of the same step, which a server writes to one connection after the other: each
message costs a router more than a token in it. A tenth of the time between two tokens."""

EXPIRY_CHECK_S = 0.5
"""Time between two looks at kept prefill legs, and at answers that are over."""

FIGURES_INTERVAL_S = 1.0
"""Time between two looks at the engine's own figures: a page of metrics costs a server some milliseconds."""

REPORTED_WITHIN_S = 0.2
"""Time after which routers have reported what they sent: they do so 20 times a second."""

END_WAIT_MS = 500.0
"""How long an answer may take to end after its finish reason or its error status: usage and end mark follow at once."""


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Times and bounds: settings of the worker, or constants next to them."""

    max_requests: int
    kept_transfers_max: int
    kv_transfer_timeout_ms: float
    health_interval_ms: float
    health_timeout_ms: float
    progress_timeout_ms: float


class ServerEngine:
    """``poolgrid.workers.engines.protocol.Engine`` over an engine server."""

    def __init__(
        self,
        client: ServerClient,
        dialect: ServerDialect,
        dp_size: int,
        block_size: int,
        total_blocks: int,
        limits: ServerLimits,
        events: CacheEvents,
        confirm: Callable[[bool], Awaitable[str]],
        about: Callable[[], dict[str, object]],
        clock: Clock,
        metrics: WorkerMetrics,
        server: StartedServer | None = None,
        health_path: str = HEALTH_PATH,
        figures: EngineFigures | None = None,
    ) -> None:
        """``confirm`` asks what the server serves, or all that it is, and says in what it differs from before;
        ``about`` is for people.

        ``server`` is one that the worker has started.
        """
        self._client = client
        self._dialect = dialect
        self.dp_size = dp_size
        self._limits = limits
        self._events = events
        self._about = about
        self._server = server
        self._clock = clock
        self._metrics = metrics
        self._books = RequestLedger(
            dp_size,
            block_size,
            total_blocks,
            limits.progress_timeout_ms,
            dialect.tells_reuse_first,
            events.cached_blocks,
            events.is_behind,
            self._on_lost_report,
        )
        self._report = self._books.report
        self.forward_books = ServerForwardBooks(self._books.loads, self._report)
        self._health = ServerHealth(
            client,
            confirm,
            events.is_current,
            self._stalled,
            lambda since_ms: self._books.lives_since(self._active.values(), since_ms),
            limits.health_interval_ms,
            limits.health_timeout_ms,
            clock,
            metrics,
            None if server is None else server.excuse,
            health_path,
        )
        self._figures = figures
        self._health.observe(self._on_health)
        self._observer: Callable[[], None] | None = None
        self._active: dict[str, ServerRequest] = {}
        self._kept: dict[str, ServerRequest] = {}
        """In order of their deadlines: all wait equally long."""
        self._exchanges: dict[asyncio.Task[None], ServerRequest] = {}
        self._room = ServerRoom()
        self._said = Complaints(log, clock)
        self._watching: list[asyncio.Task[None]] = []
        self._follows = asyncio.Event()
        """Set once the server's cache events are followed."""
        self._loop = asyncio.get_running_loop()
        self._fault: asyncio.Future[None] = self._loop.create_future()
        """Fails when a report is lost."""

    # -- what the worker sees ------------------------------------------------------------------------------------------

    @property
    def unhealthy_reason(self) -> str:
        return self._health.unhealthy_reason

    @property
    def is_silent(self) -> bool:
        return self._health.is_silent

    def observe_health(self, changed: Callable[[], None]) -> None:
        self._observer = changed

    def describe(self) -> dict[str, object]:
        return {"engine_server": {**self._about(), **self._events.describe()}}

    def load(self, dp_rank: int) -> LoadReported:
        return self._books.load(dp_rank)

    def resident_blocks(self, dp_rank: int) -> list[BlocksStored]:
        raise NotImplementedError("an engine server cannot list its cache; only its events show it")

    def restate(self, dp_rank: int) -> Sequence[RestatedEvent]:
        return self._events.restate(dp_rank)

    async def until_known(self) -> None:
        """Wait until what the server held before this process is known; ``run`` has begun, or is about to."""
        await self._follows.wait()
        await self._events.until_current()

    async def run(self, deliver: Callable[[EngineReport], None]) -> None:
        """Hand over reports until cancelled.

        Raises ``EngineBrokenError`` when the server came back as another, or is not started again any more, and what
        a report was lost by.
        """
        self._report.open(deliver)
        self._events.open(self._on_cache)
        self._follows.set()
        self._watching = [owned(self._health.run(), "health of the server"), owned(self._expire(), "kept legs")]
        if self._figures is not None:
            self._watching.append(
                owned(follow_figures(self._client, self._figures, self._books, self.dp_size), "figures")
            )
        if self._server is not None:
            self._watching.append(owned(self._server.watch(self._health.doubt), "watch over the server"))
        done, _ = await asyncio.wait([*self._watching, self._fault], return_when=asyncio.FIRST_COMPLETED)
        for each in done:
            each.result()

    # -- requests in ---------------------------------------------------------------------------------------------------

    def submit(self, request: Generate) -> None:
        """Ask the server, or raise ``RefusedError`` and change nothing. What it answers comes as deltas."""
        prompt_tokens = self._admit(request)
        call = self._dialect.call(request)
        active = ServerRequest(request, call, prompt_tokens)
        active.answer = AnswerStream(call, partial(self._on_piece, active), partial(self._on_end, active, None))
        self._active[request.request_id] = active
        self._books.enter(active, self._clock.monotonic_ms())
        active.exchange = exchange = owned(self._ask(active), "request to the server")
        self._exchanges[exchange] = active
        exchange.add_done_callback(self._on_exchange_over)
        if call.left_at_once is not None:
            # Another worker may continue while the server still computes the prompt.
            self._loop.call_soon(self._left, active, call.left_at_once)

    def cancel(self, request_id: str) -> None:
        """Stop a request by closing its connection; kept KV is given up."""
        kept = self._kept.get(request_id)
        if kept is not None:
            # The usual way for a leg to end: its router reports it when the decode worker has the KV.
            self._release(kept, PREFILLED)
            return
        active = self._active.get(request_id)
        if active is not None:
            self._close(active)
            self._finish(active, CANCELLED)

    def _admit(self, request: Generate) -> int:
        """Refuse what the adapter itself cannot take; return the tokens of the prompt."""
        if self._health.is_silent:
            raise BrokenError(SILENT)
        if request.request_id in self._active or request.request_id in self._kept:
            raise RefusedError(f"request id {request.request_id!r} is already active on this worker")
        wait_ms = self._room.wait_ms(self._clock.monotonic_ms())
        if wait_ms:
            raise BusyError("the engine server has no room", wait_ms)
        prompt_tokens = len(request.token_ids) // 4
        if prompt_tokens < 1:
            raise RefusedError("the prompt has 0 tokens, allowed are integers from 1")
        if request.sampling.max_tokens < 1:
            raise RefusedError("max_tokens is 0, allowed are integers from 1")
        if len(self._active) >= self._limits.max_requests:
            raise BusyError(
                f"{len(self._active)} requests are in the engine server, allowed are at most "
                f"{self._limits.max_requests} (max_requests)"
            )
        if request.stage is Stage.PREFILL:
            kept = len(self._kept) + sum(each.request.stage is Stage.PREFILL for each in self._active.values())
            if kept >= self._limits.kept_transfers_max:
                raise BusyError(
                    f"{kept} prefill legs run or are kept for decode workers, allowed are at most "
                    f"{self._limits.kept_transfers_max} (kept_transfers_max)"
                )
        return prompt_tokens

    async def _ask(self, active: ServerRequest) -> None:
        """Carry out a request's exchange, and take its end."""
        answer = active.answer
        call = active.call
        failure: Failure | None = None
        try:
            await self._client.http.send("POST", call.path, call.body, answer, call.headers)
        except RequestFailed as failed:
            failure = answer.refusal(self._dialect.title)
            if failure is None:
                failure = Failure(FAILED_WORDS.get(failed.kind, "the engine server failed"), BROKEN, failed.detail)
                if failed.kind in ("connect", "disconnect"):
                    self._health.doubt_facts()  # it may have been started again, as another one
        except Exception as error:
            log.exception("request %s failed", active.request_id)
            failure = Failure("the engine server's answer cannot be read", BROKEN, repr(error))
        try:
            self._on_end(active, failure)
        except Exception as error:
            self._break(active, error)

    def _on_exchange_over(self, exchange: asyncio.Task[None]) -> None:
        """Cut the circles of a request: it would keep its prompt until a full run of the collector."""
        active = self._exchanges.pop(exchange)
        active.exchange = None
        active.answer.detach()

    # -- answers -------------------------------------------------------------------------------------------------------

    def _on_piece(self, active: ServerRequest, piece: ServerAnswerPiece) -> None:
        if self._active.get(active.request_id) is not active:
            return  # it was taken away; or its decode leg has it all
        try:
            self._take(active, piece)
        except Exception as error:
            self._break(active, error)

    def _take(self, active: ServerRequest, piece: ServerAnswerPiece) -> None:
        cached = piece.cached_tokens
        if cached is not None:
            # The server counts the tokens of images too, and only it knows how many those are.
            active.cached_tokens = cached if cached <= active.prompt_tokens else active.prompt_tokens
        if piece.failure is not None:
            self._close(active)  # the server may say more, or nothing ever
            self._on_end(active, piece.failure)
            return
        if active.last_piece is not None:
            return  # nothing but counts comes after the finish reason
        left = active.request.sampling.max_tokens - active.taken
        if len(piece.tokens) > left:
            self._cut(active, piece, left)
        elif piece.finish is not None:
            active.last_piece = piece
        elif piece.tokens:
            begins = not active.taken
            self._books.grow(active, piece, self._clock.monotonic_ms())
            if begins:
                self._report.flush_soon()
            else:
                self._report.flush_within(GATHER_S)

    def _cut(self, active: ServerRequest, piece: ServerAnswerPiece, left: int) -> None:
        self._metrics.overlong_answers.inc()
        log.warning(
            "request %s: the engine server sent more than max_tokens (%d): its answer is cut there",
            active.request_id,
            active.request.sampling.max_tokens,
        )
        piece.tokens = piece.tokens[:left]
        piece.logprobs = None if piece.logprobs is None else piece.logprobs[:left]
        piece.params = None
        self._close(active)
        self._finish(active, FinishReason.LENGTH, piece)

    def _break(self, active: ServerRequest, error: Exception) -> None:
        log.error("request %s failed: this is a bug", active.request_id, exc_info=error)
        self._metrics.request_faults.inc()
        if self._active.get(active.request_id) is active:
            self._close(active)
            failure = Failure(f"reading the engine's answer failed: {error!r}", BROKEN)
            self._finish(active, ERROR, failure=failure)

    def _on_end(self, active: ServerRequest, failure: Failure | None) -> None:
        request_id = active.request_id
        if self._kept.get(request_id) is active:
            if failure is not None:
                log.warning("prefill leg %s failed together with its decode leg: %s", request_id, failure.reason)
            return
        if self._active.get(request_id) is not active:
            return
        last = active.last_piece
        if last is None:
            if failure is None and (active.leaves_kv or not active.taken):
                failure = Failure("the engine server's answer ended without a finish reason", BROKEN)
            if failure is not None:
                self._fail(active, failure)
                return
            whole = active.taken >= active.request.sampling.max_tokens
            last = ServerAnswerPiece(finish=FinishReason.LENGTH if whole else FinishReason.STOP)
        self._finish(active, last.finish or ERROR, last)

    def _fail(self, active: ServerRequest, failure: Failure) -> None:
        """End a request with the kind of the server's failure; the server's own words are for the log."""
        kind, pause_ms = failure.kind, None
        if kind is RefusalKind.CANNOT_DO and active.taken:
            kind = BROKEN  # it could, up to here
        elif kind is RefusalKind.BUSY:
            pause_ms = self._room.refused(self._clock.monotonic_ms(), failure.retry_after_ms)
        if failure.unknown_model or failure.key_refused:
            self._health.doubt_facts()
        self._said.note(
            "" if kind is None else kind.value,
            "the engine server did not serve request %s: %s%s%s",
            active.request_id,
            failure.reason,
            f" ({' '.join(failure.words.split())})" if failure.words and failure.words not in failure.reason else "",
        )
        self._finish(active, ERROR, failure=structs.replace(failure, kind=kind, retry_after_ms=pause_ms))

    def _left(self, active: ServerRequest, params: bytes) -> None:
        if self._active.get(active.request_id) is not active:
            return
        try:
            self._finish(active, PREFILLED, ServerAnswerPiece(finish=PREFILLED, params=params))
        except Exception as error:
            self._break(active, error)

    def _finish(
        self,
        active: ServerRequest,
        reason: FinishReason,
        piece: ServerAnswerPiece | None = None,
        failure: Failure | None = None,
    ) -> None:
        """Give out a request's last delta, and take it off the books, or keep it."""
        now_ms = self._clock.monotonic_ms()
        self._books.end(active, reason, now_ms, piece, failure)
        del self._active[active.request_id]
        if reason == PREFILLED:
            active.deadline_ms = now_ms + self._limits.kv_transfer_timeout_ms
            self._kept[active.request_id] = active
            self._report.kept_transfers = len(self._kept)
        self._report.flush_soon()

    def _release(self, active: ServerRequest, reason: FinishReason) -> None:
        """Take a kept prefill leg off the books; the server frees its KV by itself."""
        del self._kept[active.request_id]
        self._report.kept_transfers = len(self._kept)
        self._close(active)
        self._books.release(active, reason)
        self._report.flush_soon()

    def _close(self, active: ServerRequest) -> None:
        if active.exchange is not None and active.exchange is not asyncio.current_task():
            active.exchange.cancel()

    def _on_cache(self, dp_rank: int, events: Sequence[AnyEvent]) -> None:
        self._books.cache_changed(dp_rank, events, self._clock.monotonic_ms())
        # At once: a restatement must not know more than the reports have told.
        self._report.flush()

    def _on_lost_report(self, error: Exception) -> None:
        if not self._fault.done():
            self._fault.set_exception(error)

    # -- its life ------------------------------------------------------------------------------------------------------

    def _stalled(self, now_ms: float) -> str:
        """Return what has not moved for too long; empty = nothing."""
        self._metrics.engine_silence_seconds.set(self._books.silent_ms(now_ms) / 1e3)
        return self._books.stall(self._active.values(), now_ms)

    def _on_health(self) -> None:
        """Take the requests away from a server that has become silent; tell the worker."""
        if self._health.is_silent:
            for active in list(self._active.values()):
                self._close(active)
                self._finish(active, ERROR, failure=Failure(SILENT, BROKEN))
            for active in list(self._kept.values()):
                self._release(active, EXPIRED)
            # At once: the worker's next message is its exit.
            self._report.flush()
        if self._observer is not None:
            self._observer()

    def _end_answers(self, now_ms: float) -> None:
        for exchange, active in list(self._exchanges.items()):
            answer = active.answer
            if not answer.ended_ms and answer.status not in (0, 200):
                answer.ended_ms = now_ms
            if answer.ended_ms and now_ms - answer.ended_ms > END_WAIT_MS:
                self._on_end(active, answer.refusal(self._dialect.title))
                exchange.cancel()

    async def _expire(self) -> None:
        """Release kept KV that was never fetched, and answers that do not end."""
        while True:
            await asyncio.sleep(EXPIRY_CHECK_S)
            now_ms = self._clock.monotonic_ms()
            self._end_answers(now_ms)
            for active in list(self._kept.values()):
                if active.deadline_ms > now_ms:
                    break
                log.warning(
                    "no fetch of the KV of prefill leg %s was reported within %.0f ms: releasing it",
                    active.request_id,
                    self._limits.kv_transfer_timeout_ms,
                )
                self._release(active, EXPIRED)

    async def close(self) -> None:
        """End every exchange, and stop following."""
        self._report.close()
        self._events.close()
        await cancel_all([*self._watching, *self._exchanges])


async def follow_figures(client: ServerClient, figures: EngineFigures, books: RequestLedger, dp_size: int) -> None:
    """Compare the requests that the engine reports with the books, again and again."""
    while True:
        before = books.booked()
        try:
            page = await client.ask(figures.path)
        except ServerError:
            page = b""
        await asyncio.sleep(REPORTED_WITHIN_S)
        books.compare(figures.read(page, dp_size), before, books.booked())
        await asyncio.sleep(FIGURES_INTERVAL_S)
