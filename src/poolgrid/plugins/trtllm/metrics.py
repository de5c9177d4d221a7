"""What a worker measures of TensorRT-LLM: ``poolgrid_trtllm_*``, each described here and in ``docs/metrics.md``.

Requests, blocks and step times are those of every worker (``workers.metrics``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from poolgrid.kernel.wire.identifiers import Tier
from poolgrid.kernel.worker_protocol.event_translation import Counts, EventTranslator
from poolgrid.plugins.trtllm.core.statistics import EngineStatistics

log = logging.getLogger(__name__)

LAG_SECONDS_BUCKETS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0)

NO_COUNTS = Counts()


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
        counts = self._counted[rank] = copy(translator.counts)
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
        for tier, blocks in ((Tier.DEVICE, device_blocks), (Tier.HOST, host_blocks)):
            self._blocks.labels(str(rank), tier.name.lower()).set(blocks)

    def observe_load(self, statistics: EngineStatistics) -> None:
        """Show a rank's newest statistics."""
        label = str(statistics.rank)
        self._paused.labels(label).set(statistics.paused_requests)
        cache = statistics.kv_cache
        if cache is not None and cache.cache_hit_rate is not None:
            self._kv_hit_ratio.labels(label).set(cache.cache_hit_rate)


PREFIX = "trtllm_"
ENGINE_TYPE = "trtllm"
FINISHED_REASON = "finished_reason"
"""Key of a request's metrics under which the collector expects why it ended."""

REQUEST_METHODS = ("log_request_metrics_dict", "log_metrics_dict")
"""After 1.2, and in 1.2."""
ITERATION_METHOD = "log_iteration_stats"


class EngineCollector(Collector):
    """TensorRT-LLM's own metrics of one ``LLM``, on the worker's ``/metrics`` as ``trtllm_*``; warns without any.

    Its ``MetricsCollector`` writes into the process-wide registry and takes no other, so this bridge shows what has its
    prefix there. Method names changed after 1.2, so the methods are looked for. Failures are logged once and never
    reach a request.

    ``registry`` is the worker's. ``close`` takes the bridge out again, so that a process can make another engine.
    """

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self._registry = registry
        self._warned = False
        self._collector: Any = None
        self._on_request: Callable[[dict[str, Any]], None] | None = None
        before = set(REGISTRY._collector_to_names)
        try:
            from tensorrt_llm.metrics import MetricsCollector

            self._collector = MetricsCollector({"model_name": model_name, "engine_type": ENGINE_TYPE})
        except Exception as error:
            # Another version, or a second engine in this process: the worker serves without them.
            log.warning("TensorRT-LLM's own metrics are not shown: %r", error)
        self._made = set(REGISTRY._collector_to_names) - before
        for name in REQUEST_METHODS:
            self._on_request = self._on_request or getattr(self._collector, name, None)
        self._on_iteration = getattr(self._collector, ITERATION_METHOD, None)
        registry.register(self)

    def describe(self) -> Iterable[Metric]:
        """Name nothing: what the engine has is known only when it is asked."""
        return ()

    def collect(self) -> Iterable[Metric]:
        return [metric for each in self._made for metric in each.collect() if metric.name.startswith(PREFIX)]

    def observe_request(self, metrics_dict: Mapping[str, Any], finish_reason: str | None) -> None:
        """Take a finished request's ``metrics_dict``; empty without ``return_perf_metrics``."""
        item = dict(metrics_dict)
        if finish_reason is not None:
            item.setdefault(FINISHED_REASON, finish_reason)
        self._guarded(self._on_request, item)

    def observe_iteration(self, item: Mapping[str, Any]) -> None:
        self._guarded(self._on_iteration, item)

    def close(self) -> None:
        self._registry.unregister(self)
        for each in self._made:
            REGISTRY.unregister(each)

    def _guarded(self, call: Callable[[Any], None] | None, item: Any) -> None:
        if call is None:
            return
        try:
            call(item)
        except Exception as error:
            if not self._warned:
                self._warned = True
                log.warning("TensorRT-LLM's own metrics failed, later failures are not logged: %r", error)
