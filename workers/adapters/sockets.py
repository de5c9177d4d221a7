"""The worker's ZMQ sockets: the request plane's ROUTER, the event stream's DEALER, a DEALER per prefill worker, and one
from each rank of an engine that spans nodes to its leader."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import zmq

from poolgrid.runtime.planes import name_plane, watch_as_client
from poolgrid.runtime.zmq_socket import CallbackSocket, bind, port_of
from poolgrid.wire.limits import FRAME_BYTES_MAX

REQUEST_HIGH_WATER_MARK = 10_000
"""Frames queued per peer and direction: minutes of one frame per engine step. A peer that leaves more than that
unread is stuck; it is treated as gone."""

EVENT_HIGH_WATER_MARK = 10_000
"""Event batches in the socket. More stay in the outbox, and the consolidator's ``Resend`` brings them."""

SOURCE_HIGH_WATER_MARK = 10_000
"""Questions to one prefill worker that are on their way; each fetch has one at a time."""

RANK_HIGH_WATER_MARK = 10
"""Beats of a rank on their way to its leader; a beat that finds no place is followed by the next."""

CLOSE_LINGER_MS = 1000
"""How long the last frames may take to leave at the end of an orderly life."""

RECONNECT_INTERVAL_MS = 50
RECONNECT_INTERVAL_MAX_MS = 1000


class RequestSocket:
    """A ROUTER socket that knows when a peer is gone."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], host: str, port: int) -> None:
        socket = context.socket(zmq.ROUTER)
        name_plane(socket, "request")
        socket.setsockopt(zmq.LINGER, 0)
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
        """Close; an orderly end lets the last frames leave."""
        if self._socket is None:
            self._raw.close(linger=0)
        else:
            self._socket.close(CLOSE_LINGER_MS if orderly else 0)


class DealerSocket:
    """A DEALER socket towards one other process."""

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        endpoint: str,
        high_water_mark: int,
        on_frames: Callable[[list[bytes]], None],
    ) -> None:
        """Connect; raises ``zmq.ZMQError`` for an endpoint that is none, and closes the socket then."""
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, high_water_mark)
        socket.setsockopt(zmq.RCVHWM, high_water_mark)
        socket.setsockopt(zmq.MAXMSGSIZE, FRAME_BYTES_MAX)
        socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_INTERVAL_MS)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_INTERVAL_MAX_MS)
        try:
            socket.connect(endpoint)
        except zmq.ZMQError:
            socket.close()
            raise
        self._socket = CallbackSocket(socket, on_frames)

    def send(self, frames: Sequence[bytes]) -> bool:
        """Send; ``False`` when the socket takes no more just now."""
        return self._socket.send(frames)

    def close(self, orderly: bool) -> None:
        """Close; an orderly end lets the last frames leave."""
        self._socket.close(CLOSE_LINGER_MS if orderly else 0)


class EventSocket(DealerSocket):
    """Towards the consolidator."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, on_frames: Callable[[list[bytes]], None]
    ) -> None:
        socket = context.socket(zmq.DEALER)
        watch_as_client(socket, "the consolidator's ingest plane")
        # Nothing piles up towards a consolidator that is not there: the outbox keeps it, and greets again.
        socket.setsockopt(zmq.IMMEDIATE, 1)
        try:
            super().__init__(socket, endpoint, EVENT_HIGH_WATER_MARK, on_frames)
        except zmq.ZMQError as error:
            raise ValueError(
                f"connecting consolidator: {endpoint!r} cannot be used ({error}); "
                "allowed are ZMQ endpoints such as tcp://127.0.0.1:5557"
            ) from error


class SourceSocket(DealerSocket):
    """Towards the request plane of a prefill worker; what is for one that is not there waits in the socket."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, on_frames: Callable[[list[bytes]], None]
    ) -> None:
        try:
            if not endpoint.startswith("tcp://"):
                raise zmq.ZMQError(zmq.EPROTONOSUPPORT)
            super().__init__(context.socket(zmq.DEALER), endpoint, SOURCE_HIGH_WATER_MARK, on_frames)
        except zmq.ZMQError as error:
            raise ValueError(
                f"fetching KV: the prefill worker's endpoint {endpoint!r} cannot be used ({error}); "
                "allowed are ZMQ endpoints such as tcp://127.0.0.1:40001"
            ) from error


class RankSocket(DealerSocket):
    """Towards the leader of an engine's ranks."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, on_frames: Callable[[list[bytes]], None]
    ) -> None:
        socket = context.socket(zmq.DEALER)
        watch_as_client(socket, "the leader of the ranks")
        # Beats say how it is now: none wait for a leader that is not there.
        socket.setsockopt(zmq.IMMEDIATE, 1)
        try:
            super().__init__(socket, endpoint, RANK_HIGH_WATER_MARK, on_frames)
        except zmq.ZMQError as error:
            raise ValueError(
                f"connecting to the leader of the ranks: {endpoint!r} cannot be used ({error}); "
                "set leader_host to the host of rank 0"
            ) from error
