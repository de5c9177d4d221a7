"""A ZMQ socket on the event loop: callbacks in, non-blocking sends out.

``zmq.asyncio`` makes a future per message; a router that receives one frame per engine step from hundreds of workers
does better with a plain callback. ZMQ's file descriptor is edge-triggered: it signals a *change*, so whoever is told
must read until nothing is left, and must look again after every send. This class does both.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

import zmq

log = logging.getLogger(__name__)

# As plain integers: combining the library's flags costs more than asking for them.
_EVENTS = int(zmq.EVENTS)
_POLLIN = int(zmq.POLLIN)
_NOBLOCK = int(zmq.NOBLOCK)

MESSAGES_PER_WAKEUP_MAX = 256
"""Messages handled before the loop gets its turn again; the rest follow in the next turn."""


class CallbackSocket:
    """Owns a ZMQ socket and calls ``on_message(frames)`` for each message that arrives."""

    def __init__(self, socket: zmq.Socket[bytes], on_message: Callable[[list[bytes]], None]) -> None:
        self.socket = socket
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self._scheduled = False
        self._loop.add_reader(socket.FD, self._drain)
        self._schedule()

    def send(self, frames: Sequence[bytes]) -> bool:
        """Send without waiting; return False when the high-water mark is reached and nothing was sent."""
        try:
            if len(frames) == 1:
                self.socket.send(frames[0], _NOBLOCK)
            else:
                self.socket.send_multipart(frames, zmq.NOBLOCK, copy=True)
        except zmq.Again:
            return False
        finally:
            self._schedule()
        return True

    def close(self) -> None:
        """Stop reading and close the socket; a second close does nothing."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self.socket.FD)
            self.socket.close(linger=0)

    def _schedule(self) -> None:
        if not self._scheduled and not self._closed:
            self._scheduled = True
            self._loop.call_soon(self._scheduled_drain)

    def _scheduled_drain(self) -> None:
        self._scheduled = False
        self._drain()

    def _drain(self) -> None:
        for _ in range(MESSAGES_PER_WAKEUP_MAX):
            if self._closed:
                return
            try:
                # Asking costs less than the exception of an empty queue, which most looks would end with.
                if not self.socket.getsockopt(_EVENTS) & _POLLIN:  # type: ignore[operator]
                    return
                frames = self.socket.recv_multipart(_NOBLOCK)
            except zmq.Again:
                return
            except zmq.ZMQError as error:
                if error.errno in (zmq.ETERM, zmq.ENOTSOCK):
                    return
                raise
            try:
                self._on_message(frames)
            except Exception:
                # One message must not end the reading of all others; whoever handles messages catches what it expects.
                log.exception("handling a message failed; it was dropped")
        self._schedule()
