"""Whether a connection is read, whether its client takes what is written, and whether it is still there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"

PROBES_S = (0.02, 0.05, 0.2, 1.0)
"""Pauses before the first probes of a client that has ended its side: short answers are out before the first, and a
client that has left on the same network is found by the second."""

PROBE_EVERY_S = 5.0
"""Pause before each further probe."""


class FlowControl:
    """When a connection is read, and whether its client takes what is written."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.is_blocked = False
        """Nothing is read, because enough waits here."""
        self.is_full = False
        """Nothing is read, because the application has enough to read."""
        self.is_paused = False
        self.is_write_blocked = False
        self._drained: asyncio.Event | None = None
        self._unsent_bytes = 0

    def block(self, blocked: bool) -> None:
        self.is_blocked = blocked
        self._set_reading()

    def fill(self, full: bool) -> None:
        self.is_full = full
        self._set_reading()

    def _set_reading(self) -> None:
        paused = self.is_blocked or self.is_full
        if paused != self.is_paused and not self._transport.is_closing():
            self.is_paused = paused
            if paused:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()

    def block_writing(self, blocked: bool) -> None:
        self.is_write_blocked = blocked
        if blocked:
            self._unsent_bytes = self._transport.get_write_buffer_size()
        if not blocked and self._drained is not None:
            self._drained.set()

    async def drain(self) -> None:
        """Wait until the client has taken enough of the answer, or has left."""
        while self.is_write_blocked:
            if self._drained is None or self._drained.is_set():
                self._drained = asyncio.Event()
            await self._drained.wait()

    def is_draining(self) -> bool:
        """Return whether the client has taken some of what waits for it since this was last asked."""
        before, self._unsent_bytes = self._unsent_bytes, self._transport.get_write_buffer_size()
        return self._unsent_bytes < before


class ClientProbe:
    """Finds out whether a client that has ended its side is still there.

    It writes ``100 Continue``, which clients skip and a closed socket answers with a reset: the first write draws the
    reset, the next one finds it, and the connection is lost like any other.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport, is_answered: Callable[[], bool]
    ) -> None:
        """Write nothing while ``is_answered``: then the answer itself finds that a client has left."""
        self._loop = loop
        self._transport = transport
        self._is_answered = is_answered
        self._timer = loop.call_later(PROBES_S[0], self._probe, 0)

    def stop(self) -> None:
        self._timer.cancel()

    def _probe(self, index: int) -> None:
        if not self._is_answered() and not self._transport.is_closing():
            self._transport.write(CONTINUE)
        index += 1
        pause_s = PROBES_S[index] if index < len(PROBES_S) else PROBE_EVERY_S
        self._timer = self._loop.call_later(pause_s, self._probe, index)
