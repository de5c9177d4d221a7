"""TensorRT-LLM's own Prometheus metrics, by the names of the 1.2 line."""

from __future__ import annotations

from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram


class MetricsCollector:
    """Counts finished requests and their times; ``log_metrics_dict`` was renamed after 1.2."""

    def __init__(self, labels: dict[str, str], registry: CollectorRegistry = REGISTRY) -> None:
        self.labels = labels
        names = list(labels)
        self._finished = Counter(
            "trtllm_request_success_total", "Requests by finish reason.", [*names, "finished_reason"], registry=registry
        )
        self._histograms = {
            key: Histogram(f"trtllm_{name}", text, names, registry=registry)
            for key, name, text in (
                ("e2e", "e2e_request_latency_seconds", "End to end latency."),
                ("ttft", "time_to_first_token_seconds", "Time to first token."),
                ("tpot", "time_per_output_token_seconds", "Time per output token."),
                ("request_queue_time", "request_queue_time_seconds", "Time in the queue."),
            )
        }

    def log_metrics_dict(self, metrics_dict: dict[str, Any]) -> None:
        reason = metrics_dict.get("finished_reason")
        if reason is not None:
            self._finished.labels(**self.labels, finished_reason=reason).inc()
        for key, histogram in self._histograms.items():
            if key in metrics_dict:
                histogram.labels(**self.labels).observe(metrics_dict[key])
