"""Chunked transfer coding as it passes: chunks that arrive whole are left as they are, all else is framed again. Pure.

So what has been written to a client always ends with a whole chunk, where an error event or a continuation fits.
"""

from __future__ import annotations

from typing import Final

CHUNK_DIGITS_MAX: Final = 8
"""Hexadecimal digits of a chunk's size: up to 4 GiB."""

LINE_BYTES_MAX: Final = 16 * 1024
"""Longest size line with its extensions, and most bytes of trailers: what parsers of other servers take at most."""

HEX: Final = frozenset(b"0123456789abcdefABCDEF")

LAST_CHUNK: Final = b"0\r\n\r\n"


class ChunkError(ValueError):
    """The bytes are not the chunked coding."""


def chunk(payload: bytes) -> bytes:
    """Return a payload as one chunk; it must not be empty, which would end the message."""
    return b"%x\r\n%b\r\n" % (len(payload), payload)


def size_of(line: bytes) -> int:
    """Return the size in a chunk's first line; raises ``ChunkError``."""
    digits = line.partition(b";")[0].strip(b" \t\r")
    # int() would take signs, underscores and blanks too.
    if not 0 < len(digits) <= CHUNK_DIGITS_MAX or not HEX.issuperset(digits):
        raise ChunkError(f"a chunk's size is not 1 to {CHUNK_DIGITS_MAX} hexadecimal digits")
    return int(digits, 16)


def whole_payload(data: bytes) -> bytes:
    """Return what bytes hold that are one or more whole chunks, without extensions and none of them the last; nothing
    for any other bytes."""
    at, end, found = 0, len(data), []
    while at < end:
        cut = data.find(b"\r\n", at, at + CHUNK_DIGITS_MAX + 2)
        digits = data[at:cut]
        if cut <= at or not HEX.issuperset(digits):
            return b""
        begin = cut + 2
        at = begin + int(digits, 16) + 2
        payload = data[begin : at - 2]
        if not payload or data[at - 2 : at] != b"\r\n":
            return b""
        found.append(payload)
    return found[0] if len(found) == 1 else b"".join(found)


class ChunkReader:
    """Takes the chunked coding apart, wherever it is cut."""

    __slots__ = ("_left", "_line", "_line_bytes", "_mark", "_trailers")

    def __init__(self) -> None:
        self._left = 0
        """Bytes still to come of the current chunk's payload."""
        self._mark = 0
        """Bytes still to come of the line end behind a payload."""
        self._line = b""
        """What has come of a size line or a trailer."""
        self._line_bytes = 0
        """Bytes of size lines or trailers since the last payload."""
        self._trailers = False

    @property
    def is_between(self) -> bool:
        """Return whether a new chunk begins with the next byte."""
        return not (self._left or self._mark or self._line or self._trailers)

    def feed(self, data: bytes) -> tuple[bytes, int]:
        """Return the payload in the next bytes, and how many of them belong to the message once it has ended, else -1.

        Raises ``ChunkError``.
        """
        at, end, found = 0, len(data), []
        while at < end:
            if self._left:
                part = data[at : at + self._left]
                found.append(part)
                self._left -= len(part)
                at += len(part)
                self._mark = 0 if self._left else 2
            elif self._mark:
                part = data[at : at + self._mark]
                if part != b"\r\n"[2 - self._mark : 2 - self._mark + len(part)]:
                    raise ChunkError(f"behind a chunk stands {part!r}, allowed is a line end")
                self._mark -= len(part)
                at += len(part)
            else:
                cut = data.find(b"\n", at)
                stop = end if cut < 0 else cut
                self._line_bytes += stop - at + 1
                if self._line_bytes > LINE_BYTES_MAX:
                    raise ChunkError(f"size lines and trailers have more than {LINE_BYTES_MAX} bytes")
                self._line += data[at:stop]
                at = stop + 1
                if cut >= 0:
                    line, self._line = self._line, b""
                    if self._take(line):
                        return b"".join(found), at
        return found[0] if len(found) == 1 else b"".join(found), -1

    def _take(self, line: bytes) -> bool:
        """Take a whole line; return whether the message ends with it."""
        if self._trailers:
            return line in (b"", b"\r")
        self._left = size_of(line)
        self._trailers = not self._left
        if self._left:
            self._line_bytes = 0
        return False
