"""The router's state: a fold over the pool's journal.

``apply(record)`` is the only way facts get in, in journal order and without holes; the ledger's ``reserve`` and
``release`` add the router's own predictions on top. A snapshot replaces everything by a state that the consolidator
folded, after which the next record is the one at the snapshot's offset. The law: snapshot(n) + records from n on ==
records from 0.

A snapshot is loaded next to the state in use (``SnapshotLoad``), in as many steps as the caller likes, and takes its
place in one step (``adopt``). No reader sees half of it, and the result does not depend on the number of steps.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final, Protocol

from poolgrid.kernel.consolidation.session_table import SessionTable
from poolgrid.kernel.index.prefix_index import PrefixIndex
from poolgrid.kernel.projection.approximate_index import ApproximateIndex
from poolgrid.kernel.projection.fleet import Fleet, Worker
from poolgrid.kernel.projection.leg_times import LearnedLegTimes
from poolgrid.kernel.projection.lineage import Lineage
from poolgrid.kernel.projection.load_ledger import LoadLedger
from poolgrid.kernel.projection.observers import Observer
from poolgrid.kernel.projection.stream_health import StreamHealth
from poolgrid.kernel.wire.events import (
    AnyEvent,
    BlocksReleased,
    BlocksRemoved,
    BlocksShared,
    BlocksStored,
    CacheCleared,
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
from poolgrid.kernel.wire.feed import WORKER_SOURCE, BlockChain, WorkerState, fold
from poolgrid.kernel.wire.hashing import hash_array
from poolgrid.kernel.wire.identifiers import Role, StreamState, WorkerId, WorkerKey, request_of
from poolgrid.kernel.wire.sessions import NO_SESSIONS, SessionsSnapshot

HASH_BYTES: Final = 8
"""Of one packed hash."""

LOAD_STEP_BLOCKS: Final = 2048
"""Blocks of a snapshot loaded between two turns of a router: about a millisecond."""


class SnapshotLoad:
    """A snapshot on its way into a projection."""

    def __init__(
        self,
        index: PrefixIndex | None,
        next_offset: int,
        workers: Sequence[WorkerState],
        chains: Iterable[tuple[int, BlockChain]],
        sessions: SessionsSnapshot = NO_SESSIONS,
    ) -> None:
        self.next_offset = next_offset
        self.sessions = sessions
        self.workers = workers
        self.keys = [WorkerKey(WorkerId(state.worker_id), state.dp_rank) for state in workers]
        self.index = index
        """Where the blocks go; ``None`` when they are not wanted. After ``adopt`` it is what was there before."""
        self._chains = iter(chains)
        if index is not None:
            for key, state in zip(self.keys, workers, strict=True):
                index.slot(key)
                if state.groups is not None:
                    index.report_groups(key, state.groups)

    def step(self, blocks: int) -> bool:
        """Load about that many blocks; return whether there are more."""
        index = self.index
        if index is None:
            return False
        keys = self.keys
        for position, chain in self._chains:
            if chain.group:
                stored = BlocksStored(None, chain.sequence_hashes, chain.tier, chain.group)
                index.change_group(keys[position], stored)
            else:
                index.store(keys[position], chain.parent, hash_array(chain.sequence_hashes), chain.tier)
            blocks -= len(chain.sequence_hashes) // HASH_BYTES
            if blocks <= 0:
                return True
        return False


class Hole(RuntimeError):
    """Records do not continue the ones before: what was in between is missing, or they were there already."""

    def __init__(self, came: int, expected: int) -> None:
        super().__init__(
            f"applying records of the journal: record {came} came, expected is record {expected}; nothing of it was "
            "applied, and only a snapshot leads on"
        )


Promise = tuple[Sequence[int], int]
"""A prompt's path, and the leading tokens of it that its worker held by the index."""


class ReuseExaminer(Protocol):
    """Looks on while requests start (``poolgrid.server.router.examiner``)."""

    def started(self, key: WorkerKey, event: RequestStarted, promised: Promise | None) -> None: ...

    def finished(self, key: WorkerKey, request_id: str, promised: Promise | None, reported_tokens: int) -> None: ...

    def ended_silently(self, key: WorkerKey, request_id: str) -> None: ...

    def cleared(self, worker: WorkerKey) -> None: ...

    def left(self, worker: WorkerKey) -> None: ...


class Projection:
    """Fleet, prefix index and load ledger of one pool, at one journal offset."""

    def __init__(self, index: PrefixIndex, ledger: LoadLedger) -> None:
        self.fleet = Fleet()
        self.index = index
        self.ledger = ledger
        self.trust = StreamHealth(index)
        self.sessions = SessionTable()
        self.lineage = Lineage()
        self.next_offset = 0
        """Every record below this offset has been applied."""
        self.observers: tuple[Observer, ...] = ()
        self.legs: LearnedLegTimes | None = None
        """Follows since the first prefill worker: other pools have one leg, and nothing to learn of it."""
        self.predictions: ApproximateIndex = self.trust.predictions
        """Cached blocks according to choices: in place of all events, or of events that are not trusted."""
        self.examiner: ReuseExaminer | None = None
        """Compares promised and reported reuse; changes nothing."""
        self.follows_blocks = True
        """Whether the index holds the blocks of events; else it holds the choices."""

    def attach(self, observer: Observer) -> Observer:
        """Let an observer follow from now on, unless one of its name does; return the one that follows."""
        known: Observer | None = self.observer(observer.name)
        if known is not None:
            return known
        self.observers += (observer,)
        if isinstance(observer, ApproximateIndex):
            self.predictions = observer
            self.follows_blocks = False
        return observer

    def follow_legs(self) -> None:
        if self.legs is None:
            self.legs = LearnedLegTimes()
            self.observers += (self.legs,)

    def observer(self, name: str) -> Any:
        return next((observer for observer in self.observers if observer.name == name), None)

    def expect(self, offset: int) -> None:
        """Raise ``Hole`` unless the record at an offset is the next."""
        if offset != self.next_offset:
            raise Hole(offset, self.next_offset)

    def apply(self, record: JournalRecord, now_ms: float) -> None:
        """Apply the next record; ``now_ms`` is the router's monotonic clock, for reservations only.

        Raises ``Hole``, and changes nothing, when it is another than the next.
        """
        if record.offset != self.next_offset:
            raise Hole(record.offset, self.next_offset)
        self.next_offset += 1
        workers, events = self.fleet.workers, record.events
        # A plain tuple finds what a WorkerKey was stored under, and costs less to make.
        worker = workers.get((record.worker_id, record.dp_rank))  # type: ignore[call-overload]
        key = WorkerKey(WorkerId(record.worker_id), record.dp_rank) if worker is None else worker.key
        for event in events:
            _EFFECTS[type(event)](self, key, record, event, now_ms)
        worker = workers.get(key)
        if worker is not None:
            known = worker.streams.get(record.source)
            # A stream that is live stays so, without ``fold``, until an event changes that.
            is_live = known is not None and known.state is _LIVE and _OF_STREAMS.isdisjoint(map(type, events))
            if not is_live and fold(worker.streams, record.source, events):
                self.trust.note_streams(key, worker.streams.values())
            worker.last_event_ms = record.time_ms
            worker.last_recorded_ms = record.recorded_ms

    # -- events: each with the worker that it is of, its record, and the time --------------------------------------

    def _stored(self, key: WorkerKey, record: JournalRecord, event: BlocksStored, now_ms: float) -> None:
        worker = self.fleet.workers.get(key) if self.follows_blocks else None
        if worker is not None:
            if event.group:
                self.index.change_group(key, event)
            else:
                worker.stored_blocks += len(event.sequence_hashes) // HASH_BYTES
                self.index.store(key, event.parent, hash_array(event.sequence_hashes), event.tier)

    def _removed(self, key: WorkerKey, record: JournalRecord, event: BlocksRemoved, now_ms: float) -> None:
        if self.follows_blocks and key in self.fleet.workers:
            if event.group:
                self.index.change_group(key, event)
            else:
                self.index.remove(key, hash_array(event.sequence_hashes), event.tier)

    def _grouped(self, key: WorkerKey, record: JournalRecord, event: GroupsReported, now_ms: float) -> None:
        if self.follows_blocks and key in self.fleet.workers:
            self.index.report_groups(key, event)

    def _cleared(self, key: WorkerKey, record: JournalRecord, event: AnyEvent, now_ms: float) -> None:
        if type(event) is CacheCleared:
            self.sessions.cleared(record, event)
            if self.examiner is not None:
                self.examiner.cleared(key)
        if self.follows_blocks:
            self.index.clear(key)
            self.ledger.move(key, self.index.slot(key))
            self.trust.computed.drop_all_of(key)
        for observer in self.observers:
            observer.on_cleared(key)

    def _started(self, key: WorkerKey, record: JournalRecord, event: RequestStarted, now_ms: float) -> None:
        request_id, cached_tokens = event.request_id, event.cached_tokens
        uncached = event.isl - cached_tokens
        self.ledger.started(key, self.index.slot(key), request_id, uncached, event.active_blocks, now_ms)
        worker = self.fleet.workers.get(key)
        if worker is not None:
            worker.requests_total += 1
        # Compare what it reused with what the index held.
        promised = None if event.cached_later else self.trust.started(key, request_id, cached_tokens)
        if self.examiner is not None:
            self.examiner.started(key, event, promised)
        for observer in self.observers:
            observer.on_started(key, request_id, cached_tokens)
        self.sessions.started(record, event)

    def _prefilled(self, key: WorkerKey, record: JournalRecord, event: PrefillCompleted, now_ms: float) -> None:
        self.ledger.prefill_completed(key, event.request_id)
        worker = self.fleet.workers.get(key)
        known = None if worker is None else worker.streams.get(WORKER_SOURCE)
        if event.untimed or (known is not None and known.state in _BEHIND):
            self.untimed_token(key, event.request_id)
        else:
            self.first_token(key, event.request_id, now_ms)

    def first_token(self, key: WorkerKey, request_id: str, now_ms: float) -> None:
        """Have observers learn when a first token came, as its worker or this router saw it."""
        for observer in self.observers:
            observer.on_first_token(key, request_id, now_ms)

    def untimed_token(self, key: WorkerKey, request_id: str) -> None:
        """Have observers know of a first token whose time says nothing."""
        for observer in self.observers:
            observer.on_untimed_token(key, request_id)

    def _progressed(self, key: WorkerKey, record: JournalRecord, event: RequestProgressed, now_ms: float) -> None:
        self.ledger.progressed(key, event.request_id, event.active_blocks)
        self.sessions.progressed(record, event)

    def _finished(self, key: WorkerKey, record: JournalRecord, event: RequestFinished, now_ms: float) -> None:
        request_id = event.request_id
        blocks = self.ledger.finished(key, request_id)
        for observer in self.observers:
            observer.on_finished(key, request_id, blocks, now_ms)
        cached_tokens = event.cached_tokens
        if cached_tokens is None:
            self.trust.not_started(key, request_id)
            if self.examiner is not None:
                self.examiner.ended_silently(key, request_id)
        else:
            promised = self.trust.started(key, request_id, cached_tokens)
            if self.examiner is not None:
                self.examiner.finished(key, request_id, promised, cached_tokens)
        if event.reason in _GIVEN_UP:
            self.lineage.withdraw(request_of(request_id))
        self.sessions.finished(record, event)

    def _loaded(self, key: WorkerKey, record: JournalRecord, event: LoadReported, now_ms: float) -> None:
        worker = self.fleet.workers.get(key)
        if worker is not None:
            before, worker.load = worker.load, event
            if event.foreign_requests != (0 if before is None else before.foreign_requests):
                self._count_foreign(worker, now_ms)

    def _count_foreign(self, worker: Worker, now_ms: float) -> None:
        load = worker.load
        if load is not None:
            self.ledger.foreign(
                worker.key, self.index.slot(worker.key), load.foreign_requests, worker.card.block_size, now_ms
            )

    def _joined(self, key: WorkerKey, record: JournalRecord, event: WorkerJoined, now_ms: float) -> None:
        self._forget(key)
        self.fleet.join(key, record.epoch, event.card)
        self.ledger.ensure_slot(self.index.slot(key))
        if event.card.role is Role.PREFILL:
            self.follow_legs()
        self.sessions.lost(record, event)

    def _draining(self, key: WorkerKey, record: JournalRecord, event: WorkerDraining, now_ms: float) -> None:
        self.fleet.drain(key)

    def _left(self, key: WorkerKey, record: JournalRecord, event: WorkerLeft, now_ms: float) -> None:
        if self.examiner is not None:
            self.examiner.left(key)
        self._forget(key)
        self.fleet.leave(key)
        self.sessions.lost(record, event)

    def _turn_began(self, key: WorkerKey, record: JournalRecord, event: TurnBegan, now_ms: float) -> None:
        self.lineage.begin(request_of(event.request_id), event.turn, event.isl)
        self.sessions.began(record, event)
        worker = self.fleet.workers.get(key)
        if worker is not None:
            for observer in self.observers:
                observer.on_turn_began(worker, event, now_ms)

    def _turn_ended(self, key: WorkerKey, record: JournalRecord, event: TurnEnded, now_ms: float) -> None:
        answer = event.answer
        self.lineage.end(answer.request_id, answer.total, answer.digest, answer.echoes)
        self.sessions.answered(record, event)

    def _elsewhere(self, key: WorkerKey, record: JournalRecord, event: AnyEvent, now_ms: float) -> None:
        """Pass over an event of another source of the worker, or one that ``fold`` takes."""

    def _forget(self, key: WorkerKey) -> None:
        self.index.drop(key)
        self.ledger.drop(key)
        self.trust.forget(key)
        for observer in self.observers:
            observer.on_left(key)

    def release(self, key: WorkerKey, request_id: str) -> bool:
        """Take a request that is over for this router off a worker; return whether it was known."""
        blocks = self.ledger.finished(key, request_id, is_released=True)
        if blocks is None:
            return False
        for observer in self.observers:
            observer.on_released(key, request_id, blocks)
        return True

    def expire(self, now_ms: float, held: Collection[str] = frozenset()) -> tuple[int, list[str]]:
        expired, renewed = self.ledger.expire(now_ms, held)
        if expired:
            for observer in self.observers:
                observer.on_expired(self.ledger.knows)
        return expired, renewed

    def begin_load(
        self,
        next_offset: int,
        workers: Sequence[WorkerState],
        chains: Iterable[tuple[int, BlockChain]],
        sessions: SessionsSnapshot = NO_SESSIONS,
    ) -> SnapshotLoad:
        return SnapshotLoad(self.index.empty() if self.follows_blocks else None, next_offset, workers, chains, sessions)

    def adopt(self, load: SnapshotLoad, now_ms: float) -> None:
        """Replace all state by a snapshot that was loaded to its end."""
        for key in list(self.fleet.workers):
            self.trust.forget(key)
            self.fleet.leave(key)
        self.ledger.clear()
        if load.index is None:
            load.index = self.index.empty()
        self.index.exchange(load.index)
        for key, state in zip(load.keys, load.workers, strict=True):
            worker = self.fleet.join(key, state.epoch, state.card)
            worker.load = state.load
            slot = self.index.slot(key)
            self.ledger.ensure_slot(slot)
            if state.draining:
                self.fleet.drain(key)
            worker.streams = {stream.source: stream for stream in state.streams}
            self.trust.note_streams(key, state.streams)
            for request in state.requests:
                prefill = request.isl - request.cached_tokens if request.prefilling else 0
                self.ledger.started(key, slot, request.request_id, prefill, request.active_blocks, now_ms)
            self._count_foreign(worker, now_ms)
        if any(state.card.role is Role.PREFILL for state in load.workers):
            self.follow_legs()
        for observer in self.observers:
            observer.on_snapshot(frozenset(load.keys), self.ledger.knows)
        self.sessions.load(load.sessions)
        self.lineage.load(load.sessions)
        self.next_offset = load.next_offset


_EFFECTS: Final[Mapping[type[AnyEvent], Callable[[Projection, WorkerKey, JournalRecord, Any, float], None]]] = {
    BlocksStored: Projection._stored,
    BlocksRemoved: Projection._removed,
    BlocksShared: Projection._elsewhere,
    BlocksReleased: Projection._elsewhere,
    CacheCleared: Projection._cleared,
    SnapshotBegan: Projection._cleared,
    SnapshotEnded: Projection._elsewhere,
    StreamStateChanged: Projection._elsewhere,
    GroupsReported: Projection._grouped,
    RequestStarted: Projection._started,
    PrefillCompleted: Projection._prefilled,
    RequestProgressed: Projection._progressed,
    RequestFinished: Projection._finished,
    LoadReported: Projection._loaded,
    WorkerJoined: Projection._joined,
    WorkerDraining: Projection._draining,
    WorkerLeft: Projection._left,
    TurnBegan: Projection._turn_began,
    TurnEnded: Projection._turn_ended,
}
"""By exact type: each failed ``case`` of a match on structs takes a quarter of a microsecond."""

_LIVE: Final = StreamState.LIVE

_GIVEN_UP: Final = frozenset(("cancelled", "error"))
"""Finish reasons of turns without a complete answer."""

_BEHIND: Final = (StreamState.REPLAYING, StreamState.SNAPSHOTTING)
"""States of a worker's stream in which its reports stand behind what it has to report again."""

_OF_STREAMS: Final = frozenset((CacheCleared, SnapshotBegan, SnapshotEnded, StreamStateChanged))
"""Events about how far a stream can be trusted."""
