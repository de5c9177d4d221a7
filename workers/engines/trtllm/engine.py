"""TensorRT-LLM as a worker's engine: its books, on the worker's event loop.

Rules:

1. Nothing here calls the engine: requests are posted to its thread (``generations``), and what becomes visible comes
   back as values; events and statistics come from the feed. So nothing here waits, whatever the engine does. What
   comes in one turn of the loop is one report.
2. A prefill leg is a ``context_only`` request. Its KV stays in the engine until a decode worker's engine fetched it,
   which nobody tells: the leg is *kept* until its router says that it is over, or for ``kv_transfer_timeout_ms``.
   At most ``kept_transfers_max`` are kept. Nobody can give such KV up: the engine has forgotten the request, and lets
   go of its blocks by its own time-out, which is the same. A leg of one token is an ordinary request: no one would
   fetch its KV.
3. A cancelled request is over when the engine says so, or after ``CANCEL_TIMEOUT_MS``: an engine that hangs says
   nothing. One whose KV is on its way is the exception: its blocks are not free before.
4. What a request causes is its own error, and one that befell the engine moves its requests: an error that comes after
   output, that several requests have at once, or that speaks of the engine, is the engine's. Of any other error that
   comes late nobody can tell, so another worker may try.
5. Where embeddings travel as bytes, an encode leg is *kept* too, until its taker has them or their lease ends
   (``embedding_offers``).
6. An engine that has shut down, or says that it is not healthy, ends ``run``: the worker then tells everybody and ends.
   One that is silent (``lifecycle.health``) has its requests taken away, each ending as broken: they go on elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import zmq
from prometheus_client import CollectorRegistry

from poolgrid.process.clock import Clock
from poolgrid.process.tasks import owned
from poolgrid.wire.errors import WireError
from poolgrid.wire.events import (
    AnyEvent,
    BlocksStored,
    LoadReported,
    PrefillCompleted,
    RequestFinished,
    RequestProgressed,
    RequestStarted,
)
from poolgrid.wire.identifiers import STAGE_WORD, Role, Stage, Tier
from poolgrid.wire.limits import TEXT_CHARS_MAX
from poolgrid.wire.requests import FinishReason, Generate, RefusalKind, TokenDelta
from poolgrid.workers.core.refusal import BrokenError, BusyError, RefusedError, UnableError
from poolgrid.workers.engines.lifecycle.engine_thread import EngineThread
from poolgrid.workers.engines.lifecycle.health import EngineBrokenError, EngineHealth
from poolgrid.workers.engines.lifecycle.loading import end_engine, start_engine
from poolgrid.workers.engines.lifecycle.rank_load import RankLoad
from poolgrid.workers.engines.protocol import EngineReport, RankReport
from poolgrid.workers.engines.trtllm.arguments.engine_arguments import EngineArguments
from poolgrid.workers.engines.trtllm.calls import TrtllmCalls
from poolgrid.workers.engines.trtllm.collector import EngineCollector
from poolgrid.workers.engines.trtllm.core.disaggregated_params import with_tensors
from poolgrid.workers.engines.trtllm.core.loras import adapters
from poolgrid.workers.engines.trtllm.core.model_abilities import abilities_of, model_problem
from poolgrid.workers.engines.trtllm.core.model_facts import ModelFacts
from poolgrid.workers.engines.trtllm.core.outputs import FINISH_REASONS, GOES_ON
from poolgrid.workers.engines.trtllm.core.statistics import EngineStatistics, load_of
from poolgrid.workers.engines.trtllm.embedding_offers import EmbeddingOffers
from poolgrid.workers.engines.trtllm.feed import TrtllmFeed, WireCacheEvent
from poolgrid.workers.engines.trtllm.generations import End, Generations, Growth, MediaLoader
from poolgrid.workers.engines.trtllm.library import TrtllmLibrary, is_alive, load_library
from poolgrid.workers.engines.trtllm.logits import ProcessorsOfRequests
from poolgrid.workers.engines.trtllm.media import load_media
from poolgrid.workers.engines.trtllm.metrics import TrtllmMetrics
from poolgrid.workers.engines.trtllm.model_files import read_model_facts
from poolgrid.workers.engines.trtllm.shared_tensors import HostTensor, SharedTensors
from poolgrid.workers.engines.trtllm.stream import EngineStream
from poolgrid.workers.logits.failure_channel import FailureChannel
from poolgrid.workers.logits.registry import LogitsProcessorRegistry
from poolgrid.workers.metrics import WorkerMetrics
from poolgrid.workers.ranks.watch import RankWatch
from poolgrid.workers.tensor_transfer.port import Tensor, TensorTransfer

log = logging.getLogger(__name__)

PREFILLED = FinishReason.PREFILLED
ENCODED = FinishReason.ENCODED
CANCELLED = FinishReason.CANCELLED
EXPIRED = FinishReason.EXPIRED
ERROR = FinishReason.ERROR
BROKEN = RefusalKind.BROKEN

WARM_UP_TIMEOUT_S = 600.0
"""How long the first token of a new engine may take; kernels may be tuned and compiled for it."""

STATISTICS_TIMEOUT_S = 5.0
"""How long the first statistics are waited for, which say how many blocks there are."""

END_TIMEOUT_S = 2.0
"""How long the engine's thread may take to let go of its requests at the end."""

CANCEL_TIMEOUT_MS = 1000.0
"""How long the engine may take to confirm a cancellation: many steps."""

ENGINE_FAULT = re.compile(r"out of memory|\b(?:cuda|cublas|nccl|mpi|nvshmem|ucx|nixl)\b|illegal memory|bad_alloc", re.I)
"""Words of errors that befall an engine, whichever request they are told to."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Times and bounds of the adapter; all of them are settings of the worker."""

    kept_transfers_max: int = 256
    kv_transfer_timeout_ms: float = 60_000.0
    max_requests: int = 8192
    health_interval_ms: float = 30_000.0
    health_timeout_ms: float = 30_000.0
    progress_timeout_ms: float = 60_000.0
    answer_timeout_ms: float = 5_000.0


@dataclass(slots=True, eq=False)
class _Active:
    """A request that the engine has, or is about to get."""

    serial: int
    request: Generate
    rank: int
    prompt_tokens: int
    context_only: bool
    taken: int = 0
    """Tokens that were reported."""
    began: bool = False
    cancelled_ms: float | None = None
    """Since when it is no longer wanted."""
    deadline_ms: float = 0.0
    """When its kept KV is given up."""

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def transfers(self) -> bool:
        return self.request.stage is Stage.DECODE


@dataclass(slots=True)
class _Pending:
    """What became visible since the last report."""

    deltas: list[TokenDelta] = field(default_factory=list)
    events: dict[int, list[AnyEvent]] = field(default_factory=dict)
    released: list[str] = field(default_factory=list)
    expired: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    steps: int = 0
    duration_ms: float = 0.0

    def rank(self, rank: int) -> list[AnyEvent]:
        """Return the events of a rank, which is then part of the report."""
        events = self.events.get(rank)
        if events is None:
            events = self.events[rank] = []
        return events

    def __bool__(self) -> bool:
        return bool(self.deltas or self.events or self.released)


class TrtllmEngine:
    """``poolgrid.workers.engines.protocol.Engine`` over ``tensorrt_llm.LLM`` or ``MultimodalEncoder``; see
    ``load_engine``."""

    def __init__(
        self,
        thread: EngineThread,
        library: TrtllmLibrary,
        llm: Any,
        role: Role,
        arguments: EngineArguments,
        facts: ModelFacts,
        limits: EngineLimits,
        clock: Clock,
        metrics: WorkerMetrics,
        trtllm_metrics: TrtllmMetrics,
        collector: EngineCollector,
        processors: ProcessorsOfRequests,
        context: zmq.Context[Any],
        load_media: MediaLoader | None = None,
        tensors: TensorTransfer | None = None,
    ) -> None:
        self._thread = thread
        self._library = library
        self._collector = collector
        self._llm = llm
        self._role = role
        self._limits = limits
        self._clock = clock
        self._metrics = metrics
        self._takes_media = load_media is not None
        self._calls = TrtllmCalls(library, llm, arguments, facts, processors)
        self._generations = Generations(
            thread,
            library,
            llm,
            self._calls,
            self._on_growths,
            load_media,
            trtllm_metrics.note_miscounted,
            None if tensors is None else SharedTensors(),
        )
        self._offers: EmbeddingOffers | None = None
        if tensors is not None and role is Role.ENCODE:
            self._offers = EmbeddingOffers(tensors, self._on_embeddings_gone)
        self._transfers_kv = bool((arguments.values.get("cache_transceiver_config") or {}).get("backend"))
        self._dp_size = arguments.attention_dp_size
        self._stream: EngineStream | None = None
        if arguments.stream is not None:
            self._stream = EngineStream(
                arguments.stream,
                self._dp_size,
                arguments.block_size,
                context,
                clock,
                self._calls.roots,
                self._on_stream,
            )
        self._trtllm_metrics = trtllm_metrics
        self._feed = TrtllmFeed(
            llm,
            self._dp_size,
            arguments.block_size,
            clock,
            trtllm_metrics,
            root_seed=self._calls.roots,
            name_media=self._calls.media if self._takes_media else None,
            stream=self._stream,
            own_metrics=collector,
        )
        self._feeding: asyncio.Task[None] | None = None
        self._reads = arguments.publishes_kv_events or bool(arguments.values.get("enable_iter_perf_stats"))
        self._loads = [RankLoad(arguments.block_size) for _ in range(self._dp_size)]
        self._health = EngineHealth(
            thread,
            lambda: is_alive(llm),
            None if role is Role.ENCODE else self._calls.generate_one,
            self._feed.silent_ms,
            self._dp_size,
            interval_ms=limits.health_interval_ms,
            timeout_ms=limits.health_timeout_ms,
            progress_timeout_ms=limits.progress_timeout_ms,
            answer_timeout_ms=limits.answer_timeout_ms,
            clock=clock,
            metrics=metrics,
        )
        self._health.observe(self._on_health)
        self._observer: Callable[[], None] | None = None
        self._active: dict[str, _Active] = {}
        self._by_serial: dict[int, _Active] = {}
        self._cancelling: dict[_Active, None] = {}
        """In order of their cancellations; those whose KV is on its way are not among them."""
        self._serial = 0
        self._kept: dict[str, _Active] = {}
        """In order of their deadlines: all wait equally long."""
        self._contexts = 0
        """Prefill legs that run; those that are kept not included."""
        self._pending = _Pending()
        self._flushing: asyncio.Handle | None = None
        self._deliver: Callable[[EngineReport], None] | None = None
        self._loop = asyncio.get_running_loop()
        self._iterations: dict[int, int] = {}
        self._has_statistics = asyncio.Event()
        self._closed = False
        self._ranks: RankWatch | None = None

    # -- what the worker sees ------------------------------------------------------------------------------------------

    @property
    def dp_size(self) -> int:
        """How many attention-DP ranks there are; 1 without attention data parallelism."""
        return self._dp_size

    @property
    def names_media(self) -> bool:
        """Whether the model's files say what stands for a picture among its tokens."""
        return self._takes_media and self._calls.media is not None

    @property
    def takes_retention(self) -> bool:
        return self._calls.takes_retention

    @property
    def unhealthy_reason(self) -> str:
        """Why the engine does not do its work; empty = it does."""
        return self._health.unhealthy_reason

    @property
    def is_silent(self) -> bool:
        """Whether nothing can be expected of the engine; its requests have been taken away then."""
        return self._health.is_silent

    def observe_health(self, changed: Callable[[], None]) -> None:
        """Call ``changed`` from now on when ``unhealthy_reason`` begins or ends, or ``is_silent`` changes."""
        self._observer = changed

    def describe(self) -> dict[str, object]:
        """Return how reading its events goes, which ranks' indexes lack something after a loss, what is on offer."""
        described: dict[str, object] = {"feed": self._feed.describe()} if self._reads else {}
        if self._ranks is not None:
            described["ranks"] = self._ranks.describe()
        if self._offers is not None:
            described["kept_embeddings"] = len(self._offers)
        return described

    def follow_ranks(self, ranks: RankWatch) -> Callable[[str], None]:
        """Show these ranks from now on; return what breaks the engine, with the reason, when one is lost."""
        self._ranks = ranks
        return self._health.lose

    @property
    def loras(self) -> tuple[str, ...]:
        return tuple(self._calls.adapters)

    @property
    def total_blocks(self) -> int:
        """Device blocks of a rank; 0 = the engine has not said."""
        return self._loads[0].total_blocks

    def load(self, dp_rank: int) -> LoadReported:
        """Return a rank's statistics now: the engine's where there are any, else the worker's own books."""
        return self._loads[dp_rank].report(self._feed.cached_blocks(dp_rank))

    def resident_blocks(self, dp_rank: int) -> list[BlocksStored]:
        """Return what a rank really holds; raises ``NotImplementedError``: TensorRT-LLM cannot tell."""
        if self._health.is_silent:
            raise NotImplementedError("the engine does not answer")
        return self._feed.resident(dp_rank)

    def restate(self, dp_rank: int) -> list[BlocksStored]:
        """Return everything in a rank's cache, as reports have told it."""
        return self._feed.restate(dp_rank)

    async def run(self, deliver: Callable[[EngineReport], None]) -> None:
        """Hand over reports until cancelled; raises ``EngineBrokenError`` when the engine is."""
        self._deliver = deliver
        self._flush()
        watching = owned(self._watch(), "engine health")
        try:
            await asyncio.wait({self._health.broken, watching}, return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                watching.result()
            self._health.broken.result()
        finally:
            watching.cancel()

    # -- requests in ---------------------------------------------------------------------------------------------------

    def submit(self, request: Generate) -> None:
        """Give a request to the engine, or raise ``RefusedError`` and change nothing.

        What the engine itself refuses is told with the request's only delta.
        """
        self.submit_embedded(request, ())

    def submit_embedded(self, request: Generate, tensors: Sequence[Tensor]) -> None:
        """Do the same with a request whose embeddings were fetched, as its ``disaggregated_params`` say."""
        active = self._admit(request)
        plan = self._calls.plan(request)
        self._enter(active)
        self._thread.post(self._generations.begin, active.serial, request, plan, active.context_only, tensors)
        self._feed.wake()

    def cancel(self, request_id: str) -> None:
        """Stop a request as soon as the engine allows it; kept KV is given up."""
        kept = self._kept.get(request_id)
        if kept is not None:
            # The usual way for a leg to end: its router says so when the decode worker has the KV.
            self._release(kept, PREFILLED)
            return
        if self._offers is not None and request_id in self._offers:
            self._offers.withdraw(request_id)
            self._let_go(request_id, CANCELLED)
            return
        active = self._active.get(request_id)
        if active is None or active.cancelled_ms is not None:
            return
        active.cancelled_ms = self._clock.monotonic_ms()
        if active.began or not active.transfers:
            self._cancelling[active] = None
        self._thread.post(self._generations.abort, active.serial)

    def _admit(self, request: Generate) -> _Active:
        """Refuse what the adapter itself cannot take."""
        stage = request.stage
        sampling = request.sampling
        if self._health.broken.done() or self._closed:
            raise BrokenError("the engine has shut down")
        if (
            request.request_id in self._active
            or request.request_id in self._kept
            or (self._offers is not None and request.request_id in self._offers)
        ):
            raise RefusedError(f"request id {request.request_id!r} is already active on this worker")
        if stage in (Stage.PREFILL, Stage.DECODE) and not self._transfers_kv:
            raise BrokenError(
                f"the stage {STAGE_WORD[stage]} needs cache_transceiver_config, which this engine was started without"
            )
        if (stage is Stage.ENCODE) != (self._role is Role.ENCODE):
            raise BrokenError(
                f"this worker has the role {self._role.name.lower()}, it does not take the stage {STAGE_WORD[stage]}"
            )
        prompt_tokens = len(request.token_ids) // 4
        if stage is not Stage.ENCODE and prompt_tokens < 1:
            raise RefusedError("the prompt has 0 tokens, allowed are integers from 1")
        if stage is not Stage.ENCODE and sampling.max_tokens < 1:
            raise RefusedError("max_tokens is 0, allowed are integers from 1")
        if stage is Stage.DECODE and request.disaggregated_params is None:
            raise RefusedError("a decode leg comes without disaggregated_params: nothing says where its KV is")
        if stage is Stage.DECODE and request.multimodal is not None:
            raise RefusedError("a decode leg comes with media, which its KV holds already")
        if stage is Stage.ENCODE and request.multimodal is None:
            raise RefusedError("an encode leg comes without media")
        if request.multimodal is not None and not self._takes_media:
            raise UnableError("the request has media, this worker was started with --modality text")
        if len(self._active) >= self._limits.max_requests:
            raise BusyError(
                f"{len(self._active)} requests are in the engine, allowed are at most {self._limits.max_requests} "
                "(max_requests)"
            )
        context_only = stage is Stage.PREFILL and sampling.max_tokens > 1
        if context_only:
            # Those that run now will be kept too.
            kept = len(self._kept) + self._contexts
            if kept >= self._limits.kept_transfers_max:
                raise BusyError(
                    f"{kept} prefill legs run or are kept for decode workers, allowed are at most "
                    f"{self._limits.kept_transfers_max} (kept_transfers_max)"
                )
        self._serial += 1
        return _Active(self._serial, request, request.routing.dp_rank, prompt_tokens, context_only)

    def _enter(self, active: _Active) -> None:
        request_id = active.request_id
        self._active[request_id] = active
        self._by_serial[active.serial] = active
        self._contexts += active.context_only
        self._loads[active.rank].entered(request_id, active.prompt_tokens, computes=not active.transfers)
        self._health.entered(active.rank, request_id, active.transfers)

    # -- from the engine's thread --------------------------------------------------------------------------------------

    def _on_growths(self) -> None:
        """Take what the engine's thread has brought."""
        growths = self._generations.take()
        failed: Counter[str] = Counter()
        for growth in growths:
            if growth.end is not None and growth.end.error is not None:
                failed[str(growth.end.error)] += 1
        for growth in growths:
            active = self._by_serial.get(growth.serial)
            if active is None:
                continue  # it was taken away, or its cancellation was not waited for
            try:
                self._collect(active, growth, failed)
            except Exception as error:
                self._break(active, error)
            if self._health.broken.done():
                return  # everybody is told by the worker
        self._flush_soon()

    def _flush_soon(self) -> None:
        if self._flushing is None and self._deliver is not None:
            # In the next turn: whatever else this turn brings is in the same report.
            self._flushing = self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        if self._flushing is not None:
            self._flushing.cancel()
            self._flushing = None
        pending = self._pending
        if self._deliver is None or not pending:
            return
        self._pending = _Pending()
        try:
            ranks = {rank: RankReport(events, self.load(rank)) for rank, events in pending.events.items()}
            self._deliver(
                EngineReport(
                    deltas=pending.deltas,
                    ranks=ranks,
                    steps=pending.steps,
                    duration_ms=pending.duration_ms,
                    prefill_tokens=pending.prefill_tokens,
                    decode_tokens=pending.decode_tokens,
                    released=pending.released,
                    expired=pending.expired,
                    kept_transfers=len(self._kept),
                    keeps_encoded=self._offers is not None,
                )
            )
        except Exception as error:
            # Nobody has what is lost with it, and whoever called this, a loop or a socket, goes on without.
            log.error("a report of the engine is lost: this is a bug", exc_info=error)
            self._health.lose(f"a report of the engine is lost: {error!r}")

    def _break(self, active: _Active, error: Exception) -> None:
        """End one request as broken, for an exception that is its own."""
        log.error("request %s failed: this is a bug", active.request_id, exc_info=error)
        self._metrics.request_faults.inc()
        if self._by_serial.get(active.serial) is active:
            self._thread.post(self._generations.abort, active.serial)
            delta = TokenDelta(active.request_id, active.taken, b"")
            self._finish(active, delta, ERROR, error=f"reading the engine's output failed: {error!r}", refusal=BROKEN)

    def _collect(self, active: _Active, growth: Growth, failed: Counter[str]) -> None:
        """Take what is new of one request."""
        left = active.request.sampling.max_tokens - active.taken
        if len(growth.tokens) > 4 * left and active.request.stage is not Stage.ENCODE:
            growth = self._cut(active, growth, left)
        delta = TokenDelta(
            active.request_id,
            active.taken,
            growth.tokens,
            cached_tokens=growth.cached_tokens,
            logprobs=growth.logprobs,
            prompt_logprobs=growth.prompt_logprobs,
        )
        if growth.tokens:
            active.taken += len(growth.tokens) // 4
            self._book(active, growth.cached_tokens or 0, len(growth.tokens) // 4)
        end = growth.end
        if end is None:
            self._pending.deltas.append(delta)
            return
        if end.error is not None:
            self._fail(active, delta, end, failed[str(end.error)] > 1)
            return
        reason = end.reason
        if active.cancelled_ms is not None:
            self._finish(active, delta, CANCELLED)
        elif active.request.stage is Stage.ENCODE:
            self._finish_encoded(active, delta, end)
        elif active.context_only and reason in GOES_ON:
            self._finish(active, delta, PREFILLED, params=end.params, metrics=end.metrics)
        elif reason == CANCELLED:
            self._finish(active, delta, ERROR, error="the engine cancelled the request", refusal=BROKEN)
        elif reason in FINISH_REASONS:
            self._finish(active, delta, FINISH_REASONS[reason], metrics=end.metrics)
        else:
            self._finish(active, delta, ERROR, error=f"the engine ended the request with {reason!r}", refusal=BROKEN)

    def _cut(self, active: _Active, growth: Growth, left: int) -> Growth:
        """Return what was asked for of an output that is longer, as the request's end."""
        self._metrics.overlong_answers.inc()
        log.warning(
            "request %s: the engine made more than max_tokens (%d): its output is cut there",
            active.request_id,
            active.request.sampling.max_tokens,
        )
        end = growth.end
        if end is None:
            self._thread.post(self._generations.abort, active.serial)
            end = End("length")
        elif end.error is None:
            end = replace(end, reason="length")
        logprobs = None if growth.logprobs is None else growth.logprobs[:left]
        return replace(growth, tokens=growth.tokens[: 4 * left], logprobs=logprobs, end=end)

    def _finish_encoded(self, active: _Active, delta: TokenDelta, end: End) -> None:
        """End an encode leg; what it left is offered, where it travels as bytes."""
        params = end.params
        if self._offers is not None and end.embeddings:
            assert params is not None, "an encode leg has some"
            try:
                params = self._offer(self._offers, active.request_id, params, end.embeddings)
            except RefusedError as refusal:
                self._finish(active, delta, ERROR, error=refusal.reason, refusal=refusal.kind)
                return
        self._finish(active, delta, ENCODED, params=params, metrics=end.metrics)

    @staticmethod
    def _offer(offers: EmbeddingOffers, request_id: str, params: bytes, tensors: Sequence[HostTensor]) -> bytes:
        carried = offers.offer(request_id, tensors)
        try:
            return with_tensors(params, carried)
        except WireError as error:
            offers.withdraw(request_id)
            raise UnableError(f"what the next leg needs cannot travel: {error}") from None

    def _on_embeddings_gone(self, request_id: str, expired: bool) -> None:
        self._let_go(request_id, EXPIRED if expired else ENCODED)

    def _let_go(self, request_id: str, reason: FinishReason) -> None:
        """Take an encode leg off the books whose embeddings were kept."""
        self._loads[0].left(request_id)
        self._pending.released.append(request_id)
        self._pending.rank(0).append(RequestFinished(request_id, reason))
        self._flush_soon()

    def _book(self, active: _Active, cached_tokens: int, fresh: int) -> None:
        """Note that a request has grown, in the books and for the event stream."""
        request_id = active.request_id
        self._health.moved(active.rank, request_id)
        began, blocks = self._loads[active.rank].grew(request_id, active.prompt_tokens + active.taken)
        events = self._pending.rank(active.rank)
        if began:
            active.began = True
            if active.cancelled_ms is not None:
                self._cancelling[active] = None  # its KV is here now
            events.append(RequestStarted(request_id, active.prompt_tokens, cached_tokens, blocks or 0))
            events.append(PrefillCompleted(request_id))
            if not active.transfers:
                self._pending.prefill_tokens += active.prompt_tokens - cached_tokens
            fresh -= 1
        elif blocks is not None:
            events.append(RequestProgressed(request_id, blocks))
        self._pending.decode_tokens += fresh

    def _fail(self, active: _Active, delta: TokenDelta, end: End, shared: bool) -> None:
        """End a request whose result raised; ``shared``: others have the same error now."""
        error = end.error
        assert error is not None
        if self._health.seen(end.alive, error):
            return
        if isinstance(error, RefusedError):
            self._finish(active, delta, ERROR, error=error.reason, refusal=error.kind)
            return
        text = str(error)
        if end.at_call:
            # With embeddings of an encode worker it may be those that it refuses; the request has its pictures still.
            has_handles = active.request.multimodal is not None and active.request.disaggregated_params is not None
            refusal = RefusalKind.CANNOT_DO if has_handles else RefusalKind.INVALID
            text = f"TensorRT-LLM refuses the request: {text}"
        elif not isinstance(error, self._library.request_error):
            log.error("request %s failed: %r", active.request_id, error, exc_info=error)
            text, refusal = repr(error), BROKEN
        elif shared or active.began or active.transfers or ENGINE_FAULT.search(text):
            # A decode leg may fail by what happened on the way of its KV; computed anew it may succeed.
            refusal = BROKEN
        else:
            refusal = RefusalKind.CANNOT_DO
        self._finish(active, delta, ERROR, error=text, refusal=refusal)

    def _finish(
        self,
        active: _Active,
        delta: TokenDelta,
        reason: FinishReason,
        *,
        error: str | None = None,
        refusal: RefusalKind | None = None,
        params: bytes | None = None,
        metrics: dict[str, Any] | None = None,
    ) -> None:
        """Give out a request's last delta, and take it off the books, or keep it."""
        request_id = active.request_id
        now_ms = self._clock.monotonic_ms()
        del self._active[request_id]
        del self._by_serial[active.serial]
        self._cancelling.pop(active, None)
        self._contexts -= active.context_only
        if error is None and reason is not CANCELLED:
            self._health.ended(active.rank, request_id, now_ms)
            self._collector.observe_request(metrics or {}, reason)
        else:
            self._health.given_up(active.rank, request_id, now_ms)
        self._pending.deltas.append(
            msgspec.structs.replace(
                delta,
                finish_reason=reason,
                error=None if error is None else error[:TEXT_CHARS_MAX],
                refusal=refusal,
                disaggregated_params=params,
            )
        )
        if reason == PREFILLED:
            active.deadline_ms = now_ms + self._limits.kv_transfer_timeout_ms
            self._kept[request_id] = active
            self._loads[active.rank].keep(request_id)
            self._pending.rank(active.rank)
            return
        if reason == ENCODED and self._offers is not None and request_id in self._offers:
            self._loads[active.rank].keep(request_id)
            self._pending.rank(active.rank)
            return
        self._loads[active.rank].left(request_id)
        self._pending.rank(active.rank).append(RequestFinished(request_id, reason))

    def _release(self, active: _Active, reason: str) -> None:
        """Take a kept prefill leg off the books; the engine lets go of its KV by itself."""
        request_id = active.request_id
        del self._kept[request_id]
        self._loads[active.rank].left(request_id)
        self._pending.released.append(request_id)
        self._pending.expired += reason == EXPIRED
        self._pending.rank(active.rank).append(RequestFinished(request_id, reason))
        self._flush_soon()

    # -- when it does not answer ---------------------------------------------------------------------------------------

    def _on_health(self) -> None:
        """Take the requests away from an engine that has become silent; tell the worker."""
        if self._health.is_silent:
            for active in list(self._active.values()):
                self._thread.post(self._generations.abort, active.serial)
                delta = TokenDelta(active.request_id, active.taken, b"")
                if active.cancelled_ms is not None:
                    self._finish(active, delta, CANCELLED)
                else:
                    error = f"the engine is silent: {self._health.unhealthy_reason}"
                    self._finish(active, delta, ERROR, error=error, refusal=BROKEN)
            # At once: what the worker says next is that it leaves.
            self._flush()
        if self._observer is not None:
            self._observer()

    def _end_cancelled(self, now_ms: float) -> None:
        """End what was cancelled and of which the engine has said nothing for too long."""
        for active in list(self._cancelling):
            assert active.cancelled_ms is not None, "it is being cancelled"
            if now_ms - active.cancelled_ms < CANCEL_TIMEOUT_MS:
                break
            self._finish(active, TokenDelta(active.request_id, active.taken, b""), CANCELLED)
            self._flush_soon()

    # -- the engine's own reports --------------------------------------------------------------------------------------

    def _on_cache(self, rank: int, events: Sequence[WireCacheEvent]) -> None:
        self._pending.rank(rank).extend(events)
        # At once: a restatement must not know more than the reports have told.
        self._flush()

    def _on_stream(self, rank: int, events: list[AnyEvent]) -> None:
        stream = self._stream
        assert stream is not None, "it tells"
        self._trtllm_metrics.observe_stream(
            rank, stream.blocks_on(rank, Tier.DEVICE), stream.blocks_on(rank, Tier.HOST)
        )
        self._pending.rank(rank).extend(events)
        self._flush()

    def _on_load(self, rank: int, statistics: EngineStatistics) -> None:
        self._loads[rank].reported(load_of(statistics, 0))
        total_blocks = self._loads[rank].total_blocks
        for load in self._loads:
            load.assume_total_blocks(total_blocks)
        before = self._iterations.get(rank, 0)
        self._iterations[rank] = statistics.iteration
        if rank == 0:
            self._pending.steps += max(0, statistics.iteration - before)
            self._pending.duration_ms = statistics.iteration_latency_ms
        self._pending.rank(rank)
        self._has_statistics.set()
        self._flush_soon()

    # -- its life ------------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Look after the engine's health and after kept KV."""
        while True:
            await asyncio.sleep(self._health.check_interval_s)
            if self._health.broken.done():
                return
            now_ms = self._clock.monotonic_ms()
            for active in list(self._kept.values()):
                if active.deadline_ms > now_ms:
                    break
                log.warning(
                    "nobody said within %.0f ms that the KV of prefill leg %s was fetched: giving it up",
                    self._limits.kv_transfer_timeout_ms,
                    active.request_id,
                )
                self._release(active, EXPIRED)
            self._end_cancelled(now_ms)
            self._health.check(now_ms, busy=bool(self._active))

    async def begin(self) -> None:
        """Read what the engine publishes, from before its first request; then generate a first token on every rank."""
        if self._role is Role.ENCODE:
            return
        if self._reads:
            self._feeding = owned(self._feed.run(self._on_cache, self._on_load), "engine feed")
            self._feeding.add_done_callback(self._on_feed_end)
        if self._stream is not None:
            await self._stream.open()
        try:
            if self._reads:
                async with asyncio.timeout(WARM_UP_TIMEOUT_S):
                    await self._feed.has_begun()
            await self._health.generate_one(WARM_UP_TIMEOUT_S)
        except TimeoutError:
            raise EngineBrokenError(
                f"starting the engine: its first token did not come within {WARM_UP_TIMEOUT_S:.0f} s"
            ) from None
        self._health.proved(self._clock.monotonic_ms())
        self._feed.wake()
        if self._reads:
            try:
                async with asyncio.timeout(STATISTICS_TIMEOUT_S):
                    await self._has_statistics.wait()
            except TimeoutError:
                log.warning(
                    "the engine has no statistics: its number of blocks is not known, loads are the worker's own"
                )

    def _on_feed_end(self, feeding: asyncio.Task[None]) -> None:
        if not feeding.cancelled() and not self._health.broken.done():
            # It tries again by itself; that it ends is a fault of ours, and routers would trust a stale index.
            error = feeding.exception()
            self._health.broken.set_exception(EngineBrokenError(f"reading the engine's events ended: {error!r}"))

    async def close(self) -> None:
        """End every task; the engine itself is shut down by who made it."""
        self._closed = True
        if self._stream is not None:
            self._stream.close()
        if self._feeding is not None:
            self._feeding.cancel()
            await asyncio.wait({self._feeding})
        if self._flushing is not None:
            self._flushing.cancel()
        await self._health.close()
        try:
            async with asyncio.timeout(END_TIMEOUT_S):
                await self._thread.run(self._generations.close, "end of the requests")
        except TimeoutError:
            log.warning("the engine does not answer: its requests are left behind with it")


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """A running engine and what is known of it."""

    engine: TrtllmEngine
    version: str
    facts: ModelFacts
    names_media: bool = False
    """Whether its events say which blocks depend on a picture, by a name that routers know."""
    takes_retention: bool = False
    """Whether it can be told how long the blocks of a request stay."""


@asynccontextmanager
async def load_engine(
    arguments: EngineArguments,
    role: Role,
    limits: EngineLimits,
    clock: Clock,
    metrics: WorkerMetrics,
    registry: CollectorRegistry,
    context: zmq.Context[Any],
    served_model_name: str,
    logits_processors: Sequence[str] = (),
    takes_media: bool = False,
    encode_endpoint: str = "",
    tensors: TensorTransfer | None = None,
    warming: Callable[[], None] = lambda: None,
) -> AsyncIterator[LoadedEngine]:
    """Load a model and keep its engine until the end of the block; whatever ends it, the engine is shut down.

    ``tensors``: embeddings travel by it, and not as handles. ``warming`` is called between loading and the first token.

    Takes minutes; cancelling it leaves what is being made to be shut down when it exists. Raises
    ``LibraryMissingError``, ``EngineBrokenError``, and what TensorRT-LLM raises.
    """
    _check_adapters(arguments)
    named = LogitsProcessorRegistry.from_settings(logits_processors)
    started_ms = clock.monotonic_ms()
    if takes_media:
        # Before it is loaded, where its files are here already; what is brought in from elsewhere is known after.
        _check_model(await asyncio.to_thread(read_model_facts, str(arguments.values["model"])), role, takes_media)
    thread = EngineThread()
    try:
        library = await thread.call(load_library)
        log.info("starting TensorRT-LLM %s with %s", library.version, arguments.values.get("model"))
        try:
            llm = await start_engine(
                thread, lambda: library.make_engine(arguments.values, role is Role.ENCODE), _shut_down
            )
        except Exception as error:
            raise EngineBrokenError(f"starting TensorRT-LLM {library.version} failed: {error!r}") from error
        collector: EngineCollector | None = None
        failures = FailureChannel(lambda name: metrics.logits_processor_failures.labels(name).inc())
        try:
            mode = "prefill_and_decode" if role is Role.AGGREGATED else role.name.lower()
            processors = ProcessorsOfRequests(named, failures.reporter, mode, arguments.values)
            trtllm_metrics = TrtllmMetrics(registry)
            collector = EngineCollector(registry, served_model_name, trtllm_metrics)
            facts = await asyncio.to_thread(read_model_facts, str(arguments.values["model"]))
            _check_model(facts, role, takes_media)
            abilities = abilities_of(facts.architecture)
            engine = TrtllmEngine(
                thread,
                library,
                llm,
                role,
                arguments,
                facts,
                limits,
                clock,
                metrics,
                trtllm_metrics,
                collector,
                processors,
                context,
                partial(load_media, takes_embeddings=abilities.takes_embeddings, encoded_by=encode_endpoint)
                if takes_media
                else None,
                tensors,
            )
            try:
                warming()
                await engine.begin()
                load_s = (clock.monotonic_ms() - started_ms) / 1e3
                metrics.engine_load_seconds.set(load_s)
                metrics.engine_healthy.set(1)
                log.info("the engine is ready after %.1f s", load_s)
                names_media = engine.names_media and (library.names_media or bool(encode_endpoint))
                yield LoadedEngine(engine, library.version, facts, names_media, engine.takes_retention)
            finally:
                await engine.close()
        finally:
            failures.close()
            if collector is not None:
                collector.close()
            await end_engine(thread, llm, _shut_down)
    finally:
        thread.end()


def _check_model(facts: ModelFacts, role: Role, takes_media: bool) -> None:
    problem = model_problem(facts.architecture, role is Role.ENCODE, takes_media)
    if problem:
        raise ValueError(f"starting a worker of the role {role.name.lower()}: {problem}")


def _check_adapters(arguments: EngineArguments) -> None:
    for adapter in adapters(arguments.values).values():
        # LoRARequest would refuse it, request by request.
        if not Path(adapter.path).exists():
            raise ValueError(f"reading lora_config.lora_dir: {adapter.path} does not exist; no engine was started")


def _shut_down(llm: Any) -> None:
    llm.shutdown()
