"""A connection to one server of a plane over libzmq: a DEALER socket and its monitor."""

from __future__ import annotations

from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from poolgrid.transport.dealer import DealerOwner
from poolgrid.transport.reconnecting import look_again_soon
from poolgrid.transport.zmq_socket import CallbackSocket, FrameSocket

SEND_HIGH_WATER_MARK = 10_000
"""Messages queued towards one server; far beyond the requests a worker is given, so it only fills when it is stuck."""


class ZmqDealer:
    """Connected, or being connected again."""

    def __init__(self, context: zmq.Context[Any], endpoint: str, owner: DealerOwner) -> None:
        """Begin to connect; raises ``zmq.ZMQError``, and keeps no socket then."""
        self._owner = owner
        socket, monitor = _connected(context, endpoint)
        self._monitor = CallbackSocket(monitor, self._on_monitor)
        self._socket = FrameSocket(socket, owner.on_frame)

    def send(self, frame: bytes) -> bool:
        """Send without waiting; return False when there is no connection, or too much waits in it."""
        return self._socket.send((frame,))

    def flush(self) -> None:
        """Do nothing: libzmq's thread has it already."""

    def close(self) -> None:
        """End; nobody is told."""
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
    socket = context.socket(zmq.DEALER)
    try:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, SEND_HIGH_WATER_MARK)
        socket.setsockopt(zmq.RCVHWM, 0)  # bounded by the tokens of the requests that this router has there
        # Nothing waits for a connection that is not there: what was on a broken link has already moved elsewhere.
        socket.setsockopt(zmq.IMMEDIATE, 1)
        look_again_soon(socket)
        # Before it connects: the first event is not missed.
        monitor: zmq.Socket[bytes] = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        try:
            socket.connect(endpoint)
        except BaseException:
            socket.disable_monitor()
            monitor.close(linger=0)
            raise
    except BaseException:
        socket.close(linger=0)
        raise
    return socket, monitor
