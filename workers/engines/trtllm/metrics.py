"""What a worker measures of TensorRT-LLM: ``poolgrid_trtllm_*``, each described here and in ``docs/metrics.md``.

Requests, blocks and step times are those of every worker (``workers.metrics``).
"""

from __future__ import annotations

import logging

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from poolgrid.wire.identifiers import Tier
from poolgrid.workers.core.event_translation import Counts, EventTranslator
from poolgrid.workers.engines.trtllm.core.statistics import EngineStatistics

log = logging.getLogger(__name__)

LAG_SECONDS_BUCKETS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0)

NO_COUNTS = Counts(0, 0, 0, 0, 0, 0, 0, 0, 0)


class TrtllmMetrics:
    """The collectors of one engine in the registry given, labelled by attention-DP rank where ranks differ."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"poolgrid_trtllm_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"poolgrid_trtllm_{name}", text, ("dp_rank", *labels), registry=registry)

        self._kv_hit_ratio = gauge(
            "kv_hit_ratio", "Share of looked-up blocks that were reused since the engine started, warm-up included."
        )
        self._paused = gauge(
            "paused_requests",
            "Preempted requests that wait to continue. The cache is too small for the batch.",
        )
        self._events = counter(
            "kv_events_total",
            "KV cache events read. If it is constant while the engine works, events are off or the reader fails.",
            "dp_rank",
        )
        self._lost = counter(
            "kv_events_lost_total",
            "KV cache events that the engine dropped. Raise `event_buffer_max_size` if there are any.",
            "dp_rank",
        )
        self._gaps = counter(
            "kv_event_gaps_total",
            "Times that the index of the rank was cleared after lost or late events.",
            "dp_rank",
        )
        self._unnamed = counter(
            "unnamed_blocks_total",
            "Blocks not reported to routers, by reason: `partial` (not full, normal), `orphaned` (after a "
            "loss), `multimodal`, or `foreign` (unknown adapter or salt).",
            "dp_rank",
            "reason",
        )
        self._incomplete = gauge(
            "incomplete",
            "1 from a loss of events until the cache has turned over. Blocks may be missing from the index; "
            "none is wrong.",
        )
        self._blocks = gauge("indexed_blocks", "Blocks reported to routers, by tier.", "tier")
        self.lag_seconds = Histogram(
            "poolgrid_trtllm_kv_event_lag_seconds",
            "Longest possible wait of the events of one reading. It grows when the worker's event loop is busy.",
            buckets=LAG_SECONDS_BUCKETS,
            registry=registry,
        )
        self.reader_errors = counter(
            "reader_errors_total",
            "Failed readings of `events` or `statistics`. `/health` has the error.",
            "reader",
        )
        self.undecodable = counter(
            "undecodable_items_total",
            "Events and statistics of an unknown form: the engine has another version of TensorRT-LLM.",
            "reader",
        )
        self.media_miscounted = counter(
            "media_miscounted_total",
            "Prompts with media whose token count differs between engine and router. Blocks behind the media "
            "are never reused. The log has the first one.",
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
            for reason in ("partial", "orphaned", "multimodal", "foreign"):
                name = f"{reason}_blocks"
                self._unnamed.labels(label, reason).inc(getattr(counts, name) - getattr(before, name))
        self._incomplete.labels(label).set(translator.is_incomplete)
        self.observe_blocks(rank, translator.blocks_on(Tier.DEVICE), translator.blocks_on(Tier.HOST))

    def observe_blocks(self, rank: int, device_blocks: int, host_blocks: int) -> None:
        """Show how many blocks of a rank routers were told of."""
        for tier, blocks in ((Tier.DEVICE, device_blocks), (Tier.HOST, host_blocks)):
            self._blocks.labels(str(rank), tier.name.lower()).set(blocks)

    def observe_load(self, statistics: EngineStatistics) -> None:
        """Show a rank's newest statistics."""
        label = str(statistics.rank)
        self._paused.labels(label).set(statistics.paused_requests)
        cache = statistics.kv_cache
        if cache is not None and cache.cache_hit_rate is not None:
            self._kv_hit_ratio.labels(label).set(cache.cache_hit_rate)
