"""What one connection brings: one request at a time is handed on, what follows it waits.

Rules
    1. A head is handed on when it is whole, the body when the application has been called: then its headers are known.
    2. What follows a request waits unparsed. Beyond ``pipeline_bytes`` nothing is read until the application has
       returned.
    3. What is held of requests that are not whole, or not begun, is counted in the table of the server.
"""

from __future__ import annotations

import asyncio
import re
from typing import Final, Protocol

from poolgrid.server.http.connections import HttpConnections, Queue, TrackedConnection
from poolgrid.server.http.request_framing import (
    EMPTY_LINE,
    SLICE_PIECES,
    ChunkedBody,
    InvalidBodyError,
    SizedBody,
    without_upgrade,
)

SKIPPED_BYTES_MAX: Final = 64 * 2**20
"""Most that is read and dropped of a body whose request is answered; twice the largest body, by default."""

COPIED_BYTES_MAX: Final = 16 * 1024
"""Longest piece of a read that is copied to be handed on; of a longer one a view is made, which costs more."""

_REQUEST_LINE: Final = re.compile(rb"([A-Z][A-Z-]{0,19}( |$)|$)")
"""How a request begins; TLS and other protocols that are sent to a plain server do not."""


class SocketReading:
    """Whether a socket is read; each of two has its reason to read nothing."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._is_blocked = False
        self._is_full = False
        self.is_paused = False
        self.has_ended = False
        """The client has ended its side: reading again would find the end again."""

    def block(self, blocked: bool) -> None:
        """Read nothing because enough waits here."""
        self._is_blocked = blocked
        self._set()

    def fill(self, full: bool) -> None:
        """Read nothing because the application has enough to read."""
        self._is_full = full
        self._set()

    def unlimited(self) -> None:
        self._is_blocked = self._is_full = False
        self._set()

    def _set(self) -> None:
        paused = self._is_blocked or self._is_full or self.has_ended
        if paused != self.is_paused and not self._transport.is_closing():
            self.is_paused = paused
            if paused:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()


class RequestSink(TrackedConnection, Protocol):
    """What a reader needs of a connection: ``poolgrid.server.http.guard.Guard``, which explains each."""

    is_discarding: bool
    client: str

    def begin(self, head: bytes) -> None: ...
    def feed(self, data: bytes | bytearray | memoryview) -> bool: ...
    def end_request(self) -> None: ...
    def refuse(self, status: int, reason: str, message: str) -> None: ...
    def refuse_invalid(self) -> None: ...
    def finish(self) -> None: ...
    def wait_in(self, queue: Queue | None) -> None: ...


class RequestReader:
    """Reads the requests of one connection, and does not keep its guard: no circle is left when the connection ends."""

    held: bytearray | None = None
    """A part of a head, or what follows the request in flight, or what of a body is left for the next slice."""
    _searched = 0
    """Bytes of it without the end of a head."""
    head_bytes = 0
    """Empty lines that have come before a head."""
    is_busy = False
    """A head has been handed on, whose application has not returned."""
    is_starting = False
    """Its application is not called yet."""
    body: SizedBody | ChunkedBody | None = None
    """The body of a request that is not whole."""
    turn: asyncio.Handle | None = None
    """Reads what is held, in the next turn of the loop."""
    _is_last = False
    """What follows the request in flight is dropped."""
    _held_bytes = 0
    """What the table counts for this connection."""
    _passed_bytes = 0
    """Of the body, by an application that sends it somewhere as it comes."""

    def __init__(self, table: HttpConnections, loop: asyncio.AbstractEventLoop, reading: SocketReading) -> None:
        self._table = table
        self._limits = table.limits
        self._loop = loop
        self._reading = reading

    def receive(self, data: bytes, guard: RequestSink) -> None:
        """Hand on what belongs to the request in flight; hold what follows it."""
        if self.body is not None and self.turn is None:
            self._read_body(data, guard)
        elif self.is_busy or self.turn is not None:
            self._hold(data, guard)
        else:
            self._read_head(data, guard)

    def open_body(self, body: SizedBody | ChunkedBody | None, guard: RequestSink) -> None:
        """Begin with the body of a request whose application is to be called; ``None`` = it has none."""
        self.is_starting = False
        self._passed_bytes = 0
        held, self.held = self.held, None
        if body is not None:
            self.body = body
            self._read_body(held or b"", guard)
        elif held is not None:
            self._hold(held, guard)
        if self._reading.is_paused:
            self._unblock()

    def end(self, guard: RequestSink) -> bool:
        """Take note that the application has returned; return whether there is more to read of what came."""
        self.is_busy = False
        if self.body is not None:
            self._settle(guard)
        elif self.held is not None:
            # Later: the application may have failed, which has to be answered first.
            self.turn = self._loop.call_soon(self._read_held, guard)
        else:
            return False
        return True

    @property
    def is_passing(self) -> bool:
        return self._passed_bytes > 0

    def passed(self, size: int) -> None:
        """Count so much less of the body."""
        self._passed_bytes += size
        self._count()

    def take_all(self) -> bytes:
        """Return what is held, and forget it."""
        held = bytes(self.held or b"")
        self.drop()
        return held

    def drop(self) -> None:
        """Forget what is held."""
        self.held = None
        if isinstance(self.body, ChunkedBody):
            self.body.close()
        self.body = None
        if self.turn is not None:
            self.turn.cancel()
            self.turn = None
        self._count()

    # -- heads ---------------------------------------------------------------------------------------------------------

    def _read_head(self, data: bytes, guard: RequestSink) -> None:
        """Hand on a head when it is whole."""
        whole: bytes | bytearray = data
        if self.held is not None:
            self.held += data
            whole = self.held
        if whole[:1] in (b"\r", b"\n"):
            # Empty lines before a request are skipped (RFC 9112, 2.2).
            self.head_bytes += len(whole)
            whole = whole.lstrip(b"\r\n")
            self.head_bytes -= len(whole)
        end = whole.find(EMPTY_LINE, self._searched) + len(EMPTY_LINE)
        is_whole = end >= len(EMPTY_LINE)
        limit = self._limits.head_bytes
        if (end if is_whole else len(whole)) + self.head_bytes > limit:
            guard.refuse(431, "head_too_large", f"reading a request: its head has more than {limit} bytes, the limit")
        elif not is_whole and _REQUEST_LINE.match(whole) is None:
            guard.refuse_invalid()
        elif is_whole:
            self.held = bytearray(memoryview(whole)[end:]) if end < len(whole) else None
            self._begin(bytes(whole[:end]), guard)
        elif self._reading.has_ended:
            guard.finish()  # no more will come
        else:
            if whole is not self.held:
                self.held = bytearray(whole) if whole else None
            self._searched = max(0, len(whole) - len(EMPTY_LINE) + 1)
            self._count()
            guard.wait_in(self._table.heads)

    def _begin(self, head: bytes, guard: RequestSink) -> None:
        fields = head.count(b"\n") - 2
        if fields > self._limits.headers:
            message = f"reading a request: it has {fields} header fields, allowed are {self._limits.headers}"
            guard.refuse(431, "head_too_large", message)
            return
        if b"\r\nupgrade:" in head.lower():
            head = without_upgrade(head)
        self._searched = self.head_bytes = 0
        if self._held_bytes:
            self._count()
        self.is_busy = self.is_starting = True
        guard.begin(head)

    def _read_held(self, guard: RequestSink) -> None:
        """Begin the next request of those that wait, or read the next slice of a body."""
        self.turn = None
        if self.body is not None:
            held, self.held = self.held, None
            self._read_body(held or b"", guard)
        else:
            self._read_head(b"", guard)
        if not guard.is_discarding:
            self._count()
            self._unblock()

    # -- bodies --------------------------------------------------------------------------------------------------------

    def _read_body(self, data: bytes | bytearray, guard: RequestSink) -> None:
        """Hand on what belongs to the body, a slice of it at most."""
        body = self.body
        assert body is not None, "it is not whole"
        at, size = 0, len(data)
        body.pieces = 0
        try:
            while at < size and not body.is_whole and body.pieces < SLICE_PIECES:
                end = body.take(data, at)
                is_short = end - at == size or end - at <= COPIED_BYTES_MAX
                if not guard.feed(data[at:end] if is_short else memoryview(data)[at:end]):
                    return
                at = end
        except InvalidBodyError as error:
            guard.refuse(400, error.reason, error.message)
            return
        if not body.is_whole:
            if at < size:
                self.held = bytearray(memoryview(data)[at:])
                self._reading.block(True)
                self.turn = self._loop.call_soon(self._read_held, guard)
            self._settle(guard)
            return
        self.body = None
        self._count()
        # uvicorn reads on when its application asks for more. Behind the end it does not, and a client left unseen.
        self._reading.fill(False)
        if at < size:
            self._hold(data[at:], guard)
        if self.is_busy:
            guard.wait_in(None)
        else:
            guard.end_request()

    def _settle(self, guard: RequestSink) -> None:
        """Count and time a body that is not whole."""
        body, table = self.body, self._table
        assert body is not None, "it is not whole"
        guard.wait_in(table.bodies)
        self._count()
        if self.is_busy:
            table.make_room(guard, guard.client, self._loop.time())
        elif (body.left_bytes or body.received_bytes) > SKIPPED_BYTES_MAX:
            guard.refuse(413, "unread_body", "")

    # -- what waits ----------------------------------------------------------------------------------------------------

    def _hold(self, data: bytes | bytearray, guard: RequestSink) -> None:
        """Keep what comes behind a request in flight, or before its application is called."""
        if self._is_last:
            return
        if not (self.is_starting or self.turn is not None or self._table.has_room(len(data))):
            # A client that pipelines must be ready to send its requests again (RFC 9112, 9.3.2).
            self._table.note("unfinished_bytes", guard.client, self._loop.time())
            self.held = None
            self._count()
            self._is_last = True
            guard.shutdown()
            return
        if self.held is None:
            self.held = bytearray()
        self.held += data
        self._count()
        if len(self.held) >= self._limits.pipeline_bytes:
            self._reading.block(True)

    def _unblock(self) -> None:
        """Read again, unless what waits is enough."""
        if self.turn is None:
            self._reading.block(self.held is not None and len(self.held) >= self._limits.pipeline_bytes)

    def _count(self) -> None:
        """Report to the table how many bytes this connection holds of requests that are not whole or not begun."""
        held = 0 if self.held is None else len(self.held)
        if self.body is not None and self.is_busy:
            held += self.body.received_bytes - self._passed_bytes
        if held != self._held_bytes:
            self._table.unfinished_bytes += held - self._held_bytes
            self._held_bytes = held
