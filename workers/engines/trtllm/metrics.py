"""What a worker measures of TensorRT-LLM: ``poolgrid_trtllm_*``, each described here and in ``docs/metrics.md``."""

from __future__ import annotations

import logging

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from poolgrid.wire.identifiers import Tier
from poolgrid.workers.core.event_translation import Counts, EventTranslator
from poolgrid.workers.engines.trtllm.core.statistics import EngineStatistics

log = logging.getLogger(__name__)

ITERATION_SECONDS_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
LAG_SECONDS_BUCKETS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0)

NO_COUNTS = Counts(0, 0, 0, 0, 0, 0, 0, 0, 0)


class TrtllmMetrics:
    """The collectors of one engine in the registry given, labelled by attention-DP rank where ranks differ."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"poolgrid_trtllm_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"poolgrid_trtllm_{name}", text, ("dp_rank",), registry=registry)

        self._kv_blocks_used = gauge(
            "kv_blocks_used",
            "Device blocks that requests hold, as the engine says. Reusable content that nobody holds is not "
            "among them.",
        )
        self._kv_blocks = gauge("kv_blocks", "Device blocks of the engine.")
        self._kv_hit_ratio = gauge(
            "kv_hit_ratio", "Share of looked-up blocks that were reused since the engine began, its warm-up included."
        )
        self._active = gauge(
            "active_requests",
            "Requests in the engine's batch, as of its last iteration. An idle engine reports nothing, and "
            "neither does one that hangs.",
        )
        self._queued = gauge("queued_requests", "Requests that the engine has not begun, as of its last iteration.")
        self._paused = gauge(
            "paused_requests",
            "Requests that gave up their blocks and wait to go on. The cache is too small for the batch.",
        )
        self._iteration_seconds = Histogram(
            "poolgrid_trtllm_iteration_seconds",
            "Duration of an engine iteration, which is a floor under ITL.",
            ("dp_rank",),
            buckets=ITERATION_SECONDS_BUCKETS,
            registry=registry,
        )
        self._events = counter(
            "kv_events_total",
            "KV cache events read. If it is flat while the engine works, events are off or the reader fails.",
            "dp_rank",
        )
        self._lost = counter(
            "kv_events_lost_total",
            "KV cache events that the engine dropped unread. If there are any, raise `event_buffer_max_size`.",
            "dp_rank",
        )
        self._gaps = counter(
            "kv_event_gaps_total",
            "Times that events were lost, or could not be read for long, and the index of the rank was cleared.",
            "dp_rank",
        )
        self._restarts = counter("engine_restarts_total", "Times that the event numbers began again.", "dp_rank")
        self._recalled = counter(
            "recalled_blocks_total", "Blocks from before a loss that the engine proved to be there.", "dp_rank"
        )
        self._unnamed = counter(
            "unnamed_blocks_total",
            "Blocks that routers are not told of, by reason: `partial` (not full, which is normal), `orphaned` "
            "(after a loss), `multimodal`, or `foreign` (of an adapter or salt that the worker was not told "
            "of).",
            "dp_rank",
            "reason",
        )
        self._incomplete = gauge(
            "incomplete",
            "1 from a loss of events until the cache has turned over. Meanwhile blocks may be missing from the "
            "index, but none in it is wrong.",
        )
        self._remembered = gauge(
            "remembered_blocks",
            "Blocks from before a loss that the engine has neither proved nor disproved to be there.",
        )
        self._blocks = Gauge(
            "poolgrid_trtllm_indexed_blocks",
            "Blocks that routers are told of, by tier.",
            ("dp_rank", "tier"),
            registry=registry,
        )
        self.lag_seconds = Histogram(
            "poolgrid_trtllm_kv_event_lag_seconds",
            "Longest that the events of one reading can have waited to be read. It grows when the worker's "
            "event loop is busy.",
            buckets=LAG_SECONDS_BUCKETS,
            registry=registry,
        )
        self.reader_errors = counter(
            "reader_errors_total",
            "Readings of `events` or `statistics` that failed. `/health` has the text of the error.",
            "reader",
        )
        self.undecodable = counter(
            "undecodable_items_total",
            "Events and statistics of a shape that is not known. The engine is another version of TensorRT-LLM.",
            "reader",
        )
        self.media_miscounted = counter(
            "media_miscounted_total",
            "Prompts with media that have another number of tokens in the engine than routers counted. Their blocks "
            "behind the media are never found again. The log has the first of them.",
        )
        self.own_metrics_errors = counter(
            "own_metrics_errors_total",
            "Failures of TensorRT-LLM's own metrics (`trtllm_*`, in the same answer), which are shown as they come.",
        )
        self._counted: dict[int, Counts] = {}
        self._miscounts = 0

    def note_miscounted(self, believed: int, made: int) -> None:
        """Count a prompt with media that has another number of tokens in the engine than a router counted."""
        if not self._miscounts:
            log.warning(
                "a prompt with media has %d tokens in the engine, and its router counted %d: routing will not find "
                "the blocks behind its media again. Later ones are only counted",
                made,
                believed,
            )
        self._miscounts += 1
        self.media_miscounted.inc()

    def observe_events(self, rank: int, events: int, translator: EventTranslator) -> None:
        """Count what a translator has made of some more events."""
        label = str(rank)
        before = self._counted.get(rank, NO_COUNTS)
        counts = self._counted[rank] = translator.counts
        if events:
            self._events.labels(label).inc(events)
        if counts != before:
            self._lost.labels(label).inc(counts.lost_events - before.lost_events)
            self._gaps.labels(label).inc(counts.gaps - before.gaps)
            self._restarts.labels(label).inc(counts.restarts - before.restarts)
            self._recalled.labels(label).inc(counts.recalled_blocks - before.recalled_blocks)
            for reason in ("partial", "orphaned", "multimodal", "foreign"):
                name = f"{reason}_blocks"
                self._unnamed.labels(label, reason).inc(getattr(counts, name) - getattr(before, name))
        self._incomplete.labels(label).set(translator.is_incomplete)
        self._remembered.labels(label).set(translator.remembered_blocks)
        for tier in (Tier.DEVICE, Tier.HOST):
            self._blocks.labels(label, tier.name.lower()).set(translator.blocks_on(tier))

    def observe_stream(self, rank: int, device_blocks: int, host_blocks: int) -> None:
        """Show what routers were told of a rank that publishes by itself."""
        for tier, blocks in ((Tier.DEVICE, device_blocks), (Tier.HOST, host_blocks)):
            self._blocks.labels(str(rank), tier.name.lower()).set(blocks)

    def observe_iteration(self, statistics: EngineStatistics) -> None:
        self._iteration_seconds.labels(str(statistics.rank)).observe(statistics.iteration_latency_ms / 1e3)

    def observe_load(self, statistics: EngineStatistics) -> None:
        """Show a rank's newest statistics."""
        label = str(statistics.rank)
        self._active.labels(label).set(statistics.active_requests)
        self._queued.labels(label).set(statistics.queued_requests)
        self._paused.labels(label).set(statistics.paused_requests)
        cache = statistics.kv_cache
        if cache is not None:
            self._kv_blocks_used.labels(label).set(cache.used_num_blocks)
            self._kv_blocks.labels(label).set(cache.max_num_blocks)
            if cache.cache_hit_rate is not None:
                self._kv_hit_ratio.labels(label).set(cache.cache_hit_rate)
