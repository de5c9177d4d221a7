"""The LoRA adapters that an engine is configured with: their names, numbers and places. Pure.

An adapter is called like its directory. Its number enters the engine's block hashes, so it must be the same in every
life and on every worker: it is made of the name, and two names with one number are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from poolgrid.wire.hashing import stable_u64
from poolgrid.wire.limits import IDENTIFIER_BYTES_MAX, LORAS_PER_WORKER_MAX

NUMBER_MAX = 2**31 - 1
"""Adapter numbers are signed 32-bit in the engine's caches."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """One LoRA adapter."""

    name: str
    number: int
    """The engine's ``lora_int_id``."""
    path: str
    checkpoint_source: str = "hf"


def adapter_number(name: str) -> int:
    """Return the number of an adapter, from 1."""
    return 1 + stable_u64(name) % NUMBER_MAX


def adapters(arguments: Mapping[str, Any]) -> dict[str, Adapter]:
    """Return the adapters of ``lora_config.lora_dir`` by name; raise ``ValueError`` for two with one name."""
    config = arguments.get("lora_config") or {}
    directories = config.get("lora_dir") or ()
    if len(directories) > LORAS_PER_WORKER_MAX:
        raise ValueError(
            f"reading lora_config.lora_dir: {len(directories)} adapters, allowed are at most {LORAS_PER_WORKER_MAX}"
        )
    found: dict[str, Adapter] = {}
    numbers: dict[int, str] = {}
    for directory in directories:
        name = PurePath(directory).name
        if not name or len(name) > IDENTIFIER_BYTES_MAX:
            raise ValueError(
                f"reading lora_config.lora_dir: {directory!r} ends in no name of 1 to {IDENTIFIER_BYTES_MAX} characters"
            )
        if name in found:
            raise ValueError(
                f"reading lora_config.lora_dir: {directory} and {found[name].path} are both called {name!r}; "
                "adapters are distinguished by the last part of their path"
            )
        number = adapter_number(name)
        if number in numbers:
            raise ValueError(
                f"reading lora_config.lora_dir: adapters {name!r} and {numbers[number]!r} would have the same number, "
                "rename one of them"
            )
        numbers[number] = name
        found[name] = Adapter(name, number, str(directory), config.get("lora_ckpt_source") or "hf")
    return found
