"""Receive from a ZMQ socket on the event loop, many messages per wake-up.

A ZMQ socket signals through a file descriptor, and only when its state changes: after each signal and after each send
of our own it must be asked what is there. Everything received in one wake-up is handed over in one call, so that the
owner can append it to the journal in one write. While paused nothing is received: the socket's own bounded queue fills
and then the peers' do. Both are what ``runtime.zmq_socket`` does not do, which hands over message by message at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import zmq

MESSAGES_PER_WAKE_UP_MAX = 64
"""Messages handed over at once; other tasks of the loop run before the rest. A batch of 32 blocks is 15 to 30
microseconds of work, with a router in the same process."""

BYTES_PER_WAKE_UP_MAX = 16 * 1024
"""Bytes handed over at once, and the rest of the last message: 2,048 blocks are one to two milliseconds of work."""


class Inbox:
    """The receiving side of one socket; owned by the event loop it was started on."""

    def __init__(self, socket: zmq.Socket[bytes], handle: Callable[[list[list[bytes]]], None]) -> None:
        self._socket = socket
        self._handle = handle
        self._loop: asyncio.AbstractEventLoop | None = None
        self._scheduled = False
        self._paused = False
        self.has_more = False
        """Whether messages were left behind when it last received: others run before they are taken."""

    def start(self) -> None:
        """Begin to receive on the running loop."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.fileno(), self.check)
        self.check()

    def check(self) -> None:
        """Look for messages soon; call this after each send on the same socket."""
        if not self._scheduled and not self._paused and self._loop is not None:
            self._scheduled = True
            self._loop.call_soon(self._drain)

    def pause(self) -> None:
        """Receive nothing until ``resume``."""
        self._paused = True

    def resume(self) -> None:
        """Receive again, beginning with what is waiting."""
        self._paused = False
        self.check()

    def close(self) -> None:
        """Stop receiving; the socket stays open."""
        if self._loop is not None:
            self._loop.remove_reader(self._socket.fileno())
            self._loop = None

    def _drain(self) -> None:
        self._scheduled = False
        if self._loop is None or self._paused:
            return
        messages: list[list[bytes]] = []
        room = BYTES_PER_WAKE_UP_MAX
        receive = self._socket.recv_multipart
        try:
            while len(messages) < MESSAGES_PER_WAKE_UP_MAX and room > 0:
                frames = receive(zmq.NOBLOCK)
                room -= len(frames[-1])
                messages.append(frames)
        except zmq.Again:
            self.has_more = False
        else:
            self.has_more = True
            self.check()
        if messages:
            self._handle(messages)
