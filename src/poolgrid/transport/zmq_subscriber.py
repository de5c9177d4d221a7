"""A subscription over libzmq: a SUB socket."""

from __future__ import annotations

from typing import Any

import zmq

from poolgrid.transport.reconnecting import look_again_soon
from poolgrid.transport.subscriber import OnMessages
from poolgrid.transport.zmq_socket import BatchSocket
from poolgrid.wire.limits import FRAME_BYTES_MAX

QUEUE_MAX = 50_000
"""Messages that ZMQ keeps for us while we are busy; beyond it some are lost."""


class ZmqSubscriber:
    """Subscribed, or being connected again."""

    def __init__(self, context: zmq.Context[Any], endpoint: str, topic: bytes, on_messages: OnMessages) -> None:
        """Begin to connect; raises ``zmq.ZMQError`` for an endpoint that is none."""
        self.socket: zmq.Socket[bytes] = context.socket(zmq.SUB)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.MAXMSGSIZE, FRAME_BYTES_MAX)
        self.socket.setsockopt(zmq.RCVHWM, QUEUE_MAX)
        self.socket.setsockopt(zmq.SUBSCRIBE, topic)
        look_again_soon(self.socket)
        self.inbox = BatchSocket(self.socket, on_messages)
        self.inbox.start()
        self.socket.connect(endpoint)

    @property
    def has_more(self) -> bool:
        """Return whether messages were left behind: others have their turn first."""
        return self.inbox.has_more

    def close(self) -> None:
        """End; nothing more is handed over."""
        self.inbox.close()
