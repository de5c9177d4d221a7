"""Model directories that ship with poolgrid: tokenizer, template and configuration, no weights."""

from __future__ import annotations

from pathlib import Path

TINY_MODEL_PATH = Path(__file__).parent / "tiny"
"""The tiny model directory of the simulated engine; built by ``lab/build_tiny.py``."""
