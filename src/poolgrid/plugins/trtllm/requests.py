"""The requests of one TensorRT-LLM engine as the worker's loop sees them: admitted, followed, ended, kept.

Rules:

1. A prefill leg is a ``context_only`` request. Its KV stays in the engine until a decode worker's engine fetched it,
   which nothing reports: the leg is *kept* until its router cancels it, or for ``kv_transfer_timeout_ms``. At most
   ``kept_transfers_max`` are kept. Such KV cannot be given up: the engine has forgotten the request, and releases its
   blocks by its own time-out, which is the same. A leg of one token is an ordinary request: no engine would fetch its
   KV.
2. A cancelled request is over when the engine ends it, or after ``CANCEL_TIMEOUT_MS``: an engine that hangs ends
   nothing. One whose KV is on its way is the exception: its blocks are not free before.
3. What a request causes is its own error, and one that befell the engine moves its requests: an error that comes after
   output, that several requests have at once, or that speaks of the engine, is the engine's. The cause of any other
   error that comes late is unknown, so another worker may try.
4. Where embeddings travel as bytes, an encode leg is *kept* too, until its taker has them or their lease ends
   (``tensor_transfer.offers``).
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec

from poolgrid.kernel.wire.errors import WireError
from poolgrid.kernel.wire.events import PrefillCompleted, RequestFinished, RequestProgressed, RequestStarted
from poolgrid.kernel.wire.identifiers import STAGE_WORD, Role, Stage
from poolgrid.kernel.wire.limits import TEXT_CHARS_MAX
from poolgrid.kernel.wire.requests import FinishReason, Generate, RefusalKind, TokenDelta
from poolgrid.kernel.worker_protocol.refusal import BrokenError, BusyError, RefusedError, UnableError
from poolgrid.kernel.worker_protocol.tensor_transfer import Tensor
from poolgrid.plugins.trtllm.calls import TrtllmCalls
from poolgrid.plugins.trtllm.core.disaggregated_params import CarriedTensor, with_tensors
from poolgrid.plugins.trtllm.core.outputs import FINISH_REASONS, GOES_ON
from poolgrid.plugins.trtllm.generations import Generations, Growth, RequestEnd
from poolgrid.plugins.trtllm.metrics import EngineCollector
from poolgrid.plugins.trtllm.shared_tensors import HostTensor
from poolgrid.server.process.clock import Clock
from poolgrid.server.workers.engines.lifecycle.health import EngineHealth
from poolgrid.server.workers.engines.lifecycle.rank_load import RankLoad, ReportBuffer
from poolgrid.server.workers.metrics import WorkerMetrics
from poolgrid.server.workers.tensor_transfer.offers import EmbeddingOffers

if TYPE_CHECKING:
    from poolgrid.server.workers.tensor_transfer.zmq_transfer import TensorTransfer

log = logging.getLogger(__name__)

CANCEL_TIMEOUT_MS = 1000.0
"""How long the engine may take to confirm a cancellation: many steps."""

ENGINE_FAULT = re.compile(r"out of memory|\b(?:cuda|cublas|nccl|mpi|nvshmem|ucx|nixl)\b|illegal memory|bad_alloc", re.I)
"""Words of errors of the engine itself, in the report to any request."""


@dataclass(frozen=True, slots=True)
class TrtllmLimits:
    """Times and bounds of the adapter; all of them are settings of the worker."""

    kept_transfers_max: int = 256
    kv_transfer_timeout_ms: float = 60_000.0
    max_requests: int = 8192
    health_interval_ms: float = 30_000.0
    health_timeout_ms: float = 30_000.0
    progress_timeout_ms: float = 60_000.0
    answer_timeout_ms: float = 5_000.0


@dataclass(slots=True, eq=False)
class ActiveRequest:
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


class EngineRequests:
    """The requests of one engine; every method is called on the worker's loop."""

    def __init__(
        self,
        generations: Generations,
        calls: TrtllmCalls,
        role: Role,
        limits: TrtllmLimits,
        clock: Clock,
        metrics: WorkerMetrics,
        collector: EngineCollector,
        health: EngineHealth,
        loads: Sequence[RankLoad],
        report: ReportBuffer,
        tensors: TensorTransfer | None,
    ) -> None:
        """``tensors``: an encode worker's embeddings travel by it, and not as handles."""
        self._generations = generations
        self._calls = calls
        self._role = role
        self._limits = limits
        self._clock = clock
        self._metrics = metrics
        self._collector = collector
        self._health = health
        self._loads = loads
        self._report = report
        self._offers = None
        if tensors is not None and role is Role.ENCODE:
            self._offers = EmbeddingOffers(tensors, self._on_embeddings_gone)
            report.keeps_encoded = True
        self._active: dict[str, ActiveRequest] = {}
        self._by_serial: dict[int, ActiveRequest] = {}
        self._cancelling: dict[ActiveRequest, None] = {}
        """In order of their cancellations; those whose KV is on its way are not among them."""
        self._serial = 0
        self._kept_legs: dict[str, ActiveRequest] = {}
        """Prefilled, in order of their deadlines: all wait equally long."""
        self._contexts = 0
        """Prefill legs that run; those that are kept not included."""
        generations.observe(self._on_growths)

    def __bool__(self) -> bool:
        return bool(self._active)

    @property
    def kept_embeddings(self) -> int | None:
        """How many encode legs are kept; ``None`` where embeddings do not travel as bytes."""
        return None if self._offers is None else len(self._offers)

    # -- in and out ----------------------------------------------------------------------------------------------------

    def submit(self, request: Generate, tensors: Sequence[Tensor]) -> None:
        """Give a request to the engine, or raise ``RefusedError`` and change nothing."""
        active = self._admit(request)
        plan = self._calls.plan(request)
        self._enter(active)
        self._generations.submit(active.serial, request, plan, active.context_only, tensors)

    def cancel(self, request_id: str) -> None:
        """Stop a request as soon as the engine allows it; kept KV is given up."""
        kept = self._kept_legs.get(request_id)
        if kept is not None:
            # The usual way for a leg to end: its router reports it when the decode worker has the KV.
            self._release(kept, FinishReason.PREFILLED)
            return
        if self._offers is not None and request_id in self._offers:
            self._offers.withdraw(request_id)
            self._let_go(request_id, FinishReason.CANCELLED)
            return
        active = self._active.get(request_id)
        if active is None or active.cancelled_ms is not None:
            return
        active.cancelled_ms = self._clock.monotonic_ms()
        if active.began or not active.transfers:
            self._cancelling[active] = None
        self._generations.abort(active.serial)

    def _admit(self, request: Generate) -> ActiveRequest:
        """Refuse what the adapter itself cannot take."""
        stage = request.stage
        sampling = request.sampling
        if self._health.broken.done():
            raise BrokenError("the engine has shut down")
        if (
            request.request_id in self._active
            or request.request_id in self._kept_legs
            or (self._offers is not None and request.request_id in self._offers)
        ):
            raise RefusedError(f"request id {request.request_id!r} is already active on this worker")
        if stage in (Stage.PREFILL, Stage.DECODE) and not self._calls.transfers_kv:
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
            raise RefusedError("a decode leg comes without disaggregated_params: the place of its KV is unknown")
        if stage is Stage.DECODE and request.multimodal is not None:
            raise RefusedError("a decode leg comes with media, which its KV holds already")
        if stage is Stage.ENCODE and request.multimodal is None:
            raise RefusedError("an encode leg comes without media")
        if request.multimodal is not None and not self._generations.takes_media:
            raise UnableError("the request has media, this worker was started with --modality text")
        if len(self._active) >= self._limits.max_requests:
            raise BusyError(
                f"{len(self._active)} requests are in the engine, allowed are at most {self._limits.max_requests} "
                "(max_requests)"
            )
        context_only = stage is Stage.PREFILL and sampling.max_tokens > 1
        if context_only:
            # Those that run now will be kept too.
            kept = len(self._kept_legs) + self._contexts
            if kept >= self._limits.kept_transfers_max:
                raise BusyError(
                    f"{kept} prefill legs run or are kept for decode workers, allowed are at most "
                    f"{self._limits.kept_transfers_max} (kept_transfers_max)"
                )
        self._serial += 1
        return ActiveRequest(self._serial, request, request.routing.dp_rank, prompt_tokens, context_only)

    def _enter(self, active: ActiveRequest) -> None:
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
                return  # the worker reports it to all owners
        self._report.flush_soon()

    def _break(self, active: ActiveRequest, error: Exception) -> None:
        log.error("request %s failed: this is a bug", active.request_id, exc_info=error)
        self._metrics.request_faults.inc()
        if self._by_serial.get(active.serial) is active:
            self._generations.abort(active.serial)
            delta = TokenDelta(active.request_id, active.taken, b"")
            self._finish_broken(active, delta, f"reading the engine's output failed: {error!r}")

    def _collect(self, active: ActiveRequest, growth: Growth, failed: Counter[str]) -> None:
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
            self._report.pending.deltas.append(delta)
            return
        if end.error is not None:
            self._fail(active, delta, end, failed[str(end.error)] > 1)
            return
        reason = end.reason
        if active.cancelled_ms is not None:
            self._finish(active, delta, FinishReason.CANCELLED)
        elif active.request.stage is Stage.ENCODE:
            self._finish_encoded(active, delta, end)
        elif active.context_only and reason in GOES_ON:
            self._finish(active, delta, FinishReason.PREFILLED, params=end.params, metrics=end.metrics)
        elif reason == FinishReason.CANCELLED:
            self._finish_broken(active, delta, "the engine cancelled the request")
        elif reason in FINISH_REASONS:
            self._finish(active, delta, FINISH_REASONS[reason], metrics=end.metrics)
        else:
            self._finish_broken(active, delta, f"the engine ended the request with {reason!r}")

    def _cut(self, active: ActiveRequest, growth: Growth, left: int) -> Growth:
        """Return what was asked for of an output that is longer, as the request's end."""
        self._metrics.overlong_answers.inc()
        log.warning(
            "request %s: the engine made more than max_tokens (%d): its output is cut there",
            active.request_id,
            active.request.sampling.max_tokens,
        )
        end = growth.end
        if end is None:
            self._generations.abort(active.serial)
            end = RequestEnd("length")
        elif end.error is None:
            end = replace(end, reason="length")
        logprobs = None if growth.logprobs is None else growth.logprobs[:left]
        return replace(growth, tokens=growth.tokens[: 4 * left], logprobs=logprobs, end=end)

    def _finish_encoded(self, active: ActiveRequest, delta: TokenDelta, end: RequestEnd) -> None:
        """End an encode leg; what it left is offered, where it travels as bytes."""
        params = end.params
        if self._offers is not None and end.embeddings:
            assert params is not None, "an encode leg has some"
            try:
                params = self._offer(self._offers, active.request_id, params, end.embeddings)
            except RefusedError as refusal:
                self._finish(active, delta, FinishReason.ERROR, error=refusal.reason, refusal=refusal.kind)
                return
        self._finish(active, delta, FinishReason.ENCODED, params=params, metrics=end.metrics)

    @staticmethod
    def _offer(offers: EmbeddingOffers, request_id: str, params: bytes, tensors: Sequence[HostTensor]) -> bytes:
        offered = offers.offer(request_id, ((f"{each.field} {at}", each.data) for at, each in enumerate(tensors)))
        carried = [CarriedTensor(each.field, each.dtype, told) for each, told in zip(tensors, offered, strict=True)]
        try:
            return with_tensors(params, carried)
        except WireError as error:
            offers.withdraw(request_id)
            raise UnableError(f"what the next leg needs cannot travel: {error}") from None

    def _on_embeddings_gone(self, request_id: str, expired: bool) -> None:
        self._let_go(request_id, FinishReason.EXPIRED if expired else FinishReason.ENCODED)

    def _let_go(self, request_id: str, reason: FinishReason) -> None:
        """Take an encode leg off the books whose embeddings were kept."""
        self._loads[0].left(request_id)
        self._report.pending.released.append(request_id)
        self._report.rank(0).append(RequestFinished(request_id, reason))
        self._report.flush_soon()

    def _book(self, active: ActiveRequest, cached_tokens: int, fresh: int) -> None:
        """Note that a request has grown, in the books and for the event stream."""
        request_id = active.request_id
        self._health.moved(active.rank, request_id)
        began, blocks = self._loads[active.rank].grew(request_id, active.prompt_tokens + active.taken)
        events = self._report.rank(active.rank)
        if began:
            active.began = True
            if active.cancelled_ms is not None:
                self._cancelling[active] = None  # its KV is here now
            events.append(RequestStarted(request_id, active.prompt_tokens, cached_tokens, blocks or 0))
            events.append(PrefillCompleted(request_id))
            if not active.transfers:
                self._report.pending.prefill_tokens += active.prompt_tokens - cached_tokens
            fresh -= 1
        elif blocks is not None:
            events.append(RequestProgressed(request_id, blocks))
        self._report.pending.decode_tokens += fresh

    def _fail(self, active: ActiveRequest, delta: TokenDelta, end: RequestEnd, shared: bool) -> None:
        """End a request whose result raised; ``shared``: others have the same error now."""
        error = end.error
        assert error is not None
        if self._health.seen(end.alive, error):
            return
        if isinstance(error, RefusedError):
            self._finish(active, delta, FinishReason.ERROR, error=error.reason, refusal=error.kind)
            return
        text = str(error)
        if end.at_call:
            # With embeddings of an encode worker it may be those that it refuses; the request has its images still.
            has_handles = active.request.multimodal is not None and active.request.disaggregated_params is not None
            refusal = RefusalKind.CANNOT_DO if has_handles else RefusalKind.INVALID
            text = f"TensorRT-LLM refuses the request: {text}"
        elif not isinstance(error, self._calls.library.request_error):
            log.error("request %s failed: %r", active.request_id, error, exc_info=error)
            text, refusal = repr(error), RefusalKind.BROKEN
        elif shared or active.began or active.transfers or ENGINE_FAULT.search(text):
            # A decode leg may fail by what happened on the way of its KV; computed again it may succeed.
            refusal = RefusalKind.BROKEN
        else:
            refusal = RefusalKind.CANNOT_DO
        self._finish(active, delta, FinishReason.ERROR, error=text, refusal=refusal)

    def _finish_broken(self, active: ActiveRequest, delta: TokenDelta, error: str) -> None:
        self._finish(active, delta, FinishReason.ERROR, error=error, refusal=RefusalKind.BROKEN)

    def _finish(
        self,
        active: ActiveRequest,
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
        if error is None and reason is not FinishReason.CANCELLED:
            self._health.ended(active.rank, request_id, now_ms)
            self._collector.observe_request(metrics or {}, reason)
        else:
            self._health.given_up(active.rank, request_id, now_ms)
        self._report.pending.deltas.append(
            msgspec.structs.replace(
                delta,
                finish_reason=reason,
                error=None if error is None else error[:TEXT_CHARS_MAX],
                refusal=refusal,
                disaggregated_params=params,
            )
        )
        if reason == FinishReason.PREFILLED:
            active.deadline_ms = now_ms + self._limits.kv_transfer_timeout_ms
            self._kept_legs[request_id] = active
            self._report.kept_transfers = len(self._kept_legs)
            self._loads[active.rank].keep(request_id)
            self._report.rank(active.rank)
            return
        if reason == FinishReason.ENCODED and self._offers is not None and request_id in self._offers:
            self._loads[active.rank].keep(request_id)
            self._report.rank(active.rank)
            return
        self._loads[active.rank].left(request_id)
        self._report.rank(active.rank).append(RequestFinished(request_id, reason))

    def _release(self, active: ActiveRequest, reason: str) -> None:
        """Take a kept prefill leg off the books; the engine frees its KV by itself."""
        request_id = active.request_id
        del self._kept_legs[request_id]
        self._report.kept_transfers = len(self._kept_legs)
        self._loads[active.rank].left(request_id)
        self._report.pending.released.append(request_id)
        self._report.pending.expired += reason == FinishReason.EXPIRED
        self._report.rank(active.rank).append(RequestFinished(request_id, reason))
        self._report.flush_soon()

    # -- when the engine does not answer -------------------------------------------------------------------------------

    def take_away(self, reason: str) -> None:
        for active in list(self._active.values()):
            self._generations.abort(active.serial)
            delta = TokenDelta(active.request_id, active.taken, b"")
            if active.cancelled_ms is not None:
                self._finish(active, delta, FinishReason.CANCELLED)
            else:
                self._finish_broken(active, delta, f"the engine is silent: {reason}")

    def check(self, now_ms: float) -> None:
        """Give up kept legs whose time is over, and cancelled requests that the engine does not end."""
        for active in list(self._kept_legs.values()):
            if active.deadline_ms > now_ms:
                break
            log.warning(
                "no router confirmed within %.0f ms that the KV of prefill leg %s was fetched: giving it up",
                self._limits.kv_transfer_timeout_ms,
                active.request_id,
            )
            self._release(active, FinishReason.EXPIRED)
        for active in list(self._cancelling):
            assert active.cancelled_ms is not None, "it is being cancelled"
            if now_ms - active.cancelled_ms < CANCEL_TIMEOUT_MS:
                break
            self._finish(active, TokenDelta(active.request_id, active.taken, b""), FinishReason.CANCELLED)
            self._report.flush_soon()
