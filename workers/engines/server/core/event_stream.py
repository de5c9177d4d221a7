"""Server-sent events out of the pieces in which they arrive. Pure."""

from __future__ import annotations

from collections.abc import Iterator

LINE_BYTES_MAX = 16 * 1024 * 1024
"""Longest line: a chunk that repeats the ids of a prompt of a million tokens stays below."""

DONE = b"[DONE]"


class LineTooLong(Exception):
    """A line is beyond ``LINE_BYTES_MAX``."""


class EventStream:
    """Lines of one answer; only ``data`` fields count, of one line each, as engines send them."""

    __slots__ = ("_rest", "done")

    def __init__(self) -> None:
        self._rest = b""
        self.done = False
        """Whether the end mark was seen."""

    def take(self, data: bytes) -> Iterator[bytes]:
        """Yield the data of each event that is whole now; raises ``LineTooLong``."""
        if self._rest:
            data = self._rest + data
        lines = data.split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) > LINE_BYTES_MAX:
            raise LineTooLong(f"a line of the stream exceeds {LINE_BYTES_MAX} bytes")
        for line in lines:
            if line.startswith(b"data:"):
                field = line[5:].strip()
                if field == DONE:
                    self.done = True
                else:
                    yield field
