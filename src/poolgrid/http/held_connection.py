"""One HTTP connection and what is held for it: counted in, timed, kept within bounds, refused, closed, counted out.

Rules
    1. It counts in the table of its server (``poolgrid.http.http_connections``) from its first moment to its last,
       and is in the queue of what it waits for. What has come of a request that is not whole or not begun is counted
       with it. Whoever reads the connection (``poolgrid.http.bounded_protocol``) says what that is.
    2. What breaks a limit is answered with its status, and the connection ends: the answer goes out, then for a moment
       what still comes is read and dropped, because closing at once would reset the connection under the answer.
    3. A client that ends its side right after its request gets its answer; whether it is still there is probed
       (``poolgrid.http.client_probe``). Amid an answer, and under TLS, whose asyncio knows no half of a connection,
       the end of a client's side means that it has left.

What is replaced here are internals of uvicorn: ``tests/http/test_uvicorn_contract.py`` tells when they change, and
``pyproject.toml`` has an upper bound for it.
"""

from __future__ import annotations

import asyncio

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from poolgrid.http.client_probe import ClientProbe
from poolgrid.http.flow_control import Reading
from poolgrid.http.http_connections import HttpConnections, Queue, source_of


class HeldConnection(HttpToolsProtocol):
    """One connection; implements ``poolgrid.http.http_connections.Held``."""

    table: HttpConnections
    """Those of its server, which makes a subclass of its own."""

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
    _payload_bytes = 0
    _paused_s = 0.0
    """When the body was last seen waiting for its endpoint, not for its client."""
    _waiting: bytearray | None = None
    """What follows the request in work, or what of a body is left for the next turn of the loop."""
    _parts: list[bytes]
    """Pieces of a chunked body that the endpoint has not got yet."""
    _held_bytes = 0
    """What the table counts for this connection."""
    _discarding = False
    _half_closed = False
    _unsent_bytes = 0
    _probe: ClientProbe | None = None

    # -- coming and going ----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count the connection in, or refuse it."""
        super().connection_made(transport)
        self.flow = Reading(transport)
        self._parts = []
        # What is asked with every request is found sooner in an object than in its class.
        self._waiting = None
        self._discarding = self._half_closed = False
        if not self.source:
            source = source_of(self._client())
            reason = self.table.admit(source, self.loop.time())
            if reason is not None:
                self._discarding = True
                self._answer(503, "too_many_connections", f"connecting: {reason}; try again later")
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
            self._probe.stop()
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
        self._probe = ClientProbe(self.loop, self.transport, lambda: self.cycle.response_started)
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

    # -- what is held --------------------------------------------------------------------------------------------------

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

    def _drop(self) -> None:
        """Forget what is held."""
        self._waiting = None
        self._parts.clear()
        self._in_body = False
        if self._held_bytes:
            self._count()

    def _move(self, queue: Queue | None) -> None:
        if self._queue is not None:
            self._queue.pop(self, None)
        self._queue = queue
        if queue is not None:
            queue[self] = self.loop.time()

    def _leave(self) -> None:
        if self.source:
            self.table.leave(self.source)
            self.source = ""

    def _client(self) -> str:
        return "somebody" if self.client is None else self.client[0]

    # -- as its server's table asks ------------------------------------------------------------------------------------

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
            "unfinished_bytes",
            f"reading the request body: more than {self.table.limits.unfinished_bytes} bytes of unfinished requests "
            "are held, the limit (setting http_unfinished_bytes), and this one began first; try again later",
        )

    def body_deadline_s(self, since_s: float, now_s: float) -> float:
        """Return when the body that began at ``since_s`` must be whole, given what has come of it."""
        if self.flow.read_paused:
            self._paused_s = now_s  # it waits for its endpoint
        return max(since_s, self._paused_s) + self.table.limits.body_time_s(self._received_bytes())

    def is_writing(self) -> bool:
        """Return whether the client has taken some of what waits for it since this was last asked."""
        before, self._unsent_bytes = self._unsent_bytes, self.transport.get_write_buffer_size()
        return self._unsent_bytes < before

    def abort(self) -> None:
        self.transport.abort()

    # -- ends ----------------------------------------------------------------------------------------------------------

    def _refuse(self, status: int, reason: str, message: str) -> None:
        self.table.note(reason, self._client(), self.loop.time())
        self._close_with(status, reason, message)

    def _close_with(self, status: int, reason: str, message: str) -> None:
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
            self._answer(status, reason, message)
        if self.transport.can_write_eof() and not self._half_closed:
            self.transport.write_eof()
            self.flow.resume_reading()
            self.flow.release()
        else:
            self.transport.close()
        self._move(self.table.lingering)

    def abandon(self) -> None:
        """Forget the request that is not whole."""

    def _answer(self, status: int, reason: str, message: str) -> None:
        # In the shape of every error of the servers behind it; no request has come whole that could have a name.
        kind = "server_error" if status >= 500 else "invalid_request_error"
        body = msgspec.json.encode({"error": {"message": message, "type": kind, "param": None, "code": reason}})
        content = [STATUS_LINE[status]]
        for name, value in self.server_state.default_headers:
            content += (name, b": ", value, b"\r\n")
        if status == 503:
            content.append(b"retry-after: 1\r\n")
        content.append(b"content-type: application/json\r\ncontent-length: %d\r\n" % len(body))
        content += (b"connection: close\r\n\r\n", body)
        self.transport.write(b"".join(content))

    def _close(self) -> None:
        self._discarding = True
        self._drop()
        self.transport.close()
        self._move(self.table.closing)
