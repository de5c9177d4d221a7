"""Arguments that came after TensorRT-LLM 1.2.1 and that poolgrid knows what to do with (``later_arguments.json``).

They pass the check of arguments, which happens before the package is imported. Whether the installed version has them
is asked of its own classes, when it is (``missing``).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from importlib import resources
from typing import Any

KV_CACHE = "kv_cache_config"
KV_EVENTS = "kv_events_config"


def _read() -> dict[str, dict[str, dict[str, Any]]]:
    text = resources.files(__package__).joinpath("later_arguments.json").read_text(encoding="utf-8")
    return {name: fields for name, fields in json.loads(text).items() if not name.startswith("_")}


LATER_FIELDS = _read()
"""By section; those of ``kv_events_config`` are a section of their own that came with it."""


def missing(values: Mapping[str, Any], kv_cache_fields: Collection[str]) -> list[str]:
    """Return the paths of later arguments that are given and that the installed ``KvCacheConfig`` does not have."""
    given = values.get(KV_CACHE) or {}
    return [f"{KV_CACHE}.{name}" for name in LATER_FIELDS[KV_CACHE] if name in given and name not in kv_cache_fields]
