"""The worker's ZMQ sockets: the request plane's ROUTER, and a DEALER to each process that it contacts by itself: the
consolidator and prefill workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import zmq

from poolgrid.server.transport.planes import name_plane, watch_as_client
from poolgrid.server.transport.zmq_socket import CallbackSocket, bind, connect, look_again_soon, make_socket, port_of

REQUEST_HIGH_WATER_MARK = 10_000
"""Frames queued per peer and direction: minutes of one frame per engine step. A peer that leaves more than that
unread is stuck; it is treated as gone."""

EVENT_HIGH_WATER_MARK = 10_000
"""Event batches in the socket. More stay in the outbox, and the consolidator's ``Resend`` brings them."""

SOURCE_HIGH_WATER_MARK = 10_000
"""Questions to one prefill worker that are on their way; each fetch has one at a time."""

CLOSE_LINGER_MS = 1000
"""How long the last frames may take to leave at the end of an orderly life."""


class RequestSocket:
    """A ROUTER socket that knows when a peer is gone."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], host: str, port: int) -> None:
        socket = make_socket(context, zmq.ROUTER)
        name_plane(socket, "request")
        socket.setsockopt(zmq.SNDHWM, REQUEST_HIGH_WATER_MARK)
        socket.setsockopt(zmq.RCVHWM, REQUEST_HIGH_WATER_MARK)
        # A frame for a peer that is gone is an error, and not silence: its requests can then be stopped at once.
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.port = port_of(bind(socket, host, port, "request_port"))
        self._raw = socket
        self._socket: CallbackSocket | None = None

    def start(self, on_frames: Callable[[list[bytes]], None]) -> None:
        """Begin to receive; what came since the bind is waiting."""
        self._socket = CallbackSocket(self._raw, on_frames)

    def send(self, peer: bytes, frame: bytes) -> bool:
        """Send to a peer; ``False`` when it is gone or reads nothing any more."""
        assert self._socket is not None, "sending before start"
        try:
            return self._socket.send([peer, frame])
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return False
            raise

    def close(self, orderly: bool) -> None:
        if self._socket is None:
            self._raw.close(linger=0)
        else:
            self._socket.close(CLOSE_LINGER_MS if orderly else 0)


class Peer(NamedTuple):
    """Peer of a DEALER socket."""

    attempt: str
    """What is being done, for errors."""
    advice: str
    """What is allowed, for errors."""
    high_water_mark: int
    waits: bool = False
    """Whether frames for one that is not there wait in the socket for it; else sending fails."""
    watched_as: str = ""
    """What it is called when it refuses this worker's key; empty = it is not logged."""
    scheme: str = ""
    """What its endpoints begin with; empty = all that ZMQ knows."""


CONSOLIDATOR = Peer(
    attempt="connecting consolidator:",
    advice="allowed are ZMQ endpoints such as tcp://127.0.0.1:5557",
    high_water_mark=EVENT_HIGH_WATER_MARK,
    watched_as="the consolidator's ingest plane",
)
"""Nothing piles up towards one that is not there: the outbox keeps it, and greets again."""

PREFILL_WORKER = Peer(
    attempt="fetching KV: the prefill worker's endpoint",
    advice="allowed are ZMQ endpoints such as tcp://127.0.0.1:40001",
    high_water_mark=SOURCE_HIGH_WATER_MARK,
    waits=True,
    scheme="tcp://",
)
"""On its request plane."""


class DealerSocket:
    """A DEALER socket towards one other process."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        peer: Peer,
        endpoint: str,
        on_frames: Callable[[list[bytes]], None],
    ) -> None:
        """Connect; raises ``ValueError`` for an endpoint that is none."""
        socket = make_socket(context, zmq.DEALER)
        if peer.watched_as:
            watch_as_client(socket, peer.watched_as)
        socket.setsockopt(zmq.IMMEDIATE, 0 if peer.waits else 1)
        socket.setsockopt(zmq.SNDHWM, peer.high_water_mark)
        socket.setsockopt(zmq.RCVHWM, peer.high_water_mark)
        look_again_soon(socket)
        try:
            if not endpoint.startswith(peer.scheme):
                raise zmq.ZMQError(zmq.EPROTONOSUPPORT)
            connect(socket, endpoint)
        except zmq.ZMQError as error:
            socket.close()
            raise ValueError(f"{peer.attempt} {endpoint!r} cannot be used ({error}); {peer.advice}") from error
        self._socket = CallbackSocket(socket, on_frames)

    def send(self, frames: Sequence[bytes]) -> bool:
        """Send; ``False`` when the socket takes no more just now."""
        return self._socket.send(frames)

    def close(self, orderly: bool) -> None:
        self._socket.close(CLOSE_LINGER_MS if orderly else 0)
