"""Which arguments a release lacks or has besides those of 1.2.1, section by section, in the words of the facts.

Sources: the differences that ``contract_1_2_1.json`` and the files of the 1.1 and 1.3 lines name.
"""

from __future__ import annotations

from typing import Any

LACKING: dict[str, dict[str, tuple[str, ...]]] = {
    "1.1.0": {
        "llm_args": ("custom_tokenizer", "env_overrides", "otlp_traces_endpoint", "pp_partition", "max_stats_len"),
        "kv_cache_config": ("max_gpu_total_bytes",),
        "cache_transceiver_config": ("kv_transfer_sender_future_timeout_ms",),
    },
    "1.2.1": {},
    "1.3.0": {},
}

ADDED: dict[str, dict[str, dict[str, Any]]] = {
    "1.1.0": {
        "llm_args": {"build_config": {"type": "object | None", "default": None}},
        "cache_transceiver_config": {
            "backend": {"type": "Literal['DEFAULT','UCX','NIXL','MPI'] | None", "default": None}
        },
    },
    "1.2.1": {},
    "1.3.0": {
        "llm_args": {
            "model_kwargs": {"type": "dict | None", "default": None},
            "post_processor_hook": {"type": "str | None", "default": None},
        },
        "kv_cache_config": {
            "kv_events_config": {"type": "KVEventsConfig | None", "default": None},
            "use_kv_cache_manager_v2": {"type": "bool | Literal['auto']", "default": "auto"},
            "kv_cache_event_hash_algo": {
                "type": "Literal['auto','v1_block_key','v2_sha256','v2_sha256_64']",
                "default": "auto",
            },
        },
        "scheduler_config": {"waiting_queue_policy": {"type": "Literal['fcfs','priority']", "default": "fcfs"}},
    },
}
"""A field that 1.2.1 has too is replaced."""

KV_EVENTS: dict[str, dict[str, Any]] = {
    "enable_kv_cache_events": {"type": "bool", "default": False},
    "publisher": {"type": "Literal['null','zmq'] | None", "default": None},
    "endpoint": {"type": "str", "default": "tcp://*:5557"},
    "replay_endpoint": {"type": "str | None", "default": None},
    "buffer_steps": {"type": "int", "default": 10_000, "range": "> 0"},
    "hwm": {"type": "int", "default": 100_000, "range": "> 0"},
    "max_queue_size": {"type": "int", "default": 100_000, "range": "> 0"},
    "topic": {"type": "str", "default": ""},
}
"""Fields of ``KVEventsConfig``, where there is one (the published reference of the 1.3 line)."""
