"""Encoding and decoding of inputs: each kind of input next to the kind of entry that stands for it.

An entry holds less than its input where the rest is known from elsewhere: which records and which snapshot it was (the
pool's journal has them), which decision was booked (it is the last one of that request). Workers are numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import assert_never

import msgspec

from poolgrid.consolidator.journal.inspection import NotKept, reaches_back_to, state_at
from poolgrid.consolidator.journal.stored_records import StoredRecord, stored_records
from poolgrid.consolidator.ports import ReadableDisk
from poolgrid.router.core.decision import Decision
from poolgrid.router.core.inputs import (
    Booked,
    Expired,
    Input,
    Overcommitted,
    PromptComputed,
    RecordsArrived,
    Released,
    Renewed,
    SnapshotArrived,
    TurnOffered,
    WorkerWanted,
)
from poolgrid.router.core.projection import LOAD_STEP_BLOCKS, Projection
from poolgrid.router.core.working_set import Admission
from poolgrid.router.decision_journal.entries import (
    AnyEntry,
    Checkpoint,
    DecisionBooked,
    DecisionMade,
    EntryReleased,
    FirstTokenCame,
    InputsLost,
    JournalEntry,
    LeaseRenewed,
    OverlapRealised,
    PrefillEnded,
    RecordsApplied,
    RequestEnded,
    ReservationsExpired,
    RouterSettingsNoted,
    SnapshotLoaded,
    TurnJudged,
    WorkerCrowded,
    WorkersNamed,
    encoder,
    made_of,
    path_of,
    stream_check,
)
from poolgrid.wire.events import JournalRecord
from poolgrid.wire.hashing import pack_hashes, unpack_hashes
from poolgrid.wire.identifiers import Role, WorkerKey

# -- from input to entry -----------------------------------------------------------------------------------------------


class Decided(msgspec.Struct, frozen=True, gc=False):
    """A request that wanted a worker, and what came of it."""

    wanted: WorkerWanted
    decision: Decision


class Judged(msgspec.Struct, frozen=True, gc=False):
    """A turn of a session that asked for a place, and what came of it."""

    offered: TurnOffered
    admission: Admission


Kept = Decided | Judged | Booked | Overcommitted | Renewed | PromptComputed | Released | Expired | JournalEntry
"""What is kept of an input until it is written: of records and snapshots no more than the entry needs."""


def kept(given: Input, came: Decision | Admission | None) -> Kept:
    """Return what to keep of an input, in the router's turn."""
    match given:
        case RecordsArrived():
            return records_applied(given, 0)
        case WorkerWanted():
            assert isinstance(came, Decision), "a request that got no worker changes nothing, and is no input"
            return Decided(given, came)
        case TurnOffered():
            assert isinstance(came, Admission), "each offer is answered"
            return Judged(given, came)
        case SnapshotArrived(load, now_ms):
            return SnapshotLoaded(load.next_offset, now_ms)
        case _:
            return given


def records_applied(given: RecordsArrived, check: int) -> RecordsApplied:
    """Return the entry of records that follow on others of the check ``check``, or on none."""
    for record in given.records:
        check = stream_check(check, record)
    return RecordsApplied(given.records[-1].offset + 1, given.now_ms, check)


class InputWriter:
    """Writes inputs as entries of one segment; belongs to the writing thread."""

    def __init__(self) -> None:
        self._numbers: dict[WorkerKey, int] = {}

    def begin_segment(self) -> None:
        self._numbers.clear()

    def write(self, item: Kept, out: list[bytes]) -> None:
        out.append(encoder.encode(self._entry(item, out)))

    def _entry(self, item: Kept, out: list[bytes]) -> JournalEntry:
        match item:
            case JournalEntry():
                return item
            case Decided(wanted, decision):
                workers = [*decision.candidates.workers, *decision.filtered, *wanted.unavailable, *decision.untrusted]
                workers += wanted.behind
                return made_of(wanted, decision, self._named(workers, out))
            case Judged(offered, admission):
                return judged_of(offered, admission, self._named(admission.crowded, out))
            case Booked():
                return DecisionBooked(item.decision.request.request_id, item.dispatch_id, item.now_ms, item.lease_ms)
            case Overcommitted():
                number = self._named((item.worker,), out)[item.worker]
                return WorkerCrowded(number, item.dispatch_id, item.booked_tokens, item.now_ms)
            case Renewed():
                return LeaseRenewed(self._named((item.worker,), out)[item.worker], item.dispatch_id, item.now_ms)
            case PromptComputed():
                return PrefillEnded(self._named((item.worker,), out)[item.worker], item.dispatch_id, item.is_held)
            case Released():
                return EntryReleased(self._named((item.worker,), out)[item.worker], item.dispatch_id)
            case Expired():
                return ReservationsExpired(item.now_ms, list(item.held))
            case _:
                assert_never(item)

    def _named(self, workers: Sequence[WorkerKey], out: list[bytes]) -> Mapping[WorkerKey, int]:
        numbers = self._numbers
        named: list[tuple[str, int]] = []
        for worker in workers:
            if worker not in numbers:
                numbers[worker] = len(numbers)
                named.append((worker.worker_id, worker.dp_rank))
        if named:
            out.append(encoder.encode(WorkersNamed(named)))
        return numbers


# -- from entry to input -----------------------------------------------------------------------------------------------


class StreamDiffers(Exception):
    """The pool's journal holds other records than those that the router saw."""


class NoDecision(Exception):
    """A booking does not follow a decision of its request."""

    def __init__(self, request_id: str) -> None:
        super().__init__("a booking without its decision")
        self.request_id = request_id


class PoolJournalTooShort(NotKept):
    """The pool's journal no longer reaches back as far as an input does."""


class InputReader:
    """Reads entries as the inputs that they stand for, with what the pool's journal has of them."""

    def __init__(self, pool: ReadableDisk, blocks_per_worker_max: int) -> None:
        self._pool = pool
        self._blocks_max = blocks_per_worker_max
        self._reaches_back = reaches_back_to(pool)
        self._stored: Iterator[StoredRecord] = iter(())
        self._next_stored = -1
        self.decided: Decided | None = None
        """The decision of a booking; the code that derives decisions records their outcome."""

    def input_of(self, entry: AnyEntry, workers: Sequence[WorkerKey], projection: Projection) -> Input | None:
        """Return the input that an entry stands for, ``None`` for one that stands for none.

        ``workers`` are those named so far, by number; ``projection`` is what the input will be applied to.
        Raises ``StreamDiffers``, ``NoDecision``, ``NotKept`` or ``PoolJournalTooShort``.
        """
        match entry:
            case RecordsApplied():
                return self._records(entry, projection.next_offset)
            case SnapshotLoaded(offset, now_ms):
                return self.snapshot(offset, now_ms, projection)
            case DecisionMade():
                return wanted_of(entry, workers)
            case TurnJudged():
                return TurnOffered(
                    entry.request,
                    unpack_hashes(entry.path),
                    entry.now_ms,
                    entry.time_ms,
                    tuple(Role(role) for role in entry.roles),
                    entry.waited_ms,
                )
            case DecisionBooked():
                decided = self.decided
                if decided is None or decided.decision.request.request_id != entry.request_id:
                    raise NoDecision(entry.request_id)
                return Booked(decided.decision, decided.wanted.path, entry.dispatch_id, entry.now_ms, entry.lease_ms)
            case WorkerCrowded():
                return Overcommitted(workers[entry.worker], entry.dispatch_id, entry.booked_tokens, entry.now_ms)
            case LeaseRenewed():
                return Renewed(workers[entry.worker], entry.dispatch_id, entry.now_ms)
            case PrefillEnded():
                return PromptComputed(workers[entry.worker], entry.dispatch_id, entry.is_held)
            case EntryReleased():
                return Released(workers[entry.worker], entry.dispatch_id)
            case ReservationsExpired():
                return Expired(entry.now_ms, frozenset(entry.renewed))
            case RouterSettingsNoted() | Checkpoint() | InputsLost() | WorkersNamed():
                return None
            case OverlapRealised() | FirstTokenCame() | RequestEnded():
                return None  # what came of decisions, which none depends on
            case _:
                assert_never(entry)

    def snapshot(self, offset: int, now_ms: float, projection: Projection) -> SnapshotArrived:
        """Return the pool's state before a record; raises ``NotKept`` or ``PoolJournalTooShort``."""
        if offset and offset < self._reaches_back:
            raise PoolJournalTooShort(
                f"the pool's journal no longer holds what was seen: it reaches back to record {self._reaches_back}"
            )
        frozen = state_at(self._pool, offset, self._blocks_max).freeze()
        load = projection.begin_load(frozen.offset, frozen.states(), frozen.visible_chains(), frozen.sessions)
        while load.step(LOAD_STEP_BLOCKS):
            pass
        return SnapshotArrived(load, now_ms)

    def _records(self, entry: RecordsApplied, first: int) -> RecordsArrived:
        records = [self._record(offset) for offset in range(first, entry.to_offset)]
        arrived = RecordsArrived(records, entry.now_ms)
        if not records or kept(arrived, None) != entry:
            raise StreamDiffers(
                f"records {first} to {entry.to_offset - 1} of the pool's journal are not those that the router saw "
                "(lost in a power failure and written again, or the journal of another pool)"
            )
        return arrived

    def _record(self, offset: int) -> JournalRecord:
        for _ in range(2):
            if offset != self._next_stored:
                self._stored = stored_records(self._pool, offset)
                self._next_stored = offset
            stored = next(self._stored, None)
            if stored is not None:
                self._next_stored = stored.record.offset + 1
                return stored.record
            self._next_stored = -1  # more may have been written meanwhile
        raise StreamDiffers(f"the pool's journal has no record {offset}")


def judged_of(offered: TurnOffered, admission: Admission, number_of: Mapping[WorkerKey, int]) -> TurnJudged:
    """Return the entry of an offer and of what came of it; ``number_of`` knows every worker in it."""
    return TurnJudged(
        offered.request,
        pack_hashes(offered.path),
        offered.now_ms,
        offered.time_ms,
        tuple(map(int, offered.roles)),
        offered.waited_ms,
        admission.admitted,
        [number_of[worker] for worker in admission.crowded],
        list(admission.displaced),
    )


def wanted_of(made: DecisionMade, workers: Sequence[WorkerKey]) -> WorkerWanted:
    """Return the input that led to a recorded decision."""
    return WorkerWanted(
        made.request,
        path_of(made),
        made.now_ms,
        made.time_ms,
        {workers[number]: why for number, why in made.unavailable},
        made.attempt,
        tuple(Role(role) for role in made.roles),
        made.behind_records,
        {workers[number]: count for number, count in made.behind},
        made.queued_ms,
    )
