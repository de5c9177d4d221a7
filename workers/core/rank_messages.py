"""What the ranks of one engine tell its leader, and what it answers. They are one start of one version."""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec
from msgspec import Meta

from poolgrid.wire.errors import DecodeError
from poolgrid.wire.identifiers import U64, Identifier
from poolgrid.workers.core.rank_place import RANKS_MAX

REASON_CHARS_MAX = 500

Reason = Annotated[str, Meta(max_length=REASON_CHARS_MAX)]


class GroupState(enum.StrEnum):
    """How it is with the engine as a whole."""

    STARTING = enum.auto()
    RUNNING = enum.auto()
    DONE = enum.auto()
    """It has ended in order."""
    FAILED = enum.auto()


class Beat(msgspec.Struct, array_like=True, frozen=True):
    """A rank is alive."""

    group: Annotated[str, Meta(max_length=256)]
    rank: Annotated[int, Meta(ge=0, lt=RANKS_MAX)]
    host: Identifier
    life: U64
    """Another one under the same rank is another process."""
    ended: Reason = ""
    """How its part of the engine came to its end; empty = it runs."""
    stops: bool = False
    """It was told to end, and waits for the engine to finish what it has."""


class Word(msgspec.Struct, array_like=True, frozen=True):
    """The leader's answer to every beat."""

    state: GroupState
    reason: Reason = ""


_encoder = msgspec.msgpack.Encoder()
_beats = msgspec.msgpack.Decoder(Beat)
_words = msgspec.msgpack.Decoder(Word)


def encode(message: Beat | Word) -> bytes:
    """Return the frame of a message."""
    return _encoder.encode(message)


def decode_beat(frame: bytes) -> Beat:
    """Return the beat of a frame, or raise ``DecodeError``; the socket bounds the frame."""
    try:
        return _beats.decode(frame)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise DecodeError("a rank's beat", str(error)) from None


def decode_word(frame: bytes) -> Word:
    """Return the word of a frame, or raise ``DecodeError``; the socket bounds the frame."""
    try:
        return _words.decode(frame)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise DecodeError("a leader's word", str(error)) from None
