"""The reading of one HTTP/1.1 connection: what of it reaches uvicorn's parser, when, and how much at most.

Rules
    1. Bytes reach the parser up to the end of one request and not beyond. While that request is in work, what follows
       it waits as it came, unparsed; beyond ``pipeline_bytes`` nothing is read until the request has its answer. The
       parser does not say where a request ends, but every head, and every chunked body, ends with an empty line, and
       any other body where its announced length is over.
       A chunked body is read in turns of the event loop, a few thousand pieces each: one of a byte per chunk, or of
       empty lines, would hold the loop for as long as a read of 256 KiB takes. What is left waits, unread like it.
    2. A head is counted as it comes, before the parser sees it: the parser copies a header's value at every read. Of a
       chunked body what is not payload is counted too: sizes, extensions and trailers have no other limit.
    3. What is held meanwhile is counted, timed and ended by ``poolgrid.http.held_connection``.

What is replaced here are internals of uvicorn: ``tests/http/test_uvicorn_contract.py`` tells when they change, and
``pyproject.toml`` has an upper bound for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import httptools

from poolgrid.http.browser_requests import AllowedHosts, shown
from poolgrid.http.held_connection import HeldConnection
from poolgrid.http.http_connections import InvalidRequests, Queue

EMPTY_LINE = b"\r\n\r\n"

NOT_HTTP = "reading a request: this is not HTTP/1.1"

CHUNKS_TOO_SMALL = "reading a chunked body: what is around its chunks is many times what is in them"

CHUNK_OVERHEAD = 8
"""Bytes around each byte of a chunked body that are taken for granted: chunks of one byte have five."""

SKIPPED_BYTES_MAX = 64 * 2**20
"""Most that is read and dropped of a body whose request has its answer; twice the largest body, by default."""

COPIED_BYTES_MAX = 16 * 1024
"""Longest piece of a read that is copied for the parser; of longer ones it gets a view, which costs more to make."""

TURN_PIECES = 500
"""Pieces of a chunked body, and calls of the parser, in one turn of the loop: a quarter of a millisecond."""

TURN_BYTES = 4 * 1024
"""Most of a chunked body that the parser gets at once: what it makes of them is a turn's pieces at the worst."""


class BoundedProtocol(HeldConnection):
    """One connection."""

    invalid_requests: InvalidRequests
    hosts: AllowedHosts | None = None
    """Those that requests may name; ``None`` = any."""

    _wire_bytes = 0
    """What has come of a body of unknown length, with what is around it."""
    _turn: asyncio.Handle | None = None
    """The next turn, in which what of a body waits is read."""
    _pieces = 0
    """What this turn has taken so far, of ``TURN_PIECES``."""
    _refusal: tuple[int, str, str] | None = None
    """What a head is refused with, said once the parser has returned."""

    # -- reading -------------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Read as far as there is nothing else to do first."""
        if self._discarding:
            return
        if self._waiting is not None:
            if self._turn is not None:
                self._waiting += data
            else:
                self._wait_behind(data)
            return
        end = self._read(data)
        if end < len(data):
            if self._in_body:
                self._read_on_later(bytearray(data[end:]))
                return
            self._move(None)
            self._wait_behind(data[end:])
        elif not self._discarding:
            self._settle()

    def _read(self, data: bytes | bytearray) -> int:
        """Feed the parser, up to the end of a turn or of a request that is in work then; return how far that was."""
        size = len(data)
        at = 0
        self._pieces = 0
        while at < size:
            if self._in_body and self._body_left is not None:
                end = min(size, at + self._body_left)
            else:
                if self._in_body:
                    if self._pieces >= TURN_PIECES:
                        return at
                    limit = min(size, at + TURN_BYTES)
                else:
                    if self.cycle is not None and not self.cycle.response_complete:
                        return at
                    limit = size
                end = data.find(EMPTY_LINE, at, limit) + len(EMPTY_LINE)
                if end < len(EMPTY_LINE):
                    end = limit
                if not self._in_body:
                    self._head_bytes += end - at
                    if self._head_bytes > self.table.limits.head_bytes:
                        self._refuse(431, "head_too_large", self._head_too_large())
                        return size
            if not self._feed(data if end - at == size else _part(data, at, end), end - at):
                return size
            at = end
        return size

    def _feed(self, part: bytes | bytearray | memoryview, size: int) -> bool:
        """Give the parser a part; return whether it goes on."""
        body_of = self.scope if self._in_body else None
        self._pieces += 1
        try:
            self.parser.feed_data(part)
        except httptools.HttpParserUpgrade:
            # No protocol is upgraded to here: the request is answered as what it is otherwise. What follows it is that
            # protocol's to the parser, a body to some clients, and never a request: the connection ends there.
            self.cycle.keep_alive = False
        except httptools.HttpParserError:
            self.invalid_requests.note(self._client(), self.loop.time())
            self._close_with(400, "invalid_http", NOT_HTTP)
            return False
        if self._refusal is not None:
            self._refuse(*self._refusal)
            return False
        if self._parts:
            self._hand_on()
        if body_of is not None and self._in_body and body_of is self.scope:
            if self._body_left is not None:
                self._body_left -= size
            else:
                self._wire_bytes += size
                around = self._wire_bytes - self._payload_bytes
                if around > self.table.limits.head_bytes + self._payload_bytes * CHUNK_OVERHEAD:
                    self._refuse(400, "chunk_overhead", CHUNKS_TOO_SMALL)
                    return False
        return True

    def on_headers_complete(self) -> None:
        """Look at the whole head, then begin its request."""
        limits = self.table.limits
        headers = self.headers
        if len(headers) > limits.headers:
            message = f"reading a request: it has {len(headers)} header fields, allowed are {limits.headers}"
            self._refusal = (431, "head_too_large", f"{message} (setting http_headers)")
            return
        # A head that is no longer than a line may be has no line that is.
        if self._head_bytes > limits.header_line_bytes:
            longest = max([len(self.url), *(len(name) + len(value) for name, value in headers)])
            if longest > limits.header_line_bytes:
                message = f"reading a request: a line of its head has {longest} bytes, allowed are"
                setting = "(setting http_header_line_bytes)"
                self._refusal = (431, "head_too_large", f"{message} {limits.header_line_bytes} {setting}")
                return
        if self.hosts is not None:
            host = next((value for name, value in headers if name == b"host"), b"localhost")
            if not self.hosts.allow(host):
                message = f"reading a request: Host is {shown(host)}, allowed are addresses, names without a dot"
                where = "and names of setting http_hosts, for a server on a loopback address without API keys"
                self._refusal = (403, "foreign_host", f"{message} {where}")
                return
        self._head_bytes = 0
        self._in_body = True
        self._announced_bytes = self._body_left = _announced(headers)
        # Trailers go to whatever list is here, long after everybody has looked at the head.
        self.headers = []
        self.begin()

    def begin(self) -> None:
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Take a part of a body."""
        if self._refusal is None:
            self._payload_bytes += len(body)
            if self._body_left is None:
                self._pieces += 1
                self._parts.append(body)
            else:
                super().on_body(body)

    def _hand_on(self) -> None:
        """Give the endpoint the pieces of a chunked body in one: uvicorn copies all it holds for each that it gets."""
        parts, self._parts = self._parts, []
        super().on_body(parts[0] if len(parts) == 1 else b"".join(parts))

    def on_message_complete(self) -> None:
        """Take the end of a request."""
        if self._refusal is None:
            if self._parts:
                self._hand_on()
            self._in_body = False
            self._wire_bytes = self._payload_bytes = 0
            if self._held_bytes:
                self._count()
            self.finish()

    def finish(self) -> None:
        super().on_message_complete()

    def _settle(self) -> None:
        """Count and time what the connection waits for now; nothing is left to parse."""
        table = self.table
        cycle = self.cycle
        queue: Queue | None
        if self._in_body:
            queue = table.bodies
        elif cycle is not None and not cycle.response_complete:
            queue = None
        elif self._head_bytes:
            queue = table.heads
        else:
            queue = table.idle if self._queue is None else self._queue
        if queue is not self._queue:
            self._move(queue)
        if self._in_body:
            self._settle_body()

    def _settle_body(self) -> None:
        self._count()
        if not self.cycle.response_complete:
            self.table.make_room(self, self._client(), self.loop.time())
        elif (self._body_left or self._payload_bytes) > SKIPPED_BYTES_MAX:
            self._refuse(413, "unread_body", "")

    # -- turns ---------------------------------------------------------------------------------------------------------

    def _read_on_later(self, rest: bytearray) -> None:
        """Go on with a body in the loop's next turn, and read nothing meanwhile."""
        self._waiting = rest
        self.flow.block()
        self._settle()
        if not self._discarding:
            self._turn = self.loop.call_soon(self._take_turn)

    def _take_turn(self) -> None:
        self._turn = None
        if self._waiting is not None and not self.transport.is_closing():
            self._go_on(self._waiting)

    # -- requests behind the one in work -------------------------------------------------------------------------------

    def _wait_behind(self, data: bytes | bytearray) -> None:
        """Keep what comes behind a request in work."""
        cycle = self.cycle
        if not cycle.keep_alive:
            return  # the connection ends with the answer
        table = self.table
        if not table.has_room(len(data)):
            # Whoever sends requests without waiting must be ready to send them again (RFC 9112, 9.3.2).
            table.note("unfinished_bytes", self._client(), self.loop.time())
            cycle.keep_alive = False
            self._drop()
            return
        if self._waiting is None:
            self._waiting = bytearray()
        self._waiting += data
        self._count()
        if len(self._waiting) >= table.limits.pipeline_bytes:
            self.flow.block()

    def _go_on(self, waiting: bytearray) -> None:
        """Read on in what waits."""
        if self._turn is not None:
            return  # it is under way
        if not self._in_body:
            self._move(None)
        end = self._read(waiting)
        if self._discarding:
            return
        del waiting[:end]
        if waiting and self._in_body:
            self._read_on_later(waiting)
            return
        if not waiting:
            self._waiting = None
        self._count()
        if self.flow.blocked and not self._half_closed and len(waiting) < self.table.limits.pipeline_bytes:
            self.flow.release()
        if not waiting:
            self._settle()
            if self._half_closed and self._queue is not None:
                self._close()  # what has come is not whole, and no more will come

    def on_response_complete(self) -> None:
        """Begin what waits, or wait for the next request."""
        self.server_state.total_requests += 1
        if self._discarding:
            return
        if self.transport.is_closing():
            self._move(self.table.closing)
        elif self.pipeline:
            cycle, app = self.pipeline.pop()
            self.flow.resume_reading()
            self._start_asgi_task(cycle, app)
        elif self._waiting is not None:
            self._go_on(self._waiting)
        elif self._half_closed:
            self._close()
        else:
            flow = self.flow
            if flow.full or flow.read_paused:
                flow.resume_reading()
            if self._queue is None and not self._in_body and not self._head_bytes:
                # What ``_settle`` comes to after nearly every answer, without its calls.
                queue = self._queue = self.table.idle
                queue[self] = self.loop.time()
            else:
                self._settle()

    def _head_too_large(self) -> str:
        limit = self.table.limits.head_bytes
        return f"reading a request: its head has more than {limit} bytes, the limit (setting http_head_bytes)"


def _part(data: bytes | bytearray, start: int, end: int) -> bytes | bytearray | memoryview:
    return memoryview(data)[start:end] if end - start > COPIED_BYTES_MAX else data[start:end]


def _announced(headers: Iterable[tuple[bytes, bytes]]) -> int | None:
    """Return the length of the body by the headers, ``None`` when it comes in chunks. The parser has checked them."""
    length = 0
    for name, value in headers:
        if name == b"content-length":
            length = int(value)
        elif name == b"transfer-encoding":
            return None
    return length
