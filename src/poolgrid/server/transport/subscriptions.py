"""What peers subscribe to at a feed: a bounded number of topics each, or they lose their connection.

A subscription is kept for as long as its connection stands, at some hundreds of bytes, and ZMQ itself knows no limit:
half a million of them, sent in a second by one peer, took 400 MB. So the feed is an XPUB socket, which hands every
subscription to us together with the descriptor of the connection that it came by. Who names more topics than any router
has use for is hung up on, which frees all that it subscribed to. A router that this happened to connects again by
itself, and asks for what it missed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket as sockets
from collections.abc import Callable

import zmq

log = logging.getLogger(__name__)

TOPICS_PER_CONNECTION_MAX = 16
"""Topics that one connection may name; a router names one."""

QUEUED_MAX = 32
"""Messages of one peer that ZMQ reads ahead of us: what a peer can send before it is hung up on."""

MESSAGES_PER_TURN_MAX = 256
"""Messages looked at before the loop gets its turn again."""

_EVENTS = int(zmq.EVENTS)
_POLLIN = int(zmq.POLLIN)


class Subscriptions:
    """The subscriptions at one XPUB socket, looked at on the loop that ``start`` ran on."""

    def __init__(self, socket: zmq.Socket[bytes], on_refused: Callable[[str], None], topic: bytes = b"") -> None:
        """Prepare a socket that is not bound yet; ``on_refused(address)`` is told who was hung up on.

        ``topic`` is what its messages begin with, for ``has_readers``.
        """
        self._socket = socket
        self._on_refused = on_refused
        self._topics: dict[int, tuple[object, int]] = {}
        """By descriptor: whose connection it is, and how many topics that one has named."""
        self._topic = topic
        self._wanted: set[bytes] = set()
        """Subscriptions that match the topic: beginnings of it, so they are few."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._scheduled = False
        socket.setsockopt(zmq.RCVHWM, QUEUED_MAX)
        socket.setsockopt(zmq.XPUB_VERBOSE, 1)  # also of a topic that another subscriber has named: it costs as much

    @property
    def has_readers(self) -> bool:
        return bool(self._wanted)

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.fileno(), self.look)
        self.look()

    def close(self) -> None:
        if self._loop is not None:
            self._loop.remove_reader(self._socket.fileno())
            self._loop = None

    def look(self) -> None:
        """Take what has come; call this after each send on the socket, whose descriptor tells of changes only."""
        self._scheduled = False
        if self._loop is None:
            return
        for _ in range(MESSAGES_PER_TURN_MAX):
            if not self._socket.getsockopt(_EVENTS) & _POLLIN:  # type: ignore[operator]
                return
            try:
                self._take(self._socket.recv(zmq.NOBLOCK, copy=False))
            except zmq.Again:
                return
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self.look)

    def _take(self, message: zmq.Frame) -> None:
        word = message.bytes
        if len(word) <= len(self._topic) + 1 and self._topic.startswith(word[1:]):
            # ZMQ reports each new subscription, and the last unsubscription of a topic.
            if word[:1] == b"\x01":
                self._wanted.add(word[1:])
            else:
                self._wanted.discard(word[1:])
        try:
            descriptor = int(message.get(zmq.SRCFD))
        except zmq.ZMQError:
            return  # ZMQ's own word for the end of a connection
        connection = _connection(descriptor)
        if connection is None:
            return
        with contextlib.suppress(OSError), connection:
            peer = connection.getpeername()
            tcp = connection.family in (sockets.AF_INET, sockets.AF_INET6)
            if not tcp or connection.getsockname()[1] != self._port():
                return
            known, topics = self._topics.get(descriptor, (peer, 0))
            topics = topics + 1 if known == peer else 1
            self._topics[descriptor] = (peer, topics)
            if topics == TOPICS_PER_CONNECTION_MAX + 1:
                # Under ZMQ's feet: it has no way to end one connection of a socket.
                connection.shutdown(sockets.SHUT_RDWR)
                self._on_refused(str(peer[0]))

    def _port(self) -> int:
        return int(self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])


def _connection(descriptor: int) -> sockets.socket | None:
    """Return a descriptor's socket, to be closed; ``None`` when there is none.

    By the time that a message is looked at its connection may have ended, and the descriptor be anything's.
    """
    try:
        copy = os.dup(descriptor)
    except OSError:
        return None
    try:
        return sockets.socket(fileno=copy)
    except OSError:
        os.close(copy)
        return None
