"""The state of a pool as a fold over its journal.

Rules for this file:

1. ``apply`` is the only way by which records change the state, and it looks at nothing but the record.
2. ``freeze`` at offset n, loaded, and followed by the records from n on, gives the state that all records from 0 give.
   Freezing copies nothing (``owned_blocks``), and records are applied meanwhile.
3. A record moves the cursor of its source behind its ``seq``, of a batch in several records the last. Records that the
   consolidator writes on its own account (source ``consolidator``: ``WorkerJoined``, ``WorkerLeft``, requests that were
   lost) move none.

What a record does to a worker rank:

    event                        effect
    ---------------------------  ------------------------------------------------------------------------------
    WorkerJoined(card)           the rank starts with an empty cache, no requests, and the cursor (epoch, 0)
    WorkerDraining               marked as draining
    WorkerLeft                   the rank is forgotten, blocks, requests and cursors included
    Blocks*, CacheCleared        ``presence``
    SnapshotBegan, SnapshotEnded the blocks are void; ``restating`` in between
    StreamStateChanged           the stream of the source it names; what other events imply is in
                                 ``poolgrid.kernel.wire.feed``
    RequestStarted               the request is listed (the oldest goes when more than ``REQUESTS_PER_WORKER_MAX``)
    PrefillCompleted, Progressed the request, when it is listed, changes
    RequestFinished              the request is no longer listed
    LoadReported                 replaces the load
    TurnBegan, TurnEnded         ``session_table``, which takes requests and members too
    GroupsReported               replaces the groups

Where one source stands in its numbered stream, and what the next number means.

Rules for this file:

1. A position is ``(epoch, next_seq)``: the epoch of the source, and the number of the batch that is wanted next.
2. Judging a number changes nothing. The owner moves the cursor (``advance``, ``begin``) once it has acted.

Batches of one source carry ``(epoch, seq)``. Within an epoch the numbers run from 0 without holes, so one comparison
tells what a batch is; a batch of another epoch never moves the cursor by itself:

    epoch      seq         verdict      what the owner does
    ---------  ----------  -----------  -------------------------------------------------------------
    equal      = next      NEXT         applies it, ``advance``
    equal      < next      DUPLICATE    drops it, acknowledges again (the acknowledgement was lost)
    equal      > next      GAP          asks again from ``next_seq``; a batch that restates the whole
                                        cache is accepted instead of the missing ones
    larger     any         NEW_EPOCH    drops the old epoch's state first, then ``begin``
    smaller    any         OLD_EPOCH    refuses it: a process of an earlier epoch still sends

A source that announces itself (``Hello``, ``Heartbeat``) states the number it will use next:

    epoch      announced   verdict      what the owner does
    ---------  ----------  -----------  -------------------------------------------------------------
    equal      = next      NEXT         nothing is missing
    equal      > next      GAP          batches were lost at the end: asks again from ``next_seq``
    equal      < next      BACKWARDS    the source started over under its old epoch: treats it as a new epoch
    larger     any         NEW_EPOCH    as above
    smaller    any         OLD_EPOCH    as above
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import assert_never

import msgspec

from poolgrid.kernel.consolidation.block_ownership import BlockOwnership, Frozen, dump
from poolgrid.kernel.consolidation.owned_blocks import Discarded
from poolgrid.kernel.consolidation.session_table import SessionTable
from poolgrid.kernel.wire.card import WorkerCard
from poolgrid.kernel.wire.events import (
    AnyEvent,
    BlocksReleased,
    BlocksRemoved,
    BlocksShared,
    BlocksStored,
    CacheCleared,
    EventBatch,
    GroupsReported,
    JournalRecord,
    LoadReported,
    PrefillCompleted,
    RequestFinished,
    RequestProgressed,
    RequestStarted,
    SnapshotBegan,
    SnapshotEnded,
    StreamStateChanged,
    TurnBegan,
    TurnEnded,
    WorkerDraining,
    WorkerJoined,
    WorkerLeft,
)
from poolgrid.kernel.wire.feed import (
    CONSOLIDATOR_SOURCE,
    WORKER_SOURCE,
    BlockChain,
    RequestState,
    SourceStream,
    WorkerState,
    fold,
)
from poolgrid.kernel.wire.hashing import pack_hashes, unpack_hashes
from poolgrid.kernel.wire.identifiers import StreamState, WorkerId, WorkerKey
from poolgrid.kernel.wire.sessions import NO_SESSIONS, SessionsSnapshot


class SequenceVerdict(Enum):
    """What a number means to the stream it arrived on."""

    NEXT = "next"
    DUPLICATE = "duplicate"
    GAP = "gap"
    BACKWARDS = "backwards"
    NEW_EPOCH = "new epoch"
    OLD_EPOCH = "old epoch"


class Cursor:
    """Position of one source: its epoch, and the batch wanted next."""

    __slots__ = ("epoch", "next_seq")

    def __init__(self, epoch: int, next_seq: int = 0) -> None:
        self.epoch = epoch
        self.next_seq = next_seq

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Cursor) and (self.epoch, self.next_seq) == (other.epoch, other.next_seq)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Cursor(epoch={self.epoch}, next_seq={self.next_seq})"

    def judge_batch(self, epoch: int, seq: int) -> SequenceVerdict:
        if epoch != self.epoch:
            return SequenceVerdict.NEW_EPOCH if epoch > self.epoch else SequenceVerdict.OLD_EPOCH
        if seq == self.next_seq:
            return SequenceVerdict.NEXT
        return SequenceVerdict.DUPLICATE if seq < self.next_seq else SequenceVerdict.GAP

    def judge_announcement(self, epoch: int, next_seq: int) -> SequenceVerdict:
        """Say what it means that the source will number its next batch ``(epoch, next_seq)``."""
        if epoch != self.epoch:
            return SequenceVerdict.NEW_EPOCH if epoch > self.epoch else SequenceVerdict.OLD_EPOCH
        if next_seq == self.next_seq:
            return SequenceVerdict.NEXT
        return SequenceVerdict.BACKWARDS if next_seq < self.next_seq else SequenceVerdict.GAP

    def advance(self) -> None:
        self.next_seq += 1

    def begin(self, epoch: int) -> None:
        self.epoch = epoch
        self.next_seq = 0


REQUESTS_PER_WORKER_MAX = 65_536
"""Unfinished requests remembered per rank, far above any engine's batch and queue; beyond it the oldest goes."""

BLOCKS_PER_WORKER_MAX = 4 * 1024 * 1024
"""Blocks remembered per rank over all tiers and sources. Beyond it new chains are not taken in, and that is counted."""

WorkerEvent = LoadReported | RequestStarted | RequestProgressed | PrefillCompleted | RequestFinished | WorkerDraining
"""What an event may contain about a worker and its requests."""


class MemberRank:
    """Facts of one worker rank in the stream."""

    __slots__ = (
        "card",
        "cursors",
        "draining",
        "epoch",
        "groups",
        "key",
        "load",
        "presence",
        "requests",
        "restating",
        "streams",
    )

    def __init__(
        self,
        key: WorkerKey,
        epoch: int,
        card: WorkerCard,
        blocks_max: int = BLOCKS_PER_WORKER_MAX,
        discarded: Discarded | None = None,
    ) -> None:
        self.key = key
        self.epoch = epoch
        self.card = card
        self.draining = False
        self.restating = False
        self.load: LoadReported | None = None
        self.groups: GroupsReported | None = None
        self.requests: dict[str, RequestState] = {}
        self.presence = BlockOwnership(blocks_max, discarded)
        self.cursors: dict[str, Cursor] = {WORKER_SOURCE: Cursor(epoch)}
        self.streams: dict[str, SourceStream] = {WORKER_SOURCE: SourceStream(WORKER_SOURCE, StreamState.SYNCING)}

    def stream(self, source: str) -> SourceStream:
        """Return how far the stream of a source can be trusted; a source without a message yet is syncing."""
        return self.streams.get(source) or SourceStream(source, StreamState.SYNCING)

    def apply(self, source: str, event: AnyEvent) -> None:
        match event:
            case BlocksStored() | BlocksRemoved() | BlocksShared() | BlocksReleased() | CacheCleared():
                self.presence.apply(source, event)
            case SnapshotBegan():
                self.restating = True
                self.presence.apply(source, event)
            case SnapshotEnded():
                self.restating = False
            case GroupsReported():
                self.groups = event
            case StreamStateChanged() | WorkerJoined() | WorkerLeft() | TurnBegan() | TurnEnded():
                pass  # of the stream, which ``poolgrid.kernel.wire.feed.fold`` takes, or of the pool
            case _:
                self.note(event)

    def take(self, source: str, given: Iterable[AnyEvent], is_live: bool) -> tuple[list[AnyEvent], bool, int]:
        """Apply events of a source.

        Return what the journal and the readers get, whether any of it is about trust in a stream, and how
        many events were ignored.
        """
        out: list[AnyEvent] = []
        presence = self.presence
        tells, ignored = False, 0
        restating = self.restating or (not is_live and self.stream(source).state is StreamState.SNAPSHOTTING)
        for event in given:
            match event:
                case BlocksStored():
                    presence.store(source, event, out)
                case BlocksRemoved():
                    presence.remove(source, event, out)
                case CacheCleared():
                    presence.clear(source, out)
                case SnapshotBegan():
                    tells = True
                    if presence.restate(source, event, out):
                        self.restating = True
                    else:
                        # To readers it would mean that nothing at all is held; they get what is gone.
                        out.append(StreamStateChanged(source, StreamState.SNAPSHOTTING, "its cache is restated"))
                    restating = True
                case SnapshotEnded():
                    if restating:
                        tells = True
                        restating = self.restating = False
                        out.append(event)
                case GroupsReported():
                    if event != self.groups:
                        self.groups = event
                        out.append(event)
                case WorkerJoined() | WorkerLeft() | BlocksShared() | BlocksReleased() | StreamStateChanged():
                    ignored += 1  # the consolidator writes these, never a source
                case TurnBegan() | TurnEnded():
                    out.append(event)
                case _:
                    self.note(event)
                    out.append(event)
        return out, tells, ignored

    def admits(self, batch: EventBatch, sources_max: int, before: list[AnyEvent]) -> bool:
        """Return whether a batch of a further source is the next of it; a new epoch drops what the source held."""
        cursor = self.cursors.get(batch.source)
        if cursor is None:
            if len(self.cursors) >= sources_max or batch.source == CONSOLIDATOR_SOURCE or batch.seq != 0:
                return False
            self.cursors[batch.source] = Cursor(batch.epoch)
        elif batch.epoch > cursor.epoch and batch.seq == 0:
            self.presence.clear(batch.source, before)
            cursor.begin(batch.epoch)
        else:
            return cursor.judge_batch(batch.epoch, batch.seq) is SequenceVerdict.NEXT
        return True

    def note(self, event: WorkerEvent) -> None:
        match event:
            case RequestStarted():
                self.requests.pop(event.request_id, None)
                if len(self.requests) >= REQUESTS_PER_WORKER_MAX:
                    del self.requests[next(iter(self.requests))]
                self.requests[event.request_id] = RequestState(
                    event.request_id, event.isl, event.cached_tokens, event.active_blocks, prefilling=True
                )
            case RequestProgressed():
                request = self.requests.get(event.request_id)
                if request is not None:
                    self.requests[event.request_id] = RequestState(
                        request.request_id, request.isl, request.cached_tokens, event.active_blocks, request.prefilling
                    )
            case PrefillCompleted():
                request = self.requests.get(event.request_id)
                if request is not None:
                    self.requests[event.request_id] = RequestState(
                        request.request_id, request.isl, request.cached_tokens, request.active_blocks, prefilling=False
                    )
            case RequestFinished():
                self.requests.pop(event.request_id, None)
            case LoadReported():
                self.load = event
            case WorkerDraining():
                self.draining = True
            case _:
                assert_never(event)

    def state(self) -> WorkerState:
        """Return the worker without its blocks, as readers get it."""
        return WorkerState(
            worker_id=self.key.worker_id,
            dp_rank=self.key.dp_rank,
            epoch=self.epoch,
            next_seq=self.cursors[WORKER_SOURCE].next_seq,
            card=self.card,
            draining=self.draining,
            requests=list(self.requests.values()),
            load=self.load,
            restating=self.restating,
            streams=[stream for _, stream in sorted(self.streams.items())],
            groups=self.groups,
        )


class SourcePosition(msgspec.Struct, array_like=True, frozen=True):
    """Cursor of one source, as a snapshot keeps it."""

    source: str
    epoch: int
    next_seq: int


class WorkerEntry(msgspec.Struct, array_like=True, frozen=True):
    """One worker of a journal snapshot."""

    state: WorkerState
    positions: list[SourcePosition]


@dataclass(frozen=True, slots=True)
class FrozenWorker:
    """One worker at one moment."""

    entry: WorkerEntry
    held: Frozen


@dataclass(frozen=True, slots=True)
class FrozenPool:
    """A pool's state before record ``offset``, as it stays."""

    offset: int
    workers: list[FrozenWorker]
    sessions: SessionsSnapshot = NO_SESSIONS

    def states(self) -> list[WorkerState]:
        return [worker.entry.state for worker in self.workers]

    def visible_chains(self) -> Iterator[tuple[int, BlockChain]]:
        """Yield (position of the worker, chain) for readers, sources merged, in the form of ``presence.dump``."""
        for position, worker in enumerate(self.workers):
            places = dict.fromkeys((tier, group) for tier, group, _, _ in worker.held)
            for tier, group in places:
                of_place = [held for at, of, _, held in worker.held if at is tier and of == group]
                for parent, hashes in dump(of_place):
                    yield position, BlockChain(parent, pack_hashes(hashes), tier, group)

    def source_chains(self) -> Iterator[tuple[int, str, BlockChain]]:
        for position, worker in enumerate(self.workers):
            for tier, group, source, held in worker.held:
                for parent, hashes in dump([held]):
                    yield position, source, BlockChain(parent, pack_hashes(hashes), tier, group)


class PoolState:
    """Workers, their blocks and the cursors of their sources before record ``offset``."""

    __slots__ = ("_blocks_max", "discarded", "offset", "sessions", "workers")

    def __init__(self, blocks_per_worker_max: int = BLOCKS_PER_WORKER_MAX) -> None:
        self._blocks_max = blocks_per_worker_max
        self.offset = 0
        """Offset of the next record."""
        self.workers: dict[WorkerKey, MemberRank] = {}
        self.discarded = Discarded()
        """Blocks of workers that left or were cleared; the owner frees them in slices."""
        self.sessions = SessionTable()

    def apply(self, record: JournalRecord) -> None:
        """Fold the next record in. Records must come in order: an offset out of line is our own fault."""
        assert record.offset == self.offset, f"record {record.offset} was applied at offset {self.offset}"
        self.offset += 1
        key = record.worker
        worker = self.workers.get(key)
        for event in record.events:
            if type(event) is WorkerJoined:
                self.forget(key)
                worker = self.workers[key] = self.new_worker(key, record.epoch, event.card)
            elif type(event) is WorkerLeft:
                self.forget(key)
                worker = None
            elif worker is not None:
                worker.apply(record.source, event)
        if worker is not None:
            fold(worker.streams, record.source, record.events)
        if worker is not None and record.source != CONSOLIDATOR_SOURCE:
            cursor = worker.cursors.get(record.source)
            if cursor is None:
                cursor = worker.cursors[record.source] = Cursor(record.epoch)
            cursor.epoch = record.epoch
            cursor.next_seq = record.seq if record.more else record.seq + 1
        self.sessions.apply(record)

    def new_worker(self, key: WorkerKey, epoch: int, card: WorkerCard) -> MemberRank:
        """Return a worker as it is right after it joined; the caller lists it."""
        return MemberRank(key, epoch, card, self._blocks_max, self.discarded)

    def forget(self, key: WorkerKey) -> None:
        worker = self.workers.pop(key, None)
        if worker is not None:
            worker.presence.forget_all()

    def freeze(self) -> FrozenPool:
        """Return the state at this offset, as it stays whatever is applied later, in a fixed order of workers."""
        return FrozenPool(
            self.offset,
            [
                FrozenWorker(
                    WorkerEntry(
                        worker.state(),
                        [SourcePosition(name, at.epoch, at.next_seq) for name, at in sorted(worker.cursors.items())],
                    ),
                    worker.presence.freeze(),
                )
                for _, worker in sorted(self.workers.items())
            ],
            self.sessions.freeze(),
        )

    def facts(self) -> object:
        """Return all that the fold knows, in a form that two states can be compared by; not a copy."""
        workers = [
            (
                worker.state(),
                sorted((name, at.epoch, at.next_seq) for name, at in worker.cursors.items()),
                {(tier, group, source): held for tier, group, source, held in worker.presence.freeze() if held},
            )
            for _, worker in sorted(self.workers.items())
        ]
        return self.offset, workers, self.sessions.freeze()

    @classmethod
    def load(
        cls,
        offset: int,
        entries: Iterable[WorkerEntry],
        blocks: Iterable[tuple[int, str, BlockChain]],
        blocks_per_worker_max: int = BLOCKS_PER_WORKER_MAX,
        sessions: SessionsSnapshot = NO_SESSIONS,
    ) -> PoolState:
        """Return the state that a snapshot describes: workers, then (position of the worker, source, chain)."""
        pool = cls(blocks_per_worker_max)
        pool.offset = offset
        pool.sessions.load(sessions)
        listed: list[MemberRank] = []
        for entry in entries:
            state = entry.state
            worker = pool.new_worker(WorkerKey(WorkerId(state.worker_id), state.dp_rank), state.epoch, state.card)
            worker.draining = state.draining
            worker.restating = state.restating
            worker.load = state.load
            worker.groups = state.groups
            worker.streams = {stream.source: stream for stream in state.streams}
            worker.requests = {request.request_id: request for request in state.requests}
            worker.cursors = {at.source: Cursor(at.epoch, at.next_seq) for at in entry.positions}
            pool.workers[worker.key] = worker
            listed.append(worker)
        for position, source, chain in blocks:
            hashes = unpack_hashes(chain.sequence_hashes)
            listed[position].presence.load(chain.tier, chain.group, source, chain.parent, hashes)
        return pool
