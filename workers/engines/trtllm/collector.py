"""TensorRT-LLM's own Prometheus metrics, shown on the worker's ``/metrics`` beside ours, as ``trtllm_*``.

Its ``MetricsCollector`` writes into the process-wide registry of ``prometheus_client`` and takes no other. A bridge in
the worker's registry shows what the collector holds. Method names changed after 1.2 (``log_metrics_dict`` became
``log_request_metrics_dict``, ``log_iteration_stats`` was added), so the methods are looked for, not the version. Its
failures are counted and never reach a request.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from poolgrid.workers.engines.trtllm.metrics import TrtllmMetrics

log = logging.getLogger(__name__)

ENGINE_TYPE = "trtllm"
FINISHED_REASON = "finished_reason"
"""Key of a request's metrics under which the collector expects why it ended."""

REQUEST_METHODS = ("log_request_metrics_dict", "log_metrics_dict")
"""After 1.2, and in 1.2."""
ITERATION_METHOD = "log_iteration_stats"


class _Bridge(Collector):
    """Shows the metrics that an object holds."""

    def __init__(self, holder: Any) -> None:
        self._holder = holder
        self._told = False

    def describe(self) -> Iterable[Metric]:
        """Name nothing: what the engine has is known only when it is asked."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Return what there is now."""
        found = [metric for each in _metrics_of(self._holder) for metric in each.collect()]
        if not found and self._holder is not None and not self._told:
            self._told = True
            log.warning("TensorRT-LLM's own metrics are not shown: its collector holds none that could be read")
        return found


class EngineCollector:
    """The engine's own metrics of one ``LLM``; does nothing but warn when the installed version has none.

    ``registry`` is the worker's. ``close`` takes everything out again, so that a process can make another engine.
    """

    def __init__(self, registry: CollectorRegistry, model_name: str, metrics: TrtllmMetrics) -> None:
        self._registry = registry
        self._errors = metrics.own_metrics_errors
        self._told = False
        self._collector: Any = None
        self._on_request: Callable[[dict[str, Any]], None] | None = None
        self._on_iteration: Callable[[Mapping[str, Any]], None] | None = None
        try:
            from tensorrt_llm.metrics import MetricsCollector

            self._collector = MetricsCollector({"model_name": model_name, "engine_type": ENGINE_TYPE})
        except Exception as error:
            # Another version, or a second engine in this process: the worker serves without them.
            log.warning("TensorRT-LLM's own metrics are not shown: %r", error)
            self._errors.inc()
        for name in REQUEST_METHODS:
            self._on_request = self._on_request or getattr(self._collector, name, None)
        self._on_iteration = getattr(self._collector, ITERATION_METHOD, None)
        self._bridge = _Bridge(self._collector)
        registry.register(self._bridge)

    def observe_request(self, metrics_dict: Mapping[str, Any], finish_reason: str | None) -> None:
        """Take a finished request's ``metrics_dict``; empty without ``return_perf_metrics``."""
        if self._on_request is None:
            return
        item = dict(metrics_dict)
        if finish_reason is not None:
            item.setdefault(FINISHED_REASON, finish_reason)
        self._guarded(self._on_request, item)

    def observe_iteration(self, item: Mapping[str, Any]) -> None:
        """Take an iteration's statistics, where the version wants them."""
        if self._on_iteration is not None:
            self._guarded(self._on_iteration, item)

    def close(self) -> None:
        """Show nothing any more."""
        self._registry.unregister(self._bridge)
        for each in _metrics_of(self._collector):
            try:
                REGISTRY.unregister(each)
            except KeyError:
                pass  # it was in another registry

    def _guarded(self, call: Callable[[Any], None], item: Any) -> None:
        try:
            call(item)
        except Exception as error:
            self._errors.inc()
            if not self._told:
                self._told = True
                log.warning("TensorRT-LLM's own metrics failed, later failures are only counted: %r", error)


def _metrics_of(holder: Any) -> Iterable[MetricWrapperBase]:
    """Return the metrics that an object has as attributes, or in dictionaries that it has."""
    return () if holder is None else _metrics_in(getattr(holder, "__dict__", {}))


def _metrics_in(values: Mapping[str, Any]) -> Iterable[MetricWrapperBase]:
    for value in values.values():
        if isinstance(value, MetricWrapperBase):
            yield value
        elif isinstance(value, dict):
            yield from _metrics_in(value)
