"""Server-sent events out of the pieces in which they arrive. Pure."""

from __future__ import annotations

from collections.abc import Iterator

LINE_BYTES_MAX = 16 * 1024 * 1024
"""Longest line: a chunk that repeats the ids of a prompt of a million tokens stays below."""

DONE = b"[DONE]"


class LineTooLong(Exception):
    """A line is beyond ``LINE_BYTES_MAX``."""


class ServerSentEvents:
    """Lines of one answer; only ``data`` fields count, of one line each, as engines send them."""

    __slots__ = ("_rest", "done")

    def __init__(self) -> None:
        self._rest = bytearray()
        """The beginning of a line: what follows is searched and added, never all of it again."""
        self.done = False
        """Whether the end mark was seen."""

    def take(self, data: bytes) -> Iterator[bytes]:
        """Yield the data of each event that is whole now; raises ``LineTooLong``."""
        rest = self._rest
        lines = data.split(b"\n")
        if len(rest) + len(lines[0]) > LINE_BYTES_MAX:
            raise LineTooLong(f"a line of the stream exceeds {LINE_BYTES_MAX} bytes")
        if rest:
            rest += lines[0]
            if len(lines) == 1:
                return
            lines[0] = bytes(rest)
            rest.clear()
        rest += lines.pop()
        for line in lines:
            if line.startswith(b"data:"):
                field = line[5:].strip()
                if field == DONE:
                    self.done = True
                else:
                    yield field
