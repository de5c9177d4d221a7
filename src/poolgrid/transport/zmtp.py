"""ZMTP 3.0, as one side of a connection speaks it: greeting, handshake without security, and messages.

Pure: bytes in, bytes and messages out. libzmq speaks the same (https://rfc.zeromq.org/spec/23/), with a thread and
several system calls for every message; a connection that the event loop reads by itself needs neither.

Rules
    1. A peer is believed once its greeting and its ``READY`` have come: it speaks at least ZMTP 3.0, without security,
       and is of a kind that this one talks to. What it sends before is a fault.
    2. To a DEALER a frame is a message, whether or not further frames follow it. To a SUB a message is the list of its
       frames, at most ``MESSAGE_FRAMES_MAX``.
    3. Nothing is kept for a frame that is longer than the limit: its header is a fault already. The frames of a message
       that is not whole are kept, as long as they are together no longer than that either.
    4. After a fault the connection is to be closed; nothing more may be fed.
"""

from __future__ import annotations

import struct
from typing import Any, Final, NamedTuple

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

MESSAGE_FRAMES_MAX: Final = 4096
"""Frames of one message: several times those of the longest that a feed sends."""

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


class Kind(NamedTuple):
    """A kind of socket, as one side of a connection."""

    ready: bytes
    """What it says when the peer has greeted."""
    peers: tuple[bytes, ...]
    """Kinds that it talks to."""
    joins: bool = False
    """Whether its messages are lists of frames."""


def _kind(name: bytes, *peers: bytes, joins: bool = False) -> Kind:
    properties = b"\x0bSocket-Type" + struct.pack(">I", len(name)) + name + b"\x08Identity" + struct.pack(">I", 0)
    return Kind(command(b"READY", properties), peers, joins)


DEALER: Final = _kind(b"DEALER", b"ROUTER")
SUB: Final = _kind(b"SUB", b"PUB", b"XPUB", joins=True)


def subscription(topic: bytes) -> bytes:
    """Return what a SUB sends to be sent what begins with ``topic``."""
    return framed(b"\x01" + topic)


class Session:
    """What one connection has come to: feed it what arrives, and send what it wants sent."""

    def __init__(self, kind: Kind, frame_bytes_max: int) -> None:
        """Be a socket of a kind, which takes frames of so many bytes."""
        self._kind = kind
        self._joins = kind.joins
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
        self._message: list[bytes] = []
        """Frames of a message that is not whole."""
        self._message_bytes = 0

    def feed(self, data: bytes) -> list[Any]:
        """Take what has arrived and return the messages that are whole now, frames or lists of frames as the kind of
        socket has them; raises ``ZmtpError``."""
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
            self.outgoing += self._kind.ready
            at = GREETING_BYTES
        messages: list[Any] = []
        joins = self._joins
        message = self._message
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
            elif not joins:
                messages.append(data[begin:stop])
            else:
                message.append(data[begin:stop])
                if flags & _MORE:
                    self._message_bytes += size
                    if len(message) >= MESSAGE_FRAMES_MAX or self._message_bytes > self._frame_bytes_max:
                        raise self._too_large()
                else:
                    messages.append(message)
                    message = self._message = []
                    self._message_bytes = 0
            at = stop
            wanted = _SHORT_HEADER_BYTES
        if at < end:
            self._keep(data[at:] if at else data, wanted)
        return messages

    def _too_large(self) -> ZmtpError:
        return ZmtpError(
            f"reading a message: {len(self._message)} frames and {self._message_bytes:,} bytes, and it is not "
            f"whole; allowed are {MESSAGE_FRAMES_MAX} and {self._frame_bytes_max:,} bytes; the connection is closed"
        )

    def _keep(self, data: bytes, wanted_bytes: int) -> None:
        self._parts = [data] if data else []
        self._held_bytes = len(data)
        self._wanted_bytes = wanted_bytes

    def _on_command(self, content: bytes) -> None:
        size = content[0] if content else 0
        name, body = content[1 : 1 + size], content[1 + size :]
        if name == b"READY" and not self.is_ready:
            kind = _properties(body).get(b"socket-type", b"")
            if kind not in self._kind.peers:
                raise ZmtpError(
                    f"shaking hands: the peer is a {_shown(kind) or 'socket of no type'}; allowed: "
                    f"{b', '.join(self._kind.peers).decode()}; the connection is closed"
                )
            self.is_ready = True
        elif name == b"PING" and self.is_ready:
            # Two bytes say how long the peer waits; the rest is repeated.
            self.outgoing += command(b"PONG", body[2 : 2 + PING_CONTEXT_BYTES_MAX])
        elif name == b"ERROR":
            raise ZmtpError(f"shaking hands: the peer refuses, and says {_shown(body[1:])}; the connection is closed")
        elif not self.is_ready:
            raise ZmtpError(
                f"shaking hands: the peer said {_shown(name)} in the place of READY; the connection is closed"
            )
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
            f"reading the greeting: the peer speaks ZMTP {major}; allowed is 3 and later; the connection is closed"
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
