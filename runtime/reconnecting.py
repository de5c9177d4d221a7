"""How soon a server of a plane that is gone is looked for again."""

from __future__ import annotations

from typing import Any

import zmq

RECONNECT_MS = 50
RECONNECT_MAX_MS = 1000
"""The first pause, and the longest that it grows to: a server that starts again is found within a second, and one that
is gone costs one attempt a second."""


def look_again_soon(socket: zmq.Socket[Any]) -> None:
    """Have libzmq keep to these pauses; its own never grow."""
    socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
