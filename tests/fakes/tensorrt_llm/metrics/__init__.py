# ruff: noqa: TID252 - relative, so that it imports as tensorrt_llm and as tests.fakes.tensorrt_llm
"""TensorRT-LLM's own Prometheus metrics: their prefix and the names of the methods differ between releases."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from .._fake.profile import PROFILE


class _Collector:
    """Counts finished requests and their times."""

    def __init__(self, labels: dict[str, str], registry: CollectorRegistry = REGISTRY) -> None:
        self.labels = labels
        self.metric_prefix = "trtllm_"
        names = list(labels)
        self._finished = Counter(
            f"{self.metric_prefix}request_success_total",
            "Requests by finish reason.",
            [*names, "finished_reason"],
            registry=registry,
        )
        self._histograms = {
            key: Histogram(f"{self.metric_prefix}{name}", text, names, registry=registry)
            for key, name, text in (
                ("e2e", "e2e_request_latency_seconds", "End to end latency."),
                ("ttft", "time_to_first_token_seconds", "Time to first token."),
                ("tpot", "time_per_output_token_seconds", "Time per output token."),
                ("request_queue_time", "request_queue_time_seconds", "Time in the queue."),
            )
        }

    def _log(self, metrics_dict: dict[str, Any]) -> None:
        reason = metrics_dict.get("finished_reason")
        if reason is not None:
            self._finished.labels(**self.labels, finished_reason=reason).inc()
        for key, histogram in self._histograms.items():
            if key in metrics_dict:
                histogram.labels(**self.labels).observe(metrics_dict[key])


class _Released(_Collector):
    """The collector of 1.2 and before."""

    def log_metrics_dict(self, metrics_dict: dict[str, Any]) -> None:
        self._log(metrics_dict)


class _Later(_Collector):
    """The collector after 1.2: one method renamed, one more, and gauges of iterations."""

    def __init__(self, labels: dict[str, str], registry: CollectorRegistry = REGISTRY) -> None:
        super().__init__(labels, registry)
        self._gauges = {
            key: Gauge(f"{self.metric_prefix}{name}", text, list(labels), registry=registry)
            for key, name, text in (
                ("numActiveRequests", "num_requests_running", "Active requests."),
                ("numQueuedRequests", "num_requests_waiting", "Queued requests."),
            )
        }

    def log_request_metrics_dict(self, metrics_dict: dict[str, Any]) -> None:
        self._log(metrics_dict)

    def log_iteration_stats(self, iteration_stats: dict[str, Any]) -> None:
        for key, gauge in self._gauges.items():
            if key in iteration_stats:
                gauge.labels(**self.labels).set(iteration_stats[key])


if TYPE_CHECKING:
    MetricsCollector = _Released
else:
    MetricsCollector = _Later if PROFILE.renamed_metrics else _Released
