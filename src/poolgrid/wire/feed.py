"""How routers follow a consolidator: a live PUB feed, and a ROUTER socket that answers replay and snapshot requests.

``poolgrid.wire.feed_frames`` lays their frames out. A router subscribes first, then asks for the snapshot, drops feed
records below the snapshot's offset and applies the rest; a hole between two offsets is filled by ``Replay``. Answers
come in parts, each one frame; the last part is marked.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from poolgrid.wire.card import WorkerCard
from poolgrid.wire.events import GroupsReported, LoadReported
from poolgrid.wire.identifiers import U32, U64, GroupNumber, Identifier, PackedHashes, StreamState, Text, Tier
from poolgrid.wire.limits import REPLAY_RECORDS_MAX, SNAPSHOT_CHAINS_PER_PART_MAX, SOURCES_PER_WORKER_MAX
from poolgrid.wire.sessions import NO_SESSIONS, SessionsSnapshot


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
    """The stream of one source of a worker; see ``poolgrid.wire.streams``."""

    source: Identifier
    state: StreamState
    reason: Text = ""


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
