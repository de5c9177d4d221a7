"""One HTTP/1.1 connection: the guard between its socket and uvicorn's protocol, which reads requests, writes answers.

uvicorn's protocol lacks limits on what a client may cost before and after its request, so the guard has each callback
of the socket first. To uvicorn it is the transport.

Rules
    1. A connection is in the table of its server (``poolgrid.server.http.connections``) from its first moment to its
       last, in the queue of what it waits for. Unfinished and unparsed requests are counted there.
    2. uvicorn gets one request at a time: its head when the head is whole, its body when the application has been
       called, for then its headers are known (``GuardedApplication``). What follows waits unparsed; beyond
       ``pipeline_bytes`` nothing is read until the application has returned.
    3. A request that breaks a limit is answered with its status and the connection ends: the answer goes out, then for
       a moment what still comes is read and dropped, because closing at once would reset the connection. To uvicorn
       the client has left.
    4. A client that ends its side right after its request gets its answer. Whether it is still there is probed
       (``poolgrid.server.http.client_probe``). During an answer, and under TLS, whose asyncio transport has no
       half-closed state, the end of the client's side means that it has left.
    5. An application finds the guard of its request in ``scope["state"]["guard"]``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from http import HTTPStatus
from typing import Any, Final, Protocol, cast

import msgspec
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from poolgrid.server.http.browser_requests import shown
from poolgrid.server.http.client_probe import ClientProbe
from poolgrid.server.http.connections import HttpConnections, Queue, source_of
from poolgrid.server.http.request_framing import announced_body, offers_upgrade, unchunked
from poolgrid.server.http.request_reader import RequestReader, SocketReading

log = logging.getLogger(__name__)

SERVER_ENDS: Final = "the server is shutting down"
"""Message of the cancellation of a request that is not answered in time for the end of the server."""

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
    transport: asyncio.Transport
    _inner: HttpToolsProtocol | None = None
    """uvicorn's protocol, until it is done with this connection."""
    _queue: Queue | None = None
    _reader: RequestReader
    _reading: SocketReading
    is_answering = False
    """Bytes of its answer have been written."""
    _knows_chunks = True
    """Clients before HTTP/1.1 do not; the end of the connection is the end of their answer."""
    _unchunks = False
    """uvicorn writes chunks, for a client that does not know them."""
    _head = b""
    """Of an answer: held until the end of this turn of the loop, so that what follows it is the same system call."""
    _allowed_host: bytes | None = None
    """That of the request before: clients of one connection name one."""
    _tunnel: tuple[Callable[[bytes], None], Callable[[], None]] | None = None
    is_discarding = False
    _is_feeding = False
    """uvicorn is called: what it does with its transport meanwhile is its own answer to what is not HTTP."""
    _is_invalid = False
    _paused_s = 0.0
    """When the body was last seen waiting for its application, not for its client."""
    _unsent_bytes = 0
    _probe: ClientProbe | None = None
    client = "an unknown address"

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
        self._reading = SocketReading(self.transport)
        self._reader = RequestReader(self.table, self._loop, self._reading)
        peer = transport.get_extra_info("peername")
        if isinstance(peer, tuple):
            self.client = str(peer[0])
        table = self.table
        table.open.add(self)
        if not self.address:
            address = source_of(self.client)
            reason = table.admit(address, self._loop.time())
            server_headers = self._server_state.default_headers
            if reason is not None:
                self.is_discarding = True
                message = f"connecting: {reason}; try again later"
                self.transport.write(refusal(503, "too_many_connections", message, server_headers))
                self.transport.close()
                self.wait_in(table.lingering)
                return
            self.address = address
        self._inner = HttpToolsProtocol(
            self._config, self._server_state, {**self._app_state, "guard": self}, self._loop
        )
        self._inner.connection_made(cast(asyncio.Transport, self))
        self.wait_in(table.heads)

    def connection_lost(self, exc: Exception | None) -> None:
        """Count the connection out, and end what serves it."""
        self.is_lost = True
        self.is_discarding = True
        self._reader.drop()
        self.wait_in(None)
        self.table.stuck.pop(self, None)
        self.table.open.discard(self)
        self.leave()
        if self._probe is not None:
            self._probe.stop()
            self._probe = None
        self._give_up()
        tunnel, self._tunnel = self._tunnel, None
        if tunnel is not None:
            tunnel[1]()

    def eof_received(self) -> bool:
        """Keep the connection for a request that is whole and has no answer yet."""
        reader = self._reader
        is_unanswered = (reader.is_busy and not self.is_answering) or reader.turn is not None
        is_waiting = is_unanswered and reader.body is None and self._tunnel is None
        is_encrypted = self.transport.get_extra_info("sslcontext") is not None
        if self.is_discarding or not is_waiting or not self._knows_chunks or is_encrypted:
            return False
        self._reading.has_ended = True
        self._probe = ClientProbe(self._loop, self.transport, lambda: not reader.is_busy or self.is_answering)
        return True

    def shutdown(self) -> None:
        """End after the request in flight."""
        if self._tunnel is not None:
            return
        if self._reader.is_busy and self._inner is not None:
            self._inner.shutdown()
        else:
            self.finish()

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
            if self.is_answering:
                self._head = data
                self._loop.call_soon(self._write_head)
                return
        elif self._unchunks:
            data = unchunked(data)
        if self._head:
            head, self._head = self._head, b""
            self.transport.writelines((head, data))
        else:
            self.transport.write(data)

    def close(self) -> None:
        """Close the connection when the client has what was written."""
        if not (self._is_feeding or self.is_lost):
            self.finish()

    def abort(self) -> None:
        """Cut the connection within an answer."""
        if not self.is_lost:
            self._detach()  # uvicorn would log that the application did not complete its answer
            self._write_head()
            self.transport.abort()

    def break_off(self) -> None:
        """End the connection within an answer, when the client has what was written."""
        if not self.is_lost:
            self._detach()
            self.finish()

    def divert(self, receive: Callable[[bytes], None], lost: Callable[[], None]) -> None:
        """Give all further bytes of the client to ``receive``, those that have come at once, and none to uvicorn:
        ``send`` does nothing from now on. ``lost`` is called when the connection ends; ``source`` stays until then."""
        if self.is_lost:
            lost()
            return
        self._tunnel = receive, lost
        self._detach()
        self.wait_in(None)
        held = self._reader.take_all()
        self._reading.unlimited()
        if held:
            receive(held)

    def passed(self, size: int) -> None:
        """Take note that the application has passed so much of the body on, and holds it no longer."""
        self._reader.passed(size)

    def is_closing(self) -> bool:
        """Return whether nothing more can be written."""
        return (self._inner is None and self._tunnel is None) or self.transport.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self.transport.get_extra_info(name, default)

    def pause_reading(self) -> None:
        """Read nothing of the client: there is enough to do."""
        self._reading.fill(True)

    def resume_reading(self) -> None:
        """Read it again."""
        self._reading.fill(False)

    # -- requests ------------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Hand on what the client sends."""
        if self._tunnel is not None:
            self._tunnel[0](data)
        elif not self.is_discarding:
            self._reader.receive(data, self)

    def begin(self, head: bytes) -> None:
        """Give uvicorn a whole head."""
        self.wait_in(None)
        self.is_answering = False
        tasks = len(self._server_state.tasks)
        if self.feed(head) and len(self._server_state.tasks) == tasks:
            self.refuse_invalid()  # the beginning of HTTP/2

    def begin_request(self, scope: Scope) -> bool:
        """Begin with the body of a request whose application is to be called; return whether it may be."""
        if self._inner is None:
            return False
        headers = scope["headers"]
        fields = dict(headers)
        host = fields.get(b"host", b"localhost")
        if host != self._allowed_host and not self._is_host_allowed(host):
            return False
        self._unchunks = False
        self._knows_chunks = scope["http_version"] == "1.1"
        is_upgrade = offers_upgrade(headers, fields)
        if self.table.is_ending or not self._knows_chunks or is_upgrade:
            self._inner.shutdown()
        scope["headers"] = headers[:]  # uvicorn adds trailers to its list, long after the head was checked
        body = None if is_upgrade else announced_body(fields, self.table.limits.chunk_overhead_bytes)
        self._reader.open_body(body, self)
        if self._reading.has_ended and (self._reader.body is not None or not self._knows_chunks):
            self.finish()  # no more of it will come, or the client cannot be probed
            self._give_up()
        return not self.is_discarding

    def end_request(self) -> None:
        """Take note that the application has returned: begin what waits, or wait for the next request."""
        if self._tunnel is not None:
            return
        self.source = None
        if self.is_discarding:
            self._reader.is_busy = False
        elif self.transport.is_closing():
            self.finish()
        elif not self._reader.end(self):
            if self._reading.has_ended:
                self.finish()
            else:
                self.wait_in(self.table.idle)

    def feed(self, data: bytes | bytearray | memoryview) -> bool:
        """Give bytes to uvicorn; return whether they were HTTP."""
        if self._inner is None:
            return False
        self._is_feeding = True
        self._inner.data_received(cast(bytes, data))
        self._is_feeding = False
        if self._is_invalid:
            self.refuse_invalid()
            return False
        return True

    def wait_in(self, queue: Queue | None) -> None:
        """Wait in a queue of the table, from now on unless it was there already."""
        if queue is self._queue:
            return
        if self._queue is not None:
            self._queue.pop(self, None)
        self._queue = queue
        if queue is not None:
            queue[self] = self._loop.time()

    def _is_host_allowed(self, host: bytes) -> bool:
        hosts = self.table.hosts
        if hosts is not None and not hosts.allow(host):
            message = f"reading a request: Host is {shown(host)}, allowed are addresses, names without a dot"
            where = "and names of setting http_hosts, for a server on a loopback address without API keys"
            self.refuse(403, "foreign_host", f"{message} {where}")
            return False
        self._allowed_host = host
        return True

    def leave(self) -> None:
        """Be counted out, at the latest when the connection is lost."""
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
            self.finish()
        elif self._reader.body is not None:
            limits = table.limits
            self.refuse(
                408,
                "body_timeout",
                f"reading the request body: {self._reader.body.received_bytes} bytes came in time, allowed are "
                f"{limits.body_timeout_s:g} s and a second for each {limits.body_bytes_per_s:g} bytes "
                "(setting http_request_timeout_ms)",
            )
        elif self._reader.held or self._reader.head_bytes:
            self.refuse(
                408,
                "header_timeout",
                f"reading a request: its head is not whole after {table.limits.header_timeout_s:g} s, the limit "
                "(setting http_request_timeout_ms)",
            )
        else:
            # Browsers connect ahead of need; an answer to no request would be taken for that of the next.
            table.note("header_timeout", self.client, now_s)
            self.finish()

    def close_idle(self) -> None:
        """Close without an answer, and be counted out at once."""
        self.leave()
        self.finish()

    def abort_body(self) -> None:
        """Forget the unfinished body and answer 503."""
        self.refuse(
            503,
            "unfinished_bytes",
            f"reading the request body: more than {self.table.limits.unfinished_bytes} bytes of unfinished requests "
            "are held, the limit, and this one began first; try again later",
            is_noted=True,
        )

    @property
    def is_passing(self) -> bool:
        """Return whether the body is passed on as it comes."""
        return self._reader.is_passing

    def body_deadline_s(self, since_s: float, now_s: float) -> float:
        """Return when the body that began at ``since_s`` must be whole, given what has come of it."""
        if self._reading.is_paused:
            self._paused_s = now_s  # it waits for its application
        body = self._reader.body
        received_bytes = 0 if body is None else body.received_bytes
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

    def _write_head(self) -> None:
        """Write the head that is held, if nothing has followed it."""
        head, self._head = self._head, b""
        if head and not self.is_lost:
            self.transport.write(head)

    def refuse_invalid(self) -> None:
        """Refuse what is not HTTP."""
        self._is_invalid = False
        self.refuse(400, "invalid_http", "reading a request: this is not HTTP/1.1")

    def refuse(self, status: int, reason: str, message: str, is_noted: bool = False) -> None:
        """Answer unless there is an answer already, and end the connection when the client has had time to read it."""
        if self._inner is None:
            return
        if not is_noted:
            self.table.note(reason, self.client, self._loop.time())
        reader = self._reader
        is_answered = reader.body is not None and not reader.is_busy
        is_amid_answer = reader.is_busy and self.is_answering
        self.is_discarding = True
        reader.drop()
        self._give_up()
        if is_amid_answer:
            self.finish()
            return
        if not is_answered:
            self.transport.write(refusal(status, reason, message, self._server_state.default_headers))
        if self.transport.can_write_eof() and not self._reading.has_ended:
            self.transport.write_eof()
            self._reading.unlimited()
        else:
            self.transport.close()
        self.wait_in(self.table.lingering)

    def finish(self) -> None:
        """Close the connection when the client has what was written."""
        self.is_discarding = True
        self._reader.drop()
        self._write_head()
        self.transport.close()
        self.wait_in(self.table.closing)

    def _give_up(self) -> None:
        """Report to the request in work that its client has left."""
        self._detach()
        source, self.source = self.source, None
        if source is not None:
            source.client_gone()

    def _detach(self) -> None:
        """Release uvicorn's protocol: to it the connection is lost."""
        inner, self._inner = self._inner, None
        if inner is not None:
            self._is_feeding = True
            # Without an error also where there is one: uvicorn's timer of the connection would be left behind.
            inner.connection_lost(None)
            self._is_feeding = False


class GuardedApplication:
    """The application that uvicorn calls: reports the begin and the end of each request to its guard."""

    def __init__(self, app: Application) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        guard: Guard = scope["state"]["guard"]
        if guard.begin_request(scope):
            try:
                await self._app(scope, receive, send)
            except asyncio.CancelledError:
                guard.refuse(503, "not_ready", SERVER_ENDS, is_noted=True)
            except Exception as error:
                log.error("the application failed: this is a bug", exc_info=error)
                message = "serving the request failed; the log has the details"
                guard.refuse(500, "internal_error", message, is_noted=True)
            finally:
                guard.end_request()


def refusal(status: int, reason: str, message: str, headers: list[tuple[bytes, bytes]]) -> bytes:
    """Return an answer in the shape of every error of the applications; no request has come whole to have a name."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    body = msgspec.json.encode({"error": {"message": message, "type": kind, "param": None, "code": reason}})
    lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n".encode()]
    lines += [b"%b: %b\r\n" % header for header in headers]
    if status == 503:
        lines.append(b"retry-after: 1\r\n")
    lines.append(b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body))
    return b"".join([*lines, body])


def guard_of(scope: Scope) -> Guard | None:
    """Return the guard of a request; ``None`` under another server."""
    guard: Guard | None = scope.get("state", {}).get("guard")
    return guard
