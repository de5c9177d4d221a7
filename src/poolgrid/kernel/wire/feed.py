"""How routers follow a consolidator: a live PUB feed, and a ROUTER socket that answers replay and snapshot requests.

A router subscribes first, then asks for the snapshot, drops feed
records below the snapshot's offset and applies the rest; a hole between two offsets is filled by ``Replay``. Answers
come in parts, each one frame; the last part is marked.

The frames of the feed and of its answers, around the messages of ``poolgrid.kernel.wire.feed``: layout and writers.

    message      frames, in this order
    -----------  ------------------------------------------------------------------------------------------------
    records      topic (``FEED_TOPIC``), offset of the first record, life, record, record, ...
    keepalive    topic (``ALIVE_TOPIC``), offset of the next record, life
    loading      topic (``poolgrid.kernel.wire.ingest.LOADING_TOPIC``), encoded ``LoadingWorkers``
    answer       answer (``poolgrid.kernel.wire.feed.FromFeed``), life

An offset is u64 big-endian, so that bytes sort like numbers; a record is an encoded ``JournalRecord``, and those of one
message follow each other. ``life`` names one life of the consolidator. A reader that meets another one than before
starts over with a snapshot: what it knows may be ahead of what a journal kept over a power failure. The keepalive is
sent when the feed was silent for a while, so that a loss at the end of a burst is noticed. All topics begin with
``FEED_TOPIC``, which is what readers subscribe to.

The health of a source's event stream, and what each event of the journal means for it.

    state          the source ...
    -------------  ------------------------------------------------------------------------------------------
    SYNCING        has joined; nothing of it was taken in yet
    LIVE           is followed without a hole
    REPLAYING      has a hole that it was asked to fill
    SNAPSHOTTING   restates its whole cache
    STALE          has a hole that is not filled, or is not connected: what is known of its cache is not trusted
    ABSENT         is a further source and has been silent for the lease: nothing that it reported is held
    FORMER         is a further source and belongs to an epoch of the worker that has ended: nothing of it is taken in

A worker's own stream (``WORKER_SOURCE``) decides how far the worker can be trusted. What a further source reports is
true or taken away, so one that fails makes the worker's view smaller and not wrong.

The consolidator decides (``poolgrid.kernel.consolidation``) and writes ``StreamStateChanged``; what other events
imply is not written twice. Every reader uses ``fold``, so all of them see the same state at the same offset.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from poolgrid.kernel.wire.card import WorkerCard
from poolgrid.kernel.wire.errors import DecodeError
from poolgrid.kernel.wire.events import (
    AnyEvent,
    GroupsReported,
    LoadReported,
    SnapshotBegan,
    SnapshotEnded,
    StreamStateChanged,
)
from poolgrid.kernel.wire.identifiers import U32, U64, GroupNumber, Identifier, PackedHashes, StreamState, Text, Tier
from poolgrid.kernel.wire.limits import (
    FEED_RECORDS_PER_MESSAGE_MAX,
    REPLAY_RECORDS_MAX,
    SNAPSHOT_CHAINS_PER_PART_MAX,
    SOURCES_PER_WORKER_MAX,
)
from poolgrid.kernel.wire.sessions import NO_SESSIONS, SessionsSnapshot


class Replay(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """Send the records from ``from_offset`` on, at most ``limit`` of them."""

    request: U64
    from_offset: U64
    limit: U32


class TakeSnapshot(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """Send the folded state of the pool."""

    request: U64


ToFeed = Replay | TakeSnapshot


class Records(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """Answer to ``Replay``: encoded records in order; ``next_offset`` is where the journal ends."""

    request: U64
    records: Annotated[list[bytes], Meta(max_length=REPLAY_RECORDS_MAX)]
    next_offset: U64


class TooOld(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """Answer to ``Replay``: the oldest record still kept is ``oldest_offset``; take a snapshot instead."""

    request: U64
    oldest_offset: U64


class BlockChain(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Blocks that follow each other on one tier of one worker; packed u64 little-endian."""

    parent: U64 | None
    sequence_hashes: PackedHashes
    tier: Tier = Tier.DEVICE
    group: GroupNumber = 0


class RequestState(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One request that the worker has not finished."""

    request_id: Identifier
    isl: U32
    cached_tokens: U32
    active_blocks: U32
    prefilling: bool


class SourceStream(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The stream of one source of a worker; see ``poolgrid.kernel.wire.feed``."""

    source: Identifier
    state: StreamState
    reason: Text = ""

    def is_known(self, state: StreamState, reason: str) -> bool:
        """Return whether a state is no news: reasons of others than a live stream change with every frame."""
        return self.state is state and (state is not StreamState.LIVE or self.reason == reason)


class WorkerState(msgspec.Struct, array_like=True, frozen=True):
    """All facts of the stream about one worker rank, without its blocks."""

    worker_id: Identifier
    dp_rank: U32
    epoch: U64
    next_seq: U64
    card: WorkerCard
    draining: bool
    requests: list[RequestState]
    load: LoadReported | None = None
    restating: bool = False
    """Between ``SnapshotBegan`` and ``SnapshotEnded``."""
    streams: Annotated[list[SourceStream], Meta(max_length=SOURCES_PER_WORKER_MAX)] = []
    groups: GroupsReported | None = None
    """``None`` = full attention alone."""


class SnapshotPart(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """One part of a snapshot: the first carries the workers, all carry chains of blocks by worker position."""

    request: U64
    offset: U64
    """The state after every record below this offset (the next record to apply)."""
    part: U32
    last: bool
    workers: list[WorkerState]
    """All workers of the pool; only in part 0."""
    chains: Annotated[list[tuple[U32, BlockChain]], Meta(max_length=SNAPSHOT_CHAINS_PER_PART_MAX)]
    """(position in part 0's ``workers``, chain), in order of arrival: a parent that went away and came back may come
    after its children."""
    sessions: SessionsSnapshot = NO_SESSIONS
    """All sessions of the pool; only in part 0."""


FromFeed = Records | TooOld | SnapshotPart


WORKER_SOURCE = "worker"
"""Source of what a worker reports itself: what it pushes, or what an engine publishes that is listed with its card."""

CONSOLIDATOR_SOURCE = "consolidator"
"""Source of the records that the consolidator writes on its own account."""


OWN_STATES = (
    StreamState.SYNCING,
    StreamState.LIVE,
    StreamState.REPLAYING,
    StreamState.SNAPSHOTTING,
    StreamState.STALE,
)
"""States of a worker's own stream; one that is absent is no member of the pool."""


def fold(streams: dict[str, SourceStream], source: str, events: Iterable[AnyEvent]) -> bool:
    """Fold the events of one record into the streams of its worker, by source; return whether any changed.

    Any batch of a source ends its ``SYNCING``, an empty one too. What the consolidator writes on its own account says
    something of a stream only by ``StreamStateChanged``.
    """
    known = streams.get(source)
    before: StreamState = StreamState.SYNCING if known is None else known.state
    state: StreamState = StreamState.LIVE if before is StreamState.SYNCING else before
    changed = False
    for event in events:
        if type(event) is SnapshotBegan:
            state = StreamState.SNAPSHOTTING
        elif type(event) is SnapshotEnded:
            state = StreamState.LIVE
        elif type(event) is StreamStateChanged:
            streams[event.source] = SourceStream(event.source, event.state, event.reason)
            changed = True
            if event.source == source:
                before = state = event.state
    if source != CONSOLIDATOR_SOURCE and state is not before:
        streams[source] = SourceStream(source, state)
        changed = True
    return changed


def own_stream(streams: Iterable[SourceStream]) -> SourceStream:
    """Return the stream that decides how far a worker can be trusted: its own."""
    return next((one for one in streams if one.source == WORKER_SOURCE), _UNHEARD)


_UNHEARD = SourceStream(WORKER_SOURCE, StreamState.SYNCING)


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
