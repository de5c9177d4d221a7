"""How bytes of HTTP/1.1 are divided: where the body of a request ends, and what whole chunks hold.

Rules
    1. A body is handed on up to its end and not beyond, so what follows a request waits as it came, unparsed.
    2. httptools does not report where a request ends, but every chunked body ends with an empty line. So a chunked body
       is handed on up to each empty line, and a parser of its own reports whether it was the end.
    3. A chunked body is read in slices of the event loop, a few hundred pieces each: one byte per chunk, or empty
       lines, would block the loop for as long as a read of 256 KiB takes.
    4. What is around the payload of a chunked body is counted: sizes, extensions and trailers have no other limit.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import httptools

from poolgrid.server.http.browser_requests import Headers

EMPTY_LINE: Final = b"\r\n\r\n"

CHUNK_OVERHEAD: Final = 8
"""Bytes around each byte of a chunked body that are accepted: chunks of one byte have five."""

SLICE_PIECES: Final = 500
"""Pieces of a chunked body in one slice of the loop: half a millisecond."""

SLICE_BYTES: Final = 4 * 1024
"""Most of a chunked body that a parser gets at once: it makes a slice's pieces of them at worst."""

_CHUNKED_HEAD: Final = b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n"

_OTHER_UPGRADE: Final = re.compile(rb"\r\nupgrade:(?![ \t]*websocket[ \t]*\r)[^\r]*", re.IGNORECASE)


class InvalidBodyError(Exception):
    """A chunked body is none, or has too much around its chunks."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


class SizedBody:
    """A body of announced length."""

    pieces = 0

    def __init__(self, announced_bytes: int) -> None:
        self.left_bytes = announced_bytes
        self.received_bytes = 0
        self.is_whole = False

    def take(self, data: bytes | bytearray, at: int) -> int:
        """Return up to where ``data`` belongs to the body from ``at`` on."""
        end = min(len(data), at + self.left_bytes)
        self.received_bytes += end - at
        self.left_bytes -= end - at
        self.is_whole = not self.left_bytes
        return end


class ChunkedBody:
    """A body in chunks."""

    left_bytes = 0
    """Unknown."""

    def __init__(self, overhead_bytes: int) -> None:
        """``overhead_bytes`` around its chunks are accepted whatever is in them."""
        self._overhead_bytes = overhead_bytes
        self.received_bytes = 0
        """Of its payload."""
        self.is_whole = False
        self.pieces = 0
        """Chunks, and calls of the parser, since the caller last set it to 0."""
        self._wire_bytes = 0
        self._tail = b""
        """The last bytes that came, less than an empty line."""
        self._parser: Any = httptools.HttpRequestParser(self)
        self._parser.feed_data(_CHUNKED_HEAD)

    def take(self, data: bytes | bytearray, at: int) -> int:
        """Return up to where ``data`` may be handed on from ``at`` on: the possible end of the body, or of a slice.

        Raises ``InvalidBodyError``.
        """
        limit = min(len(data), at + SLICE_BYTES)
        # The empty line of its end may have begun in what came before.
        before = self._tail
        end = (before + data[at : at + len(EMPTY_LINE) - 1]).find(EMPTY_LINE) + len(EMPTY_LINE) - len(before) + at
        if end <= at:
            end = data.find(EMPTY_LINE, at, limit) + len(EMPTY_LINE)
            if end < len(EMPTY_LINE):
                end = limit
        self._tail = (before + data[max(at, end - len(EMPTY_LINE)) : end])[1 - len(EMPTY_LINE) :]
        self._wire_bytes += end - at
        self.pieces += 1
        try:
            self._parser.feed_data(data[at:end])
        except httptools.HttpParserError:
            raise InvalidBodyError("invalid_http", "reading a chunked body: this is not HTTP/1.1") from None
        if self.is_whole:
            self._parser = None  # it refers to this
        elif self._wire_bytes - self.received_bytes > self._overhead_bytes + self.received_bytes * CHUNK_OVERHEAD:
            message = "reading a chunked body: what is around its chunks is many times what is in them"
            raise InvalidBodyError("chunk_overhead", message)
        return end

    def close(self) -> None:
        """Break the circle with the parser, for a body that is given up."""
        self._parser = None

    # -- called by httptools -------------------------------------------------------------------------------------------

    def on_body(self, body: bytes) -> None:
        self.received_bytes += len(body)
        self.pieces += 1

    def on_message_complete(self) -> None:
        self.is_whole = True


def announced_body(fields: Mapping[bytes, bytes], overhead_bytes: int) -> SizedBody | ChunkedBody | None:
    """Return the body that the fields of a head announce, which llhttp has checked; ``None`` = there is none."""
    if b"transfer-encoding" in fields:
        return ChunkedBody(overhead_bytes)
    length_bytes = int(fields.get(b"content-length", 0))
    return SizedBody(length_bytes) if length_bytes else None


def offers_upgrade(headers: Headers, fields: Mapping[bytes, bytes]) -> bool:
    """Return whether llhttp takes what follows a head for another protocol."""
    if b"upgrade" not in fields:
        return False
    connection = b",".join(value for name, value in headers if name == b"connection")
    return b"upgrade" in [token.strip().lower() for token in connection.split(b",")]


def unchunked(data: bytes) -> bytes:
    """Return what whole chunks hold, for a client that does not know them."""
    parts = []
    at = 0
    while at < len(data):
        begin = data.index(b"\r\n", at) + 2
        size = int(data[at:begin].partition(b";")[0], 16)
        if not size:
            break  # what follows are trailers
        parts.append(data[begin : begin + size])
        at = begin + size + 2
    return b"".join(parts)


def without_upgrade(head: bytes) -> bytes:
    """Return a head without an offer to change to another protocol than websockets.

    A server may ignore such an offer, which Java's client makes with every request (``h2c``). llhttp takes what follows
    the head for that protocol, and a request would lose its body.
    """
    return _OTHER_UPGRADE.sub(b"", head)
