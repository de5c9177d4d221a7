"""Reads KV cache events and iteration statistics out of ``LLM``, without ever blocking the engine or the event loop.

Rules:

1. Reads are destructive, so an engine has one reader; a second ``run`` is refused.
2. Only the asynchronous readers are used, and only with a timeout of 0. With a longer one the reader is *done* on
   expiry and gives nothing more until the next request; a synchronous read spoils the asynchronous ones. That nothing
   is there is told by ``asyncio.QueueEmpty``, sometimes by ``TimeoutError`` or ``IndexError`` (a late notification).
3. Before the first request reading events is an ``AssertionError``: what happens until then waits in the engine's
   buffer.
4. One turn reads at most ``events_per_turn`` events and lets go of the interpreter. What was read is translated and
   handed over before anything else happens, so that ``restate`` says exactly what ``on_cache`` has said.
5. Between turns the feed pauses: shortly while things happen, longer and longer while nothing does. ``wake`` ends a
   long pause.
6. A reader that fails is tried again, for ever, and never ends ``run``. When events could not be read for
   ``failing_clears_ms`` nobody knows any more what the engine holds, and all ranks are cleared.
7. Each attention-DP rank counts its events apart and has a translator of its own. An event of a rank that does not
   exist, or of a shape that is not known, is counted; the hole that it leaves clears its rank.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import AsyncIterable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from poolgrid.runtime.clock import Clock
from poolgrid.wire.dialects.cache_events import AnyEngineEvent, Stored
from poolgrid.wire.dialects.trtllm import parse_event
from poolgrid.wire.errors import DecodeError
from poolgrid.wire.events import BlocksRemoved, BlocksStored, CacheCleared
from poolgrid.wire.identifiers import Tier
from poolgrid.workers.core.event_translation import EventTranslator, RootSeed
from poolgrid.workers.engines.trtllm.core.statistics import EngineStatistics, parse_statistics
from poolgrid.workers.engines.trtllm.metrics import TrtllmMetrics

log = logging.getLogger(__name__)

WireCacheEvent = BlocksStored | BlocksRemoved | CacheCleared
OnCache = Callable[[int, list[WireCacheEvent]], None]
OnLoad = Callable[[int, EngineStatistics], None]

NOTHING_THERE = (asyncio.QueueEmpty, TimeoutError, IndexError)
"""How a reader with a timeout of 0 says that it has nothing."""

LOSS_LOG_INTERVAL_MS = 10_000.0
"""An engine that overflows does so again and again; every loss is counted, not every one is logged."""

EVENTS = "events"
STATISTICS = "statistics"


class Readable(Protocol):
    """What the feed uses of ``LLM``."""

    def get_kv_cache_events_async(self, timeout: float | None = 2) -> AsyncIterable[dict[str, Any]]:
        """Return the events as they come."""
        ...

    def get_stats_async(self, timeout: float | None = 2) -> AsyncIterable[dict[str, Any]]:
        """Return the statistics as they come."""
        ...


class OwnMetrics(Protocol):
    """TensorRT-LLM's own metrics, as far as they want iteration statistics."""

    def observe_iteration(self, item: Mapping[str, Any]) -> None:
        """Take an iteration's statistics as the engine gave them."""
        ...


@dataclass(frozen=True, slots=True)
class FeedLimits:
    """How often and how much the feed reads."""

    pause_min_ms: float = 5.0
    """Between two turns while something happens: below the time of an engine step, so that lag stays below a step."""
    pause_max_ms: float = 20.0
    """While the engine worked less than ``idle_after_ms`` ago: events are never later than this plus one turn."""
    pause_growth: float = 1.5
    """Factor from one turn that found nothing to the next."""
    idle_after_ms: float = 1000.0
    """An engine that said nothing for so long is idle."""
    idle_pause_max_ms: float = 200.0
    """Between two turns of an idle engine: its last events come late, and there is no other sign of them."""
    events_per_turn: int = 256
    """Then others have their turn: 1 to 3 ms of our work. The rest is read after ``turn_gap_ms``."""
    blocks_per_turn: int = 1024
    """The same for events with many blocks (an event of a long prompt has thousands)."""
    turn_gap_ms: float = 1.0
    """Between two turns when there is more to read: threads of the engine that wait for the interpreter get it, which a
    turn of the loop alone does not see to. 256 events per turn then are about 100,000 a second."""
    statistics_per_turn: int = 256
    """Iterations whose statistics are read in one turn; the engine keeps 1000."""
    failing_clears_ms: float = 5000.0
    """How long reading events may fail before the ranks are cleared: well below the time that a cache turns over."""


class TrtllmFeed:
    """The one reader of an engine's events and statistics; made and used on the worker's event loop.

    ``llm`` is a ``tensorrt_llm.LLM``, ``dp_size`` the number of its attention-DP ranks (1 without), ``block_size`` its
    tokens per block. ``windows`` and ``reuse_is_on_device`` are read from ``llm.args`` unless given.
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
        own_metrics: OwnMetrics | None = None,
        windows: int | None = None,
        reuse_is_on_device: bool | None = None,
    ) -> None:
        self._llm: Readable = llm
        self._resident = getattr(llm, "resident_blocks", None)
        self._clock = clock
        self._metrics = metrics
        self._limits = limits or FeedLimits()
        self._own_metrics = own_metrics
        configured = _cache_layout(llm)
        self._device_only = configured[2]
        self._translators = [
            EventTranslator(
                block_size,
                configured[0] if windows is None else windows,
                root_seed,
                configured[1] if reuse_is_on_device is None else reuse_is_on_device,
            )
            for _ in range(dp_size)
        ]
        self._woken = asyncio.Event()
        self._requested = False
        self._found_ms = self._empty_ms = clock.monotonic_ms()
        self._failing: dict[str, tuple[float, str]] = {}
        """Since when a reader fails, and how it did first."""
        self._loss_told_ms = float("-inf")
        self._dropped: set[str] = set()
        """Readers of which an item was dropped."""
        self._cleared = False
        """The ranks were cleared because events cannot be read."""

    # -- for the engine ------------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Say that a request was just submitted: a long pause ends now."""
        self._requested = True
        self._woken.set()

    def restate(self, rank: int) -> list[BlocksStored]:
        """Return what ``on_cache`` has told of a rank up to now, parents before children."""
        return self._translators[rank].restate()

    def resident(self, rank: int) -> list[BlocksStored]:
        """Return what a rank really holds, asked of the engine itself.

        Raises ``NotImplementedError`` when the engine cannot tell, as TensorRT-LLM cannot.
        """
        if self._resident is None:
            raise NotImplementedError("TensorRT-LLM cannot say what its cache holds; only its events tell")
        held: list[BlocksStored] = self._resident(rank)
        return held

    def cached_blocks(self, rank: int) -> int:
        """Return how many device blocks of a rank routers are told of."""
        return self._translators[rank].blocks_on(Tier.DEVICE)

    def describe(self) -> dict[str, object]:
        """Return the state for people and probes, as JSON values."""
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

        Raises ``RuntimeError`` when the engine has a reader already, and what the callbacks raise.
        """
        if self._llm in _engines_with_a_reader:
            raise RuntimeError(
                "reading an engine's events: it has a reader already, and what one reads the other lacks"
            )
        _engines_with_a_reader.add(self._llm)
        try:
            await self._read_for_ever(on_cache, on_load)
        finally:
            _engines_with_a_reader.discard(self._llm)

    # -- the turns -----------------------------------------------------------------------------------------------------

    async def _read_for_ever(self, on_cache: OnCache, on_load: OnLoad) -> None:
        limits = self._limits
        pause_ms = limits.pause_min_ms
        while True:
            events, more_events = await self._read_events(on_cache)
            statistics, more_statistics = await self._read_statistics(on_load)
            if more_events or more_statistics:
                await asyncio.sleep(limits.turn_gap_ms / 1e3)
                continue
            now_ms = self._clock.monotonic_ms()
            if events or statistics:
                self._found_ms = now_ms
                pause_ms = limits.pause_min_ms
            else:
                idle = now_ms - self._found_ms >= limits.idle_after_ms
                most = limits.idle_pause_max_ms if idle else limits.pause_max_ms
                pause_ms = min(pause_ms * limits.pause_growth, most)
            if await self._pause(pause_ms):
                self._found_ms = self._clock.monotonic_ms()
                pause_ms = limits.pause_min_ms

    async def _pause(self, pause_ms: float) -> bool:
        """Wait; say whether ``wake`` ended it. The shortest pause is always kept: many requests make no more turns."""
        shortest = self._limits.pause_min_ms
        await asyncio.sleep(shortest / 1e3)
        if not self._woken.is_set():
            if pause_ms <= shortest:
                return False
            try:
                async with asyncio.timeout((pause_ms - shortest) / 1e3):
                    await self._woken.wait()
            except TimeoutError:
                return False
        self._woken.clear()
        return True

    async def _read_events(self, on_cache: OnCache) -> tuple[int, bool]:
        """Read a turn's events and hand them over; return how many, and whether there may be more."""
        events_max = self._limits.events_per_turn
        blocks_max = self._limits.blocks_per_turn
        by_rank: list[list[AnyEngineEvent]] = [[] for _ in self._translators]
        # What an event says of its rank; it may say nothing where there is only one.
        takers = {rank: events.append for rank, events in enumerate(by_rank)}
        only = by_rank[0].append if len(by_rank) == 1 else None
        count = blocks = 0
        more = False
        error: Exception | None = None
        try:
            async for item in self._llm.get_kv_cache_events_async(timeout=0):
                count += 1
                try:
                    # At once: what was read last is still in the processor's cache.
                    event = parse_event(item)
                    rank = event.attention_dp_rank
                    take = only if rank is None else takers.get(rank)
                    if take is None:
                        raise _foreign(rank)
                except DecodeError as failure:
                    self._drop(EVENTS, failure, "the hole that it leaves clears its rank")
                else:
                    take(event)
                    if type(event) is Stored:
                        blocks += len(event.blocks)
                if count >= events_max or blocks >= blocks_max:
                    more = True
                    break
        except NOTHING_THERE:
            pass
        except AssertionError as failure:
            # The reader does not exist before the first request, and never where events are not enabled.
            if self._requested:
                error = failure
        except Exception as failure:
            error = failure
        read_ms = self._clock.monotonic_ms()
        if count:
            self._metrics.lag_seconds.observe(max(0.0, read_ms - self._empty_ms) / 1e3)
        if not more:
            self._empty_ms = read_ms
        for rank, events in enumerate(by_rank):
            if events:
                self._hand_over(rank, events, on_cache)
        self._note(EVENTS, error)
        if error is not None:
            self._clear_if_failing_long(on_cache)
        else:
            self._cleared = False
        return count, more

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
        if translation.events:
            on_cache(rank, translation.events)

    async def _read_statistics(self, on_load: OnLoad) -> tuple[int, bool]:
        newest: dict[int, EngineStatistics] = {}
        count = 0
        more = False
        error: Exception | None = None
        try:
            async for item in self._llm.get_stats_async(timeout=0):
                count += 1
                self._take_statistics(item, newest)
                if count >= self._limits.statistics_per_turn:
                    more = True
                    break
        except NOTHING_THERE:
            pass
        except Exception as failure:
            error = failure
        for rank, statistics in newest.items():
            self._metrics.observe_load(statistics)
            if self._device_only and statistics.kv_cache is not None:
                self._translators[rank].learn_capacity(statistics.kv_cache.max_num_blocks)
            on_load(rank, statistics)
        self._note(STATISTICS, error)
        return count, more

    def _take_statistics(self, item: dict[str, Any], newest: dict[int, EngineStatistics]) -> None:
        try:
            statistics = parse_statistics(item)
            if not 0 <= statistics.rank < len(self._translators):
                raise DecodeError("iteration statistics of the engine", f"attentionDpRank is {statistics.rank}")
        except DecodeError as error:
            self._drop(STATISTICS, error, "the next one replaces it")
            return
        newest[statistics.rank] = statistics
        self._metrics.observe_iteration(statistics)
        if self._own_metrics is not None:
            self._own_metrics.observe_iteration(item)

    def _drop(self, reader: str, error: DecodeError, follows: str) -> None:
        self._metrics.undecodable.labels(reader).inc()
        if reader not in self._dropped:
            self._dropped.add(reader)
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

    def _clear_if_failing_long(self, on_cache: OnCache) -> None:
        since_ms = self._failing[EVENTS][0]
        if self._cleared or self._clock.monotonic_ms() - since_ms < self._limits.failing_clears_ms:
            return
        self._cleared = True
        log.error("reading the engine's events failed for too long: the index of all its ranks was cleared")
        for rank, translator in enumerate(self._translators):
            told: list[WireCacheEvent] = [translator.lose()]
            self._metrics.observe_events(rank, 0, translator)
            on_cache(rank, told)


def _foreign(rank: int | None) -> DecodeError:
    said = "is missing" if rank is None else f"is {rank}"
    return DecodeError("a KV cache event of the engine", f"attention_dp_rank {said}")


_engines_with_a_reader: weakref.WeakSet[Any] = weakref.WeakSet()


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
