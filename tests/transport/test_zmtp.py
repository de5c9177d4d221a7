"""ZMTP as one side speaks it: what is taken, in whatever pieces it comes, and what is refused."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterable
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poolgrid.server.transport.zmtp import GREETING, READY, Session, ZmtpError, command, framed

FRAME_BYTES_MAX = 100_000


def ready(kind: bytes = b"ROUTER", name: bytes = b"Socket-Type") -> bytes:
    return command(b"READY", bytes((len(name),)) + name + struct.pack(">I", len(kind)) + kind)


HANDSHAKE = GREETING + ready()


def greeted(words: bytes = HANDSHAKE) -> Session:
    session = Session(FRAME_BYTES_MAX)
    assert session.feed(words) == []
    return session


def feed_all(session: Session, pieces: Iterable[bytes]) -> list[bytes]:
    return [message for piece in pieces for message in session.feed(piece)]


def test_it_greets_at_once_and_says_ready_when_the_peer_has_greeted() -> None:
    session = Session(FRAME_BYTES_MAX)

    assert (session.outgoing, session.is_ready) == (GREETING, False)
    session.outgoing = b""
    assert session.feed(GREETING) == []
    assert (session.outgoing, session.is_ready) == (READY, False)
    assert session.feed(ready()) == []
    assert session.is_ready


@given(
    messages=st.lists(st.one_of(st.binary(max_size=300), st.integers(0, 70_000).map(bytes)), max_size=6),
    cuts=st.lists(st.integers(0, 300_000), max_size=20),
)
def test_messages_come_out_whole_and_in_order_however_they_are_cut(messages: list[bytes], cuts: list[int]) -> None:
    stream = HANDSHAKE + b"".join(framed(message) for message in messages)
    places = [0, *sorted(cut for cut in cuts if cut < len(stream)), len(stream)]
    session = Session(FRAME_BYTES_MAX)

    found = [message for begin, end in itertools.pairwise(places) for message in session.feed(stream[begin:end])]

    assert found == messages


def test_each_frame_of_a_message_is_a_message() -> None:
    first = bytearray(framed(b"first"))
    first[0] |= 1  # further frames follow

    assert greeted().feed(bytes(first) + framed(b"second")) == [b"first", b"second"]


def test_a_heartbeat_is_answered_with_its_context() -> None:
    session = greeted()
    session.outgoing = b""

    assert session.feed(command(b"PING", b"\x00\x0acontext") + framed(b"m")) == [b"m"]

    assert session.outgoing == command(b"PONG", b"context")


BROKEN = {
    "SSH-2.0-OpenSSH_9.2p1\r\n": b"SSH-2.0-OpenSSH_9.2p1\r\n",
    "a signature that does not end": b"\xff" + bytes(8) + b"\x01",
    "uses ZMTP 1": GREETING[:10] + b"\x01\x00" + GREETING[12:],
    "security is CURVE": GREETING[:12] + b"CURVE".ljust(20, b"\0") + GREETING[32:],
    "peer is a PUB": GREETING + ready(b"PUB"),
    "socket of no type": GREETING + command(b"READY", b""),
    "cut off": GREETING + command(b"READY", b"\x0bSocket-Type\x00\x00\x00\x09ROUTER"),
    "cut off in the size": GREETING + command(b"READY", b"\x0bSocket-Type\x00"),
    "no room": GREETING + command(b"ERROR", b"\x07no room"),
    "sent HELLO": GREETING + command(b"HELLO", b""),
    "before the peer's READY": GREETING + framed(b"m"),
    "flags 0x08": HANDSHAKE + b"\x08\x00",
    "100,001 bytes": HANDSHAKE + b"\x02" + struct.pack(">Q", FRAME_BYTES_MAX + 1),
    "18,446,744,073,709,551,615 bytes": HANDSHAKE + b"\x02" + b"\xff" * 8,
}


@pytest.mark.parametrize("what", BROKEN)
@pytest.mark.parametrize("in_pieces", [False, True])
def test_what_is_not_zmtp_is_refused_with_the_reason(what: str, in_pieces: bool) -> None:
    session = Session(FRAME_BYTES_MAX)
    stream = BROKEN[what]

    with pytest.raises(ZmtpError) as refused:
        feed_all(session, [stream[at : at + 1] for at in range(len(stream))] if in_pieces else [stream])

    assert "the connection is closed" in str(refused.value)
    if what[0].islower() and " " in what and what not in ("a signature that does not end", "cut off in the size"):
        assert what in str(refused.value)


@given(st.binary(max_size=400), st.booleans())
def test_bytes_at_random_raise_nothing_else(noise: bytes, after_the_handshake: bool) -> None:
    session = greeted() if after_the_handshake else Session(FRAME_BYTES_MAX)

    with suppress(ZmtpError):
        session.feed(noise)
