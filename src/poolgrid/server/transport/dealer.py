"""A connection to one server of a plane, for messages of one frame.

Over TCP without CURVE the event loop reads and writes the socket itself (``StreamDealer``): no thread, and one system
call for all that is sent in a turn of the loop. Otherwise libzmq does (``ZmqDealer``). Both speak ZMTP, so a server
cannot distinguish them. Both connect again whenever the connection breaks, with the pauses of
``poolgrid.server.transport.zmq_socket``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

import zmq
from zmq.utils.monitor import parse_monitor_message

from poolgrid.kernel.wire.addresses import TCP
from poolgrid.server.process.tasks import detached
from poolgrid.server.transport.planes import PlaneContext
from poolgrid.server.transport.zmq_socket import (
    RECONNECT_MAX_MS,
    RECONNECT_MS,
    CallbackSocket,
    FrameSocket,
    connect,
    look_again_soon,
    make_socket,
)
from poolgrid.server.transport.zmtp import ZmtpConnection, framed, long_header

log = logging.getLogger(__name__)

JOINED_BYTES_MAX: Final = 8 * 1024
"""Longest frame that is copied behind its header; handing both to the kernel by themselves costs as much."""

CONNECT_TIMEOUT_S = 10.0
"""For the connection and the handshake together: a host that is cut off answers nothing at all, and what is no server
of ours may accept and say nothing."""

SEND_HIGH_WATER_MARK = 10_000
"""Messages queued towards one server; far beyond the requests a worker is given, so it only fills when it is stuck."""


class DealerOwner(Protocol):
    """Receives what happens to a connection."""

    def on_connected(self) -> None:
        """Messages may be sent, to a server that knows nothing yet."""
        ...

    def on_disconnected(self) -> None:
        """The connection broke, after all that came over it; it is tried again."""
        ...

    def on_refused(self, why: str) -> None:
        """The server does not speak as it should; it is tried again."""
        ...

    def on_frame(self, frame: bytes) -> None: ...


class Dealer(Protocol):
    """The connection."""

    def send(self, frame: bytes) -> bool:
        """Send without waiting; return False when there is no connection, or too much waits in it."""
        ...

    def flush(self) -> None:
        """Have what was sent leave now, and not at the end of this turn of the loop."""
        ...

    def close(self) -> None:
        """End; the owner is not called any more."""
        ...


def connect_dealer(context: zmq.Context[Any], endpoint: str, owner: DealerOwner) -> Dealer:
    """Begin to connect, on the running loop; raises ``zmq.ZMQError`` for an endpoint that is none."""
    is_plain = isinstance(context, PlaneContext) and context.keys is None
    address = plain_address(endpoint) if is_plain else None
    if address is None:
        return ZmqDealer(context, endpoint, owner)
    return StreamDealer(address.host, address.port, owner)


class Address(NamedTuple):
    """Where a server listens."""

    host: str
    port: int


def plain_address(endpoint: str) -> Address | None:
    """Return the host and the port of ``tcp://HOST:PORT``; ``None`` for anything else, of which libzmq knows more."""
    host, colon, port = endpoint.removeprefix(TCP).rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    if not endpoint.startswith(TCP) or not colon or not host or set(host) & set("/;*[]"):
        return None
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 65_536):
        return None
    return Address(host, int(port))


class StreamDealer:
    """A connection that the event loop reads and writes itself."""

    def __init__(self, host: str, port: int, owner: DealerOwner) -> None:
        """Begin to connect, on the running loop."""
        self._host = host
        self._port = port
        self._owner = owner
        self.conversation: ZmtpConnection | None = None
        """The connection over which messages may be sent."""
        self._task = detached(self._keep_connected(), f"connection to {host}:{port}")

    def send(self, frame: bytes) -> bool:
        conversation = self.conversation
        if conversation is None or conversation.is_full:
            return False
        size = len(frame)
        if size > JOINED_BYTES_MAX:
            conversation.send_long(long_header(size), frame)
        else:
            conversation.send(framed(frame))
        return True

    def flush(self) -> None:
        if self.conversation is not None:
            self.conversation.flush()

    def close(self) -> None:
        conversation, self.conversation = self.conversation, None
        if conversation is not None:
            conversation.abort()
        self._task.cancel()

    async def _keep_connected(self) -> None:
        pause_ms = RECONNECT_MS
        while True:
            conversation = ZmtpConnection(self._owner.on_frame)
            try:
                if await self._connect(conversation):
                    pause_ms = RECONNECT_MS
                    self.conversation = conversation
                    _call(self._owner.on_connected)
                    conversation.begin()
                    await conversation.ended.wait()
                    self.conversation = None
                    _call(self._owner.on_disconnected)
            finally:
                self.conversation = None
                conversation.abort()
            if conversation.fault:
                _call(partial(self._owner.on_refused, conversation.fault))
            await asyncio.sleep(pause_ms / 1000)
            pause_ms = min(RECONNECT_MAX_MS, 2 * pause_ms)

    async def _connect(self, conversation: ZmtpConnection) -> bool:
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await asyncio.get_running_loop().create_connection(lambda: conversation, self._host, self._port)
                await conversation.ready_or_ended.wait()
        except TimeoutError:
            conversation.fault = conversation.fault or (
                f"connecting: no handshake within {CONNECT_TIMEOUT_S:.0f} s; it is tried again"
            )
            return False
        except (OSError, ValueError):
            return False  # nothing listens there, or no host has such a name; the owner's own timeout reports it
        return not conversation.ended.is_set()


def _call(callback: Callable[[], None]) -> None:
    """Call the owner; a failure there is logged, and the connection lives."""
    try:
        callback()
    except Exception:
        log.exception("handling the state of a connection failed")


class ZmqDealer:
    """A connection over libzmq: a DEALER socket and its monitor."""

    def __init__(self, context: zmq.Context[Any], endpoint: str, owner: DealerOwner) -> None:
        """Begin to connect; raises ``zmq.ZMQError``, and keeps no socket then."""
        self._owner = owner
        socket, monitor = _connected(context, endpoint)
        self._monitor = CallbackSocket(monitor, self._on_monitor)
        self._socket = FrameSocket(socket, owner.on_frame)

    def send(self, frame: bytes) -> bool:
        return self._socket.send((frame,))

    def flush(self) -> None:
        """Do nothing: libzmq's thread has it already."""

    def close(self) -> None:
        self._socket.socket.disable_monitor()
        self._monitor.close()
        self._socket.close()

    def _on_monitor(self, frames: list[bytes]) -> None:
        event = parse_monitor_message(frames)["event"]
        if event == zmq.EVENT_DISCONNECTED:
            self._owner.on_disconnected()
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._owner.on_connected()


def _connected(context: zmq.Context[Any], endpoint: str) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
    """Return a socket towards a server and its monitor; what was made is closed when the rest cannot be."""
    socket = make_socket(context, zmq.DEALER)
    try:
        socket.setsockopt(zmq.SNDHWM, SEND_HIGH_WATER_MARK)
        socket.setsockopt(zmq.RCVHWM, 0)  # bounded by the tokens of the requests that this router has there
        # Nothing waits for a connection that is not there: what was on a broken link has already moved elsewhere.
        socket.setsockopt(zmq.IMMEDIATE, 1)
        look_again_soon(socket)
        # Before it connects: the first event is not missed.
        monitor: zmq.Socket[bytes] = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        try:
            connect(socket, endpoint)
        except BaseException:
            socket.disable_monitor()
            monitor.close(linger=0)
            raise
    except BaseException:
        socket.close(linger=0)
        raise
    return socket, monitor
