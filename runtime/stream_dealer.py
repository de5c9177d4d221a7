"""A connection to one server of a plane that the event loop reads and writes by itself, without libzmq's thread.

Rules
    1. It connects, shakes hands (``poolgrid.runtime.zmtp``) and tries again whenever that fails or the connection
       breaks, with the pauses of ``poolgrid.runtime.reconnecting``.
    2. All that is sent in a turn of the loop leaves together at its end. Sending never waits: beyond ``SEND_BYTES_MAX``
       that the server has not taken, it refuses until half is gone.
    3. What comes is handed over at once, at most ``MESSAGES_PER_TURN`` messages or ``TURN_S`` in a turn of the loop.
       The rest follows in the next turns, and nothing more is read until it is gone.
    4. The owner hears that the connection broke after it got all that had come, and not at all after ``close``.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import cast

from poolgrid.runtime.dealer import DealerOwner
from poolgrid.runtime.reconnecting import RECONNECT_MAX_MS, RECONNECT_MS
from poolgrid.runtime.tasks import detached
from poolgrid.runtime.turns import MESSAGES_PER_TURN, TURN_S, WITHOUT_A_CLOCK
from poolgrid.runtime.zmtp import DealerSession, ZmtpError, framed
from poolgrid.wire.limits import FRAME_BYTES_MAX

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 10.0
"""For the connection and the handshake together: a host that is cut off answers nothing at all, and what is no server
of ours may accept and say nothing."""

SEND_BYTES_MAX = FRAME_BYTES_MAX
"""Bytes that wait for a server; far beyond the requests that a worker is given, so only one that is stuck fills it. One
frame more may come on top, however large."""


class StreamDealer:
    """Connected, or being connected again."""

    def __init__(self, host: str, port: int, owner: DealerOwner) -> None:
        """Begin to connect, on the running loop."""
        self._host = host
        self._port = port
        self._owner = owner
        self._conversation: _Conversation | None = None
        """The connection over which messages may be sent."""
        self._task = detached(self._keep_connected(), f"connection to {host}:{port}")

    def send(self, frame: bytes) -> bool:
        """Send without waiting; return False when there is no connection, or too much waits in it."""
        conversation = self._conversation
        if conversation is None or conversation.is_full:
            return False
        conversation.send(framed(frame))
        return True

    def close(self) -> None:
        """End; nobody is told."""
        conversation, self._conversation = self._conversation, None
        if conversation is not None:
            conversation.abort()
        self._task.cancel()

    async def _keep_connected(self) -> None:
        pause_ms = RECONNECT_MS
        while True:
            conversation = _Conversation(self._owner)
            try:
                if await self._connect(conversation):
                    pause_ms = RECONNECT_MS
                    self._conversation = conversation
                    _tell(self._owner.on_connected)
                    conversation.begin()
                    await conversation.ended.wait()
                    self._conversation = None
                    _tell(self._owner.on_disconnected)
            finally:
                self._conversation = None
                conversation.abort()
            if conversation.fault:
                self._owner.on_refused(conversation.fault)
            await asyncio.sleep(pause_ms / 1000)
            pause_ms = min(RECONNECT_MAX_MS, 2 * pause_ms)

    async def _connect(self, conversation: _Conversation) -> bool:
        """Return whether the handshake with the server has succeeded."""
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await asyncio.get_running_loop().create_connection(lambda: conversation, self._host, self._port)
                await conversation.ready_or_ended.wait()
        except TimeoutError:
            conversation.fault = conversation.fault or (
                f"connecting: no handshake within {CONNECT_TIMEOUT_S:.0f} s; it is tried again"
            )
            return False
        except (OSError, ValueError):
            return False  # nobody is there, or no host has such a name; whoever wants this server says so
        return not conversation.ended.is_set()


class _Conversation(asyncio.Protocol):
    """One connection."""

    def __init__(self, owner: DealerOwner) -> None:
        self.fault = ""
        """Why it was closed from here."""
        self.is_full = False
        self.ready_or_ended = asyncio.Event()
        self.ended = asyncio.Event()
        self.write: Callable[[bytes], None] = _write_nowhere
        """Sends bytes: the transport's own, as soon as there is one."""
        self._out: list[bytes] = []
        """Frames that leave together, once everybody whose turn it is has had it."""
        self._hand_over = owner.on_frame
        self._session = DealerSession(FRAME_BYTES_MAX)
        self._waiting: deque[bytes] = deque()
        """Messages for further turns of the loop, and before the owner knows of the connection."""
        self._begun = False
        self._lost = False
        self._call_soon = asyncio.get_running_loop().call_soon
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Say who we are."""
        stream = cast(asyncio.Transport, transport)  # uvloop's are of no class of asyncio's
        self._transport = stream
        self.write = stream.write
        stream.set_write_buffer_limits(SEND_BYTES_MAX, SEND_BYTES_MAX // 2)
        self._send_words()

    def send(self, frame: bytes) -> None:
        """Send a frame with what else is sent in this turn of the loop, in one system call."""
        out = self._out
        if not out:
            self._call_soon(self._flush)
        out.append(frame)

    def _flush(self) -> None:
        out, self._out = self._out, []
        if out and not self._lost:  # nothing is left where ``abort`` came first
            self.write(out[0] if len(out) == 1 else b"".join(out))

    def pause_writing(self) -> None:
        """Refuse to send."""
        self.is_full = True

    def resume_writing(self) -> None:
        """Send again."""
        self.is_full = False

    def begin(self) -> None:
        """Hand messages over from now on."""
        self._begun = True
        if self._waiting:
            self._take_waiting()
        self._look_at_end()

    def abort(self) -> None:
        """End at once; what the kernel does not take now does not leave, and what has come is dropped."""
        if self._out:
            self._flush()
        self._waiting.clear()
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
        if self._begun and not self._waiting and len(messages) <= WITHOUT_A_CLOCK:
            for message in messages:
                try:
                    self._hand_over(message)
                except Exception:  # one message must not end the reading of all others
                    log.exception("handling a message failed; it was dropped")
                if not self._begun:
                    return  # the owner has closed it
        elif messages:
            is_taking = bool(self._waiting)
            self._waiting.extend(messages)
            if self._begun and not is_taking:
                self._take_waiting()
        if session.is_ready and not self.ready_or_ended.is_set():
            self.ready_or_ended.set()

    def connection_lost(self, exc: Exception | None) -> None:
        """Have what came taken, and then the end known."""
        self._lost = self.is_full = True
        self._look_at_end()

    def _send_words(self) -> None:
        words, self._session.outgoing = self._session.outgoing, b""
        self.write(words)

    def _give_up(self, error: ZmtpError) -> None:
        self.fault = str(error)
        if self._transport is not None:
            self._transport.abort()

    def _look_at_end(self) -> None:
        """Once all that came is taken, the end of a lost connection is known."""
        if self._lost and not (self._begun and self._waiting):
            self.ended.set()
            self.ready_or_ended.set()

    def _take_waiting(self) -> None:
        """Hand over what one turn may, and see to the rest."""
        waiting = self._waiting
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


def _tell(news: Callable[[], None]) -> None:
    """Tell the owner something; a failure there is logged, and the connection lives."""
    try:
        news()
    except Exception:
        log.exception("handling the news of a connection failed")
