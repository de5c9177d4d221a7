"""Places in a JSON document, written the way people look them up: ``$.prefill.mapping[2][1]``."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

JsonPath = tuple[str | int, ...]
"""Keys and indices from the root of a document."""

_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_TEXT_MAX = 60
"""A value in a message is cut here: the place is named anyway, and a line stays a line."""


def path_text(path: JsonPath) -> str:
    """Return a path as text; a key that is not a plain word is quoted: ``$["a b"]``."""
    parts = ["$"]
    for step in path:
        if isinstance(step, int):
            parts.append(f"[{step}]")
        elif _PLAIN_KEY.fullmatch(step) and len(step) <= _TEXT_MAX:
            parts.append(f".{step}")
        else:
            parts.append(f"[{json.dumps(step if len(step) <= _TEXT_MAX else step[:_TEXT_MAX] + '…')}]")
    return "".join(parts)


def value_text(value: Any) -> str:
    """Return a value as a short piece of JSON for a message: ``0.5``, ``true``, ``NaN``, ``an array of 3``."""
    if isinstance(value, list | tuple):
        return f"an array of {len(value)}"
    if isinstance(value, dict):
        return f"an object of {len(value)} keys"
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 200:
        return f"an integer of {value.bit_length()} bits"
    text = json.dumps(value) if isinstance(value, str | bool | int | float | None) else repr(value)
    return text if len(text) <= _TEXT_MAX else text[:_TEXT_MAX] + "…"


def suggestion(key: str, known: Sequence[str]) -> str:
    """Return ``; did you mean "..."?`` or nothing."""
    near = get_close_matches(key[:64], known, n=1, cutoff=0.6)
    return f"; did you mean {value_text(near[0])}?" if near else ""
