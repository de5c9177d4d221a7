"""TensorRT-LLM as a worker's engine, on the worker's event loop: requests, events, loads and health of one ``LLM``.

Rules:

1. Nothing here calls the engine: requests are posted to its thread (``generations``), and what becomes visible comes
   back as values (``requests``); events and statistics come from the feed. So nothing here waits, whatever the engine
   does. What comes in one turn of the loop is one report (``report_buffer``).
2. An engine that has shut down, or reports that it is not healthy, ends ``run``: the worker then deregisters and ends.
   One that is silent (``lifecycle.health``) has its requests taken away, each ending as broken: they move elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import zmq

from poolgrid.kernel.wire.card import Inability
from poolgrid.kernel.wire.events import (
    AnyEvent,
    BlocksStored,
    LoadReported,
)
from poolgrid.kernel.wire.identifiers import Role, Tier
from poolgrid.kernel.wire.requests import Generate
from poolgrid.kernel.worker_protocol.cache_facts import RestatedEvent
from poolgrid.kernel.worker_protocol.engine import EngineReport
from poolgrid.kernel.worker_protocol.tensor_transfer import Tensor
from poolgrid.plugins.trtllm.calls import TrtllmCalls
from poolgrid.plugins.trtllm.core.statistics import EngineStatistics, load_of
from poolgrid.plugins.trtllm.feed import TrtllmFeed, WireCacheEvent
from poolgrid.plugins.trtllm.generations import Generations, MediaInputs
from poolgrid.plugins.trtllm.kvbm import KvbmExchange
from poolgrid.plugins.trtllm.library import is_alive
from poolgrid.plugins.trtllm.metrics import EngineCollector, TrtllmMetrics
from poolgrid.plugins.trtllm.requests import EngineRequests, TrtllmLimits
from poolgrid.plugins.trtllm.shared_tensors import SharedTensors
from poolgrid.server.process.clock import Clock
from poolgrid.server.process.tasks import owned
from poolgrid.server.workers.engines.lifecycle.engine_thread import EngineThread
from poolgrid.server.workers.engines.lifecycle.health import EngineBrokenError, EngineHealth
from poolgrid.server.workers.engines.lifecycle.rank_load import RankLoad, ReportBuffer
from poolgrid.server.workers.engines.server.cache_events import FollowedEvents
from poolgrid.server.workers.engines.server.core.server_facts import EventSource
from poolgrid.server.workers.metrics import WorkerMetrics

if TYPE_CHECKING:
    from poolgrid.server.workers.tensor_transfer.zmq_transfer import TensorTransfer

log = logging.getLogger(__name__)

WARM_UP_TIMEOUT_S = 600.0
"""How long the first token of a new engine may take; kernels may be tuned and compiled for it."""

STATISTICS_TIMEOUT_S = 5.0
"""How long the first statistics are waited for, which say how many blocks there are."""

STREAM_TIMEOUT_S = 5.0
"""How long the first connection to the publisher of every rank may take; the engine binds before it is ready."""

STREAM_CHECK_S = 0.01
"""Between two looks whether all ranks are connected."""

END_TIMEOUT_S = 2.0
"""How long the engine's thread may take to release its requests at the end."""


class TrtllmEngine:
    """``poolgrid.kernel.worker_protocol.engine.Engine`` over ``LLM`` or ``MultimodalEncoder``; ``loading`` makes
    one."""

    def __init__(
        self,
        thread: EngineThread,
        calls: TrtllmCalls,
        role: Role,
        limits: TrtllmLimits,
        clock: Clock,
        metrics: WorkerMetrics,
        trtllm_metrics: TrtllmMetrics,
        collector: EngineCollector,
        context: zmq.Context[Any],
        load_media: MediaInputs | None = None,
        tensors: TensorTransfer | None = None,
        kvbm: KvbmExchange | None = None,
    ) -> None:
        arguments = calls.arguments
        self._calls = calls
        self._role = role
        self._clock = clock
        self._takes_media = load_media is not None
        self._dp_size = arguments.attention_dp_size
        self._stream: FollowedEvents | None = None
        if arguments.stream is not None:
            stream = arguments.stream
            sources = [EventSource(rank, *stream.of_rank(rank), stream.topic) for rank in range(self._dp_size)]
            self._stream = FollowedEvents(
                sources,
                arguments.block_size,
                context,
                clock,
                calls.roots,
            )
        self._trtllm_metrics = trtllm_metrics
        self._feed = TrtllmFeed(
            calls.llm,
            self._dp_size,
            arguments.block_size,
            clock,
            trtllm_metrics,
            root_seed=calls.roots,
            name_media=calls.media if self._takes_media else None,
            stream=self._stream,
            own_metrics=collector,
            kvbm=kvbm,
        )
        self._kvbm = kvbm
        self._feeding: asyncio.Task[None] | None = None
        self._reads = arguments.publishes_kv_events or bool(arguments.values.get("enable_iter_perf_stats"))
        self._health = EngineHealth(
            thread,
            lambda: is_alive(calls.llm),
            None if role is Role.ENCODE else calls.generate_one,
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
        self._loads = [RankLoad(arguments.block_size) for _ in range(self._dp_size)]
        self._report = ReportBuffer(
            self.load, lambda error: self._health.lose(f"a report of the engine is lost: {error!r}")
        )
        shared = None if tensors is None else SharedTensors()
        self._generations = Generations(thread, calls, load_media, trtllm_metrics.note_miscounted, shared)
        self._requests = EngineRequests(
            self._generations,
            calls,
            role,
            limits,
            clock,
            metrics,
            collector,
            self._health,
            self._loads,
            self._report,
            tensors,
        )
        self._iterations: dict[int, int] = {}
        self._has_statistics = asyncio.Event()

    # -- what the worker sees ------------------------------------------------------------------------------------------

    @property
    def dp_size(self) -> int:
        return self._dp_size

    @property
    def names_media(self) -> bool:
        """Whether the model's files say what stands for an image among its tokens."""
        return self._takes_media and self._calls.media is not None

    @property
    def inabilities(self) -> tuple[Inability, ...]:
        return self._calls.inabilities

    @property
    def takes_retention(self) -> bool:
        return self._calls.takes_retention

    @property
    def unhealthy_reason(self) -> str:
        return self._health.unhealthy_reason

    @property
    def is_silent(self) -> bool:
        return self._health.is_silent

    def observe_health(self, changed: Callable[[], None]) -> None:
        self._observer = changed

    def describe(self) -> dict[str, object]:
        """Return how reading its events goes, which ranks' indexes lack something after a loss, what is on offer."""
        described: dict[str, object] = {"feed": self._feed.describe()} if self._reads else {}
        if self._kvbm is not None:
            described["kvbm"] = self._kvbm.describe()
        if self._requests.kept_embeddings is not None:
            described["kept_embeddings"] = self._requests.kept_embeddings
        return described

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
        """Return what a rank really holds; raises ``NotImplementedError``: TensorRT-LLM cannot tell, its fake can."""
        tell = getattr(self._calls.llm, "resident_blocks", None)
        if tell is None or self._health.is_silent:
            raise NotImplementedError("TensorRT-LLM cannot list its cache; only its events show it")
        held: list[BlocksStored] = tell(dp_rank)
        return held

    def restate(self, dp_rank: int) -> list[RestatedEvent]:
        return self._feed.restate(dp_rank)

    async def run(self, deliver: Callable[[EngineReport], None]) -> None:
        """Hand over reports until cancelled; raises ``EngineBrokenError`` when the engine is."""
        self._report.open(deliver)
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
        self._requests.submit(request, tensors)
        self._feed.wake()

    def cancel(self, request_id: str) -> None:
        self._requests.cancel(request_id)

    # -- when it does not answer ---------------------------------------------------------------------------------------

    def _on_health(self) -> None:
        """Take the requests away from an engine that has become silent; tell the worker."""
        if self._health.is_silent:
            self._requests.take_away(self._health.unhealthy_reason)
            # At once: the next thing that the worker reports is that it leaves.
            self._report.flush()
        if self._observer is not None:
            self._observer()

    # -- the engine's own reports --------------------------------------------------------------------------------------

    def _on_cache(self, rank: int, events: Sequence[WireCacheEvent]) -> None:
        self._report.rank(rank).extend(events)
        # At once: a restatement must not know more than the reports have told.
        self._report.flush()

    def _on_stream(self, rank: int, events: list[AnyEvent]) -> None:
        stream = self._stream
        assert stream is not None, "it publishes"
        self._trtllm_metrics.observe_blocks(
            rank, stream.blocks_on(rank, Tier.DEVICE), stream.blocks_on(rank, Tier.HOST)
        )
        self._report.rank(rank).extend(events)
        self._report.flush()

    def _on_kvbm(self, rank: int, events: list[AnyEvent]) -> None:
        self._report.rank(rank).extend(events)
        self._report.flush()

    def _on_load(self, rank: int, statistics: EngineStatistics) -> None:
        self._loads[rank].reported(load_of(statistics, 0))
        total_blocks = self._loads[rank].total_blocks
        for load in self._loads:
            load.assume_total_blocks(total_blocks)
        before = self._iterations.get(rank, 0)
        self._iterations[rank] = statistics.iteration
        if rank == 0:
            self._report.pending.steps += max(0, statistics.iteration - before)
            self._report.pending.duration_ms = statistics.iteration_latency_ms
        self._report.rank(rank)
        self._has_statistics.set()
        self._report.flush_soon()

    # -- its life ------------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._health.check_interval_s)
            if self._health.broken.done():
                return
            now_ms = self._clock.monotonic_ms()
            self._requests.check(now_ms)
            self._health.check(now_ms, busy=bool(self._requests))

    async def begin(self) -> None:
        """Read what the engine publishes, from before its first request; then generate a first token on every rank."""
        if self._role is Role.ENCODE:
            return
        if self._reads:
            self._feeding = owned(self._feed.run(self._on_cache, self._on_load), "engine feed")
            self._feeding.add_done_callback(self._on_feed_end)
        if self._kvbm is not None:
            self._kvbm.open(self._on_kvbm)
        if self._stream is not None:
            await self._follow(self._stream)
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

    async def _follow(self, stream: FollowedEvents) -> None:
        """Follow the engine's own stream; return when every rank is connected, or after a time-out."""
        stream.open(self._on_stream)
        try:
            async with asyncio.timeout(STREAM_TIMEOUT_S):
                while not stream.is_current():  # noqa: ASYNC110 - a socket's monitor tells it
                    await asyncio.sleep(STREAM_CHECK_S)
        except TimeoutError:
            log.warning(
                "the engine does not publish its events yet; they are followed once it does: %s", stream.describe()
            )

    def _on_feed_end(self, feeding: asyncio.Task[None]) -> None:
        if not feeding.cancelled() and not self._health.broken.done():
            # It tries again by itself; that it ends is a fault of ours, and routers would trust a stale index.
            error = feeding.exception()
            self._health.broken.set_exception(EngineBrokenError(f"reading the engine's events ended: {error!r}"))

    async def close(self) -> None:
        """End every task; the engine itself is shut down by who made it."""
        if self._stream is not None:
            self._stream.close()
        if self._kvbm is not None:
            self._kvbm.close()
        if self._feeding is not None:
            self._feeding.cancel()
            await asyncio.wait({self._feeding})
        self._report.close()
        await self._health.close()
        try:
            async with asyncio.timeout(END_TIMEOUT_S):
                await self._generations.close()
        except TimeoutError:
            log.warning("the engine does not answer: its requests are left behind with it")
