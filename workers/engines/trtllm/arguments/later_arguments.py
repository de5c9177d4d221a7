"""Arguments that came after TensorRT-LLM 1.2.1 and that poolgrid knows what to do with, in the words of the contract.

They pass the check of arguments, which happens before the package is imported. Whether the installed version has them
is asked of its own classes, when it is (``missing``). Source: the published reference of the 1.3 line
(``KvCacheConfig``, ``KVEventsConfig``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

KV_CACHE = "kv_cache_config"
KV_EVENTS = "kv_events_config"

LATER_FIELDS: dict[str, dict[str, dict[str, Any]]] = {
    KV_CACHE: {
        "use_kv_cache_manager_v2": {"type": "bool | Literal['auto']", "default": "auto"},
        "kv_cache_event_hash_algo": {
            "type": "Literal['auto','v1_block_key','v2_sha256','v2_sha256_64']",
            "default": "auto",
        },
        KV_EVENTS: {"type": f"{KV_EVENTS} | None", "default": None},
    },
    KV_EVENTS: {
        "enable_kv_cache_events": {"type": "bool", "default": False},
        "publisher": {"type": "Literal['null','zmq'] | None", "default": None},
        "endpoint": {"type": "str", "default": "tcp://*:5557"},
        "replay_endpoint": {"type": "str | None", "default": None},
        "buffer_steps": {"type": "int", "default": 10_000, "range": "> 0"},
        "hwm": {"type": "int", "default": 100_000, "range": "> 0"},
        "max_queue_size": {"type": "int", "default": 100_000, "range": "> 0"},
        "topic": {"type": "str", "default": ""},
    },
}
"""By section."""


def missing(values: Mapping[str, Any], kv_cache_fields: Collection[str]) -> list[str]:
    """Return the paths of later arguments that are given and that the installed ``KvCacheConfig`` does not have."""
    given = values.get(KV_CACHE) or {}
    return [f"{KV_CACHE}.{name}" for name in LATER_FIELDS[KV_CACHE] if name in given and name not in kv_cache_fields]
