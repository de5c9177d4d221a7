"""The simulated engine in real time: a task that steps the pure core and waits as long as its steps take.

Steps follow each other by absolute deadlines: a wake-up that comes late shortens the next wait, so the engine is as
fast as its timing model says as long as the machine keeps up. An idle engine waits for ``submit`` and costs nothing.

A guide is opened in a thread, as a real engine compiles it next to its steps: a huge one takes a quarter of a second,
which the streams of others must not wait for. So are the log probabilities of a long prompt made, which take some
microseconds a token. The request is the engine's only then; until then it can be cancelled.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from poolgrid.kernel.requests.log_fields import about
from poolgrid.kernel.wire.events import AnyEvent, BlocksStored, LoadReported, RequestFinished
from poolgrid.kernel.wire.hashing import TOKEN_BYTES
from poolgrid.kernel.wire.identifiers import Stage
from poolgrid.kernel.wire.limits import TEXT_CHARS_MAX
from poolgrid.kernel.wire.requests import FinishReason, Generate, KvOffered, TokenDelta, TokenLogprobs
from poolgrid.kernel.worker_protocol.cache_facts import ReportedBlocks, RestatedEvent
from poolgrid.kernel.worker_protocol.engine import AlwaysWell, EngineReport, RankReport
from poolgrid.kernel.worker_protocol.kv_fetches import KvWanted
from poolgrid.kernel.worker_protocol.refusal import BrokenError, RefusedError
from poolgrid.kernel.worker_protocol.tensor_transfer import Tensor
from poolgrid.plugins.simulated.core.engine import SimulatedEngine, SimulatedLimits
from poolgrid.plugins.simulated.core.guided_tokens import Guides
from poolgrid.plugins.simulated.core.kv_groups import CacheRecorder
from poolgrid.plugins.simulated.core.kv_transfer import KvSource, TransferModel, read_ticket
from poolgrid.plugins.simulated.core.media import Embeddings
from poolgrid.plugins.simulated.core.next_token import TokenGuide, Vocabulary
from poolgrid.server.process.clock import Clock
from poolgrid.server.process.tasks import detached
from poolgrid.server.workers.timing import TimingModel

log = logging.getLogger(__name__)

PROMPT_REPORTED_AT_ONCE = 256
"""Longest prompt whose log probabilities are made on the event loop: about a millisecond."""

LAG_FORGIVEN_MS = 250.0
"""How far the engine may fall behind its deadlines before it stops trying to catch up."""


class RealTimeSimulatedEngine(AlwaysWell):
    """``poolgrid.kernel.worker_protocol.engine.Engine`` of one rank over the pure core.

    It is a ``KvHandover`` too: ``source`` names this worker in tickets for decode workers.
    """

    def __init__(
        self,
        limits: SimulatedLimits,
        vocabulary: Vocabulary,
        timing: TimingModel,
        clock: Clock,
        transfer: TransferModel | None = None,
        source: KvSource | None = None,
        takes_media: bool = False,
        guides: Guides | None = None,
    ) -> None:
        self._recorder = CacheRecorder()
        self._reported = ReportedBlocks()
        self._guides = guides
        self._opening: dict[str, asyncio.Task[None]] = {}
        """Requests whose guide is being opened."""
        self._threads: ThreadPoolExecutor | None = None
        self._deliver: Callable[[EngineReport], None] | None = None
        self._core = SimulatedEngine(
            limits,
            vocabulary,
            timing,
            self._recorder,
            transfer=transfer,
            source=source,
            takes_media=takes_media,
            guides=guides,
        )
        self._clock = clock
        self._wake = asyncio.Event()

    @property
    def dp_size(self) -> int:
        return 1

    def describe(self) -> dict[str, object]:
        return {}

    def submit(self, request: Generate) -> None:
        self._take(request)

    def cancel(self, request_id: str) -> None:
        """Stop a request; the step in progress still delivers what it made."""
        opening = self._opening.pop(request_id, None)
        if opening is not None:
            opening.cancel()
            self._end(request_id, FinishReason.CANCELLED)
        elif self._core.cancel(request_id):
            self._wake.set()

    def _take(
        self, request: Generate, offer: KvOffered | None = None, embeddings: list[Embeddings] | None = None
    ) -> None:
        """Give the core a request, once its guide is open; raises ``RefusedError``."""
        guides = self._guides if request.sampling.guide else None
        if self._deliver is not None and (guides is not None or _is_long_to_report(request)):
            opening = self._open_then_take(guides, request, offer, embeddings)
            self._opening[request.request_id] = detached(opening, f"preparation of {request.request_id}")
            return
        self._core.submit(request, self._clock.monotonic_ms(), offer=offer, embeddings=embeddings)
        self._wake.set()

    async def _open_then_take(
        self, guides: Guides | None, request: Generate, offer: KvOffered | None, embeddings: list[Embeddings] | None
    ) -> None:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(1, "requests")

        def opened() -> tuple[TokenGuide | None, tuple[TokenLogprobs, ...] | None]:
            guide = None
            if guides is not None:
                guide = guides.open(request.sampling)
                guide.allowed()  # the first look costs as much as opening it, and is kept
            made = self._core.prompt_logprobs(request) if _is_long_to_report(request) else None
            return guide, made

        try:
            guide, made = await asyncio.get_running_loop().run_in_executor(self._threads, opened)
            del self._opening[request.request_id]
            now_ms = self._clock.monotonic_ms()
            self._core.submit(request, now_ms, offer=offer, embeddings=embeddings, guide=guide, prompt_logprobs=made)
        except asyncio.CancelledError:
            raise
        except RefusedError as refusal:
            self._opening.pop(request.request_id, None)
            self._end(request.request_id, FinishReason.ERROR, refusal)
        except BaseException as error:  # a panic in a compiled library is no Exception
            # Another worker may succeed; unanswered, its client would wait until it gives up.
            what = request.sampling.guide or "prompt_logprobs"
            named = about(request_id=request.request_id)
            log.exception("request %s: %s could not be opened", request.request_id, what, extra=named)
            self._opening.pop(request.request_id, None)
            why = f"{what} is set, and opening it failed here: {type(error).__name__}: {error}"
            self._end(request.request_id, FinishReason.ERROR, BrokenError(why))
        self._wake.set()

    def _end(self, request_id: str, reason: FinishReason, refusal: RefusedError | None = None) -> None:
        """Report the end of a request that the core never had."""
        error, kind = (None, None) if refusal is None else (refusal.reason[:TEXT_CHARS_MAX], refusal.kind)
        delta = TokenDelta(request_id, 0, b"", reason, error=error, refusal=kind)
        events: list[AnyEvent] = [RequestFinished(request_id, reason)]
        assert self._deliver is not None, "guides are opened while the engine runs"
        report = EngineReport([delta], {0: RankReport(events, self._core.load())}, steps=0)
        asyncio.get_running_loop().call_soon(self._deliver, report)  # as all ends come: later than what asked for them

    def wanted(self, request: Generate) -> KvWanted:
        """Return where the KV of a request of the decode stage is, or raise ``RefusedError``."""
        ticket = read_ticket(request)
        return KvWanted(ticket.endpoint, ticket.transfer_id, ticket.timeout_ms)

    def submit_offered(self, request: Generate, offer: KvOffered) -> None:
        self._take(request, offer=offer)

    def submit_embedded(self, request: Generate, tensors: Sequence[Tensor]) -> None:
        self._take(request, embeddings=list(tensors))

    def offer(self, transfer_id: str) -> KvOffered:
        return self._core.offer(transfer_id, self._clock.monotonic_ms())

    def release(self, transfer_id: str) -> None:
        if self._core.release(transfer_id):
            self._wake.set()

    def load(self, dp_rank: int = 0) -> LoadReported:
        return self._core.load()

    def resident_blocks(self, dp_rank: int = 0) -> list[BlocksStored]:
        return self._core.resident_blocks()

    def restate(self, dp_rank: int = 0) -> list[RestatedEvent]:
        return self._reported.restate()

    async def run(self, deliver: Callable[[EngineReport], None]) -> None:
        """Step while there is work, else wait for it, or for the moment at which time alone brings some."""
        self._deliver = deliver
        try:
            await self._step_on(deliver)
        finally:
            if self._threads is not None:
                self._threads.shutdown(wait=False, cancel_futures=True)

    async def _step_on(self, deliver: Callable[[EngineReport], None]) -> None:
        due_ms = self._clock.monotonic_ms()
        while True:
            outcome = self._core.step(due_ms)
            if outcome is None:
                due_ms = await self._rest()
                continue
            # Taken now, applied when it becomes visible: ``restate`` must not run ahead of the reports.
            cache_events = self._recorder.take()
            # Always gives the loop its turn, also when behind.
            await asyncio.sleep(max(0.0, (outcome.ended_ms - self._clock.monotonic_ms()) / 1e3))
            self._reported.apply(cache_events)
            events: list[AnyEvent] = [*cache_events, *outcome.facts]
            deliver(
                EngineReport(
                    deltas=outcome.deltas,
                    ranks={0: RankReport(events, self._core.load())},
                    steps=outcome.steps,
                    duration_ms=outcome.duration_ms,
                    prefill_tokens=outcome.prefill_tokens,
                    decode_tokens=outcome.decode_tokens,
                    preemptions=outcome.preemptions,
                    queue_waits_ms=outcome.queue_waits_ms,
                    arrivals=outcome.arrivals,
                    released=outcome.released,
                    expired=outcome.expired,
                    kept_transfers=self._core.kept_transfers,
                )
            )
            due_ms = max(outcome.ended_ms, self._clock.monotonic_ms() - LAG_FORGIVEN_MS)

    async def _rest(self) -> float:
        """Wait until there is something to do; return the time at which it is done."""
        self._wake.clear()
        moment_ms = self._core.next_moment_ms
        if moment_ms is None:
            await self._wake.wait()
            return self._clock.monotonic_ms()
        try:
            async with asyncio.timeout(max(0.0, (moment_ms - self._clock.monotonic_ms()) / 1e3)):
                await self._wake.wait()
        except TimeoutError:
            # The moment itself, however late the timer came: what follows is not late with it.
            return max(moment_ms, self._clock.monotonic_ms() - LAG_FORGIVEN_MS)
        return self._clock.monotonic_ms()


def _is_long_to_report(request: Generate) -> bool:
    """Return whether a request asks for the log probabilities of a prompt that is not short, and has no media."""
    return (
        request.sampling.prompt_logprobs is not None
        and len(request.token_ids) > TOKEN_BYTES * PROMPT_REPORTED_AT_ONCE
        and request.multimodal is None
        and request.stage is not Stage.DECODE
        and not request.routing.emitted_tokens
    )
