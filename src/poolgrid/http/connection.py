"""One HTTP/1.1 connection: counted in, read, kept within bounds, refused, closed, counted out.

Rules
    1. It is in the table of its server (``poolgrid.http.connections``) from its first moment to its last, in the queue
       of what it waits for. Unfinished and unparsed requests are counted there.
    2. One request is in flight at a time. What follows it waits unparsed; beyond ``pipeline_bytes`` nothing is read
       until the request is answered.
    3. A request that breaks a limit is answered with its status and the connection ends: the answer goes out, then for
       a moment what still comes is read and dropped, because closing at once would reset the connection.
    4. A client that ends its side right after its request gets its answer. Whether it is still there is probed with
       ``100 Continue``, which clients skip and a closed socket answers with a reset. During an answer, and under TLS,
       whose asyncio transport has no half-closed state, the end of the client's side means that it has left.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

import msgspec

from poolgrid.http.connections import HttpConnections, Queue, source_of
from poolgrid.http.exchange import STATUS_LINES, HttpExchange
from poolgrid.http.flow import ClientProbe, FlowControl
from poolgrid.http.request_parser import RequestParser, RequestRefusedError

SKIPPED_BYTES_MAX = 64 * 2**20
"""Most that is read and dropped of a body whose request is answered; twice the largest body, by default."""


ASGI = {"version": "3.0", "spec_version": "2.3"}


class HttpConnection(asyncio.Protocol):
    """One connection."""

    transport: asyncio.Transport
    flow: FlowControl

    def __init__(self, table: HttpConnections, source: str = "") -> None:
        """With ``source`` it is counted already, by that address."""
        self.table = table
        self._loop = asyncio.get_running_loop()
        self._parser = RequestParser(table, self._loop)
        self.source = source
        """The address that it is counted by, while it is counted."""
        self.is_made = False
        self._scheme = "http"
        self._client = ""
        self._queue: Queue | None = None
        self._waiting: bytearray | None = None
        """What follows the request in flight, or what of a body is left for the next slice of the loop."""
        self._slice: asyncio.Handle | None = None
        """The next slice, which reads what waits of a body."""
        self._held_bytes = 0
        """What the table counts for this connection."""
        self._paused_s = 0.0
        """When the body was last seen waiting for its application, not for its client."""
        self._is_discarding = False
        self._is_half_closed = False
        self._probe: ClientProbe | None = None

    # -- coming and going ----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Count the connection in, or refuse it."""
        self.transport = cast(asyncio.Transport, transport)
        self.flow = FlowControl(self.transport)
        self.is_made = True
        scheme = "http" if transport.get_extra_info("sslcontext") is None else "https"
        client, server = (_address(transport.get_extra_info(each)) for each in ("peername", "sockname"))
        self._scheme = scheme
        self._client = "an unknown address" if client is None else client[0]
        common = {"type": "http", "asgi": ASGI, "root_path": "", "scheme": scheme, "client": client, "server": server}
        self._parser.open(self.transport, self.flow, common, self.finish)
        table = self.table
        table.open.add(self)
        if not self.source:
            source = source_of(self._client)
            reason = table.admit(source, self._loop.time())
            if reason is not None:
                self._is_discarding = True
                message = f"connecting: {reason}; try again later"
                self.transport.write(_refusal(503, "too_many_connections", message, table.date_line))
                self.transport.close()
                self._move(table.lingering)
                return
            self.source = source
        self._move(table.heads)

    def connection_lost(self, exc: Exception | None) -> None:
        """Count the connection out, and tell the application."""
        self._drop()
        self._move(None)
        self.table.stuck.pop(self, None)
        self.table.open.discard(self)
        self._leave()
        if self._probe is not None:
            self._probe.stop()
            self._probe = None
        self.flow.block_writing(False)
        self._parser.close()

    def eof_received(self) -> bool:
        """Keep the connection for a request that is whole and has no answer yet."""
        exchange = self._parser.exchange
        if (
            self._is_discarding
            or self._parser.in_body
            or exchange is None
            or exchange.is_started
            or exchange.version != "1.1"
            or self._scheme != "http"
        ):
            return False
        self._is_half_closed = True
        self.flow.is_blocked = True  # reading again would find the end again
        parser = self._parser
        self._probe = ClientProbe(
            self._loop, self.transport, lambda: parser.exchange is None or parser.exchange.is_started
        )
        return True

    def shutdown(self) -> None:
        """End after the request in flight."""
        exchange = self._parser.exchange
        if exchange is None or exchange.is_complete:
            self.transport.close()
        else:
            exchange.keep_alive = False

    def pause_writing(self) -> None:
        """Begin to count the time: the client does not take its answer."""
        self.flow.block_writing(True)
        self.table.stuck[self] = self._loop.time()

    def resume_writing(self) -> None:
        """Stop counting."""
        self.flow.block_writing(False)
        self.table.stuck.pop(self, None)

    # -- reading -------------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Read as far as there is nothing else to do first."""
        if self._is_discarding:
            return
        if self._waiting is not None:
            if self._slice is not None:
                self._waiting += data
            else:
                self._wait_behind(data)
            return
        end = self._read(data)
        if end < len(data):
            if self._parser.in_body:
                self._read_on_later(bytearray(data[end:]))
                return
            self._move(None)
            self._wait_behind(data[end:])
        elif not self._is_discarding:
            self._settle()

    def _read(self, data: bytes | bytearray) -> int:
        """Read; return how far that was, or all of it when the connection ends with it."""
        try:
            return self._parser.read(data)
        except RequestRefusedError as refusal:
            self._refuse(refusal.status, refusal.reason, refusal.message)
            return len(data)

    def _settle(self) -> None:
        """Count and time what the connection waits for now; nothing is left to parse."""
        table = self.table
        queue: Queue | None
        if self._parser.in_body:
            queue = table.bodies
        elif self._parser.is_busy():
            queue = None
        elif self._parser.head_bytes:
            queue = table.heads
        else:
            queue = table.idle if self._queue is None else self._queue
        if queue is not self._queue:
            self._move(queue)
        if self._held_bytes or self._parser.in_body:
            self._count()
        if self._parser.in_body:
            if self._parser.is_busy():
                table.make_room(self, self._client, self._loop.time())
            elif (self._parser.body_left or self._parser.payload_bytes) > SKIPPED_BYTES_MAX:
                self._refuse(413, "unread_body", "")

    # -- slices --------------------------------------------------------------------------------------------------------

    def _read_on_later(self, rest: bytearray) -> None:
        """Continue with a body in the loop's next slice, and read nothing meanwhile."""
        self._waiting = rest
        self.flow.block(True)
        self._settle()
        if not self._is_discarding:
            self._slice = self._loop.call_soon(self._run_slice)

    def _run_slice(self) -> None:
        self._slice = None
        if self._waiting is not None and not self.transport.is_closing():
            self._go_on(self._waiting)

    # -- requests behind the one in flight -----------------------------------------------------------------------------

    def _wait_behind(self, data: bytes | bytearray) -> None:
        """Keep what comes behind a request in flight."""
        exchange, table = self._parser.exchange, self.table
        assert exchange is not None, "it is in flight"
        if not exchange.keep_alive:
            return  # the connection ends with the answer
        if not table.has_room(len(data)):
            # A client that pipelines must be ready to send its requests again (RFC 9112, 9.3.2).
            table.note("unfinished_bytes", self._client, self._loop.time())
            exchange.keep_alive = False
            self._drop()
            return
        if self._waiting is None:
            self._waiting = bytearray()
        self._waiting += data
        self._count()
        if len(self._waiting) >= table.limits.pipeline_bytes:
            self.flow.block(True)

    def _go_on(self, waiting: bytearray) -> None:
        """Read on in what waits."""
        if self._slice is not None:
            return
        if not self._parser.in_body:
            self._move(None)
        end = self._read(waiting)
        if self._is_discarding:
            return
        del waiting[:end]
        if waiting and self._parser.in_body:
            self._read_on_later(waiting)
            return
        if not waiting:
            self._waiting = None
        self._count()
        if self.flow.is_blocked and not self._is_half_closed and len(waiting) < self.table.limits.pipeline_bytes:
            self.flow.block(False)
        if not waiting:
            self._settle()
            if self._is_half_closed and self._queue is not None:
                self._close()  # what has come is not whole, and no more will come

    def finish(self, exchange: HttpExchange) -> None:
        """Take the end of an answer: begin what waits, or wait for the next request."""
        if not exchange.keep_alive:
            self.transport.close()
        if self._is_discarding:
            return
        if self.transport.is_closing():
            self._move(self.table.closing)
        elif self._waiting is not None:
            self._go_on(self._waiting)
        elif self._is_half_closed:
            self._close()
        else:
            if self.flow.is_full:
                self.flow.fill(False)
            if self._parser.in_body or self._held_bytes:
                self._settle()
            else:
                self._move(self.table.idle)

    # -- what is held --------------------------------------------------------------------------------------------------

    def _count(self) -> None:
        """Tell the table what this connection holds of requests that are not whole or not begun."""
        held = 0 if self._waiting is None else len(self._waiting)
        if self._parser.in_body and self._parser.is_busy():
            held += self._parser.payload_bytes
        self.table.unfinished_bytes += held - self._held_bytes
        self._held_bytes = held

    def _drop(self) -> None:
        """Forget what is held."""
        self._waiting = None
        self._parser.drop_body()
        if self._held_bytes:
            self._count()

    def _move(self, queue: Queue | None) -> None:
        if self._queue is not None:
            self._queue.pop(self, None)
        self._queue = queue
        if queue is not None:
            queue[self] = self._loop.time()

    def _leave(self) -> None:
        if self.source:
            self.table.leave(self.source)
            self.source = ""

    # -- as its server's table asks ------------------------------------------------------------------------------------

    def time_out(self, now_s: float) -> None:
        """Close, or answer 408: the time of the queue it is in is over."""
        table = self.table
        if self._queue is table.idle:
            self._close()
        elif self._parser.in_body:
            limits = table.limits
            self._refuse(
                408,
                "body_timeout",
                f"reading the request body: {self._parser.payload_bytes} bytes came in time, allowed are "
                f"{limits.body_timeout_s:g} s and a second for each {limits.body_bytes_per_s:g} bytes "
                "(setting http_request_timeout_ms)",
            )
        elif self._parser.head_bytes:
            self._refuse(
                408,
                "header_timeout",
                f"reading a request: its head is not whole after {table.limits.header_timeout_s:g} s, the limit "
                "(setting http_request_timeout_ms)",
            )
        else:
            # Browsers connect ahead of need; an answer to no request would be taken for that of the next.
            table.note("header_timeout", self._client, now_s)
            self._close()

    def close_idle(self) -> None:
        """Close without an answer, and be counted out at once."""
        self._leave()
        self._close()

    def abort_body(self) -> None:
        """Forget the unfinished body and answer 503."""
        self._refuse(
            503,
            "unfinished_bytes",
            f"reading the request body: more than {self.table.limits.unfinished_bytes} bytes of unfinished requests "
            "are held, the limit, and this one began first; try again later",
            is_noted=True,
        )

    def body_deadline_s(self, since_s: float, now_s: float) -> float:
        """Return when the body that began at ``since_s`` must be whole, given what has come of it."""
        if self.flow.is_paused:
            self._paused_s = now_s  # it waits for its application
        return max(since_s, self._paused_s) + self.table.limits.body_time_s(self._parser.payload_bytes)

    # -- ends ----------------------------------------------------------------------------------------------------------

    def _refuse(self, status: int, reason: str, message: str, is_noted: bool = False) -> None:
        """Answer unless there is an answer already, and end the connection when the client has had time to read it."""
        if not is_noted:
            self.table.note(reason, self._client, self._loop.time())
        exchange = self._parser.exchange
        is_answered = self._parser.in_body and not self._parser.is_busy()
        self._is_discarding = True
        self._drop()
        if exchange is not None and not exchange.is_complete:
            exchange.disconnect()
            if exchange.is_started:
                self.transport.abort()
                return
        if not is_answered:
            self.transport.write(_refusal(status, reason, message, self.table.date_line))
        if self.transport.can_write_eof() and not self._is_half_closed:
            self.transport.write_eof()
            self.flow.is_full = False
            self.flow.block(False)
        else:
            self.transport.close()
        self._move(self.table.lingering)

    def _close(self) -> None:
        self._is_discarding = True
        self._drop()
        self.transport.close()
        self._move(self.table.closing)


def _address(info: Any) -> tuple[str, int] | None:
    return (str(info[0]), int(info[1])) if isinstance(info, tuple) else None


def _refusal(status: int, reason: str, message: str, date_line: bytes) -> bytes:
    """Return an answer in the shape of every error of the applications; no request has come whole to have a name."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    body = msgspec.json.encode({"error": {"message": message, "type": kind, "param": None, "code": reason}})
    retry = b"retry-after: 1\r\n" if status == 503 else b""
    head = b"%b%b%bcontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
    return head % (STATUS_LINES[status], date_line, retry, len(body)) + body
