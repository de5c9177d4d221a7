"""gzip for whole answers, for clients that take it; request bodies are ``poolgrid.frontend.inflation``'s."""

from __future__ import annotations

import gzip

LEVEL = 1
"""JSON of an answer is repetitive: the fastest level comes within a few percent of the best."""

GZIP_BYTES_MIN = 4096
"""Shortest answer that is compressed: shorter ones fit into a few packets. Streams are never compressed."""


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
