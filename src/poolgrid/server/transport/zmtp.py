"""ZMTP 3.0 as a DEALER speaks it: greeting, handshake without security, and messages; and a connection in it.

``Session`` is pure: bytes in, bytes and messages out. libzmq speaks the same (https://rfc.zeromq.org/spec/23/), with a
thread and several system calls for every message; a connection that the event loop reads by itself needs neither.

Rules
    1. A peer is accepted once its greeting and its ``READY`` have come: it has at least ZMTP 3.0, without security,
       and is a ROUTER. What it sends before is a fault.
    2. A frame is a message, whether or not further frames follow it.
    3. Nothing is kept for a frame that is longer than the limit: its header is a fault already.
    4. After a fault the connection is to be closed; nothing more may be fed.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Final, cast

from poolgrid.kernel.wire.limits import FRAME_BYTES_MAX
from poolgrid.server.process.tasks import MESSAGES_PER_TURN, TURN_S, WITHOUT_A_CLOCK
from poolgrid.server.transport.zmq_socket import probe_when_silent

log = logging.getLogger(__name__)

SIGNATURE: Final = b"\xff" + bytes(8) + b"\x7f"
GREETING_BYTES: Final = 64
GREETING: Final = SIGNATURE + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(GREETING_BYTES - 32)
"""Signature, version 3.0, mechanism, no server, filler. Later versions differ in what subscribers say, who are not
here, and in heartbeats, which are answered all the same."""

_MORE: Final = 1
_LONG: Final = 2
_COMMAND: Final = 4
_FLAGS: Final = _MORE | _LONG | _COMMAND
_SHORT_BYTES_MAX: Final = 255
"""Longest frame whose size is one byte."""

_LONG_HEADER: Final = struct.Struct(">BQ")
_SHORT_HEADERS: Final = tuple(bytes((0, size)) for size in range(_SHORT_BYTES_MAX + 1))
_SHORT_HEADER_BYTES: Final = 2
_LONG_HEADER_BYTES: Final = 9
_VALUE_SIZE_BYTES: Final = 4
"""Of the size of a property's value."""

PING_CONTEXT_BYTES_MAX: Final = 16
"""What a heartbeat may have repeated in its answer."""

REASON_BYTES_MAX: Final = 200
"""So much of a peer's own words is put in a message about it."""


class ZmtpError(ValueError):
    """What a peer sent is not ZMTP 3, or not what it may send here."""


def framed(message: bytes) -> bytes:
    """Return a message of one frame as it is sent."""
    size = len(message)
    if size <= _SHORT_BYTES_MAX:
        return _SHORT_HEADERS[size] + message
    return long_header(size) + message


def long_header(size: int) -> bytes:
    """Return what is sent before a frame of so many bytes, more than a short one has."""
    return _LONG_HEADER.pack(_LONG, size)


def command(name: bytes, body: bytes) -> bytes:
    """Return a command as it is sent; it is short."""
    content = bytes((len(name),)) + name + body
    return bytes((_COMMAND, len(content))) + content


def _ready(kind: bytes) -> bytes:
    properties = b"\x0bSocket-Type" + struct.pack(">I", len(kind)) + kind + b"\x08Identity" + struct.pack(">I", 0)
    return command(b"READY", properties)


READY: Final = _ready(b"DEALER")
"""What is sent when the peer has greeted."""


class Session:
    """What one connection has come to: feed it what arrives, and send what it wants sent."""

    def __init__(self, frame_bytes_max: int) -> None:
        self.is_ready = False
        """Whether the handshake has succeeded: messages may be sent."""
        self.outgoing = GREETING
        """To be sent, and then set to nothing, before anything else."""
        self._greeted = False
        self._frame_bytes_max = frame_bytes_max
        self._parts: list[bytes] = []
        """Of a frame, or of the greeting, that is not whole."""
        self._held_bytes = 0
        self._wanted_bytes = 0
        """How much there must be before it is looked at again."""

    def feed(self, data: bytes) -> list[bytes]:
        """Take what has arrived and return the messages that are whole now; raises ``ZmtpError``."""
        if self._parts:
            self._parts.append(data)
            self._held_bytes += len(data)
            if self._held_bytes < self._wanted_bytes:
                return []
            data = b"".join(self._parts)
            self._parts = []
        at, end = 0, len(data)
        if not self._greeted:
            if end < GREETING_BYTES:
                _check_signature(data)
                self._keep(data, end + 1)
                return []
            _check_greeting(data[:GREETING_BYTES])
            self._greeted = True
            self.outgoing += READY
            at = GREETING_BYTES
        messages: list[bytes] = []
        wanted = _SHORT_HEADER_BYTES
        while end - at >= _SHORT_HEADER_BYTES:
            flags = data[at]
            if flags & _LONG:
                if end - at < _LONG_HEADER_BYTES:
                    wanted = _LONG_HEADER_BYTES
                    break
                size = _LONG_HEADER.unpack_from(data, at)[1]
                begin = at + _LONG_HEADER_BYTES
            else:
                size = data[at + 1]
                begin = at + _SHORT_HEADER_BYTES
            if flags > _FLAGS or size > self._frame_bytes_max:
                raise ZmtpError(
                    f"reading a frame: flags {flags:#04x} and {size:,} bytes; allowed are flags up to {_FLAGS:#04x} "
                    f"and {self._frame_bytes_max:,} bytes; the connection is closed"
                )
            stop = begin + size
            if stop > end:
                wanted = stop - at
                break
            if flags & _COMMAND:
                self._on_command(data[begin:stop])
            elif not self.is_ready:
                raise ZmtpError("reading a frame: it came before the peer's READY; the connection is closed")
            else:
                messages.append(data[begin:stop])
            at = stop
            wanted = _SHORT_HEADER_BYTES
        if at < end:
            self._keep(data[at:] if at else data, wanted)
        return messages

    def _keep(self, data: bytes, wanted_bytes: int) -> None:
        self._parts = [data] if data else []
        self._held_bytes = len(data)
        self._wanted_bytes = wanted_bytes

    def _on_command(self, content: bytes) -> None:
        size = content[0] if content else 0
        name, body = content[1 : 1 + size], content[1 + size :]
        if name == b"READY" and not self.is_ready:
            kind = _properties(body).get(b"socket-type", b"")
            if kind != b"ROUTER":
                raise ZmtpError(
                    f"shaking hands: the peer is a {_shown(kind) or 'socket of no type'}; allowed: ROUTER; the "
                    "connection is closed"
                )
            self.is_ready = True
        elif name == b"PING" and self.is_ready:
            # Two bytes say how long the peer waits; the rest is repeated.
            self.outgoing += command(b"PONG", body[2 : 2 + PING_CONTEXT_BYTES_MAX])
        elif name == b"ERROR":
            raise ZmtpError(f"shaking hands: the peer refuses with {_shown(body[1:])}; the connection is closed")
        elif not self.is_ready:
            raise ZmtpError(f"shaking hands: the peer sent {_shown(name)} instead of READY; the connection is closed")
        # Other commands are of other patterns, or of versions to come.


def _check_signature(data: bytes) -> None:
    """Raise ``ZmtpError`` for what cannot become a greeting; its eight bytes in the middle mean nothing."""
    begins = data[: len(SIGNATURE)]
    if (begins and begins[0] != SIGNATURE[0]) or (len(begins) == len(SIGNATURE) and begins[-1] != SIGNATURE[-1]):
        raise ZmtpError(f"reading the greeting: {begins.hex()} is no signature of ZMTP; the connection is closed")


def _check_greeting(greeting: bytes) -> None:
    _check_signature(greeting)
    major = greeting[len(SIGNATURE)]
    mechanism = greeting[12:32].rstrip(b"\0")
    if major < GREETING[len(SIGNATURE)]:
        raise ZmtpError(
            f"reading the greeting: the peer uses ZMTP {major}; allowed is 3 and later; the connection is closed"
        )
    if mechanism != b"NULL":
        raise ZmtpError(
            f"reading the greeting: the peer's security is {_shown(mechanism)}, and this process has no CURVE key; the "
            "connection is closed"
        )


def _properties(body: bytes) -> dict[bytes, bytes]:
    """Return the properties of a ``READY``, their names in lower case; raises ``ZmtpError``."""
    found: dict[bytes, bytes] = {}
    at = 0
    while at < len(body):
        name_ends = at + 1 + body[at]
        value_begins = name_ends + _VALUE_SIZE_BYTES
        value_ends = value_begins + int.from_bytes(body[name_ends:value_begins], "big")
        if value_begins > len(body) or value_ends > len(body):
            raise ZmtpError("shaking hands: a property of the peer's READY is cut off; the connection is closed")
        found[body[at + 1 : name_ends].lower()] = body[value_begins:value_ends]
        at = value_ends
    return found


def _shown(words: bytes) -> str:
    return words[:REASON_BYTES_MAX].decode("latin-1").encode("unicode_escape").decode()


SEND_BYTES_MAX = FRAME_BYTES_MAX
"""Bytes that wait for a peer; far beyond the requests that a worker is given, so only one that is stuck fills it. One
frame more may come on top, however large."""


class ZmtpConnection(asyncio.Protocol):
    """One connection in ZMTP that the event loop reads and writes itself; made on the running loop, and used once.

    Rules
        1. It shakes hands, and hands messages over from ``begin`` on.
        2. All that is sent in a turn of the loop leaves together at its end, or when it is flushed. Sending never
           waits; beyond ``SEND_BYTES_MAX`` that the peer has not taken, it ``is_full`` until half is gone, and nothing
           more should be sent.
        3. What comes is handed over at once, at most ``MESSAGES_PER_TURN`` messages or ``TURN_S`` in a turn of the
           loop. The rest follows in the next turns, and nothing more is read until it is gone.
        4. It has ``ended`` when all that had come is handed over, or after ``abort``.
    """

    def __init__(self, hand_over: Callable[[bytes], None]) -> None:
        self.fault = ""
        """Why it was closed from here."""
        self.is_full = False
        self.ready_or_ended = asyncio.Event()
        self.ended = asyncio.Event()
        self.write: Callable[[bytes], None] = _write_nowhere
        """Sends bytes: the transport's own, as soon as there is one."""
        self._out: list[bytes] = []
        """Frames that leave together, once all whose turn it is have had it."""
        self._hand_over = hand_over
        self._session = Session(FRAME_BYTES_MAX)
        self.waiting: deque[bytes] = deque()
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
