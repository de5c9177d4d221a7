"""Series that boards show and that are not poolgrid's: names and labels as those who make them document them.

Of TensorRT-LLM 1.2 and later and of vLLM 0.12 and later (their pages on metrics), of ``prometheus_client`` and of
Prometheus itself.
"""

from __future__ import annotations

from collections.abc import Mapping

TARGET_LABELS = frozenset({"instance", "job", "namespace", "pool", "component"})
"""What ``deploy/prometheus/prometheus.yml`` puts to every series."""

FOREIGN: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(
        (
            "trtllm_num_requests_running",
            "trtllm_num_requests_waiting",
            "trtllm_kv_cache_utilization",
        ),
        frozenset({"model_name", "engine_type"}),
    ),
    **dict.fromkeys(
        (
            "vllm:num_requests_running",
            "vllm:num_requests_waiting",
            "vllm:kv_cache_usage_perc",
            "vllm:prefix_cache_hits_total",
            "vllm:prefix_cache_queries_total",
        ),
        frozenset({"model_name", "engine"}),
    ),
    **dict.fromkeys(("process_cpu_seconds_total", "process_resident_memory_bytes"), frozenset()),
    "up": frozenset(),
    "ALERTS": frozenset({"alertname", "alertstate", "severity"}),
}
"""Labels by series."""

RECORDED: Mapping[str, frozenset[str]] = {
    "poolgrid:worker_requests": frozenset({"worker", "role", "model"}),
}
"""Series that ``deploy/prometheus/rules`` records and boards show; a test compares them."""
