"""Which arguments a release lacks or has besides those of 1.2.1, section by section, in the words of the facts.

Sources: the differences that ``contract_1_2_1.json`` and the files of the 1.1 and 1.3 lines name. What poolgrid itself
knows of the 1.3 line stands in its own facts (``later_arguments.json``), and is taken from there.
"""

from __future__ import annotations

from typing import Any

from poolgrid.workers.engines.trtllm.arguments.later_arguments import LATER_FIELDS

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
        "kv_cache_config": LATER_FIELDS["kv_cache_config"],
        "scheduler_config": {"waiting_queue_policy": {"type": "Literal['fcfs','priority']", "default": "fcfs"}},
    },
}
"""A field that 1.2.1 has too is replaced."""
