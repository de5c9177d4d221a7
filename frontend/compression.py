"""gzip on both ways: request bodies that clients compressed, and whole answers for clients that take it.

Inflation is bounded: a body of a few kilobytes can stand for gigabytes.
"""

from __future__ import annotations

import gzip
import zlib

from frontend.errors import RequestError

LEVEL = 1
"""JSON of an answer is repetitive: the fastest level comes within a few percent of the best."""

_GZIP = 16 + zlib.MAX_WBITS


def inflate(body: bytes, encoding: str, limit: int) -> bytes:
    """Return the body behind ``content-encoding``; raises ``RequestError`` 415 for other encodings, 413 above
    ``limit`` bytes, 400 for what is not gzip."""
    if encoding in ("", "identity"):
        return body
    if encoding not in ("gzip", "x-gzip"):
        raise RequestError(
            415,
            "unsupported_content_encoding",
            f"reading the request body: content-encoding is {encoding[:80]!r}, allowed are gzip and identity",
            param="content-encoding",
        )
    parts: list[bytes] = []
    room = limit
    try:
        while body:
            member = zlib.decompressobj(_GZIP)
            part = member.decompress(body, room + 1)
            room -= len(part)
            if room < 0:
                raise RequestError(
                    413,
                    "body_too_large",
                    f"reading the request body: inflated it has more than {limit} bytes, the limit "
                    "(setting max_body_bytes)",
                    headers=((b"connection", b"close"),),
                )
            if not member.eof:
                raise zlib.error("it ends too early")
            parts.append(part)
            body = member.unused_data
    except zlib.error as error:
        raise RequestError(
            400,
            "invalid_encoding",
            f"reading the request body: it is not valid gzip: {error}",
            param="content-encoding",
        ) from None
    return b"".join(parts)


def accepts_gzip(accept_encoding: bytes) -> bool:
    """Return whether a client takes gzip, by its ``accept-encoding``."""
    for entry in accept_encoding.lower().split(b","):
        coding, _, parameters = entry.partition(b";")
        if coding.strip() in (b"gzip", b"*"):
            quality = parameters.replace(b" ", b"")
            return not (quality.startswith(b"q=0") and not quality.strip(b"q=0."))
    return False


def compressed(body: bytes) -> bytes:
    """Return ``body`` as gzip; the same bytes for the same body, for there is no time in it."""
    return gzip.compress(body, LEVEL, mtime=0)
