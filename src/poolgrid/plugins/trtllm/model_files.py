"""Reads a model's configuration files: from its directory, or from Hugging Face's cache, never from the network."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from poolgrid.plugins.trtllm.core.model_facts import (
    CONFIG_FILE,
    GENERATION_FILE,
    PREPROCESSOR_FILE,
    ModelFacts,
    model_facts,
)

log = logging.getLogger(__name__)

FILE_BYTES_MAX = 8 * 1024 * 1024
"""A configuration has kilobytes; a larger file is something else."""


def read_model_facts(model: str) -> ModelFacts:
    """Return what the files of a model say; what is not there or cannot be read is not known, and logged.

    An engine that has loaded the model has also brought its files into the cache.
    """
    config = _read(model, CONFIG_FILE)
    # Models of text have none, and that needs no warning.
    preprocessor = _read(model, PREPROCESSOR_FILE) if "vision_config" in config else {}
    return model_facts(config, _read(model, GENERATION_FILE), preprocessor)


def _read(model: str, name: str) -> dict[str, Any]:
    path = _find(model, name)
    if path is None:
        log.info("model %s: no %s was found; the worker's card lacks its contents", model, name)
        return {}
    try:
        if path.stat().st_size > FILE_BYTES_MAX:
            raise ValueError(f"more than {FILE_BYTES_MAX} bytes")
        value = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(value, dict):
            raise ValueError("not a JSON object")
    except (OSError, ValueError, RecursionError) as error:
        log.warning("reading %s: %s; the worker's card lacks its contents", path, error)
        return {}
    return value


def _find(model: str, name: str) -> Path | None:
    directory = Path(model)
    if directory.is_dir():
        path = directory / name
        return path if path.is_file() else None
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(model, name)
    except (ImportError, ValueError):  # not a repository's name, or no such package
        return None
    return Path(found) if isinstance(found, str) else None
