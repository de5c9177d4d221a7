"""One connection in ZMTP that the event loop reads and writes by itself.

Rules
    1. It shakes hands (``poolgrid.transport.zmtp``), and hands messages over from ``begin`` on.
    2. All that is sent in a turn of the loop leaves together at its end, or when it is flushed. Sending never waits;
       beyond ``SEND_BYTES_MAX`` that the peer has not taken, it ``is_full`` until half is gone, and nothing more should
       be sent.
    3. What comes is handed over at once, at most ``MESSAGES_PER_TURN`` messages or ``TURN_S`` in a turn of the loop.
       The rest follows in the next turns, and nothing more is read until it is gone.
    4. It has ``ended`` when all that had come is handed over, or after ``abort``.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Any, cast

from poolgrid.process.turns import MESSAGES_PER_TURN, TURN_S, WITHOUT_A_CLOCK
from poolgrid.transport.reconnecting import probe_when_silent
from poolgrid.transport.zmtp import Kind, Session, ZmtpError
from poolgrid.wire.limits import FRAME_BYTES_MAX

log = logging.getLogger(__name__)

SEND_BYTES_MAX = FRAME_BYTES_MAX
"""Bytes that wait for a peer; far beyond the requests that a worker is given, so only one that is stuck fills it. One
frame more may come on top, however large."""


class StreamConversation(asyncio.Protocol):
    """The connection; it is made on the running loop, and used once."""

    def __init__(self, kind: Kind, hand_over: Callable[[Any], None]) -> None:
        """Be a socket of a kind, and give ``hand_over`` each message, in the form that the kind has them in."""
        self.fault = ""
        """Why it was closed from here."""
        self.is_full = False
        self.ready_or_ended = asyncio.Event()
        self.ended = asyncio.Event()
        self.write: Callable[[bytes], None] = _write_nowhere
        """Sends bytes: the transport's own, as soon as there is one."""
        self._out: list[bytes] = []
        """Frames that leave together, once everybody whose turn it is has had it."""
        self._hand_over = hand_over
        self._session = Session(kind, FRAME_BYTES_MAX)
        self.waiting: deque[Any] = deque()
        """Messages for further turns of the loop, and before the owner knows of the connection."""
        self._begun = False
        self._lost = False
        self._told_ready = False
        self._is_long = False
        """Whether a frame is among ``_out`` that is not to be copied."""
        self._call_soon = asyncio.get_running_loop().call_soon
        self._transport: asyncio.Transport | None = None
        self._bounds_lines = False
        """Whether the transport's ``writelines`` says when its buffer is full. asyncio's own does not before 3.12.9 and
        3.13.2 (CVE-2024-12254), so there even long frames are copied; uvloop's does, and sends all in one call."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Say who we are."""
        stream = cast(asyncio.Transport, transport)  # uvloop's are of no class of asyncio's
        self._transport = stream
        self._bounds_lines = not isinstance(transport, asyncio.Transport)
        self.write = stream.write
        probe_when_silent(stream.get_extra_info("socket"))
        stream.set_write_buffer_limits(SEND_BYTES_MAX, SEND_BYTES_MAX // 2)
        self._send_words()

    def send(self, frame: bytes) -> None:
        """Send a frame with what else is sent in this turn of the loop, in one system call."""
        out = self._out
        if not out:
            self._call_soon(self.flush)
        out.append(frame)

    def send_long(self, header: bytes, frame: bytes) -> None:
        """Send a frame that is too long to be copied, behind its header."""
        self._is_long = True
        self.send(header)
        self._out.append(frame)

    def flush(self) -> None:
        """Have what was sent leave now: at the end of a turn of the loop, or earlier for who cannot wait for that."""
        out, self._out = self._out, []
        is_long, self._is_long = self._is_long, False
        if out and not self._lost:  # nothing is left where ``abort`` came first
            if is_long and self._bounds_lines:
                assert self._transport is not None, "frames are sent over it"
                self._transport.writelines(out)
            else:
                self.write(out[0] if len(out) == 1 else b"".join(out))

    def pause_writing(self) -> None:
        self.is_full = True

    def resume_writing(self) -> None:
        """Send again."""
        self.is_full = False

    def begin(self) -> None:
        """Hand messages over from now on."""
        self._begun = True
        if self.waiting:
            self._take_waiting()
        self._look_at_end()

    def abort(self) -> None:
        """End at once; what the kernel does not take now does not leave, and what has come is dropped."""
        if self._out:
            self.flush()
        self.waiting.clear()
        self._begun = False
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """Hand over what has become whole."""
        session = self._session
        try:
            messages = session.feed(data)
        except ZmtpError as error:
            self._give_up(error)
            return
        if session.outgoing:
            self._send_words()
        if self._begun and not self.waiting and len(messages) <= WITHOUT_A_CLOCK:
            hand_over = self._hand_over
            for message in messages:
                try:
                    hand_over(message)
                except Exception:  # one message must not end the reading of all others
                    log.exception("handling a message failed; it was dropped")
                if not self._begun:
                    return  # the owner has closed it
        elif messages:
            is_taking = bool(self.waiting)
            self.waiting.extend(messages)
            if self._begun and not is_taking:
                self._take_waiting()
        if not self._told_ready and session.is_ready:
            self._told_ready = True
            self.ready_or_ended.set()

    def connection_lost(self, exc: Exception | None) -> None:
        """Have what came taken, and then the end known."""
        self._lost = self.is_full = True
        self._look_at_end()

    def _send_words(self) -> None:
        words, self._session.outgoing = self._session.outgoing, b""
        if not self.is_full:  # who takes nothing gets no answers to heartbeats either
            self.write(words)

    def _give_up(self, error: ZmtpError) -> None:
        self.fault = str(error)
        if self._transport is not None:
            self._transport.abort()

    def _look_at_end(self) -> None:
        """Once all that came is taken, the end of a lost connection is known."""
        if self._lost and not (self._begun and self.waiting):
            self.ended.set()
            self.ready_or_ended.set()

    def _take_waiting(self) -> None:
        """Hand over what one turn may, and see to the rest."""
        waiting = self.waiting
        ends_s = monotonic() + TURN_S
        for _ in range(min(MESSAGES_PER_TURN, len(waiting))):
            try:
                self._hand_over(waiting.popleft())
            except Exception:  # as above
                log.exception("handling a message failed; it was dropped")
            if not waiting or monotonic() > ends_s:
                break  # all are handed over, or an owner who has closed it wants no more
        transport = self._transport
        assert transport is not None, "what waits came over it"
        if waiting:
            if transport.is_reading():
                transport.pause_reading()
            self._call_soon(self._take_waiting)
        else:
            if not transport.is_closing() and not transport.is_reading():
                transport.resume_reading()
            self._look_at_end()


def _write_nowhere(_: bytes) -> None:
    raise AssertionError("writing before the connection is made")
