"""What passes by of an engine's answer: that it has begun, and how much of the prompt it says it reused.

Usage stands at the end of an answer, in OpenAI's and in Anthropic's form, streamed or whole. So its last bytes are kept
and looked at once; nothing is parsed while a stream flows.
"""

from __future__ import annotations

import json
from typing import Any

TAIL_BYTES = 16 * 1024
"""Kept of the end of an answer: the usage, and the choices of a whole answer's last lines. Older ones go."""

_USAGE = '"usage"'
_decoder = json.JSONDecoder()


class AnswerReader:
    """Reads one answer."""

    def __init__(self) -> None:
        self.has_begun = False
        self._tail = bytearray()

    def take(self, part: bytes) -> bool:
        """Take the next bytes of the body; return whether they are the first."""
        if not part:
            return False
        is_first, self.has_begun = not self.has_begun, True
        self._tail += part
        if len(self._tail) > 2 * TAIL_BYTES:
            del self._tail[:-TAIL_BYTES]
        return is_first

    def cached_tokens(self) -> int | None:
        """Return the prompt tokens that the answer says came from a cache; ``None`` where it does not say."""
        text = self._tail.decode("utf-8", "replace")
        at = text.rfind(_USAGE)
        while at >= 0:
            value = _value_after(text, at + len(_USAGE))
            if isinstance(value, dict):
                return _cached(value)
            at = text.rfind(_USAGE, 0, at)  # a last chunk may have ``"usage": null``
        return None


def _value_after(text: str, at: int) -> Any:
    rest = text[at:].lstrip()
    if not rest.startswith(":"):
        return None
    try:
        return _decoder.raw_decode(rest[1:].lstrip())[0]
    except (ValueError, RecursionError):
        return None


def _cached(usage: dict[str, Any]) -> int | None:
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
    value = details.get("cached_tokens") if isinstance(details, dict) else usage.get("cache_read_input_tokens")
    return value if type(value) is int and value >= 0 else None
