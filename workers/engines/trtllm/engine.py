"""TensorRT-LLM as a worker's engine.

Rules:

1. Everything here happens on the worker's event loop, and nothing of it waits. An engine steps in other threads and
   processes; what becomes visible during one turn of the loop is one report. A request has one task, which does
   nothing but notice that its result has grown.
2. A result is one object that grows; ``OutputCursor`` remembers what was taken.
3. A prefill leg is a ``context_only`` request. Its KV stays in the engine until a decode worker's engine fetched it,
   which nobody tells: the leg is *kept* until its router says that it is over, or for ``kv_transfer_timeout_ms``.
   At most ``kept_transfers_max`` are kept. A leg of one token is an ordinary request: no one would fetch its KV.
4. A decode leg that is cancelled before its first output is aborted after it: an abort during the transfer of its KV
   leaks the blocks.
5. What a request causes is its own error. An engine that has shut down, or says that it is not healthy, ends ``run``:
   the worker then tells everybody and ends. Anything else is logged and costs at most the request.
6. Whether the engine does its work at all is ``trtllm_health``'s to know.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from prometheus_client import CollectorRegistry

from poolgrid.runtime.clock import Clock
from poolgrid.runtime.tasks import detached, owned
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
from poolgrid.wire.hashing import pack_tokens, unpack_tokens
from poolgrid.wire.identifiers import Role, Stage
from poolgrid.wire.limits import TEXT_CHARS_MAX
from poolgrid.wire.requests import FinishReason, Generate, RefusalKind, TokenDelta, TokenLogprobs
from poolgrid.workers.core.refusal import BrokenError, BusyError, RefusedError, UnableError, UnsupportedError
from poolgrid.workers.engines.lifecycle.loading import end_engine, start_engine
from poolgrid.workers.engines.lifecycle.rank_load import RankLoad
from poolgrid.workers.engines.protocol import EngineReport, RankReport
from poolgrid.workers.engines.trtllm.arguments.engine_arguments import EngineArguments
from poolgrid.workers.engines.trtllm.calls import TrtllmCalls
from poolgrid.workers.engines.trtllm.collector import EngineCollector
from poolgrid.workers.engines.trtllm.core import disaggregated_params as codec
from poolgrid.workers.engines.trtllm.core.loras import adapters
from poolgrid.workers.engines.trtllm.core.model_facts import ModelFacts
from poolgrid.workers.engines.trtllm.core.outputs import FINISH_REASONS, GOES_ON, OutputCursor, prompt_logprobs
from poolgrid.workers.engines.trtllm.core.statistics import EngineStatistics, load_of
from poolgrid.workers.engines.trtllm.feed import TrtllmFeed, WireCacheEvent
from poolgrid.workers.engines.trtllm.health import EngineBrokenError, EngineHealth
from poolgrid.workers.engines.trtllm.library import REQUEST_ERRORS, TrtllmLibrary, load_library
from poolgrid.workers.engines.trtllm.logits import ProcessorsOfRequests
from poolgrid.workers.engines.trtllm.media import load_media
from poolgrid.workers.engines.trtllm.metrics import TrtllmMetrics
from poolgrid.workers.engines.trtllm.model_files import read_model_facts
from poolgrid.workers.logits.failure_channel import FailureChannel
from poolgrid.workers.logits.registry import LogitsProcessorRegistry
from poolgrid.workers.metrics import WorkerMetrics

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


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Times and bounds of the adapter; all of them are settings of the worker."""

    kept_transfers_max: int = 256
    kv_transfer_timeout_ms: float = 60_000.0
    max_requests: int = 8192
    health_interval_ms: float = 30_000.0
    health_timeout_ms: float = 30_000.0
    progress_timeout_ms: float = 60_000.0


class MediaLoader(Protocol):
    """Makes an engine's inputs of a request with media; may take long, and runs in a thread."""

    def __call__(self, request: Generate, has_handles: bool) -> Any:
        """Return the inputs of ``generate_async``; raises ``RefusedError``."""
        ...


@dataclass(slots=True, eq=False)
class _Active:
    """A request that the engine has, or is about to get."""

    request: Generate
    rank: int
    prompt_tokens: int
    context_only: bool
    cursor: OutputCursor
    result: Any = None
    task: asyncio.Task[None] | None = None
    began: bool = False
    ended: bool = False
    error: BaseException | None = None
    cancelling: bool = False
    aborted: bool = False
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
        load_media: MediaLoader | None = None,
    ) -> None:
        self._library = library
        self._collector = collector
        self._llm = llm
        self._role = role
        self._limits = limits
        self._clock = clock
        self._metrics = metrics
        self._load_media = load_media
        self._calls = TrtllmCalls(library, llm, arguments, facts, processors)
        self._transfers_kv = bool((arguments.values.get("cache_transceiver_config") or {}).get("backend"))
        self._dp_size = arguments.attention_dp_size
        self._feed = TrtllmFeed(
            llm,
            self._dp_size,
            arguments.block_size,
            clock,
            trtllm_metrics,
            root_seed=self._calls.roots,
            own_metrics=collector,
        )
        self._feeding: asyncio.Task[None] | None = None
        self._reads = arguments.publishes_kv_events or bool(arguments.values.get("enable_iter_perf_stats"))
        self._loads = [RankLoad(arguments.block_size) for _ in range(self._dp_size)]
        self._health = EngineHealth(
            llm,
            self._calls,
            self._feed.wake,
            self._dp_size,
            role is not Role.ENCODE,
            interval_ms=limits.health_interval_ms,
            timeout_ms=limits.health_timeout_ms,
            progress_timeout_ms=limits.progress_timeout_ms,
            clock=clock,
            metrics=metrics,
        )
        self._active: dict[str, _Active] = {}
        self._kept: dict[str, _Active] = {}
        """In order of their deadlines: all wait equally long."""
        self._contexts = 0
        """Prefill legs that run; those that are kept not included."""
        self._touched: dict[_Active, None] = {}
        self._pending = _Pending()
        self._flushing: asyncio.Handle | None = None
        self._deliver: Callable[[EngineReport], None] | None = None
        self._loop = asyncio.get_running_loop()
        self._iterations: dict[int, int] = {}
        self._has_statistics = asyncio.Event()
        self._closed = False

    # -- what the worker sees ------------------------------------------------------------------------------------------

    @property
    def dp_size(self) -> int:
        """How many attention-DP ranks there are; 1 without attention data parallelism."""
        return self._dp_size

    @property
    def ailment(self) -> str:
        """Why the engine does not do its work; empty = it does."""
        return self._health.ailment

    def describe(self) -> dict[str, object]:
        """Return how reading its events goes, and which ranks' indexes lack something after a loss."""
        return {"feed": self._feed.describe()} if self._reads else {}

    @property
    def loras(self) -> tuple[str, ...]:
        """Names of the adapters."""
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
        """Give a request to the engine, or raise ``RefusedError`` and change nothing."""
        active = self._admit(request)
        if request.multimodal is not None:
            self._enter(active)
            active.task = detached(self._prepare(active), f"request {request.request_id}")
            return
        self._start(active, list(unpack_tokens(request.token_ids)))
        self._enter(active)
        active.task = detached(self._follow(active), f"request {request.request_id}")

    def cancel(self, request_id: str) -> None:
        """Stop a request as soon as the engine allows it; kept KV is given up."""
        kept = self._kept.get(request_id)
        if kept is not None:
            # The usual way for a leg to end: its router says so when the decode worker has the KV.
            self._release(kept, PREFILLED)
            return
        active = self._active.get(request_id)
        if active is None or active.cancelling:
            return
        active.cancelling = True
        if active.result is None:
            assert active.task is not None, "what is being prepared has a task"
            active.task.cancel()
            active.ended = True
            self._touch(active)
        elif active.began or not active.transfers:
            self._abort(active)

    def _admit(self, request: Generate) -> _Active:
        """Refuse what the adapter itself cannot take."""
        stage = request.stage
        sampling = request.sampling
        if self._health.broken.done() or self._closed:
            raise BrokenError("the engine has shut down")
        if request.request_id in self._active or request.request_id in self._kept:
            raise RefusedError(f"request id {request.request_id!r} is already active on this worker")
        if stage in (Stage.PREFILL, Stage.DECODE) and not self._transfers_kv:
            raise BrokenError(
                f"the stage {stage.name.lower()} needs cache_transceiver_config, which this engine was started without"
            )
        if (stage is Stage.ENCODE) != (self._role is Role.ENCODE):
            raise BrokenError(
                f"this worker has the role {self._role.name.lower()}, it does not take the stage {stage.name.lower()}"
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
        if request.multimodal is not None and self._load_media is None:
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
        return _Active(request, request.routing.dp_rank, prompt_tokens, context_only, OutputCursor(sampling.logprobs))

    def _enter(self, active: _Active) -> None:
        request_id = active.request_id
        self._active[request_id] = active
        self._contexts += active.context_only
        self._loads[active.rank].entered(request_id, active.prompt_tokens, computes=not active.transfers)
        self._health.entered(active.rank, request_id, active.transfers)

    def _start(self, active: _Active, inputs: Any) -> None:
        """Call the engine; raises ``RefusedError`` with what it says."""
        request_error = self._library.request_error
        try:
            try:
                active.result = self._calls.generate(active.request, inputs, active.context_only)
            except request_error:
                # A fault of the engine's own threads is raised at whichever request comes next; one that is the
                # request's own is raised again.
                active.result = self._calls.generate(active.request, inputs, active.context_only)
        except RefusedError:
            raise
        except (request_error, *REQUEST_ERRORS) as error:
            raise UnsupportedError(f"TensorRT-LLM refuses the request: {error}"[:TEXT_CHARS_MAX]) from None
        except Exception as error:
            self._health.is_broken(error)
            log.warning("request %s could not be given to the engine: %r", active.request_id, error)
            raise BrokenError(f"the engine took no request: {error!r}"[:TEXT_CHARS_MAX]) from error
        self._feed.wake()

    # -- tasks: one per request ----------------------------------------------------------------------------------------

    async def _prepare(self, active: _Active) -> None:
        """Load a request's media beside the loop, give it to the engine, follow it."""
        assert self._load_media is not None
        request = active.request
        try:
            has_handles = request.disaggregated_params is not None and request.stage is not Stage.ENCODE
            inputs = await asyncio.to_thread(self._load_media, request, has_handles)
            self._start(active, inputs)
        except Exception as error:
            active.error = error
        else:
            await self._follow(active)
            return
        active.ended = True
        self._touch(active)

    async def _follow(self, active: _Active) -> None:
        """Notice every growth of a result, and its end."""
        try:
            async for _ in active.result:
                self._touch(active)
        except Exception as error:
            active.error = error
        active.ended = True
        self._touch(active)

    def _touch(self, active: _Active) -> None:
        self._touched[active] = None
        self._flush_soon()

    def _flush_soon(self) -> None:
        if self._flushing is None and self._deliver is not None:
            # In the next turn: whatever else this turn brings is in the same report.
            self._flushing = self._loop.call_soon(self._flush)

    # -- reports out ---------------------------------------------------------------------------------------------------

    def _flush(self) -> None:
        if self._flushing is not None:
            self._flushing.cancel()
            self._flushing = None
        if self._deliver is None:
            return
        touched, self._touched = self._touched, {}
        for active in touched:
            try:
                self._collect(active)
            except Exception as error:
                log.exception("request %s: its output could not be read", active.request_id)
                self._abort(active)
                if self._active.get(active.request_id) is active:
                    self._finish(active, ERROR, error=f"its output could not be read: {error!r}", refusal=BROKEN)
            if self._health.broken.done():
                return  # everybody is told by the worker
        pending = self._pending
        if not pending:
            return
        self._pending = _Pending()
        self._deliver(
            EngineReport(
                deltas=pending.deltas,
                ranks={rank: RankReport(events, self.load(rank)) for rank, events in pending.events.items()},
                steps=pending.steps,
                duration_ms=pending.duration_ms,
                prefill_tokens=pending.prefill_tokens,
                decode_tokens=pending.decode_tokens,
                released=pending.released,
                expired=pending.expired,
                kept_transfers=len(self._kept),
            )
        )

    def _collect(self, active: _Active) -> None:
        """Take what is new of one request."""
        if self._active.get(active.request_id) is not active:
            return
        position = active.cursor.taken
        tokens = b""
        logprobs: tuple[TokenLogprobs, ...] | None = None
        cached_tokens: int | None = None
        of_prompt: tuple[TokenLogprobs, ...] | None = None
        output = active.result.outputs[0] if active.result is not None and active.result.outputs else None
        if output is not None and active.request.stage is not Stage.ENCODE:
            tokens, logprobs = active.cursor.take(output)
        if tokens:
            if not active.began:
                cached_tokens = 0 if active.transfers else min(int(active.result.cached_tokens), active.prompt_tokens)
                of_prompt = self._prompt_logprobs(active, output)
            self._book(active, cached_tokens or 0, len(tokens) // 4)
        if not active.ended:
            if tokens:
                self._pending.deltas.append(
                    TokenDelta(
                        active.request_id,
                        position,
                        tokens,
                        cached_tokens=cached_tokens,
                        logprobs=logprobs,
                        prompt_logprobs=of_prompt,
                    )
                )
            if active.cancelling and active.began:
                self._abort(active)  # its KV is here now
            return
        if active.error is not None:
            self._fail(active, position, tokens)
            return
        reason = None if output is None else output.finish_reason
        told: dict[str, Any] = {
            "tokens": tokens,
            "position": position,
            "cached_tokens": cached_tokens,
            "logprobs": logprobs,
            "prompt_logprobs": of_prompt,
        }
        if active.request.stage is Stage.ENCODE and not active.cancelling:
            self._finish(active, ENCODED, disaggregated_params=codec.encode(active.result.disaggregated_params))
        elif active.context_only and reason in GOES_ON and not active.cancelling:
            params = active.result.disaggregated_params
            if params is None:
                told.update(error="the engine returned no disaggregated params", refusal=BROKEN)
                self._finish(active, ERROR, **told)
            else:
                self._finish(
                    active, PREFILLED, disaggregated_params=codec.encode(params, self._engine_prompt(active)), **told
                )
        elif active.cancelling or reason == CANCELLED:
            if not active.cancelling:
                told.update(error="the engine cancelled the request", refusal=BROKEN)
            self._finish(active, CANCELLED if active.cancelling else ERROR, **told)
        elif reason in FINISH_REASONS:
            self._finish(active, FINISH_REASONS[reason], **told)
        else:
            told.update(error=f"the engine ended the request with {reason!r}", refusal=BROKEN)
            self._finish(active, ERROR, **told)

    def _book(self, active: _Active, cached_tokens: int, fresh: int) -> None:
        """Note that a request has grown, in the books and for the event stream."""
        request_id = active.request_id
        self._health.moved(active.rank, request_id)
        began, blocks = self._loads[active.rank].grew(request_id, active.prompt_tokens + active.cursor.taken)
        events = self._pending.rank(active.rank)
        if began:
            active.began = True
            events.append(RequestStarted(request_id, active.prompt_tokens, cached_tokens, blocks or 0))
            events.append(PrefillCompleted(request_id))
            if not active.transfers:
                self._pending.prefill_tokens += active.prompt_tokens - cached_tokens
            fresh -= 1
        elif blocks is not None:
            events.append(RequestProgressed(request_id, blocks))
        self._pending.decode_tokens += fresh

    @staticmethod
    def _engine_prompt(active: _Active) -> bytes | None:
        """Return the token ids that the engine made of a prompt with media."""
        return None if active.request.multimodal is None else pack_tokens(active.result.prompt_token_ids)

    def _prompt_logprobs(self, active: _Active, output: Any) -> tuple[TokenLogprobs, ...] | None:
        alternatives = active.request.sampling.prompt_logprobs
        if alternatives is None or active.transfers:
            return None  # the prefill leg told them
        return prompt_logprobs(unpack_tokens(active.request.token_ids), output.prompt_logprobs or (), alternatives)

    def _fail(self, active: _Active, position: int, tokens: bytes) -> None:
        """End a request whose result raised."""
        error = active.error
        assert error is not None
        if self._health.is_broken(error):
            return
        refusal: RefusalKind | None = BROKEN
        if isinstance(error, RefusedError):
            text, refusal = error.reason, error.kind
        elif isinstance(error, (self._library.request_error, *REQUEST_ERRORS, WireError)):
            # A decode leg may fail by what happened on the way of its KV; computed anew it may succeed.
            text = str(error)
            if not active.transfers:
                refusal = None if isinstance(error, WireError) else RefusalKind.INVALID
        else:
            log.error("request %s failed: %r", active.request_id, error, exc_info=error)
            text = repr(error)
        self._finish(
            active,
            ERROR,
            tokens=tokens,
            position=position,
            error=text,
            refusal=refusal,
        )

    def _finish(
        self,
        active: _Active,
        reason: FinishReason,
        *,
        tokens: bytes = b"",
        position: int | None = None,
        error: str | None = None,
        refusal: RefusalKind | None = None,
        cached_tokens: int | None = None,
        logprobs: tuple[TokenLogprobs, ...] | None = None,
        prompt_logprobs: tuple[TokenLogprobs, ...] | None = None,
        disaggregated_params: bytes | None = None,
    ) -> None:
        """Give out a request's last delta, and take it off the books, or keep it."""
        request_id = active.request_id
        now_ms = self._clock.monotonic_ms()
        del self._active[request_id]
        self._contexts -= active.context_only
        self._health.left(active.rank, request_id, now_ms)
        if error is None:
            self._health.proved(now_ms)
            self._collector.observe_request(getattr(active.result, "metrics_dict", None) or {}, reason)
        self._pending.deltas.append(
            TokenDelta(
                request_id,
                active.cursor.taken if position is None else position,
                tokens,
                reason,
                cached_tokens=cached_tokens,
                error=None if error is None else error[:TEXT_CHARS_MAX],
                refusal=refusal,
                logprobs=logprobs,
                disaggregated_params=disaggregated_params,
                prompt_logprobs=prompt_logprobs,
            )
        )
        if reason == PREFILLED:
            active.deadline_ms = now_ms + self._limits.kv_transfer_timeout_ms
            self._kept[request_id] = active
            self._loads[active.rank].keep(request_id)
            self._pending.rank(active.rank)
            return
        self._loads[active.rank].left(request_id)
        self._pending.rank(active.rank).append(RequestFinished(request_id, reason))

    def _release(self, active: _Active, reason: str) -> None:
        """Give up the KV of a prefill leg, as far as the engine can be told, and take the leg off the books."""
        request_id = active.request_id
        del self._kept[request_id]
        self._loads[active.rank].left(request_id)
        self._pending.released.append(request_id)
        self._pending.expired += reason == EXPIRED
        self._pending.rank(active.rank).append(RequestFinished(request_id, reason))
        # Does nothing when the KV was fetched: the engine has forgotten the request then.
        self._abort(active)
        self._flush_soon()

    def _abort(self, active: _Active) -> None:
        if active.aborted or active.result is None:
            return
        active.aborted = True
        try:
            active.result.abort()
        except Exception as error:
            log.warning("request %s could not be aborted: %r", active.request_id, error)

    # -- the engine's own reports --------------------------------------------------------------------------------------

    def _on_cache(self, rank: int, events: Sequence[WireCacheEvent]) -> None:
        self._pending.rank(rank).extend(events)
        # At once: a restatement must not know more than the reports have told.
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
            if self._health.is_broken(RuntimeError("it says that it is not healthy")):
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
            self._health.check(now_ms, busy=bool(self._active))

    async def begin(self) -> None:
        """Read what the engine publishes, from before its first request; then generate a first token on every rank."""
        if self._role is Role.ENCODE:
            return
        if self._reads:
            self._feeding = owned(self._feed.run(self._on_cache, self._on_load), "engine feed")
            self._feeding.add_done_callback(self._on_feed_end)
        try:
            await self._health.generate_one(WARM_UP_TIMEOUT_S)
        except TimeoutError:
            raise EngineBrokenError(
                f"starting the engine: its first token did not come within {WARM_UP_TIMEOUT_S:.0f} s"
            ) from None
        self._health.proved(self._clock.monotonic_ms())
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
        tasks = [active.task for active in self._active.values() if active.task is not None]
        tasks += [self._feeding] if self._feeding is not None else []
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if self._flushing is not None:
            self._flushing.cancel()
        await self._health.close()


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """A running engine and what is known of it."""

    engine: TrtllmEngine
    version: str
    facts: ModelFacts


@asynccontextmanager
async def load_engine(
    arguments: EngineArguments,
    role: Role,
    limits: EngineLimits,
    clock: Clock,
    metrics: WorkerMetrics,
    registry: CollectorRegistry,
    served_model_name: str,
    logits_processors: Sequence[str] = (),
    takes_media: bool = False,
) -> AsyncIterator[LoadedEngine]:
    """Load a model and keep its engine until the end of the block; whatever ends it, the engine is shut down.

    Takes minutes; cancelling it leaves what is being made to be shut down when it exists. Raises
    ``LibraryMissingError``, ``EngineBrokenError``, and what TensorRT-LLM raises.
    """
    _check_adapters(arguments)
    named = LogitsProcessorRegistry.from_settings(logits_processors)
    started_ms = clock.monotonic_ms()
    library = await asyncio.to_thread(load_library)
    log.info("starting TensorRT-LLM %s with %s", library.version, arguments.values.get("model"))
    try:
        llm = await start_engine(lambda: library.make_engine(arguments.values, role is Role.ENCODE), _shut_down)
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
        engine = TrtllmEngine(
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
            load_media if takes_media else None,
        )
        try:
            await engine.begin()
            load_s = (clock.monotonic_ms() - started_ms) / 1e3
            metrics.engine_load_seconds.set(load_s)
            metrics.engine_healthy.set(1)
            log.info("the engine is ready after %.1f s", load_s)
            yield LoadedEngine(engine, library.version, facts)
        finally:
            await engine.close()
    finally:
        failures.close()
        if collector is not None:
            collector.close()
        await end_engine(llm, _shut_down)


def _check_adapters(arguments: EngineArguments) -> None:
    for adapter in adapters(arguments.values).values():
        # LoRARequest would refuse it, request by request.
        if not Path(adapter.path).exists():
            raise ValueError(f"reading lora_config.lora_dir: {adapter.path} does not exist; no engine was started")


def _shut_down(llm: Any) -> None:
    llm.shutdown()
