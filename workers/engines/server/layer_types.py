"""Which layers a model has besides full attention: servers whose events leave these out promise too much."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

CONFIG_BYTES_MAX = 4 * 2**20
"""Configurations have a few kilobytes, with quantization by layer up to a megabyte."""

Types = Annotated[list[str], msgspec.Meta(max_length=4096)]


class _Text(msgspec.Struct):
    layer_types: Types | None = None


class _Config(msgspec.Struct):
    layer_types: Types | None = None
    text_config: _Text | None = None


def other_layers(model_path: str) -> set[str]:
    """Return the ``layer_types`` of a model's configuration besides full attention.

    Empty where the model is no directory of this machine, or its configuration names no types: then they are unknown.
    """
    try:
        with (Path(model_path) / "config.json").open("rb") as file:
            config = msgspec.json.decode(file.read(CONFIG_BYTES_MAX), type=_Config)
    except (OSError, ValueError, msgspec.MsgspecError):
        return set()
    types = config.layer_types or (config.text_config.layer_types if config.text_config else None) or []
    return set(types) - {"full_attention"}


def events_leave_out(layers: set[str]) -> str:
    """Return why events are not followed that say nothing of these layers; empty = there are none."""
    if not layers:
        return ""
    return f"they say nothing of its layers with {', '.join(sorted(layers))}, without which no prompt is resumed"
