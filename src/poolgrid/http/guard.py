"""One HTTP/1.1 connection: the guard between its socket and uvicorn's protocol, which reads requests, writes answers.

uvicorn's protocol lacks limits on what a client may cost before and after its request, so the guard has each callback
of the socket first. To uvicorn it is the transport.

Rules
    1. A connection is in the table of its server (``poolgrid.http.connections``) from its first moment to its last, in
       the queue of what it waits for. Unfinished and unparsed requests are counted there.
    2. uvicorn gets one request at a time: its head when the head is whole, its body when the application has been
       called, for then its headers are known (``GuardedApplication``). What follows waits unparsed; beyond
       ``pipeline_bytes`` nothing is read until the application has returned.
    3. A request that breaks a limit is answered with its status and the connection ends: the answer goes out, then for
       a moment what still comes is read and dropped, because closing at once would reset the connection. To uvicorn
       the client has left.
    4. A client that ends its side right after its request gets its answer. Whether it is still there is probed
       (``poolgrid.http.client_probe``). During an answer, and under TLS, whose asyncio transport has no half-closed
       state, the end of the client's side means that it has left.
    5. An application finds the guard of its request in ``scope["state"]["guard"]``.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, MutableMapping
from http import HTTPStatus
from typing import Any, Final, Protocol, cast

import msgspec
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from poolgrid.http.browser_requests import shown
from poolgrid.http.client_probe import ClientProbe
from poolgrid.http.connections import HttpConnections, Queue, source_of
from poolgrid.http.request_framing import (
    EMPTY_LINE,
    SLICE_PIECES,
    ChunkedBody,
    InvalidBodyError,
    SizedBody,
    unchunked,
    without_upgrade,
)

log = logging.getLogger(__name__)

SERVER_ENDS: Final = "the server is shutting down"
"""Message of the cancellation of a request that is not answered in time for the end of the server."""

SKIPPED_BYTES_MAX: Final = 64 * 2**20
"""Most that is read and dropped of a body whose request is answered; twice the largest body, by default."""

COPIED_BYTES_MAX: Final = 16 * 1024
"""Longest piece of a read that is copied for uvicorn; longer ones are passed as a view, which costs more to make."""

_REQUEST_LINE: Final = re.compile(rb"([A-Z][A-Z-]{0,19}( |$)|$)")
"""How a request begins; TLS and other protocols that are sent to a plain server do not."""

CHUNKED_LINE: Final = b"transfer-encoding: chunked\r\n"
"""As uvicorn writes it."""

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]


class AnswerSource(Protocol):
    """What an answer comes from, as far as its client matters to it."""

    def client_gone(self) -> None:
        """The client has left, or the server has given up the request."""
        ...

    def pause(self) -> None:
        """The client does not take what is written."""
        ...

    def resume(self) -> None:
        """The client takes it again."""
        ...


class Guard(asyncio.Protocol):
    """One connection."""

    # Most of it stays as it is here for most connections.
    source: AnswerSource | None = None
    """Set by the application for the time of one answer."""
    is_lost = False
    """The client's connection has gone."""
    address = ""
    """What the connection is counted by, while it is counted."""
    is_made = False
    transport: asyncio.Transport
    _inner: HttpToolsProtocol | None = None
    """uvicorn's protocol, until it is done with this connection."""
    _queue: Queue | None = None
    _held: bytearray | None = None
    """A part of a head, or what follows the request in flight, or what of a body is left for the next slice."""
    _searched = 0
    """Bytes of it without the end of a head."""
    _head_bytes = 0
    """What has come of a head that is not whole, and of empty lines before it."""
    _is_starting = False
    """uvicorn has a head whose application is not called yet."""
    is_busy = False
    """uvicorn has a request whose application has not returned."""
    is_answering = False
    """Bytes of its answer have been written."""
    _body: SizedBody | ChunkedBody | None = None
    """The body of a request that is not whole."""
    _turn: asyncio.Handle | None = None
    """Reads what is held, in the next turn of the loop."""
    _held_bytes = 0
    """What the table counts for this connection."""
    _knows_chunks = True
    """Clients before HTTP/1.1 do not; the end of the connection is the end of their answer."""
    _unchunks = False
    """uvicorn writes chunks, for a client that does not know them."""
    _allowed_host: bytes | None = None
    """That of the request before: clients of one connection name one."""
    _tunnel: tuple[Callable[[bytes], None], Callable[[], None]] | None = None
    _is_discarding = False
    _is_half_closed = False
    _is_feeding = False
    """uvicorn is reading: what it writes meanwhile is its own answer to what is not HTTP."""
    _is_invalid = False
    _is_detaching = False
    _is_last = False
    """What follows the request in flight is dropped."""
    _is_blocked = False
    """Nothing is read, because enough waits here."""
    _is_full = False
    """Nothing is read, because the application has enough to read."""
    _is_paused = False
    _paused_s = 0.0
    """When the body was last seen waiting for its application, not for its client."""
    _unsent_bytes = 0
    _probe: ClientProbe | None = None
    _scheme = "http"
    _client = "an unknown address"

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        table: HttpConnections,
    ) -> None:
        """As uvicorn makes its own protocols, with the ``table`` of the server."""
        self._config = config
        self._server_state = server_state
        self._app_state = app_state
        self._loop = _loop or asyncio.get_running_loop()
        self.table = table

    # -- coming and going ----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Count the connection in, or refuse it."""
        self.transport = cast(asyncio.Transport, transport)
        self.is_made = True
        peer = transport.get_extra_info("peername")
        if isinstance(peer, tuple):
            self._client = str(peer[0])
        if transport.get_extra_info("sslcontext") is not None:
            self._scheme = "https"
        table = self.table
        table.open.add(self)
        if not self.address:
            address = source_of(self._client)
            reason = table.admit(address, self._loop.time())
            if reason is not None:
                self._is_discarding = True
                self._write_refusal(503, "too_many_connections", f"connecting: {reason}; try again later")
                self.transport.close()
                self._move(table.lingering)
                return
            self.address = address
        self._inner = HttpToolsProtocol(
            self._config, self._server_state, {**self._app_state, "guard": self}, self._loop
        )
        self._inner.connection_made(cast(asyncio.Transport, self))
        self._move(table.heads)

    def connection_lost(self, exc: Exception | None) -> None:
        """Count the connection out, and tell what serves it."""
        self.is_lost = True
        self._is_discarding = True
        self._drop()
        self._move(None)
        self.table.stuck.pop(self, None)
        self.table.open.discard(self)
        self._leave()
        if self._probe is not None:
            self._probe.stop()
            self._probe = None
        self._give_up()
        tunnel, self._tunnel = self._tunnel, None
        if tunnel is not None:
            tunnel[1]()

    def eof_received(self) -> bool:
        """Keep the connection for a request that is whole and has no answer yet."""
        is_unanswered = (self.is_busy and not self.is_answering) or self._turn is not None
        is_waiting = is_unanswered and self._body is None and self._tunnel is None
        if self._is_discarding or not is_waiting or not self._knows_chunks or self._scheme != "http":
            return False
        self._is_half_closed = True
        self._is_blocked = True  # reading again would find the end again
        self._probe = ClientProbe(self._loop, self.transport, lambda: not self.is_busy or self.is_answering)
        return True

    def shutdown(self) -> None:
        """End after the request in flight."""
        if self._tunnel is not None:
            return
        if self.is_busy and self._inner is not None:
            self._inner.shutdown()
        else:
            self._close()

    def pause_writing(self) -> None:
        """Begin to count the time: the client does not take its answer."""
        self._unsent_bytes = self.transport.get_write_buffer_size()
        self.table.stuck[self] = self._loop.time()
        if self._inner is not None:
            self._inner.pause_writing()
        if self.source is not None:
            self.source.pause()

    def resume_writing(self) -> None:
        """Stop counting."""
        self.table.stuck.pop(self, None)
        if self._inner is not None:
            self._inner.resume_writing()
        if self.source is not None:
            self.source.resume()

    # -- for applications, and as the transport of uvicorn -------------------------------------------------------------

    def write(self, data: bytes) -> None:
        """Write bytes of an answer as they are; applications may write whole chunks between the head and the end of an
        answer that is chunked, or anything after ``divert``."""
        if self._is_feeding:
            self._is_invalid = True
            return
        if self._inner is None and self._tunnel is None:
            return
        if not self.is_answering:
            data = self._begun(data)
        elif self._unchunks:
            data = unchunked(data)
        self.transport.write(data)

    def close(self) -> None:
        """Close the connection when the client has what was written."""
        if not (self._is_feeding or self._is_detaching or self.is_lost):
            self._close()

    def abort(self) -> None:
        """Cut the connection."""
        if not self.is_lost:
            self.transport.abort()

    def divert(self, receive: Callable[[bytes], None], lost: Callable[[], None]) -> None:
        """Give all further bytes of the client to ``receive``, those that have come at once, and none to uvicorn:
        ``send`` does nothing from now on. ``lost`` is called when the connection ends."""
        if self.is_lost:
            lost()
            return
        held, self._held = self._held, None
        self._drop()
        self._tunnel = receive, lost
        self._detach()
        self._move(None)
        if held:
            receive(bytes(held))
        self._is_full = False
        self._block(False)

    def is_closing(self) -> bool:
        """Return whether nothing more can be written."""
        return (self._inner is None and self._tunnel is None) or self.transport.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self.transport.get_extra_info(name, default)

    def pause_reading(self) -> None:
        """Read nothing of the client: there is enough to do."""
        self._is_full = True
        self._set_reading()

    def resume_reading(self) -> None:
        self._is_full = False
        self._set_reading()

    # -- reading -------------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Hand on what belongs to the request in flight; hold what follows it."""
        if self._tunnel is not None:
            self._tunnel[0](data)
        elif self._is_discarding:
            return
        elif self._body is not None and self._turn is None:
            self._read_body(data)
        elif self.is_busy or self._turn is not None:
            self._hold(data)
        else:
            self._read_head(data)

    def _read_head(self, data: bytes) -> None:
        """Hand on a head when it is whole."""
        whole: bytes | bytearray = data
        if self._held is not None:
            self._held += data
            whole = self._held
        if whole[:1] in (b"\r", b"\n"):
            # Empty lines before a request are skipped (RFC 9112, 2.2).
            self._head_bytes += len(whole)
            whole = whole.lstrip(b"\r\n")
            self._head_bytes -= len(whole)
        end = whole.find(EMPTY_LINE, self._searched) + len(EMPTY_LINE)
        is_whole = end >= len(EMPTY_LINE)
        limits = self.table.limits
        if (end if is_whole else len(whole)) + self._head_bytes > limits.head_bytes:
            message = f"reading a request: its head has more than {limits.head_bytes} bytes, the limit"
            self._refuse(431, "head_too_large", message)
        elif not is_whole and _REQUEST_LINE.match(whole) is None:
            self._refuse_invalid()
        elif not is_whole:
            if whole is not self._held:
                self._held = bytearray(whole) if whole else None
            self._searched = max(0, len(whole) - len(EMPTY_LINE) + 1)
            self._count()
            if self._is_half_closed:
                self._close()  # no more will come
            elif self._queue is not self.table.heads:
                self._move(self.table.heads)
        else:
            self._held = bytearray(memoryview(whole)[end:]) if end < len(whole) else None
            self._begin(bytes(whole[:end]))

    def _begin(self, head: bytes) -> None:
        """Hand on a whole head."""
        limits = self.table.limits
        fields = head.count(b"\n") - 2
        if fields > limits.headers:
            message = f"reading a request: it has {fields} header fields, allowed are {limits.headers}"
            self._refuse(431, "head_too_large", message)
            return
        if b"\r\nupgrade:" in head.lower():
            head = without_upgrade(head)
        self._move(None)
        self._searched = self._head_bytes = 0
        self.is_busy = self._is_starting = True
        self.is_answering = False
        tasks = len(self._server_state.tasks)
        if self._feed(head) and len(self._server_state.tasks) == tasks:
            self._refuse_invalid()  # the beginning of HTTP/2

    def begin_request(self, scope: Scope) -> bool:
        """Hand on the body of a request whose application is to be called; return whether it may be."""
        self._is_starting = False
        if self._inner is None:
            return False
        headers = scope["headers"]
        fields = dict(headers)
        host = fields.get(b"host", b"localhost")
        if host != self._allowed_host and not self._is_host_allowed(host):
            return False
        self._unchunks = False
        self._knows_chunks = scope["http_version"] == "1.1"
        is_upgrade = b"upgrade" in fields and _is_upgrade(headers)
        if self.table.is_ending or not self._knows_chunks or is_upgrade:
            self._inner.shutdown()
        length = fields.get(b"content-length", b"0")
        if is_upgrade:
            pass  # what follows is the other protocol's
        elif b"transfer-encoding" in fields:
            # uvicorn adds trailers to its list, long after the head was checked.
            scope["headers"] = headers[:]
            self._body = ChunkedBody(self.table.limits.head_bytes)
        elif length != b"0" and int(length):  # llhttp has checked it
            self._body = SizedBody(int(length))
        held, self._held = self._held, None
        if self._body is not None:
            self._read_body(held or b"")
        elif held is not None:
            self._hold(held)
        self._unblock()
        if self._is_half_closed and (self._body is not None or not self._knows_chunks):
            self._close()  # no more of it will come, or the client cannot be probed
            self._give_up()
        return not self._is_discarding

    def end_request(self) -> None:
        """Take note that the application has returned: begin what waits, or wait for the next request."""
        self.is_busy = False
        self.source = None
        if self._is_discarding or self._tunnel is not None:
            return
        if self.transport.is_closing():
            self._close()
        elif self._body is not None:
            self._settle()
        elif self._held is not None:
            # Later: uvicorn may have to answer for an application that failed.
            self._turn = self._loop.call_soon(self._read_held)
        elif self._is_half_closed:
            self._close()
        else:
            self._move(self.table.idle)

    def _read_held(self) -> None:
        """Begin the next request of those that wait, or read the next slice of a body."""
        self._turn = None
        if self._is_discarding:
            return
        if self.transport.is_closing():
            self._close()
            return
        if self._body is not None:
            held, self._held = self._held, None
            self._read_body(held or b"")
        else:
            self._read_head(b"")
        if not self._is_discarding:
            self._count()
            self._unblock()

    def _read_body(self, data: bytes | bytearray) -> None:
        """Hand on what belongs to the body, a slice of it at most."""
        body = self._body
        assert body is not None, "it is not whole"
        at, size = 0, len(data)
        body.pieces = 0
        try:
            while at < size and not body.is_whole and body.pieces < SLICE_PIECES:
                end = body.take(data, at)
                piece = data if end - at == size else memoryview(data)[at:end]
                if not self._feed(piece if isinstance(piece, bytes) or end - at > COPIED_BYTES_MAX else bytes(piece)):
                    return
                at = end
        except InvalidBodyError as error:
            self._refuse(400, error.reason, error.message)
            return
        if not body.is_whole:
            if at < size:
                self._held = bytearray(memoryview(data)[at:])
                self._block(True)
                self._turn = self._loop.call_soon(self._read_held)
            self._settle()
            return
        self._body = None
        self._count()
        if self._is_full:
            # uvicorn reads on when it is asked for more, and behind the end it is not: a client could leave unseen.
            self.resume_reading()
        if at < size:
            self._hold(data[at:])
        if not self.is_busy:
            self.end_request()
        elif self._queue is not None:
            self._move(None)

    def _settle(self) -> None:
        """Count and time a body that is not whole."""
        body, table = self._body, self.table
        assert body is not None, "it is not whole"
        if self._queue is not table.bodies:
            self._move(table.bodies)
        self._count()
        if self.is_busy:
            table.make_room(self, self._client, self._loop.time())
        elif (body.left_bytes or body.received_bytes) > SKIPPED_BYTES_MAX:
            self._refuse(413, "unread_body", "")

    def _feed(self, data: bytes | bytearray | memoryview) -> bool:
        """Give bytes to uvicorn; return whether they were HTTP."""
        if self._inner is None:
            return False
        self._is_feeding = True
        self._inner.data_received(cast(bytes, data))
        self._is_feeding = False
        if self._is_invalid:
            self._refuse_invalid()
            return False
        return True

    def _is_host_allowed(self, host: bytes) -> bool:
        hosts = self.table.hosts
        if hosts is not None and not hosts.allow(host):
            message = f"reading a request: Host is {shown(host)}, allowed are addresses, names without a dot"
            where = "and names of setting http_hosts, for a server on a loopback address without API keys"
            self._refuse(403, "foreign_host", f"{message} {where}")
            return False
        self._allowed_host = host
        return True

    # -- what waits ----------------------------------------------------------------------------------------------------

    def _hold(self, data: bytes | bytearray) -> None:
        """Keep what comes behind a request in flight, or before its application is called."""
        if self._is_last:
            return
        if not (self._is_starting or self._turn is not None or self.table.has_room(len(data))):
            # A client that pipelines must be ready to send its requests again (RFC 9112, 9.3.2).
            self.table.note("unfinished_bytes", self._client, self._loop.time())
            self._held = None
            self._count()
            self._is_last = True
            self.shutdown()
            return
        if self._held is None:
            self._held = bytearray()
        self._held += data
        self._count()
        if len(self._held) >= self.table.limits.pipeline_bytes:
            self._block(True)

    def _unblock(self) -> None:
        """Read again, unless what waits is enough."""
        if self._is_blocked and self._turn is None:
            self._block(self._held is not None and len(self._held) >= self.table.limits.pipeline_bytes)

    def _block(self, blocked: bool) -> None:
        self._is_blocked = blocked or (self._is_half_closed and not self._is_discarding)
        self._set_reading()

    def _set_reading(self) -> None:
        paused = self._is_blocked or self._is_full
        if paused != self._is_paused and not self.transport.is_closing():
            self._is_paused = paused
            if paused:
                self.transport.pause_reading()
            else:
                self.transport.resume_reading()

    def _count(self) -> None:
        """Tell the table what this connection holds of requests that are not whole or not begun."""
        held = 0 if self._held is None else len(self._held)
        if self._body is not None and self.is_busy:
            held += self._body.received_bytes
        if held != self._held_bytes:
            self.table.unfinished_bytes += held - self._held_bytes
            self._held_bytes = held

    def _drop(self) -> None:
        """Forget what is held."""
        self._held = None
        if isinstance(self._body, ChunkedBody):
            self._body.close()
        self._body = None
        if self._turn is not None:
            self._turn.cancel()
            self._turn = None
        self._count()

    def _move(self, queue: Queue | None) -> None:
        if self._queue is not None:
            self._queue.pop(self, None)
        self._queue = queue
        if queue is not None:
            queue[self] = self._loop.time()

    def _leave(self) -> None:
        if self.address:
            self.table.leave(self.address)
            self.address = ""

    # -- as its server's table asks ------------------------------------------------------------------------------------

    def is_draining(self) -> bool:
        """Return whether the client has taken some of what waits for it since this was last asked."""
        before, self._unsent_bytes = self._unsent_bytes, self.transport.get_write_buffer_size()
        return self._unsent_bytes < before

    def time_out(self, now_s: float) -> None:
        """Close, or answer 408: the time of the queue it is in is over."""
        table = self.table
        if self._queue is table.idle:
            self._close()
        elif self._body is not None:
            limits = table.limits
            self._refuse(
                408,
                "body_timeout",
                f"reading the request body: {self._body.received_bytes} bytes came in time, allowed are "
                f"{limits.body_timeout_s:g} s and a second for each {limits.body_bytes_per_s:g} bytes "
                "(setting http_request_timeout_ms)",
            )
        elif self._held or self._head_bytes:
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
        if self._is_paused:
            self._paused_s = now_s  # it waits for its application
        received_bytes = 0 if self._body is None else self._body.received_bytes
        return max(since_s, self._paused_s) + self.table.limits.body_time_s(received_bytes)

    # -- ends ----------------------------------------------------------------------------------------------------------

    def _begun(self, data: bytes) -> bytes:
        """Return what a client of its version gets of the first bytes of an answer."""
        if data.startswith(b"HTTP/1.1 100 "):
            return data if self._knows_chunks else b""
        self.is_answering = True
        if not self._knows_chunks and CHUNKED_LINE in data:
            self._unchunks = True
            return data.replace(CHUNKED_LINE, b"", 1)
        return data

    def fail(self, status: int, code: str, message: str) -> None:
        """End the request in flight for an application that cannot: with an answer, or by the end of the connection
        where one has begun."""
        if self._inner is not None:
            self._refuse(status, code, message, is_noted=True)

    def _refuse_invalid(self) -> None:
        self._is_invalid = False
        self._refuse(400, "invalid_http", "reading a request: this is not HTTP/1.1")

    def _refuse(self, status: int, reason: str, message: str, is_noted: bool = False) -> None:
        """Answer unless there is an answer already, and end the connection when the client has had time to read it."""
        if not is_noted:
            self.table.note(reason, self._client, self._loop.time())
        is_answered = self._body is not None and not self.is_busy
        is_amid_answer = self.is_busy and self.is_answering
        self._is_discarding = True
        self._drop()
        self._give_up()
        if is_amid_answer:
            self._close()
            return
        if not is_answered:
            self._write_refusal(status, reason, message)
        if self.transport.can_write_eof() and not self._is_half_closed:
            self.transport.write_eof()
            self._is_full = False
            self._block(False)
        else:
            self.transport.close()
        self._move(self.table.lingering)

    def _write_refusal(self, status: int, reason: str, message: str) -> None:
        """Write an answer in the shape of every error of the applications; no request has come whole to have a name."""
        kind = "server_error" if status >= 500 else "invalid_request_error"
        body = msgspec.json.encode({"error": {"message": message, "type": kind, "param": None, "code": reason}})
        lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n".encode()]
        lines += [b"%b: %b\r\n" % header for header in self._server_state.default_headers]
        if status == 503:
            lines.append(b"retry-after: 1\r\n")
        lines.append(b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body))
        self.transport.write(b"".join([*lines, body]))

    def _close(self) -> None:
        self._is_discarding = True
        self._drop()
        self.transport.close()
        self._move(self.table.closing)

    def _give_up(self) -> None:
        """Tell what serves the request that its client has left."""
        self._detach()
        source, self.source = self.source, None
        if source is not None:
            source.client_gone()

    def _detach(self) -> None:
        """Let go of uvicorn's protocol: to it the connection is lost."""
        inner, self._inner = self._inner, None
        if inner is not None:
            self._is_detaching = True  # it closes its transport then
            # Without an error also where there is one: uvicorn's timer of the connection would be left behind.
            inner.connection_lost(None)
            self._is_detaching = False


class GuardedApplication:
    """The application that uvicorn calls: asks the guard of a request first, and tells it of the end."""

    def __init__(self, app: Application) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        guard: Guard = scope["state"]["guard"]
        if guard.begin_request(scope):
            try:
                await self._app(scope, receive, send)
            except asyncio.CancelledError:
                guard.fail(503, "not_ready", SERVER_ENDS)
            except Exception as error:
                log.error("the application failed: this is a bug", exc_info=error)
                guard.fail(500, "internal_error", "serving the request failed; the log has the details")
            finally:
                guard.end_request()


def guard_of(scope: Scope) -> Guard | None:
    """Return the guard of a request; ``None`` under another server."""
    guard: Guard | None = scope.get("state", {}).get("guard")
    return guard


def _is_upgrade(headers: list[tuple[bytes, bytes]]) -> bool:
    """Return whether llhttp takes what follows a head with ``upgrade`` for another protocol."""
    connection = b",".join(value for name, value in headers if name == b"connection")
    return b"upgrade" in [token.strip().lower() for token in connection.split(b",")]
