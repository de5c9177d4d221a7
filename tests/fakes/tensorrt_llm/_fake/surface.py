"""Which arguments a release has besides those of 1.2.1, section by section, in the words of the facts.

Sources: the differences that ``contract_1_2_1.json`` and the files of the 1.3 line name. What poolgrid itself
knows of the 1.3 line stands in its own facts (``later_arguments.json``), and is taken from there.
"""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

from poolgrid.plugins.trtllm import arguments

RUN_TIME, LATER_FIELDS, FIELDS_OF_1_4 = (
    json.loads(resources.files(arguments).joinpath(name).read_text())
    for name in ("arguments_1_2_1.json", "later_arguments.json", "arguments_1_4.json")
)

ADDED: dict[str, dict[str, dict[str, Any]]] = {
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

ADDED["1.4.0rc4"] = {
    section: {
        # Sections that the fake has no class of are any mapping.
        **{name: {**each, "default": None} for name, each in FIELDS_OF_1_4.get(section, {}).items()},
        **ADDED["1.3.0"].get(section, {}),
    }
    for section in {*ADDED["1.3.0"], *FIELDS_OF_1_4} - {"_provenance", "_version", "enums", "unions"}
}

GONE: dict[str, dict[str, frozenset[str]]] = {"1.4.0rc4": {"kv_cache_config": frozenset({"onboard_blocks"})}}
"""Fields of 1.2.1 that a release has no more."""
