"""Settings that were removed or renamed, by option: what to use in their place. Refused by name for one version."""

from __future__ import annotations

FORMER_SETTINGS: dict[str, str] = {
    # router, global router, admission
    # front end: HTTP, tenants, media, tracing
    # consolidator, feed, discovery, NATS
    # workers: common
    # workers: TensorRT-LLM
    "--backend": "the backend is pytorch; for AutoDeploy use --engine trtllm-serve.",
    "--gpu-interval-ms": "workers show no GPU metrics, run dcgm-exporter.",
    # workers: servers and the simulated engine
    # up, bench, simulate, engine-check, model, journal
}
"""Option as it was typed, such as ``--feed-interval-ms``, to one sentence: the new option, or the fixed value."""
