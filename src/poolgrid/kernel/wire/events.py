"""The event stream: facts in the past tense, and the batches and records they travel in.

A source numbers its batches (``epoch``, ``seq``); the consolidator gives each accepted batch one journal ``offset``.
Token ids and prompts never enter an event, only sequence hashes. Structs are positional on the wire
(``[tag, field, ...]``): a reader ignores trailing fields it does not know, and a missing trailing field takes its
default.

A new kind of event is a class here and a member of ``AnyEvent``. The type checker then names each fold that does not
say what the kind means to it (they end in ``assert_never``), and tests the columns and pages that lack its fields.
"""

from __future__ import annotations

from typing import Annotated, Final, final

import msgspec
from msgspec import Meta

from poolgrid.kernel.wire.card import WorkerCard
from poolgrid.kernel.wire.identifiers import (
    U32,
    U64,
    GroupNumber,
    Identifier,
    PackedHashes,
    StreamState,
    Text,
    Tier,
    WorkerId,
    WorkerKey,
)
from poolgrid.kernel.wire.limits import EVENTS_PER_BATCH_MAX, GROUPS_PER_WORKER_MAX, WINDOW_BLOCKS_MAX
from poolgrid.kernel.wire.sessions import SessionTurn, TurnAnswer

FOLLOWED_GROUP: Final = GROUPS_PER_WORKER_MAX
"""Group of blocks that are named with the tokens behind them (``GroupsReported.following_tokens``)."""


class Event(msgspec.Struct, array_like=True, frozen=True, tag=True, gc=False):
    """Base of all events; the tag is the class name."""


@final
class WorkerJoined(Event, frozen=True):
    """A worker rank became part of the pool, with an empty cache and no requests."""

    card: WorkerCard


@final
class WorkerDraining(Event, frozen=True):
    """The worker finishes what it has and takes nothing new."""


@final
class WorkerLeft(Event, frozen=True):
    """The worker is gone: its blocks and requests with it."""

    reason: Text


@final
class BlocksStored(Event, frozen=True):
    """A chain of blocks became reusable on one tier; each hash continues the one before, the first ``parent``.

    In another group than 0 the blocks need not follow each other, and ``parent`` means nothing.
    """

    parent: U64 | None
    sequence_hashes: PackedHashes
    """u64 little-endian, 8 bytes each (``poolgrid.kernel.wire.hashing.pack_hashes``)."""
    tier: Tier = Tier.DEVICE
    group: GroupNumber = 0
    """KV group that holds the blocks: 0 = full attention, others as in ``GroupsReported``."""


@final
class BlocksRemoved(Event, frozen=True):
    """Blocks left one tier."""

    sequence_hashes: PackedHashes
    tier: Tier = Tier.DEVICE
    group: GroupNumber = 0


@final
class CacheCleared(Event, frozen=True):
    """The worker holds no block any more, on any tier."""


@final
class RequestStarted(Event, frozen=True):
    """The engine scheduled a request for the first time; ``cached_tokens`` of its prompt were reused."""

    request_id: Identifier
    isl: U32
    """Prompt tokens."""
    cached_tokens: U32
    active_blocks: U32
    """Blocks that the request occupies now, shared ones included."""
    cached_later: bool = False
    """Whether ``cached_tokens`` is an estimate: the engine reports only at the end how much it reused
    (``RequestFinished.cached_tokens``)."""


@final
class PrefillCompleted(Event, frozen=True):
    """The request's first token exists; its prompt no longer counts as prefill work."""

    request_id: Identifier
    untimed: bool = False
    """It may stand behind a replay of cache events: when it is read does not show when the token came."""


@final
class RequestProgressed(Event, frozen=True):
    """The request occupies this many blocks now."""

    request_id: Identifier
    active_blocks: U32


@final
class RequestFinished(Event, frozen=True):
    """The request left the engine and its blocks are released (they may stay cached)."""

    request_id: Identifier
    reason: Text
    """``stop``, ``length``, ``cancelled``, ``error`` or ``migrated``."""
    cached_tokens: U32 | None = None
    """Prompt tokens that were reused, where the engine reports them only at the end."""


@final
class LoadReported(Event, frozen=True):
    """Engine statistics of one rank at one moment."""

    running_requests: U32
    waiting_requests: U32
    prefill_tokens: U32
    """Prompt tokens accepted and not yet computed, waiting requests included."""
    active_blocks: U32
    """Distinct device blocks that running requests hold."""
    cached_blocks: U32
    """Device blocks that hold reusable content, active or not."""
    total_blocks: U32
    steps: U64 = 0
    """Engine steps since the epoch began."""
    foreign_requests: U32 = 0
    """Requests of the engine that no router has reported, by its own figures: others send them to it."""


@final
class SnapshotBegan(Event, frozen=True):
    """The source restates its whole cache: what was known of its blocks is void, ``BlocksStored`` follow."""


@final
class SnapshotEnded(Event, frozen=True):
    """The restatement is complete."""


@final
class BlocksShared(Event, frozen=True):
    """A further source of the worker reported blocks that it was known to hold; nothing changes for readers."""

    sequence_hashes: PackedHashes
    tier: Tier = Tier.DEVICE
    group: GroupNumber = 0


@final
class BlocksReleased(Event, frozen=True):
    """One of several sources no longer holds these blocks, the worker still does; nothing changes for readers."""

    sequence_hashes: PackedHashes
    tier: Tier = Tier.DEVICE
    group: GroupNumber = 0


@final
class StreamStateChanged(Event, frozen=True):
    """The consolidator's verdict on how far the stream of one of the worker's sources can be trusted from here on."""

    source: Identifier
    state: StreamState
    reason: Text = ""


@final
class TurnBegan(Event, frozen=True):
    """The worker accepted a dispatch of a session's turn; before its ``RequestStarted``."""

    request_id: Identifier
    isl: U32
    """Prompt tokens."""
    turn: SessionTurn


@final
class TurnEnded(Event, frozen=True):
    """A router has seen the whole answer of a turn: a prompt that repeats it continues the session."""

    answer: TurnAnswer


class KvGroup(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What a KV group other than full attention must hold so that a prompt can be resumed at a block boundary.

    Layers with a sliding window need the last blocks before the boundary, layers with a state the last one.
    """

    needed_blocks: Annotated[int, Meta(ge=0, le=WINDOW_BLOCKS_MAX)]
    """Blocks before the boundary, fewer where the prompt has fewer; 0 = not known, nothing can be resumed."""
    stride_blocks: Annotated[int, Meta(ge=1, le=WINDOW_BLOCKS_MAX)] = 1
    """Blocks of the index in a block of the group: it is held under the last of them, and can be resumed only there."""


@final
class GroupsReported(Event, frozen=True):
    """The model has several KV groups; replaces the report before. Without one a worker has group 0 alone."""

    groups: Annotated[tuple[KvGroup, ...], Meta(max_length=GROUPS_PER_WORKER_MAX)]
    """Groups 1, 2 and so on; groups with equal needs are one, which holds what all of them hold."""
    has_full_attention: bool = True
    """Whether group 0 takes part; without it a prompt can be resumed though no other block is held."""
    recomputed_blocks: U32 = 0
    """Last blocks of what is held that the engine computes again, as drafting layers do (in blocks of the index):
    full attention and windows must hold them behind the place where a prompt is resumed. States need none."""
    recomputes_windows: bool = True
    """Whether windows must hold them too: not where the draft model's layers are all of full attention."""
    following_tokens: U32 = 0
    """Tokens behind a block that the engine's hash of it covers too. Group ``FOLLOWED_GROUP`` then holds each block
    that all groups hold by ``child_hash`` of these tokens, and a prompt can be resumed behind no other."""


AnyEvent = (
    WorkerJoined
    | WorkerDraining
    | WorkerLeft
    | BlocksStored
    | BlocksRemoved
    | CacheCleared
    | RequestStarted
    | PrefillCompleted
    | RequestProgressed
    | RequestFinished
    | LoadReported
    | SnapshotBegan
    | SnapshotEnded
    | BlocksShared
    | BlocksReleased
    | StreamStateChanged
    | TurnBegan
    | TurnEnded
    | GroupsReported
)


class EventBatch(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What a source pushes: the events of one engine step, in order."""

    worker_id: Identifier
    dp_rank: U32
    epoch: U64
    seq: U64
    time_ms: U64
    """Wall clock of the source, Unix milliseconds."""
    events: Annotated[list[AnyEvent], Meta(max_length=EVENTS_PER_BATCH_MAX)]
    source: Identifier = "worker"
    """Which source of this worker: its own push, or the name of a PUB engine."""

    @property
    def worker(self) -> WorkerKey:
        return WorkerKey(WorkerId(self.worker_id), self.dp_rank)


class JournalRecord(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One entry of a pool's journal: an accepted batch or a part of a large one, consolidated, at its offset."""

    offset: U64
    worker_id: Identifier
    dp_rank: U32
    epoch: U64
    seq: U64
    time_ms: U64
    """Wall clock of the source when it made the batch."""
    recorded_ms: U64
    """Wall clock of the consolidator when it accepted the batch."""
    events: Annotated[list[AnyEvent], Meta(max_length=EVENTS_PER_BATCH_MAX)]
    source: Identifier = "worker"
    more: bool = False
    """Whether the batch continues in a later record; the source's cursor moves with the last."""

    @property
    def worker(self) -> WorkerKey:
        return WorkerKey(WorkerId(self.worker_id), self.dp_rank)
