"""Whether a client that has ended its side of a connection is still there."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Final

CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"

PROBES_S = (0.02, 0.05, 0.2, 1.0)
"""Pauses before the first probes of a client that has ended its side: short answers are out before the first, and a
client that has left on the same network is found by the second."""

PROBE_EVERY_S = 5.0
"""Pause before each further probe."""


class ClientProbe:
    """Finds out whether a client that has ended its side is still there.

    It writes ``100 Continue``, which clients skip and a closed socket answers with a reset: the first write draws the
    reset, the next one finds it, and the connection is lost like any other. Within an answer it writes nothing: what is
    there of the answer has drawn the reset, and an answer that pauses for long would not find it.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport, is_answered: Callable[[], bool]
    ) -> None:
        """``is_answered`` tells whether an answer has begun, or no request is open."""
        self._loop = loop
        self._transport = transport
        self._is_answered = is_answered
        self._timer = loop.call_later(PROBES_S[0], self._probe, 0)

    def stop(self) -> None:
        self._timer.cancel()

    def _probe(self, index: int) -> None:
        if self._transport.is_closing():
            return
        if not self._is_answered():
            self._transport.write(CONTINUE)
        elif _is_reset(self._transport):
            self._transport.abort()
            return
        index += 1
        pause_s = PROBES_S[index] if index < len(PROBES_S) else PROBE_EVERY_S
        self._timer = self._loop.call_later(pause_s, self._probe, index)


def _is_reset(transport: asyncio.Transport) -> bool:
    """Tell whether the other side has reset a connection that is not read any more, which nothing else reports."""
    found = transport.get_extra_info("socket")
    return found is not None and found.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0
