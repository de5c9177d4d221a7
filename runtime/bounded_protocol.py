"""uvicorn's HTTP/1.1 protocol with bounds on what anybody may send: how much, for how long, and how many at once.

Rules
    1. Bytes reach the parser up to the end of one request and not beyond. While that request is in work, what follows
       it waits as it came, unparsed; beyond ``pipeline_bytes`` nothing is read until the request has its answer. The
       parser does not say where a request ends, but every head, and every chunked body, ends with an empty line, and
       any other body where its announced length is over.
       A chunked body is read in turns of the event loop, a few thousand pieces each: one of a byte per chunk, or of
       empty lines, would hold the loop for as long as a read of 256 KiB takes. What is left waits, unread like it.
    2. A head is counted as it comes, before the parser sees it: the parser copies a header's value at every read. Of a
       chunked body what is not payload is counted too: sizes, extensions and trailers have no other limit.
    3. What breaks a limit is answered with its status, and the connection ends: the answer goes out, then for a moment
       what still comes is read and dropped, because closing at once would reset the connection under the answer.
    4. A client that ends its side right after its request gets its answer. One that has left looks the same until it is
       written to, so the connection is probed with ``100 Continue``, which every client skips and a closed socket
       answers with a reset; the first write draws the reset, the next one finds it. Amid an answer, and under TLS,
       whose asyncio knows no half of a connection, the end of a client's side means that it has left.

What is replaced here are internals of uvicorn: ``tests/runtime/test_uvicorn_contract.py`` tells when they change, and
``pyproject.toml`` has an upper bound for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import httptools
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from runtime.http_connections import HttpConnections, InvalidRequests, Queue, source_of

EMPTY_LINE = b"\r\n\r\n"

NOT_HTTP = "reading a request: this is not HTTP/1.1"

CHUNKS_TOO_SMALL = "reading a chunked body: what is around its chunks is many times what is in them"

CHUNK_OVERHEAD = 8
"""Bytes around each byte of a chunked body that are taken for granted: chunks of one byte have five."""

SKIPPED_BYTES_MAX = 64 * 2**20
"""Most that is read and dropped of a body whose request has its answer; twice the largest body, by default."""

COPIED_BYTES_MAX = 16 * 1024
"""Longest piece of a read that is copied for the parser; of longer ones it gets a view, which costs more to make."""

TURN_PIECES = 2_000
"""Pieces of a chunked body, and calls of the parser, in one turn of the loop: about a millisecond."""

TURN_BYTES = 16 * 1024
"""Most of a chunked body that the parser gets at once: what it makes of them is a turn's pieces at the worst."""

PROBES_S = (0.02, 0.05, 0.2, 1.0)
"""Pauses before the first probes of a client that has ended its side: short answers are out before the first, and one
that has left on the same network is found by the second."""

PROBE_EVERY_S = 5.0
"""Pause before each further one."""

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class Reading(FlowControl):
    """uvicorn's flow control, which endpoints resume as they like, with a word of ours in it."""

    blocked = False
    """Nothing is read, whoever asks for it."""
    full = False
    """The endpoint has enough for now."""

    def block(self) -> None:
        """Stop reading until it is released."""
        self.blocked = True
        super().pause_reading()

    def release(self) -> None:
        """Read again, unless the endpoint has enough."""
        self.blocked = False
        if not self.full:
            super().resume_reading()

    def pause_reading(self) -> None:
        """Stop reading until the endpoint wants more."""
        self.full = True
        super().pause_reading()

    def resume_reading(self) -> None:
        """Read again, unless it is blocked."""
        self.full = False
        if not self.blocked:
            super().resume_reading()


class BoundedProtocol(HttpToolsProtocol):
    """One connection."""

    table: HttpConnections
    """Those of its server, which makes a subclass of its own."""
    invalid_requests: InvalidRequests

    flow: Reading
    source = ""
    """What it is counted by, while it is counted."""
    _queue: Queue | None = None
    _head_bytes = 0
    """What has come of a head that is not whole."""
    _in_body = False
    """The head is whole and its body is not."""
    _announced_bytes: int | None = None
    _body_left: int | None = None
    """What is still to come of a body of announced length."""
    _wire_bytes = 0
    """What has come of a body of unknown length, with what is around it."""
    _payload_bytes = 0
    _paused_s = 0.0
    """When the body was last seen waiting for its endpoint, not for its client."""
    _waiting: bytearray | None = None
    """What follows the request in work, or what of a body is left for the next turn of the loop."""
    _turn: asyncio.Handle | None = None
    """That next turn."""
    _pieces = 0
    """What this turn has taken so far, of ``TURN_PIECES``."""
    _parts: list[bytes]
    """Pieces of a chunked body that the endpoint has not got yet."""
    _held_bytes = 0
    """What the table counts for this connection."""
    _refusal: tuple[int, str, str] | None = None
    _discarding = False
    _half_closed = False
    _unsent_bytes = 0
    _probe: asyncio.TimerHandle | None = None

    # -- coming and going ----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count the connection in, or refuse it."""
        super().connection_made(transport)
        self.flow = Reading(transport)
        self._parts = []
        if not self.source:
            source = source_of(self._client())
            reason = self.table.admit(source, self.loop.time())
            if reason is not None:
                self._discarding = True
                self._answer(503, f"connecting: {reason}; try again later")
                transport.close()
                self._move(self.table.lingering)
                return
            self.source = source
        self._move(self.table.heads)

    def connection_lost(self, exc: Exception | None) -> None:
        """Count the connection out."""
        self._drop()
        self._move(None)
        self.table.stuck.pop(self, None)
        self._leave()
        if self._probe is not None:
            self._probe.cancel()
            self._probe = None
        super().connection_lost(exc)

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Keep the connection for a request that is whole and has no answer yet."""
        cycle = self.cycle
        if (
            self._discarding
            or self._in_body
            or cycle is None
            or cycle.response_started
            or self.scheme != "http"
            or cycle.scope["http_version"] != "1.1"
        ):
            return None
        self._half_closed = True
        self.flow.blocked = True  # reading again would find the end again
        self._probe_later(0)
        return True

    def pause_writing(self) -> None:
        """Begin to count the time: the client does not take its answer."""
        super().pause_writing()
        self._unsent_bytes = self.transport.get_write_buffer_size()
        self.table.stuck[self] = self.loop.time()

    def resume_writing(self) -> None:
        """Stop counting."""
        super().resume_writing()
        self.table.stuck.pop(self, None)

    # -- reading -------------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Read as far as there is nothing else to do first."""
        if self._discarding:
            return
        if self._turn is not None and self._waiting is not None:
            self._waiting += data
            return
        if self._waiting is not None:
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
            self._close_with(400, NOT_HTTP)
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
        self._head_bytes = 0
        self._in_body = True
        self._announced_bytes = self._body_left = _announced(headers)
        # Trailers go to whatever list is here, long after everybody has looked at the head.
        self.headers = []
        self.begin()

    def begin(self) -> None:
        """Begin the request whose head is whole."""
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
        """Go on with the request whose body is whole."""
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

    def _received_bytes(self) -> int:
        """Return how much of the body has come."""
        if self._announced_bytes is None or self._body_left is None:
            return self._payload_bytes
        return self._announced_bytes - self._body_left

    def _count(self) -> None:
        """Tell the table what this connection holds of requests that are not whole or not begun."""
        held = 0 if self._waiting is None else len(self._waiting)
        if self._in_body and not self.cycle.response_complete:
            held += self._received_bytes()
        self.table.unfinished_bytes += held - self._held_bytes
        self._held_bytes = held

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
            self.flow.resume_reading()
            self._settle()

    # -- ends ----------------------------------------------------------------------------------------------------------

    def time_is_up(self, now_s: float) -> None:
        """Close, or answer 408: the time of the queue it is in is over."""
        table = self.table
        if self._queue is table.idle:
            self._close()
        elif self._in_body:
            limits = table.limits
            self._refuse(
                408,
                "body_timeout",
                f"reading the request body: {self._received_bytes()} bytes came in time, allowed are "
                f"{limits.body_timeout_s:g} s and a second for each {limits.body_bytes_per_s:g} bytes (settings "
                "http_body_timeout_ms, http_body_bytes_per_s)",
            )
        elif self._head_bytes:
            self._refuse(
                408,
                "header_timeout",
                f"reading a request: its head is not whole after {table.limits.header_timeout_s:g} s, the limit "
                "(setting http_header_timeout_ms)",
            )
        else:
            # Browsers connect ahead of need; an answer to no request would be taken for that of the next.
            table.note("header_timeout", self._client(), now_s)
            self._close()

    def give_way(self) -> None:
        """Close without an answer, and be counted out at once."""
        self._leave()
        self._close()

    def give_up_body(self) -> None:
        """Forget the unfinished body and answer 503."""
        self._close_with(
            503,
            f"reading the request body: more than {self.table.limits.unfinished_bytes} bytes of unfinished requests "
            "are held, the limit (setting http_unfinished_bytes), and this one began first; try again later",
        )

    def body_deadline_s(self, since_s: float, now_s: float) -> float:
        """Return when the body that began at ``since_s`` must be whole, given what has come of it."""
        if self.flow.read_paused:
            self._paused_s = now_s  # it waits for its endpoint
        limits = self.table.limits
        return max(since_s, self._paused_s) + limits.body_timeout_s + self._received_bytes() / limits.body_bytes_per_s

    def is_writing(self) -> bool:
        """Return whether the client has taken some of what waits for it since this was last asked."""
        before, self._unsent_bytes = self._unsent_bytes, self.transport.get_write_buffer_size()
        return self._unsent_bytes < before

    def abort(self) -> None:
        """End the connection now."""
        self.transport.abort()

    def _refuse(self, status: int, reason: str, message: str) -> None:
        self.table.note(reason, self._client(), self.loop.time())
        self._close_with(status, message)

    def _close_with(self, status: int, message: str) -> None:
        """Answer unless there is an answer already, and end the connection when the client has had time to read it."""
        cycle = self.cycle
        skipping = self._in_body and cycle.response_complete
        self._discarding = True
        self._drop()
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
            self.abandon()
            if cycle.response_started:
                self.transport.abort()
                return
        if not skipping:
            self._answer(status, message)
        if self.transport.can_write_eof() and not self._half_closed:
            self.transport.write_eof()
            self.flow.resume_reading()
            self.flow.release()
        else:
            self.transport.close()
        self._move(self.table.lingering)

    def abandon(self) -> None:
        """Forget the request that is not whole."""

    def _answer(self, status: int, message: str) -> None:
        body = message.encode()
        content = [STATUS_LINE[status]]
        for name, value in self.server_state.default_headers:
            content += (name, b": ", value, b"\r\n")
        if status == 503:
            content.append(b"retry-after: 1\r\n")
        content.append(b"content-type: text/plain; charset=utf-8\r\ncontent-length: %d\r\n" % len(body))
        content += (b"connection: close\r\n\r\n", body)
        self.transport.write(b"".join(content))

    def _close(self) -> None:
        self._discarding = True
        self._drop()
        self.transport.close()
        self._move(self.table.closing)

    def _drop(self) -> None:
        """Forget what is held."""
        self._waiting = None
        self._parts.clear()
        self._in_body = False
        if self._held_bytes:
            self._count()

    def _leave(self) -> None:
        if self.source:
            self.table.leave(self.source)
            self.source = ""

    def _move(self, queue: Queue | None) -> None:
        if self._queue is not None:
            self._queue.pop(self, None)
        self._queue = queue
        if queue is not None:
            queue[self] = self.loop.time()

    def _probe_later(self, index: int) -> None:
        pause_s = PROBES_S[index] if index < len(PROBES_S) else PROBE_EVERY_S
        self._probe = self.loop.call_later(pause_s, self._probe_now, index)

    def _probe_now(self, index: int) -> None:
        if not self.cycle.response_started and not self.transport.is_closing():
            self.transport.write(CONTINUE)
        self._probe_later(index + 1)

    def _client(self) -> str:
        return "somebody" if self.client is None else self.client[0]

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
