"""API keys blotted out of texts that another process wrote: some servers repeat the request in their answer."""

from __future__ import annotations

import json
from collections.abc import Collection
from functools import lru_cache


def blotted(text: bytes, keys: Collection[bytes]) -> bytes:
    """Return the text with stars in place of each key, as it is and as JSON writes it; its length stays.

    For header lines, and for what of an answer a client or a log gets. A text is blotted before it is cut, because a
    part of a key is not recognised.
    """
    for key in sorted(keys, key=len, reverse=True) if len(keys) > 1 else keys:
        for form in _forms(key):
            if form in text:
                text = text.replace(form, b"*" * len(form))
    return text


def blotted_part(text: bytes, keys: Collection[bytes]) -> tuple[bytes, bytes]:
    """Return what of the next part of a body can be passed, and its end, which may be the beginning of a key."""
    text = blotted(text, keys)
    kept = max((len(form) for key in keys for form in _forms(key)), default=1) - 1
    cut = max(0, len(text) - kept)
    return text[:cut], text[cut:]


@lru_cache(maxsize=64)
def _forms(key: bytes) -> tuple[bytes, ...]:
    """The longest first: it contains the others."""
    if not key:
        return ()
    plain = json.dumps(key.decode("latin-1"), ensure_ascii=False)[1:-1].encode("latin-1")
    return tuple(sorted({key, plain, plain.replace(b"/", b"\\/")}, key=len, reverse=True))


def without_received_bytes(error: Exception) -> str:
    """Return the message of an HTTP library's error without the bytes of an answer, which h11 quotes whole."""
    return str(error).partition("bytearray(")[0].rstrip(": ") or type(error).__name__
