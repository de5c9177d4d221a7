"""A ZMQ socket on the event loop: callbacks in, non-blocking sends out.

``zmq.asyncio`` makes a future per message; a router that receives one frame per engine step from hundreds of workers
does better with a plain callback. ZMQ's file descriptor is edge-triggered: it signals a *change*, so whoever is told
must read until nothing is left, and must look again after every send. This class does both.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

import zmq

log = logging.getLogger(__name__)

# As plain integers: combining the library's flags costs more than asking for them.
_EVENTS = int(zmq.EVENTS)
_POLLIN = int(zmq.POLLIN)
_NOBLOCK = int(zmq.NOBLOCK)

LOOKS = 2
"""How often a wake-up asks whether there is a message before it reads one. Where two have come there are mostly more:
the rest is read until the socket says that there is none, which costs one exception and not a question per message."""

MESSAGES_PER_WAKEUP_MAX = 64
"""Messages handled before the loop gets its turn again; the rest follow in the next turn. A flood on one plane costs
the others a few milliseconds a turn."""


class _LoopSocket:
    """A socket on the running loop; ``receive`` takes a message from it for ``on_message``."""

    def __init__(
        self, socket: zmq.Socket[bytes], receive: Callable[[int], Any], on_message: Callable[[Any], None]
    ) -> None:
        self.socket = socket
        self._receive = receive
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
        socket, receive = self.socket, self._receive
        for number in range(MESSAGES_PER_WAKEUP_MAX):
            if self._closed:
                return
            try:
                if number < LOOKS and not socket.getsockopt(_EVENTS) & _POLLIN:  # type: ignore[operator]
                    return
                message = receive(_NOBLOCK)
            except zmq.Again:
                return
            except zmq.ZMQError as error:
                if error.errno in (zmq.ETERM, zmq.ENOTSOCK):
                    return
                raise
            try:
                self._on_message(message)
            except Exception:
                # One message must not end the reading of all others; whoever handles messages catches what it expects.
                log.exception("handling a message failed; it was dropped")
        self._schedule()


class CallbackSocket(_LoopSocket):
    """Owns a ZMQ socket and calls ``on_message(frames)`` for each message that arrives."""

    def __init__(self, socket: zmq.Socket[bytes], on_message: Callable[[list[bytes]], None]) -> None:
        super().__init__(socket, socket.recv_multipart, on_message)


class FrameSocket(_LoopSocket):
    """The same for a peer whose messages are one frame each: calls ``on_frame(frame)``, at a third of the cost.

    Should a message have several frames, each counts as a message.
    """

    def __init__(self, socket: zmq.Socket[bytes], on_frame: Callable[[bytes], None]) -> None:
        super().__init__(socket, socket.recv, on_frame)
