"""How soon it is noticed that a server of a plane is gone, and how soon it is looked for again.

A process that ends closes its connections, however it ends. A machine that loses its power does not: whoever only
listens would wait for ever, also for one that has come back and knows nothing of the connection. So a connection over
which nothing comes is probed by the kernel, which ends it when it is not known there, or nobody answers.
"""

from __future__ import annotations

import socket as sockets
from typing import Any

import zmq

RECONNECT_MS = 50
RECONNECT_MAX_MS = 1000
"""The first pause, and the longest that it grows to: a server that starts again is found within a second, and one that
is gone costs one attempt a second."""

PROBED_AFTER_S = 10
"""Silence after which a connection is probed: planes say something more often, so hardly any is."""

PROBED_EVERY_S = 5
PROBES_MAX = 3
"""Probes that may stay without an answer: 25 s after it fell silent a machine that is gone is known to be."""

UNACKNOWLEDGED_S = 25
"""As long, where something was sent that nobody acknowledges: nothing is probed then, and by itself the kernel sends it
again for a quarter of an hour, also after the name of the machine has come to mean another one."""


def look_again_soon(socket: zmq.Socket[Any]) -> None:
    """Have libzmq keep to all of this; its own pauses never grow, and it probes nobody."""
    socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, PROBED_AFTER_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, PROBED_EVERY_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, PROBES_MAX)
    socket.setsockopt(zmq.TCP_MAXRT, 1000 * UNACKNOWLEDGED_S)


def probe_when_silent(connection: sockets.socket) -> None:
    """Have the kernel probe a connection of the event loop; where it has other names for these times, at its own."""
    connection.setsockopt(sockets.SOL_SOCKET, sockets.SO_KEEPALIVE, 1)
    if hasattr(sockets, "TCP_KEEPIDLE"):
        connection.setsockopt(sockets.IPPROTO_TCP, sockets.TCP_KEEPIDLE, PROBED_AFTER_S)
        connection.setsockopt(sockets.IPPROTO_TCP, sockets.TCP_KEEPINTVL, PROBED_EVERY_S)
        connection.setsockopt(sockets.IPPROTO_TCP, sockets.TCP_KEEPCNT, PROBES_MAX)
    if hasattr(sockets, "TCP_USER_TIMEOUT"):
        connection.setsockopt(sockets.IPPROTO_TCP, sockets.TCP_USER_TIMEOUT, 1000 * UNACKNOWLEDGED_S)
