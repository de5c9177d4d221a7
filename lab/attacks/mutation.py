"""Frames that are almost right: seeded mutations of real ones."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

FRAME_MAX = 200_000
"""Mutated frames stay below; huge ones are an attack of their own."""

INTERESTING = (
    *(b"\x00", b"\xff", b"\x80", b"\x90", b"\xc0", b"\xc1", b"\xc3", b"\xcf" + b"\xff" * 8, b"\xd3\x80" + b"\0" * 7),
    *(b"\xcb\x7f\xf8\0\0\0\0\0\0", b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff"),
    *(b"\xc6\xff\xff\xff\xff", b"\xdc\xff\xff", b"\xa4\xff\xfe\xfd\xfc", b"\xa3\x1b[2J", b"\xa2\r\n"),
)
"""msgpack's edges: empty and missing things, largest numbers, NaN, lengths that are only claimed, no UTF-8, and what a
terminal would obey."""


def mutated(source: random.Random, frame: bytes, others: Sequence[bytes]) -> bytes:
    """Return a frame changed in one to four places."""
    for _ in range(source.randint(1, 4)):
        frame = source.choice(_WAYS)(source, frame, others)[:FRAME_MAX]
    return frame


def _flip(source: random.Random, frame: bytes, _others: Sequence[bytes]) -> bytes:
    if not frame:
        return b"\x01"
    at = source.randrange(len(frame))
    return frame[:at] + bytes([frame[at] ^ (1 << source.randrange(8))]) + frame[at + 1 :]


def _cut(source: random.Random, frame: bytes, _others: Sequence[bytes]) -> bytes:
    return frame[: source.randint(0, len(frame))]


def _insert(source: random.Random, frame: bytes, _others: Sequence[bytes]) -> bytes:
    at = source.randint(0, len(frame))
    return frame[:at] + source.choice(INTERESTING) + frame[at:]


def _replace(source: random.Random, frame: bytes, _others: Sequence[bytes]) -> bytes:
    new = source.choice(INTERESTING)
    at = source.randint(0, len(frame))
    return frame[:at] + new + frame[at + len(new) :]


def _splice(source: random.Random, frame: bytes, others: Sequence[bytes]) -> bytes:
    other = source.choice(others)
    return frame[: source.randint(0, len(frame))] + other[source.randint(0, len(other)) :]


def _repeat(source: random.Random, frame: bytes, _others: Sequence[bytes]) -> bytes:
    if not frame:
        return b"\x90"
    at = source.randrange(len(frame))
    piece = frame[at : at + source.randint(1, 64)]
    return frame[:at] + piece * source.randint(2, 50) + frame[at:]


def _nest(source: random.Random, frame: bytes, _others: Sequence[bytes]) -> bytes:
    at = source.randint(0, len(frame))
    return frame[:at] + b"\x91" * source.randint(10, 5000) + frame[at:]


_WAYS: tuple[Callable[[random.Random, bytes, Sequence[bytes]], bytes], ...] = (
    *(_flip, _flip, _cut, _insert, _replace, _splice, _repeat, _nest),
)
