"""The one feed of an engine's KV cache events and iteration statistics: what the reader brings, told by rank.

Rules:

1. Reads are destructive, so an engine has one feed.
2. Reading happens in a thread (``poolgrid.plugins.trtllm.reader``), everything here on the worker's loop. What
   was read is translated and handed over in one turn, so that ``restate`` reports exactly what ``on_cache`` has
   reported.
3. When events could not be read for ``failing_clears_ms`` the engine's cache is unknown, and all ranks
   are cleared. So they are when the engine frees its KV cache to sleep, of which it makes no events.
4. Where the engine publishes its events by itself (``stream``), they are followed and not read: one source, never two.
5. Each attention-DP rank counts its events apart and has a translator of its own. An event of a rank that does not
   exist, or of a shape that is not known, is counted; the hole that it leaves clears its rank.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

from poolgrid.kernel.kv_events.cache_events import AnyEngineEvent
from poolgrid.kernel.wire.errors import DecodeError
from poolgrid.kernel.wire.events import BlocksRemoved, BlocksStored, CacheCleared, GroupsReported
from poolgrid.kernel.wire.identifiers import Tier
from poolgrid.kernel.worker_protocol.cache_facts import RestatedEvent
from poolgrid.kernel.worker_protocol.event_translation import EventTranslator, NameMedia, RootSeed
from poolgrid.plugins.trtllm.core.statistics import EngineStatistics
from poolgrid.plugins.trtllm.kvbm import KvbmExchange
from poolgrid.plugins.trtllm.library import observe_release
from poolgrid.plugins.trtllm.metrics import EngineCollector, TrtllmMetrics
from poolgrid.plugins.trtllm.reader import EVENTS, STATISTICS, EngineReader, FeedLimits, FeedTurn
from poolgrid.server.process.clock import Clock
from poolgrid.server.workers.engines.server.cache_events import FollowedEvents

log = logging.getLogger(__name__)

WireCacheEvent = BlocksStored | BlocksRemoved | CacheCleared | GroupsReported
OnCache = Callable[[int, list[WireCacheEvent]], None]
OnLoad = Callable[[int, EngineStatistics], None]

LOSS_LOG_INTERVAL_MS = 10_000.0
"""An engine that overflows does so again and again; every loss is counted, not every one is logged."""


class TrtllmFeed:
    """The one feed of an engine's events and statistics; made and used on the worker's event loop.

    ``llm`` is a ``tensorrt_llm.LLM``, ``dp_size`` the number of its attention-DP ranks (1 without), ``block_size`` its
    tokens per block.
    """

    def __init__(
        self,
        llm: Any,
        dp_size: int,
        block_size: int,
        clock: Clock,
        metrics: TrtllmMetrics,
        limits: FeedLimits | None = None,
        *,
        root_seed: RootSeed | None = None,
        name_media: NameMedia | None = None,
        stream: FollowedEvents | None = None,
        own_metrics: EngineCollector | None = None,
        kvbm: KvbmExchange | None = None,
    ) -> None:
        self._llm = llm
        self._clock = clock
        self._metrics = metrics
        self._limits = limits or FeedLimits()
        self._on_cache: OnCache | None = None
        self._on_load: OnLoad | None = None
        self._own_metrics = own_metrics
        windows, reuse_is_on_device, self._device_only = _cache_layout(llm)
        self._translators = [
            EventTranslator(block_size, windows, root_seed, reuse_is_on_device, name_media) for _ in range(dp_size)
        ]
        self._stream = stream
        self._kvbm = kvbm
        self._reader = EngineReader(llm, clock, self._limits, self._take, reads_events=stream is None)
        self._empty_ms = clock.monotonic_ms()
        self._failing: dict[str, tuple[float, str]] = {}
        """Since when a reader fails, and how it did first."""
        self._loss_told_ms = float("-inf")
        self._dropped: set[str] = set()
        """Readers of which an item was dropped."""
        self._cleared = False
        """The ranks were cleared because events cannot be read."""

    # -- for the engine ------------------------------------------------------------------------------------------------

    def wake(self) -> None:
        self._reader.wake()

    async def has_begun(self) -> None:
        """Wait until the engine was asked for the first time, which must be before its first request."""
        await self._reader.has_begun.wait()

    def silent_ms(self, now_ms: float) -> float:
        return self._reader.silent_ms(now_ms)

    def restate(self, rank: int) -> list[RestatedEvent]:
        """Return what ``on_cache`` has told of a rank up to now, parents before children."""
        told = self._translators[rank].restate() if self._stream is None else self._stream.restate(rank)
        return [*told] if self._kvbm is None else [*told, *self._kvbm.restate()]

    def cached_blocks(self, rank: int) -> int:
        """Return how many device blocks of a rank routers are told of."""
        if self._stream is not None:
            return self._stream.blocks_on(rank, Tier.DEVICE)
        return self._translators[rank].blocks_on(Tier.DEVICE)

    def describe(self) -> dict[str, object]:
        """Return the state for people and probes, as JSON values."""
        if self._stream is not None:
            statistics = self._failing[STATISTICS][1] if STATISTICS in self._failing else "ok"
            return {"readers": {EVENTS: "stream", STATISTICS: statistics}, "ranks": self._stream.describe()["events"]}
        return {
            "readers": {
                reader: self._failing[reader][1] if reader in self._failing else "ok" for reader in (EVENTS, STATISTICS)
            },
            "ranks": [
                {
                    "dp_rank": rank,
                    "state": "incomplete" if translator.is_incomplete else "exact",
                    "device_blocks": translator.blocks_on(Tier.DEVICE),
                    "host_blocks": translator.blocks_on(Tier.HOST),
                    "remembered_blocks": translator.remembered_blocks,
                    "lost_events": translator.counts.lost_events,
                    "gaps": translator.counts.gaps,
                }
                for rank, translator in enumerate(self._translators)
            ],
        }

    async def run(self, on_cache: OnCache, on_load: OnLoad) -> None:
        """Read until cancelled; hand over cache events by rank, in order, and each rank's newest statistics per turn.

        Raises what the callbacks raise.
        """
        self._on_cache, self._on_load = on_cache, on_load
        loop = asyncio.get_running_loop()
        observe_release(self._llm, lambda: loop.call_soon_threadsafe(self._forget_all, "the engine sleeps"))
        await self._reader.run()

    # -- the turns -----------------------------------------------------------------------------------------------------

    def _take(self, turn: FeedTurn) -> None:
        on_cache, on_load = self._on_cache, self._on_load
        assert on_cache is not None, "set by run"
        assert on_load is not None, "set by run"
        if turn.event_count:
            self._metrics.lag_seconds.observe(max(0.0, turn.read_ms - self._empty_ms) / 1e3)
        if not turn.more_events:
            self._empty_ms = turn.read_ms
        by_rank: list[list[AnyEngineEvent]] = [[] for _ in self._translators]
        # What an event says of its rank; it may say nothing where there is only one.
        takers = {rank: events.append for rank, events in enumerate(by_rank)}
        only = by_rank[0].append if len(by_rank) == 1 else None
        for event in turn.events:
            rank = event.attention_dp_rank
            take = only if rank is None else takers.get(rank)
            if take is None:
                turn.dropped.append((EVENTS, _foreign(rank)))
            else:
                take(event)
        newest: dict[int, EngineStatistics] = {}
        for statistics, item in turn.statistics:
            self._note_statistics(statistics, item, newest, turn)
        for reader, failure in turn.dropped:
            self._drop(reader, failure)
        for rank, events in enumerate(by_rank):
            if events:
                self._hand_over(rank, events, on_cache)
        for reader in (EVENTS, STATISTICS):
            self._note(reader, turn.errors.get(reader))
        if EVENTS in turn.errors:
            self._clear_if_failing_long()
        else:
            self._cleared = False
        for rank, statistics in newest.items():
            self._metrics.observe_load(statistics)
            if self._device_only and statistics.kv_cache is not None:
                self._translators[rank].learn_capacity(statistics.kv_cache.max_num_blocks)
            on_load(rank, statistics)

    def _hand_over(self, rank: int, events: list[AnyEngineEvent], on_cache: OnCache) -> None:
        translator = self._translators[rank]
        translation = translator.translate(events)
        now_ms = self._clock.monotonic_ms()
        if translation.lost and now_ms - self._loss_told_ms >= LOSS_LOG_INTERVAL_MS:
            self._loss_told_ms = now_ms
            log.warning(
                "rank %d: the engine dropped %d KV cache events; its index was cleared and is learnt again "
                "(a larger event_buffer_max_size prevents it)",
                rank,
                translation.lost,
            )
        self._metrics.observe_events(rank, len(events), translator)
        if self._kvbm is not None:
            self._kvbm.publish(events, bool(translation.lost))
        if translation.events:
            on_cache(rank, self._with_host(translation.events))

    def _with_host(self, events: list[WireCacheEvent]) -> list[WireCacheEvent]:
        """Return events and, where they clear the rank, what KVBM holds all the same."""
        if self._kvbm is None or not any(isinstance(each, CacheCleared) for each in events):
            return events
        return [*events, *self._kvbm.restate()]

    def _note_statistics(
        self,
        statistics: EngineStatistics,
        item: Mapping[str, Any],
        newest: dict[int, EngineStatistics],
        turn: FeedTurn,
    ) -> None:
        if not 0 <= statistics.rank < len(self._translators):
            error = DecodeError("iteration statistics of the engine", f"attentionDpRank is {statistics.rank}")
            turn.dropped.append((STATISTICS, error))
            return
        newest[statistics.rank] = statistics
        if self._own_metrics is not None:
            self._own_metrics.observe_iteration(item)

    def _drop(self, reader: str, error: DecodeError) -> None:
        self._metrics.undecodable.labels(reader).inc()
        if reader not in self._dropped:
            self._dropped.add(reader)
            follows = "the hole that it leaves clears its rank" if reader == EVENTS else "the next one replaces it"
            log.warning("%s; it was dropped, %s; later ones are only counted", error, follows)

    # -- readers that fail ---------------------------------------------------------------------------------------------

    def _note(self, reader: str, error: Exception | None) -> None:
        """Remember since when a reader fails; log when it begins and when it ends, not every time."""
        failing = self._failing.get(reader)
        if error is None:
            if failing is not None:
                del self._failing[reader]
                log.warning("reading the engine's %s works again", reader)
            return
        self._metrics.reader_errors.labels(reader).inc()
        if failing is None:
            self._failing[reader] = (self._clock.monotonic_ms(), f"{type(error).__name__}: {error}"[:500])
            log.warning("reading the engine's %s failed, it is tried again: %r", reader, error)

    def _clear_if_failing_long(self) -> None:
        since_ms = self._failing[EVENTS][0]
        if self._cleared or self._clock.monotonic_ms() - since_ms < self._limits.failing_clears_ms:
            return
        self._cleared = True
        self._forget_all("reading the engine's events failed for too long")

    def _forget_all(self, why: str) -> None:
        """Clear the index of every rank."""
        on_cache = self._on_cache
        assert on_cache is not None, "set by run"
        log.error("%s: the index of all its ranks was cleared", why)
        for rank, translator in enumerate(self._translators):
            told: list[WireCacheEvent] = [translator.lose()]
            self._metrics.observe_events(rank, 0, translator)
            on_cache(rank, self._with_host(told))


def _foreign(rank: int | None) -> DecodeError:
    said = "is missing" if rank is None else f"is {rank}"
    return DecodeError("a KV cache event of the engine", f"attention_dp_rank {said}")


def _cache_layout(llm: Any) -> tuple[int, bool, bool]:
    """Return how many attention windows an engine is configured with, whether it builds only on device blocks, and
    whether it has no others."""
    config = getattr(getattr(llm, "args", None), "kv_cache_config", None)
    windows = getattr(config, "max_attention_window", None) or (0,)
    return (
        len(set(windows)),
        bool(getattr(config, "onboard_blocks", True)),
        not getattr(config, "host_cache_size", None),
    )
