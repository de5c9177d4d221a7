"""TensorRT-LLM's own Prometheus metrics, shown on the worker's ``/metrics`` beside ours, as ``trtllm_*``.

Its ``MetricsCollector`` writes into the process-wide registry of ``prometheus_client`` and takes no other. A bridge in
the worker's registry shows what has its prefix there. Method names changed after 1.2 (``log_metrics_dict`` became
``log_request_metrics_dict``, ``log_iteration_stats`` was added), so the methods are looked for, not the version. Its
failures are logged once and never reach a request.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

log = logging.getLogger(__name__)

PREFIX = "trtllm_"
ENGINE_TYPE = "trtllm"
FINISHED_REASON = "finished_reason"
"""Key of a request's metrics under which the collector expects why it ended."""

REQUEST_METHODS = ("log_request_metrics_dict", "log_metrics_dict")
"""After 1.2, and in 1.2."""
ITERATION_METHOD = "log_iteration_stats"


class EngineCollector(Collector):
    """The engine's own metrics of one ``LLM``; does nothing but warn when the installed version has none.

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
        """Show nothing any more."""
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
