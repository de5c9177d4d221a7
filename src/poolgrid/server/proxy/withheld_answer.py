"""An answer that does not go to the client as it comes: why it is withheld, and what of it passes in the end."""

from __future__ import annotations

from enum import Enum
from typing import Final

from poolgrid.server.forwarding.event_filter import AnswerNotes, TakenIds, cut_answer
from poolgrid.server.proxy.server_connection import HeaderList

BUSY_STATUSES: Final = frozenset((429, 503))

BUSY_PAUSE_MAX_MS: Final = 1000
"""Longest time that a busy server gets nothing while its own ``Retry-After`` lasts: a queue of an engine moves in
tenths of a second, and one refused prompt does not show that the next has no room."""

BUSY_BODY_BYTES_MAX: Final = 64 * 1024
"""Longest answer that is kept while another server is asked; a longer one goes to the client at once."""

CUT_BYTES_MAX: Final = 8 << 20
"""Longest answer that is held until the ids in it are taken out: those of a prompt of 128k tokens are 0.9 MB, and text
completions repeat them for each choice. A longer one goes to the client as it is, ids included."""


class Withheld(Enum):
    """Why an answer that comes does not go to the client as it comes."""

    BUSY = "its server is busy, and another may take the request"
    REFUSED = "its server refuses the prompt's ids, and gets the request as text"
    CUT = "ids are to be taken out of the whole of it"
    UNCONTINUED = "it is no stream that continues the one that its client has"


class WithheldAnswer:
    """An answer that is kept until it has come."""

    __slots__ = ("body", "headers", "status", "why")

    def __init__(self, why: Withheld, status: int, headers: HeaderList) -> None:
        self.why = why
        self.status = status
        self.headers = headers
        self.body = bytearray()

    def take(self, data: bytes) -> bool:
        """Take more of its body; return ``False`` once it is too long to be withheld."""
        self.body += data
        return len(self.body) <= (CUT_BYTES_MAX if self.why is Withheld.CUT else BUSY_BODY_BYTES_MAX)

    def retry_after_ms(self) -> int | None:
        for name, value in self.headers:
            if name == b"retry-after" and value.strip().isdigit() and len(value) < 8:
                return min(BUSY_PAUSE_MAX_MS, int(value) * 1000)
        return None

    def whole_headers(self) -> HeaderList:
        """Return its header lines with the length that it has."""
        headers = [pair for pair in self.headers if pair[0] not in (b"content-length", b"transfer-encoding")]
        headers.append((b"content-length", b"%d" % len(self.body)))
        return headers

    def headers_without_length(self) -> HeaderList:
        """Return its header lines for a body whose end is unknown."""
        return [pair for pair in self.headers if pair[0] != b"content-length"]

    def cut(self, ids: TakenIds) -> tuple[HeaderList, bytes, AnswerNotes]:
        """Return its header lines and its body without the ids that were asked for, and what it reports."""
        body, notes = cut_answer(bytes(self.body), ids)
        length = b"%d" % len(body)
        headers = [(name, length if name == b"content-length" else value) for name, value in self.headers]
        return headers, body, notes
