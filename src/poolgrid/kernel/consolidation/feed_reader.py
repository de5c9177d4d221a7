"""Follow the feed of a consolidator from another process: subscribe, take a snapshot, apply what follows, fill holes.

Rules for this file:

1. Records are delivered in order and without holes, each once, behind a snapshot. What arrives early waits in a bounded
   buffer; when that is full everything in it goes, and is asked for again.
2. An offset beyond the next one (of a record or of a keepalive) is a hole: ``Replay``. When the journal no longer
   reaches back that far, and whenever the consolidator changes, everything starts over with a snapshot.
3. Every question has a number; an answer to another question than the last is ignored. A question that is not answered
   in time is asked again, without limit: without the consolidator there is nothing else to do, and ``state`` shows it.

    state      input                        what happens
    ---------  ---------------------------  -------------------------------------------------------
    any        another consolidator         SYNCING, snapshot asked
               ``resync``                   SYNCING, snapshot asked
    SYNCING    record                       kept
               last part of the snapshot    delivered, what was kept follows; LIVE or REPLAYING
    LIVE       record, next                 delivered
               record or keepalive beyond   REPLAYING, replay asked
    REPLAYING  record                       kept
               records                      delivered; more asked, or what was kept follows and LIVE
               too old                      SYNCING, snapshot asked
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from poolgrid.kernel.wire import codec
from poolgrid.kernel.wire.errors import DecodeError
from poolgrid.kernel.wire.events import JournalRecord
from poolgrid.kernel.wire.feed import (
    BlockChain,
    FeedFrame,
    FromFeed,
    Replay,
    SnapshotPart,
    TakeSnapshot,
    ToFeed,
    TooOld,
    WorkerState,
)
from poolgrid.kernel.wire.ingest import LOADING_TTL_S, LOADING_WORKERS_MAX, LoadingWorker
from poolgrid.kernel.wire.limits import REPLAY_RECORDS_MAX
from poolgrid.kernel.wire.sessions import SessionsSnapshot

KEPT_RECORDS_MAX: Final = 20_000
"""Records kept during a snapshot or replay: seconds of a busy pool."""

KEPT_BYTES_MAX: Final = 64 * 1024 * 1024
"""Bytes of records kept during a snapshot or replay."""

SNAPSHOT_PARTS_MAX: Final = 65_536
"""Parts of one snapshot: 2**28 chains at the least."""


class FeedState(Enum):
    """Where a reader stands."""

    SYNCING = "syncing"
    REPLAYING = "replaying"
    LIVE = "live"


_LIVE: Final = FeedState.LIVE


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything known is replaced by the state before record ``offset``."""

    offset: int
    workers: list[WorkerState]
    chains: list[tuple[int, BlockChain]]
    sessions: SessionsSnapshot


@dataclass(frozen=True, slots=True)
class Deliver:
    """Records that follow each other and what was delivered before."""

    records: list[JournalRecord]


FeedEffect = Snapshot | Deliver | ToFeed


class FeedReader:
    """The state of one reader; every method returns the effects in order."""

    def __init__(self, answer_timeout_ms: float = 1000.0) -> None:
        self.state = FeedState.SYNCING
        self.next_offset = 0
        self.life: bytes | None = None
        self.holes = 0
        self.snapshots = 0
        self._answer_timeout_ms = answer_timeout_ms
        self._request = 0
        self._asked_ms = 0.0
        self._kept: dict[int, bytes] = {}
        self._kept_bytes = 0
        self._parts: list[SnapshotPart] = []
        self._goal = 0
        """The highest next offset that the feed has named: replay goes at least up to here."""

    @property
    def behind(self) -> int:
        """Return how many records, at least, are missing of those that the feed has named: 0 while live."""
        return 0 if self.state is _LIVE else max(1, self._goal - self.next_offset)

    def start(self, now_ms: float) -> list[FeedEffect]:
        return self._ask_snapshot(now_ms)

    def resync(self, now_ms: float) -> list[FeedEffect]:
        """Start over with a snapshot: what was delivered could not be used."""
        return self._ask_snapshot(now_ms)

    def receive(self, frame: FeedFrame, now_ms: float) -> list[FeedEffect]:
        if frame.life != self.life:
            return self._meet(frame.life, now_ms)
        payloads = frame.payloads
        end = frame.offset + len(payloads)
        self._goal = max(self._goal, end)
        if not payloads:
            if self.state is not _LIVE:
                return []
            if end < self.next_offset:
                return self._ask_snapshot(now_ms)
            return self._close_hole(now_ms) if end > self.next_offset else []
        known = max(0, self.next_offset - frame.offset)
        if self.state is _LIVE:
            if end <= self.next_offset:
                return []
            if frame.offset <= self.next_offset:
                return self._deliver(payloads[known:] if known else payloads, now_ms)
        elif self.state is FeedState.SYNCING:
            known = 0
        for number in range(known, len(payloads)):
            self._keep(frame.offset + number, payloads[number])
        return self._close_hole(now_ms) if self.state is _LIVE else []

    def answer(self, message: FromFeed, life: bytes, now_ms: float) -> list[FeedEffect]:
        if message.request != self._request:
            return []
        if self.life is None:
            self.life = life
        elif life != self.life:
            return self._meet(life, now_ms)
        if isinstance(message, SnapshotPart):
            return self._part(message, now_ms)
        if isinstance(message, TooOld):
            return self._ask_snapshot(now_ms)
        if self.state is not FeedState.REPLAYING:
            return []
        self._goal = max(self._goal, message.next_offset)
        effects = self._deliver(message.records, now_ms)
        if self.state is FeedState.REPLAYING:
            if message.records and self.next_offset < message.next_offset:
                effects += self._ask_replay(now_ms)
            elif not message.records and message.next_offset < self.next_offset:
                effects += self._ask_snapshot(now_ms)
            elif not any(isinstance(effect, (Replay, TakeSnapshot)) for effect in effects):
                effects += self._go_live(now_ms)
        return effects

    def tick(self, now_ms: float) -> list[FeedEffect]:
        """Time has passed; call at ``due_ms``."""
        if self.state is _LIVE or now_ms - self._asked_ms < self._answer_timeout_ms:
            return []
        return self._ask_snapshot(now_ms) if self.state is FeedState.SYNCING else self._ask_replay(now_ms)

    def due_ms(self) -> float | None:
        return None if self.state is _LIVE else self._asked_ms + self._answer_timeout_ms

    # Inside

    def _meet(self, life: bytes, now_ms: float) -> list[FeedEffect]:
        first = self.life is None
        self.life = life
        self._kept.clear()
        self._kept_bytes = 0
        self._goal = 0
        if first and self.state is FeedState.SYNCING and not self._parts:
            return []  # the question is on its way
        return self._ask_snapshot(now_ms)

    def _ask_snapshot(self, now_ms: float) -> list[FeedEffect]:
        self.state = FeedState.SYNCING
        self._parts = []
        self._request += 1
        self._asked_ms = now_ms
        return [TakeSnapshot(self._request)]

    def _ask_replay(self, now_ms: float) -> list[FeedEffect]:
        self.state = FeedState.REPLAYING
        self._request += 1
        self._asked_ms = now_ms
        return [Replay(self._request, self.next_offset, REPLAY_RECORDS_MAX)]

    def _close_hole(self, now_ms: float) -> list[FeedEffect]:
        self.holes += 1
        return self._ask_replay(now_ms)

    def _part(self, part: SnapshotPart, now_ms: float) -> list[FeedEffect]:
        if self.state is not FeedState.SYNCING or part.part != len(self._parts) or part.part >= SNAPSHOT_PARTS_MAX:
            return []
        self._parts.append(part)
        self._asked_ms = now_ms
        if not part.last:
            return []
        parts, self._parts = self._parts, []
        self.snapshots += 1
        self.next_offset = part.offset
        chains = [chain for one in parts for chain in one.chains]
        effects: list[FeedEffect] = [Snapshot(part.offset, parts[0].workers, chains, parts[0].sessions)]
        return effects + self._go_live(now_ms)

    def _go_live(self, now_ms: float) -> list[FeedEffect]:
        """Take what was kept, as far as it goes without a hole."""
        self.state = _LIVE
        following: list[bytes] = []
        at = self.next_offset
        while (payload := self._kept.pop(at, None)) is not None:
            following.append(payload)
            at += 1
        for offset in [offset for offset in self._kept if offset < at]:
            del self._kept[offset]
        self._kept_bytes = sum(map(len, self._kept.values()))
        effects = self._deliver(following, now_ms)
        if self.state is _LIVE and self.next_offset < self._goal:
            effects += self._close_hole(now_ms)
        return effects

    def _deliver(self, payloads: Sequence[bytes], now_ms: float) -> list[FeedEffect]:
        records: list[JournalRecord] = []
        try:
            for payload in payloads:
                record = codec.journal_record.decode(payload)
                if record.offset == self.next_offset:
                    records.append(record)
                    self.next_offset += 1
                elif record.offset > self.next_offset:
                    raise DecodeError("the feed", f"record {record.offset} where {self.next_offset} should be")
        except DecodeError:
            # The journal of the consolidator is checked, so this is a wrong peer or version: start over, slowly.
            delivered: list[FeedEffect] = [Deliver(records)] if records else []
            self.state = FeedState.SYNCING
            self._parts = []
            self._request += 1
            self._asked_ms = now_ms
            return delivered
        return [Deliver(records)] if records else []

    def _keep(self, offset: int, payload: bytes) -> None:
        if len(self._kept) >= KEPT_RECORDS_MAX or self._kept_bytes + len(payload) > KEPT_BYTES_MAX:
            self._kept.clear()
            self._kept_bytes = 0
        if offset not in self._kept:
            self._kept[offset] = payload
            self._kept_bytes += len(payload)


LOADING_TTL_MS = 1000.0 * LOADING_TTL_S


class LoadingTable:
    """The last word of each."""

    def __init__(self) -> None:
        self._said: dict[str, tuple[float, LoadingWorker]] = {}

    def note(self, worker: LoadingWorker, now_ms: float) -> None:
        """Keep a word; of workers beyond the bound nothing is kept."""
        if worker.worker_id not in self._said and len(self._said) >= LOADING_WORKERS_MAX:
            self.workers(now_ms)
            if len(self._said) >= LOADING_WORKERS_MAX:
                return
        self._said[worker.worker_id] = (now_ms, worker)

    def replace(self, workers: Sequence[LoadingWorker], now_ms: float) -> None:
        self._said = {worker.worker_id: (now_ms, worker) for worker in workers}

    def workers(self, now_ms: float) -> list[LoadingWorker]:
        """Return the loading workers by name; those that were silent for too long are dropped."""
        self._said = {name: each for name, each in self._said.items() if now_ms - each[0] < LOADING_TTL_MS}
        return [worker for _, (_, worker) in sorted(self._said.items())]
