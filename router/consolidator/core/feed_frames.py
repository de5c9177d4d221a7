"""The frames of the live feed and of its answers, around the messages of ``wire.feed``.

    a record    [``FEED_TOPIC``, offset (u64 big-endian), JournalRecord, life]
    keepalive   [``ALIVE_TOPIC``, next offset (u64 big-endian), life]
    an answer   [answer, life]

``life`` names one life of the consolidator. A reader that meets another one than before starts over with a snapshot:
what it knows may be ahead of what a journal kept over a power failure. The keepalive is sent when the feed was silent
for a while, so that a loss at the end of a burst is noticed. Both topics begin with ``FEED_TOPIC``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from wire.errors import DecodeError
from wire.feed import FEED_TOPIC, offset_frame

ALIVE_TOPIC = FEED_TOPIC + b".alive"


@dataclass(frozen=True, slots=True)
class FeedFrame:
    """One message of the feed; ``payload`` is ``None`` for a keepalive, and ``offset`` then the next one."""

    offset: int
    payload: bytes | None
    life: bytes


def decode_feed(frames: Sequence[bytes]) -> FeedFrame:
    """Return the message that frames of the feed make, or raise ``DecodeError``."""
    if len(frames) == 4 and frames[0] == FEED_TOPIC and len(frames[1]) == 8:
        return FeedFrame(offset_frame.unpack(frames[1])[0], frames[2], frames[3])
    if len(frames) == 3 and frames[0] == ALIVE_TOPIC and len(frames[1]) == 8:
        return FeedFrame(offset_frame.unpack(frames[1])[0], None, frames[2])
    raise DecodeError("a feed message", f"{len(frames)} frames beginning with {bytes(frames[0][:16])!r}")


def encode_record(offset: int, payload: bytes, life: bytes) -> list[bytes]:
    """Return the frames that publish a record."""
    return [FEED_TOPIC, offset_frame.pack(offset), payload, life]


def encode_alive(next_offset: int, life: bytes) -> list[bytes]:
    """Return the frames of a keepalive."""
    return [ALIVE_TOPIC, offset_frame.pack(next_offset), life]
