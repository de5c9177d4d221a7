"""The frames of the feed and of its answers, around the messages of ``poolgrid.wire.feed``: layout and writers.

    message      frames, in this order
    -----------  ------------------------------------------------------------------------------------------------
    records      topic (``FEED_TOPIC``), offset of the first record, life, record, record, ...
    keepalive    topic (``ALIVE_TOPIC``), offset of the next record, life
    loading      topic (``poolgrid.wire.ingest.LOADING_TOPIC``), encoded ``LoadingWorkers``
    answer       answer (``poolgrid.wire.feed.FromFeed``), life

An offset is u64 big-endian, so that bytes sort like numbers; a record is an encoded ``JournalRecord``, and those of one
message follow each other. ``life`` names one life of the consolidator. A reader that meets another one than before
starts over with a snapshot: what it knows may be ahead of what a journal kept over a power failure. The keepalive is
sent when the feed was silent for a while, so that a loss at the end of a burst is noticed. All topics begin with
``FEED_TOPIC``, which is what readers subscribe to.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

import msgspec

from poolgrid.wire.errors import DecodeError
from poolgrid.wire.limits import FEED_RECORDS_PER_MESSAGE_MAX

FEED_TOPIC = b"poolgrid"
ALIVE_TOPIC = FEED_TOPIC + b".alive"

MESSAGE_BYTES_MAX = 1024 * 1024
"""Bytes of records that a sender puts into one message; a larger record goes alone."""

_OFFSET = struct.Struct(">Q")


class FeedFrame(msgspec.Struct, frozen=True):
    """One message of the feed: records that follow each other, or none in a keepalive, with the next ``offset``."""

    offset: int
    payloads: Sequence[bytes]
    life: bytes


def decode_feed(frames: Sequence[bytes]) -> FeedFrame:
    """Return the message that frames of the feed make, or raise ``DecodeError``."""
    if 4 <= len(frames) <= 3 + FEED_RECORDS_PER_MESSAGE_MAX and frames[0] == FEED_TOPIC and len(frames[1]) == 8:
        return FeedFrame(_OFFSET.unpack(frames[1])[0], frames[3:], frames[2])
    if len(frames) == 3 and frames[0] == ALIVE_TOPIC and len(frames[1]) == 8:
        return FeedFrame(_OFFSET.unpack(frames[1])[0], (), frames[2])
    raise DecodeError("a feed message", f"{len(frames)} frames beginning with {bytes(frames[0][:16])!r}")


def encode_records(offset: int, payloads: Sequence[bytes], life: bytes) -> Iterator[list[bytes]]:
    """Yield the messages that publish records which follow each other; ``offset`` is that of the first."""
    begin = 0
    while begin < len(payloads):
        end, size = begin + 1, len(payloads[begin])
        while end < len(payloads) and end - begin < FEED_RECORDS_PER_MESSAGE_MAX:
            size += len(payloads[end])
            if size > MESSAGE_BYTES_MAX:
                break
            end += 1
        yield [FEED_TOPIC, _OFFSET.pack(offset + begin), life, *payloads[begin:end]]
        begin = end


def encode_alive(next_offset: int, life: bytes) -> list[bytes]:
    """Return the frames of a keepalive."""
    return [ALIVE_TOPIC, _OFFSET.pack(next_offset), life]


def encode_answer(answer: bytes, life: bytes) -> list[bytes]:
    """Return the frames of an encoded answer."""
    return [answer, life]


def decode_answer(frames: Sequence[bytes]) -> tuple[bytes, bytes]:
    """Return the encoded answer and the life that frames of the query plane make, or raise ``DecodeError``."""
    if len(frames) != 2:
        raise DecodeError("an answer of the feed", f"{len(frames)} frames, expected are 2")
    return frames[0], frames[1]
