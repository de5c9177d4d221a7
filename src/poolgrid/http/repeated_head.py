"""A head of an HTTP request that its connection has had before, all but the length of the body.

Clients that keep a connection send the same head with every request. What is the same, byte for byte, need not be
parsed again.

Rules
    1. It stands for one head that the parser has taken, and for those that differ from it in the digits of their one
       ``content-length`` and in nothing else.
    2. It recognizes a request only whole: head and body in one piece, with nothing behind it.
"""

from __future__ import annotations

from poolgrid.http.bounded_protocol import EMPTY_LINE

LENGTH_DIGITS_MAX = 10
"""Digits of a length that is recognized, leading zeros among them: bodies of up to ten gigabytes."""

_LENGTH_LINE = b"\r\ncontent-length:"
_LENGTH = b"content-length"

Headers = list[tuple[bytes, bytes]]


class RepeatedHead:
    """What requests of a connection have in common."""

    __slots__ = ("_after", "_after_bytes", "_before", "_before_bytes", "_headers", "_place")

    def __init__(self, before: bytes, after: bytes, headers: Headers, place: int) -> None:
        """Take what is before and behind the digits, the parsed headers, and which of them is the length."""
        self._before = before
        self._before_bytes = len(before)
        self._after = after
        self._after_bytes = len(after)
        self._headers = headers
        self._place = place

    @classmethod
    def of(cls, request: bytes, headers: Headers, bytes_max: int) -> RepeatedHead | None:
        """Return the head of a whole request, with the headers that the parser made of it; ``None`` where it has not
        one plain length, or could grow beyond ``bytes_max`` by its digits."""
        head = request[: request.find(EMPTY_LINE) + len(EMPTY_LINE)]
        lines = head.lower()
        line = lines.find(_LENGTH_LINE)
        if line < 0 or lines.find(_LENGTH_LINE, line + 1) >= 0 or len(head) + LENGTH_DIGITS_MAX > bytes_max:
            return None
        begin = line + len(_LENGTH_LINE)
        while head[begin : begin + 1] == b" ":
            begin += 1
        end = head.find(b"\r", begin)
        places = [place for place, (name, _) in enumerate(headers) if name == _LENGTH]
        if len(places) != 1 or headers[places[0]][1] != head[begin:end] or not head[begin:end].isdigit():
            return None
        made = cls(head[:begin], head[end:], headers, places[0])
        return made if made.taken(request) else None

    def taken(self, request: bytes) -> tuple[Headers, bytes] | None:
        """Return the headers, as the parser would, and the body of a whole request with this head; ``None`` for
        anything else, or more: not even a part of a request may be behind it."""
        if not request.startswith(self._before):
            return None
        begin = self._before_bytes
        end = request.find(b"\r", begin, begin + LENGTH_DIGITS_MAX + 1)
        digits = request[begin:end]
        if end < 0 or not digits.isdigit() or not request.startswith(self._after, end):
            return None
        body = request[end + self._after_bytes :]
        if int(digits) != len(body):
            return None
        headers = self._headers.copy()
        headers[self._place] = (_LENGTH, digits)
        return headers, body
