"""uvicorn's HTTP/1.1 protocol with a short way for endpoints that want their request whole and write for themselves.

Rules
    1. An application may have ``direct_endpoint(path)``; a ``POST`` whose path it knows takes the short way, everything
       else goes as uvicorn has it. The endpoint is an ASGI application all the same.
    2. On the short way a body that announces its length is gathered first and the endpoint called once it is complete:
       no task waits for it, and a body that came in one piece is never copied. One longer than the endpoint's
       ``body_bytes_max``, of unknown length, or that waits for ``100 Continue`` is left to the endpoint to receive.
    3. ``scope["extensions"][CONNECTION]`` is the ``Connection``: the body, and a call when the client leaves, so that
       no task has to wait for that either.
    4. Status line, headers and the first part of the body are one write; a first part that is empty sends the rest
       alone, where more is to come. Headers are the endpoint's own and are not checked again.
    5. What may come at all, and for how long, is said in ``poolgrid.runtime.bounded_protocol`` and
       ``poolgrid.runtime.held_connection``.
    6. A request that comes in one piece, on a connection that waits for nothing else, with the head of the one before,
       takes the short way without the parser (``poolgrid.runtime.repeated_head``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from prometheus_client import CollectorRegistry
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from poolgrid.runtime.bounded_protocol import BoundedProtocol
from poolgrid.runtime.http_connections import HttpConnections, InvalidRequests
from poolgrid.runtime.http_settings import HttpLimits
from poolgrid.runtime.repeated_head import RepeatedHead
from poolgrid.runtime.tasks import owned

CONNECTION = "poolgrid.connection"
"""Key of the ``Connection`` among a scope's extensions."""

SERVER_ENDS = "the server is shutting down"
"""Message of the cancellation of a request whose answer has not finished in time for the end of the server."""

BODY_BYTES_MAX_DEFAULT = 1024 * 1024
"""Largest body that is gathered for an endpoint that names no limit of its own."""


_OF_A_REQUEST = ("headers", "state", "extensions")
"""What of a scope is made for each request anew."""

HEADS_TRIED_MAX = 4
"""Heads in a row that a connection keeps to know them again, and that did not come again; then it keeps none: each of
its requests has a head of its own."""

_CLOSE = (b"connection", b"close")
_line = b": ".join
"""Returns the line of a header, without its end."""

Headers = Sequence[tuple[bytes, bytes]]
Answer = Callable[[int, Headers, bytes], bool]


class DefaultLines:
    """The lines of the headers that a server puts into every answer; uvicorn makes a new list of them each second."""

    __slots__ = ("_headers", "_lines")

    def __init__(self) -> None:
        self._headers: Headers | None = None
        self._lines = b""

    def of(self, headers: Headers) -> bytes:
        """Return the lines of a list of headers, made once for each list."""
        if headers is not self._headers:
            self._lines = b"".join([_line(header) + b"\r\n" for header in headers])
            self._headers = headers
        return self._lines


class Connection:
    """What a direct endpoint gets beside ASGI."""

    __slots__ = ("answer", "body", "of_head", "on_left", "task", "write")

    def __init__(
        self, body: bytes, write: Callable[[bytes], bool], answer: Answer, of_head: dict[str, Any] | None
    ) -> None:
        self.body = body
        """The whole body."""
        self.answer = answer
        """Writes a whole answer at once (status, headers without ``content-length``, body); ``False`` = it did not,
        because the client reads too slowly: send it, which waits."""
        self.write = write
        """Writes the next part of a body whose length was not announced, at once; ``False`` = it did not, because the
        client reads too slowly: send it, which waits."""
        self.task: asyncio.Task[None] | None = None
        """Which serves it; there is one as soon as the endpoint runs."""
        self.on_left: Callable[[], None] | None = None
        """Called once when the client leaves before the answer is complete."""
        self.of_head = of_head
        """What an endpoint keeps of a head that comes again, all but its length, for the next request with it; ``None``
        where it is not known whether it does."""


class _DirectCycle(RequestResponseCycle):
    """One request on the short way."""

    connection: Connection | None = None
    task: asyncio.Task[None] | None = None
    """Which serves it."""
    _head: bytes = b""
    access_log = False
    waiting_for_100_continue = False
    more_body = True
    expected_content_length = 0

    def __init__(self, protocol: DirectProtocol, endpoint: Any, keep_alive: bool) -> None:
        """Take what uvicorn's own takes, from the connection and the scope that it has now."""
        self.scope = protocol.scope
        self.transport = protocol.transport
        self.flow = protocol.flow
        self.logger = protocol.logger
        self.access_logger = protocol.access_logger
        self.default_headers = headers = protocol.server_state.default_headers
        self.default_lines = protocol.default_lines.of(headers)
        self.on_response = protocol.on_response_complete
        self.disconnected = False
        self.keep_alive = keep_alive
        self.body = bytearray()
        self.response_started = False
        self.response_complete = False
        self.chunked_encoding: bool | None = None
        self._event: asyncio.Event | None = None
        self.endpoint = endpoint
        self.parts: list[bytes] = []
        """What has come of the body, until it is whole."""
        self.tasks: set[asyncio.Task[None]] = protocol.tasks
        """All that serve requests of its server, which waits for them when it ends."""

    @property
    def message_event(self) -> asyncio.Event:  # type: ignore[override]
        """Return what ``receive`` waits for; made when it is asked for, which is hardly ever."""
        event = self._event
        if event is None:
            event = self._event = asyncio.Event()
        return event

    async def run_asgi(self, app: Any) -> None:
        """Serve it, and answer 500 for an endpoint that fails; as uvicorn, without a coroutine around its own."""
        try:
            await app(self.scope, self.receive, self.send)
            if not self.response_complete and not self.disconnected:
                raise RuntimeError("serving a request: the endpoint returned without a complete response")
        except BaseException as error:
            self.logger.error("an endpoint failed: this is a bug", exc_info=error)
            if self.response_started:
                self.transport.close()
            else:
                await self.send_500_response()
        finally:
            self.on_response = _nobody
            if self.task is not None:
                self.tasks.discard(self.task)
                self.task = None

    async def send(self, message: Any) -> None:
        """Write; the first part of the body takes the headers along."""
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if self.disconnected:
            return
        if not self.response_started:
            self._begin(message)
        elif not self.response_complete:
            self._continue(message)
        else:
            raise RuntimeError("sending a response: it is complete already")

    def _begin(self, message: Any) -> None:
        self.response_started = True
        self.waiting_for_100_continue = False
        headers = [(name, value) for name, value in message.get("headers", ())]
        head = self._status_and_headers(message["status"], headers)
        self.chunked_encoding = b"content-length" not in dict(headers)
        self._head = head + (b"transfer-encoding: chunked\r\n\r\n" if self.chunked_encoding else b"\r\n")

    def _status_and_headers(self, status: int, headers: Headers) -> bytes:
        """Return a head up to where it says how long the body is."""
        if _CLOSE in headers:
            self.keep_alive = False
            headers = [header for header in headers if header != _CLOSE]
        last = b"" if self.keep_alive else b"connection: close\r\n"
        return b"".join((STATUS_LINE[status], self.default_lines, b"\r\n".join((*map(_line, headers), last))))

    def _continue(self, message: Any) -> None:
        # Both may be left out (ASGI, "Response Body").
        body: bytes = message.get("body", b"")
        more_body: bool = message.get("more_body", False)
        head, self._head = self._head, b""
        if not self.chunked_encoding:
            self.transport.write(head + body)
        elif body:
            end = b"\r\n" if more_body else b"\r\n0\r\n\r\n"
            self.transport.write(b"".join((head, b"%x\r\n" % len(body), body, end)))
        elif not more_body:
            self.transport.write(head + b"0\r\n\r\n")
        elif head:
            self.transport.write(head)
        if not more_body:
            self.response_complete = True
            self._complete()

    def write_now(self, part: bytes) -> bool:
        """Write the next part of a body of unknown length without waiting; return False where that has to wait."""
        if self.disconnected:
            return True
        if self.flow.write_paused or not self.chunked_encoding or not part or self._head:
            return False
        self.transport.write(b"%x\r\n%b\r\n" % (len(part), part))
        return True

    def answer_now(self, status: int, headers: Headers, body: bytes) -> bool:
        """Write a whole answer without waiting; return False where that has to wait."""
        if self.disconnected:
            return True
        if self.flow.write_paused or self.response_started:
            return False
        self.response_started = self.response_complete = True
        self.waiting_for_100_continue = False
        head = self._status_and_headers(status, headers)
        self.transport.write(b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body))
        self._complete()
        return True

    def _complete(self) -> None:
        self._let_go()
        if self._event is not None:
            self._event.set()
        if not self.keep_alive:
            self.transport.close()
        self.on_response()

    def _let_go(self) -> None:
        """Break the circle of connection and cycle, which else stays until the collector comes round, minutes later."""
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.task = None
            connection.write = _is_over
            connection.answer = _is_answered

    def left(self) -> None:
        """Tell the endpoint that its client is gone."""
        connection = self.connection
        if connection is not None and connection.on_left is not None:
            on_left, connection.on_left = connection.on_left, None
            on_left()


class _Repeated:
    """A request whose head may come again on its connection."""

    __slots__ = ("endpoint", "head", "of_head", "scope")

    def __init__(self, head: RepeatedHead, cycle: _DirectCycle) -> None:
        self.head = head
        self.scope = {name: value for name, value in cycle.scope.items() if name not in _OF_A_REQUEST}
        """What of its scope is the connection's, as it was before anybody else put something there."""
        self.endpoint = cycle.endpoint
        """Where it went."""
        self.of_head: dict[str, Any] = {}
        """What its endpoint keeps of the head."""


def _is_over(_: bytes) -> bool:
    """In the place of ``Connection.write`` after the last byte."""
    return True


def _is_answered(_: int, __: Headers, ___: bytes) -> bool:
    """In the place of ``Connection.answer`` after the last byte."""
    return True


def _nobody() -> None:
    """In the place of ``on_response`` where no answer will come, or it has come: the circle of protocol and cycle is
    broken."""


class DirectProtocol(BoundedProtocol):
    """One connection."""

    _gathering: _DirectCycle | None = None
    _serving: _DirectCycle | None = None
    _repeated: _Repeated | None = None
    """A request before: the last one that came whole, or one before that."""
    default_lines = DefaultLines()
    """Those of its server."""
    _heads_tried = 0

    @classmethod
    def serving(cls, limits: HttpLimits, registry: CollectorRegistry | None) -> type[DirectProtocol]:
        """Return the protocol of one server, with these limits and metrics in ``registry``."""

        class Serving(cls):  # type: ignore[misc, valid-type]
            table = HttpConnections(limits, registry)
            default_lines = DefaultLines()
            invalid_requests = InvalidRequests(registry)

        return Serving

    def data_received(self, data: bytes) -> None:
        """Begin the request that this is, if it is a whole one like the one before; else read on."""
        queue, table = self._queue, self.table
        if self._waiting is not None or (queue is not table.idle and (queue is not table.heads or self._head_bytes)):
            super().data_received(data)
            return
        repeated = self._repeated
        if repeated is not None and self._begin_again(repeated, data):
            return
        before = self.cycle
        super().data_received(data)
        cycle = self._serving
        if cycle is not None and cycle is self.cycle and cycle is not before:
            # It came whole, and there was nothing before it.
            self._repeated = None
            if self._heads_tried < HEADS_TRIED_MAX and cycle.keep_alive and self._waiting is None:
                self._heads_tried += 1
                head = RepeatedHead.of(data, list(cycle.scope["headers"]), table.limits.header_line_bytes)
                if head is not None:
                    self._repeated = _Repeated(head, cycle)

    def _begin_again(self, repeated: _Repeated, data: bytes) -> bool:
        """Call the endpoint with a request that needs no parser; return False where it goes another way."""
        last = self._serving
        if last is None or self.cycle is not last or self.limit_concurrency is not None:
            return False
        # Of this head, which need not be that of the request before: one that came in pieces leaves it as it is.
        endpoint, scope = repeated.endpoint, repeated.scope
        if self.app.direct_endpoint(scope["raw_path"]) is not endpoint:
            return False
        taken = repeated.head.taken(data)
        if taken is None:
            return False
        headers, body = taken
        if len(body) > getattr(endpoint, "body_bytes_max", BODY_BYTES_MAX_DEFAULT):
            return False
        self._heads_tried = 0
        queue = self._queue
        if queue is not None:  # as ``_move`` does
            self._queue = None
            queue.pop(self, None)
        self.scope = {**scope, "headers": headers, "state": self.app_state.copy()}  # type: ignore[typeddict-item]
        cycle = _DirectCycle(self, endpoint, keep_alive=True)
        self.cycle = cycle
        self._serve(cycle, body, repeated.of_head)
        return True

    def begin(self) -> None:
        """Take the short way where there is one, else go on as usual."""
        direct_endpoint = getattr(self.app, "direct_endpoint", None)
        endpoint = None
        announced = self._announced_bytes
        if (
            direct_endpoint is not None
            and announced is not None
            and self.parser.get_method() == b"POST"
            and self.parser.get_http_version() == "1.1"
            and not self.parser.should_upgrade()
            and not self.expect_100_continue
            # What is pipelined behind an answer that is not complete waits for its turn in uvicorn's queue.
            and (self.cycle is None or self.cycle.response_complete)
            and self.limit_concurrency is None
            and not self.root_path
        ):
            endpoint = direct_endpoint(self.url)
        if (
            endpoint is None
            or announced is None
            or announced > getattr(endpoint, "body_bytes_max", BODY_BYTES_MAX_DEFAULT)
        ):
            super().begin()
            return
        scope = self.scope
        scope["method"] = "POST"
        scope["raw_path"] = self.url
        scope["path"] = self.url.decode("ascii")
        scope["query_string"] = b""
        cycle = _DirectCycle(self, endpoint, keep_alive=self.parser.should_keep_alive())
        self._gathering = self.cycle = cycle

    def on_body(self, body: bytes) -> None:
        """Keep a part of the body."""
        if self._gathering is not None:
            self._gathering.parts.append(body)
        else:
            super().on_body(body)

    def finish(self) -> None:
        """Call the endpoint with the whole body."""
        cycle = self._gathering
        if cycle is None:
            super().finish()
            return
        self._gathering = None
        parts, cycle.parts = cycle.parts, []
        self._serve(cycle, parts[0] if len(parts) == 1 else b"".join(parts))

    def _serve(self, cycle: _DirectCycle, body: bytes, of_head: dict[str, Any] | None = None) -> None:
        """Start the endpoint. As uvicorn starts a task, which takes itself from the running ones: a callback of its end
        is a turn more."""
        cycle.connection = connection = Connection(body, cycle.write_now, cycle.answer_now, of_head)
        cycle.more_body = False
        cycle.scope["extensions"] = {CONNECTION: connection}  # type: ignore[dict-item]
        self._serving = cycle
        connection.task = cycle.task = task = owned(cycle.run_asgi(cycle.endpoint), "request", self.loop)
        self.tasks.add(task)

    def abandon(self) -> None:
        """Forget the body that is not whole, and its request, which nobody begins.

        uvicorn breaks the circle of protocol and cycle when the endpoint returns; here there is none to return.
        """
        gathering, self._gathering = self._gathering, None
        if gathering is not None:
            gathering.on_response = _nobody

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the endpoint at once."""
        self.abandon()
        super().connection_lost(exc)
        serving, self._serving = self._serving, None
        if serving is not None and not serving.response_complete:
            serving.disconnected = True
            serving.left()
            serving._let_go()
