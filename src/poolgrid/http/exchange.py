"""One HTTP request and its answer: the ASGI ``receive`` and ``send`` of a connection.

Rules
    1. The application starts once the body is whole, or once ``BODY_BUFFER_BYTES`` of it are buffered. Then reading
       pauses until the application asks for more.
    2. Status line, headers and the first part of the body are one write. An empty first part with more to follow sends
       the head alone.
    3. ``send`` writes at once and returns something that is already done, unless the client reads too slowly: then it
       waits. A part of a stream costs no coroutine.
    4. ``scope["extensions"][ON_DISCONNECT]`` takes a function that is called once if the client leaves before the
       answer is complete. It replaces a task per request that waits for ``http.disconnect``.
    5. ``scope["extensions"][EXCHANGE]`` is the exchange itself, for applications of ours: ``body`` returns a body that
       is whole, ``answer`` writes a whole answer and ``write`` a part of one, all without messages.
    6. A connection has one task, which serves its requests one after the other and waits between two: making a task,
       and taking it into Python's list of all tasks, costs as much as hashing a short prompt.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, MutableMapping, Sequence
from http import HTTPStatus
from typing import Any, Final, cast

from poolgrid.http.flow import CONTINUE, FlowControl
from poolgrid.process.tasks import owned

log: Final = logging.getLogger(__name__)

ON_DISCONNECT: Final = "poolgrid.on_disconnect"
"""Key in ``scope["extensions"]`` of the function that registers what is called when the client leaves."""

EXCHANGE: Final = "poolgrid.exchange"
"""Key in ``scope["extensions"]`` of the ``HttpExchange``."""

BODY_BUFFER_BYTES: Final = 64 * 1024
"""Most of a request body that waits for the application."""

STATUS_LINES: Final = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Application = Callable[[Scope, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]]

_FAILED: Final[tuple[Message, ...]] = (
    {
        "type": "http.response.start",
        "status": 500,
        "headers": [
            (b"content-type", b"text/plain; charset=utf-8"),
            (b"content-length", b"21"),
            (b"connection", b"close"),
        ],
    },
    {"type": "http.response.body", "body": b"Internal Server Error"},
)


class _Done:
    """An awaitable that has nothing to wait for."""

    __await__ = ().__iter__
    """Of C: a function here would be called for each part of a stream."""


_DONE: Final = cast("Awaitable[None]", _Done())


class HttpExchange:
    """One request and its answer."""

    # Most of it stays as it is here for most requests.
    _body: bytes | bytearray = b""
    _is_delivered = False
    """The application has the whole body."""
    _event: asyncio.Event | None = None
    _on_disconnect: Callable[[], None] | None = None
    _head = b""
    """The head of the answer, until it leaves with the first part of the body."""
    _chunked = False
    _has_body = True
    _left_bytes = 0
    """What is still to come of an answer that announced its length."""
    is_received = False
    """The request is whole."""
    is_started = False
    """The application has begun its answer."""
    is_complete = False
    is_disconnected = False
    task: asyncio.Task[None] | None = None
    """That of its connection, in which the application is called: until Python 3.12 asking for it is a system call."""

    def __init__(
        self,
        transport: asyncio.Transport,
        flow: FlowControl,
        date_line: bytes,
        on_complete: Callable[[HttpExchange], None],
        method: str,
        version: str,
        keep_alive: bool,
        expects_continue: bool,
    ) -> None:
        self._transport = transport
        self._flow = flow
        self._date_line = date_line
        self._on_complete = on_complete
        self._method = method
        self.version = version
        self.keep_alive = keep_alive
        self.expects_continue = expects_continue
        """The client sends the body only once it has been asked for it."""

    # -- the request, from the connection ------------------------------------------------------------------------------

    def take(self, part: bytes) -> bool:
        """Keep a part of the body; return whether it is enough for now. A body in one piece is never copied."""
        if not self._body:
            self._body = part
        elif isinstance(self._body, bytes):
            self._body = bytearray(self._body) + part
        else:
            self._body += part
        if len(self._body) < BODY_BUFFER_BYTES:
            return False
        self._wake()
        return True

    def receive_end(self) -> None:
        self.is_received = True
        self._wake()

    def disconnect(self) -> None:
        """Tell the application that the client has left, or that the server has given up the request."""
        self.is_disconnected = True
        self._wake()
        on_disconnect, self._on_disconnect = self._on_disconnect, None
        if on_disconnect is not None:
            on_disconnect()

    def _wake(self) -> None:
        if self._event is not None:
            self._event.set()

    # -- the application -----------------------------------------------------------------------------------------------

    async def fail(self, error: BaseException) -> None:
        """Answer 500 for an application that failed, as far as that is possible."""
        log.error("the application failed: this is a bug", exc_info=error)
        if self.is_complete or self.is_disconnected:
            return
        if self.is_started:
            self._transport.abort()
            return
        for message in _FAILED:
            await self.send(message)

    def call_on_disconnect(self, on_disconnect: Callable[[], None]) -> None:
        if self.is_disconnected:
            on_disconnect()
        elif not self.is_complete:
            self._on_disconnect = on_disconnect

    def body(self) -> bytes | None:
        """Return the body if it is whole, and ``None`` otherwise: then it is to be received."""
        if not self.is_received or self._is_delivered or self.is_disconnected or self._flow.is_full:
            return None
        self._is_delivered = True
        body, self._body = bytes(self._body), b""
        return body

    async def receive(self) -> Message:
        """Return the next part of the body, or that the client has left."""
        if self.expects_continue and not self.is_started:
            self.expects_continue = False
            self._transport.write(CONTINUE)
        while not (self.is_disconnected or self.is_complete):
            if not self._is_delivered and (self.is_received or len(self._body) >= BODY_BUFFER_BYTES):
                self._is_delivered = self.is_received
                body, self._body = bytes(self._body), b""
                if self._flow.is_full:
                    self._flow.fill(False)
                return {"type": "http.request", "body": body, "more_body": not self._is_delivered}
            if self._event is None:
                self._event = asyncio.Event()
            self._event.clear()
            await self._event.wait()
        return {"type": "http.disconnect"}

    def answer(self, status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> Awaitable[None]:
        """Write a whole answer; ``headers`` are without those about its length and its connection."""
        if not self.keep_alive or self._method == "HEAD" or self._flow.is_write_blocked or self.is_disconnected:
            return self._answer_later(status, headers, body)
        head = b"\r\n".join(map(b": ".join, headers))
        _check_breaks(head, len(headers))
        self.is_started = True
        self._transport.write(
            b"%b%b%b\r\ncontent-length: %d\r\n\r\n%b" % (STATUS_LINES[status], self._date_line, head, len(body), body)
        )
        self._complete()
        return _DONE

    async def _answer_later(self, status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> None:
        headers = [*headers, (b"content-length", b"%d" % len(body))]
        await self.send({"type": "http.response.start", "status": status, "headers": headers})
        await self.send({"type": "http.response.body", "body": body})

    def write(self, part: bytes) -> Awaitable[None]:
        """Write a part of an answer that has begun; more is to come."""
        if self._flow.is_write_blocked or not self._chunked or self._head or not part or self.is_disconnected:
            return self.send({"type": "http.response.body", "body": part, "more_body": True})
        self._transport.write(b"%x\r\n%b\r\n" % (len(part), part))
        return _DONE

    def send(self, message: Message) -> Awaitable[None]:
        """Write a part of the answer."""
        if self.is_disconnected:
            return _DONE
        if self._flow.is_write_blocked:
            return self._send_later(message)
        if self.is_complete:
            raise RuntimeError("sending a response: it is complete already")
        kind = message["type"]
        if not self.is_started:
            if kind != "http.response.start":
                raise RuntimeError(f"sending a response: it begins with {kind!r}, not with 'http.response.start'")
            self._start(message["status"], message.get("headers", ()))
        elif kind == "http.response.body":
            self._send_body(message.get("body", b""), message.get("more_body", False))
        else:
            raise RuntimeError(f"sending a response: {kind!r} came where 'http.response.body' is allowed")
        return _DONE

    async def _send_later(self, message: Message) -> None:
        await self._flow.drain()
        await self.send(message)

    def _start(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        self._has_body = self._method != "HEAD" and status not in (204, 304)
        length: int | None = None
        lines = []
        for name, value in headers:
            if name == b"content-length":
                length = int(value)
            elif name == b"connection":
                if b"close" in value.lower():
                    self.keep_alive = False
                continue
            lines.append(name + b": " + value)
        if not self.keep_alive:
            lines.append(b"connection: close")
        # Without a length HTTP/1.0 knows only the end of the connection.
        self._chunked = self._has_body and length is None and self.version == "1.1"
        self._left_bytes = -1 if length is None else length
        if self._chunked:
            lines.append(b"transfer-encoding: chunked")
        head = b"\r\n".join(lines)
        _check_breaks(head, len(lines))
        line = STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status
        self._head = b"".join((line, self._date_line, head, b"\r\n\r\n" if lines else b"\r\n"))
        self.is_started = True

    def _send_body(self, body: bytes, more: bool) -> None:
        if not self._has_body:
            body = b""
        elif self._chunked:
            if body:
                body = b"%x\r\n%b\r\n" % (len(body), body)
            if not more:
                body += b"0\r\n\r\n"
        elif self._left_bytes >= 0:
            self._left_bytes -= len(body)
            if self._left_bytes < 0 or (self._left_bytes and not more):
                self._transport.abort()
                raise RuntimeError("sending a response: its body has another length than its content-length")
        if self._head:
            body = self._head + body
            self._head = b""
        if body:
            self._transport.write(body)
        if not more:
            self._complete()

    def _complete(self) -> None:
        self.is_complete = True
        self._on_disconnect = None
        if self._event is not None:
            self._event.set()
        self._on_complete(self)


def _check_breaks(head: bytes, lines: int) -> None:
    breaks = max(0, lines - 1)
    if head.count(b"\n") != breaks or head.count(b"\r") != breaks:
        raise RuntimeError("sending a response: a header contains a line break")


class ExchangeTask:
    """The task of one connection, as soon as there is something to serve."""

    def __init__(self, app: Application, tasks: set[asyncio.Task[None]], loop: asyncio.AbstractEventLoop) -> None:
        """``tasks`` are those of the server that serve a request now."""
        self._app = app
        self._tasks = tasks
        self._loop = loop
        self._task: asyncio.Task[None] | None = None
        self._idle: asyncio.Future[tuple[HttpExchange, Scope] | None] | None = None
        """What the task waits for between two requests; ``None`` comes at the end."""

    def serve(self, exchange: HttpExchange, scope: Scope) -> None:
        """Serve a request, in a new task where the application still does something for the one before."""
        scope["extensions"] = {ON_DISCONNECT: exchange.call_on_disconnect, EXCHANGE: exchange}
        task, idle = self._task, self._idle
        if task is None or idle is None or idle.done():
            self._task = task = owned(self._run(exchange, scope), "request", self._loop)
        else:
            idle.set_result((exchange, scope))
        exchange.task = task
        self._tasks.add(task)

    def close(self) -> None:
        """End the task when it has nothing to serve."""
        self._task = None
        # Not cancelled: a task that was holds the frame it was cancelled in, which holds the task.
        if self._idle is not None and not self._idle.done():
            self._idle.set_result(None)

    async def _run(self, exchange: HttpExchange, scope: Scope) -> None:
        task = self._task
        assert task is not None, "set where it is started"
        while True:
            try:
                await self._app(scope, exchange.receive, exchange.send)
                if not (exchange.is_complete or exchange.is_disconnected):
                    raise RuntimeError("serving a request: the application returned without a complete response")
            except BaseException as error:
                await exchange.fail(error)
            finally:
                self._tasks.discard(task)
            if self._task is not task or task.cancelling():
                return
            self._idle = self._loop.create_future()
            further = await self._idle
            self._idle = None  # it has the exchange, which has the connection, which has this
            if further is None:
                return
            exchange, scope = further
