"""The router's state: a fold over the pool's journal.

``apply(record)`` is the only way facts get in, in journal order and without holes; the ledger's ``reserve`` and
``release`` add the router's own predictions on top. A snapshot replaces everything by a state that the consolidator
folded, after which the next record is the one at the snapshot's offset. The law: snapshot(n) + records from n on ==
records from 0.

A snapshot is loaded beside the state in use (``SnapshotLoad``), in as many steps as the caller likes, and takes its
place in one (``adopt``). Nobody ever sees half of it, and what is seen does not depend on how many steps it took.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, assert_never

from poolgrid.router.core.approximate_index import ApproximateIndex
from poolgrid.router.core.fleet import Fleet
from poolgrid.router.core.hole import Hole
from poolgrid.router.core.load_ledger import LoadLedger
from poolgrid.router.core.paces import Paces
from poolgrid.router.core.prefix_index import PrefixIndex
from poolgrid.router.core.retention.learner import RetentionLearner
from poolgrid.router.core.stream_trust import StreamTrust
from poolgrid.wire.events import (
    BlocksReleased,
    BlocksRemoved,
    BlocksShared,
    BlocksStored,
    CacheCleared,
    JournalRecord,
    LoadReported,
    PrefillCompleted,
    RequestFinished,
    RequestProgressed,
    RequestStarted,
    SnapshotBegan,
    SnapshotEnded,
    StreamStateChanged,
    WorkerDraining,
    WorkerJoined,
    WorkerLeft,
)
from poolgrid.wire.feed import BlockChain, WorkerState
from poolgrid.wire.hashing import hash_array
from poolgrid.wire.identifiers import StreamState, WorkerId, WorkerKey
from poolgrid.wire.streams import fold

LIVE: Final = StreamState.LIVE

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
    ) -> None:
        self.next_offset = next_offset
        self.workers = workers
        self.keys = [WorkerKey(WorkerId(state.worker_id), state.dp_rank) for state in workers]
        self.index = index
        """Where the blocks go; ``None`` when they are not wanted. After ``adopt`` it is what was there before."""
        self._chains = iter(chains)
        if index is not None:
            for key in self.keys:
                index.slot(key)

    def step(self, blocks: int) -> bool:
        """Load about that many blocks; return whether there are more."""
        index = self.index
        if index is None:
            return False
        keys = self.keys
        for position, chain in self._chains:
            hashes = hash_array(chain.sequence_hashes)
            index.store(keys[position], chain.parent, hashes, chain.tier)
            blocks -= len(hashes)
            if blocks <= 0:
                return True
        return False


class Projection:
    """Fleet, prefix index and load ledger of one pool, at one journal offset."""

    def __init__(
        self,
        index: PrefixIndex,
        ledger: LoadLedger,
        approximate: ApproximateIndex | None = None,
        retention: RetentionLearner | None = None,
    ) -> None:
        self.fleet = Fleet()
        self.index = index
        self.ledger = ledger
        self.trust = StreamTrust(index)
        self.paces: Paces | None = None
        """How fast workers really are; only for a policy that asks for it."""
        self.next_offset = 0
        """Every record below this offset has been applied."""
        self.approximate = approximate
        """What feeds the index in approximate mode: choices, instead of events."""
        self.retention = retention
        """What learns how long blocks should stay, where that is wanted."""

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
        # A plain tuple finds what a WorkerKey was stored under, and costs less to make.
        worker = self.fleet.workers.get((record.worker_id, record.dp_rank))  # type: ignore[call-overload]
        key = WorkerKey(WorkerId(record.worker_id), record.dp_rank) if worker is None else worker.key
        index = self.index
        # Whether an event says how far the stream can be trusted. Else one that is live stays so, without ``fold``.
        tells = False
        for event in record.events:
            if type(event) is BlocksStored:
                if worker is not None and self.approximate is None:
                    index.store(key, event.parent, hash_array(event.sequence_hashes), event.tier)
            elif type(event) is BlocksRemoved:
                if worker is not None and self.approximate is None:
                    index.remove(key, hash_array(event.sequence_hashes), event.tier)
            elif type(event) is RequestStarted:
                self.ledger.started(
                    key, index.slot(key), event.request_id, event.isl - event.cached_tokens, event.active_blocks, now_ms
                )
                if worker is not None:
                    worker.requests_total += 1
                if not event.cached_later:
                    self.trust.started(key, event.request_id, event.cached_tokens)
                if self.retention is not None:
                    self.retention.started(key, event.request_id, event.cached_tokens)
            elif type(event) is PrefillCompleted:
                self.ledger.prefill_completed(key, event.request_id)
                if self.paces is not None:
                    self.paces.first_token(key, event.request_id, now_ms)
            elif type(event) is RequestProgressed:
                self.ledger.progressed(key, event.request_id, event.active_blocks)
            elif type(event) is RequestFinished:
                if self.retention is not None:
                    blocks = self.ledger.blocks_of(key, event.request_id)
                    self.retention.end(key, event.request_id, now_ms, blocks)
                self.ledger.finished(key, event.request_id)
                if event.cached_tokens is not None:
                    self.trust.started(key, event.request_id, event.cached_tokens)
                self.trust.not_started(key, event.request_id)
                if self.paces is not None:
                    self.paces.ended(key, event.request_id)
            elif type(event) is LoadReported:
                if worker is not None:
                    worker.load = event
            elif type(event) is CacheCleared or type(event) is SnapshotBegan:
                tells = True
                if self.approximate is None:
                    index.clear(key)
                    self.ledger.move(key, index.slot(key))
                    self.trust.computed.drop_all_of(key)
                if self.retention is not None:
                    self.retention.drop(key)
            elif type(event) is WorkerJoined:
                self._forget(key)
                worker = self.fleet.join(key, record.epoch, event.card)
                self.ledger.ensure_slot(index.slot(key))
            elif type(event) is WorkerDraining:
                self.fleet.drain(key)
            elif type(event) is WorkerLeft:
                self._forget(key)
                self.fleet.leave(key)
                worker = None
            elif type(event) is BlocksShared or type(event) is BlocksReleased:
                pass  # another source of the worker: what the worker as a whole holds is the same
            elif type(event) is SnapshotEnded or type(event) is StreamStateChanged:
                tells = True  # ``fold`` takes these, below
            else:
                assert_never(event)
        if worker is not None:
            known = worker.streams.get(record.source)
            if (tells or known is None or known.state is not LIVE) and fold(
                worker.streams, record.source, record.events
            ):
                self.trust.note_streams(key, worker.streams.values())
            worker.last_event_ms = record.time_ms
            worker.last_recorded_ms = record.recorded_ms

    def load_snapshot(
        self,
        next_offset: int,
        workers: Sequence[WorkerState],
        chains: Iterable[tuple[int, BlockChain]],
        now_ms: float,
    ) -> None:
        """Replace all state in one go; ``chains`` name their worker by its position in ``workers``."""
        load = self.begin_load(next_offset, workers, chains)
        while load.step(LOAD_STEP_BLOCKS):
            pass
        self.adopt(load, now_ms)

    def begin_load(
        self, next_offset: int, workers: Sequence[WorkerState], chains: Iterable[tuple[int, BlockChain]]
    ) -> SnapshotLoad:
        """Begin to load a snapshot beside the state in use; ``chains`` are read as it steps on."""
        return SnapshotLoad(self.index.empty() if self.approximate is None else None, next_offset, workers, chains)

    def adopt(self, load: SnapshotLoad, now_ms: float) -> None:
        """Replace all state by a snapshot that was loaded to its end."""
        next_offset, workers, keys = load.next_offset, load.workers, load.keys
        for key in list(self.fleet.workers):
            self.trust.forget(key)
            self.fleet.leave(key)
        self.ledger.clear()
        if load.index is None:
            load.index = self.index.empty()
        self.index.exchange(load.index)
        if self.approximate is not None:
            self.approximate.forget_all()
        for key, state in zip(keys, workers, strict=True):
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
        if self.paces is not None:
            self.paces.keep_only(frozenset(keys))
        if self.retention is not None:
            self.retention.keep_only(frozenset(keys))
            self.retention.hold_only(self.ledger.knows)
        self.next_offset = next_offset

    def _forget(self, key: WorkerKey) -> None:
        if self.approximate is None:
            self.index.drop(key)
        else:
            self.approximate.drop(key)
        self.ledger.drop(key)
        self.trust.forget(key)
        if self.retention is not None:
            self.retention.drop(key)
        if self.paces is not None:
            self.paces.forget(key)
