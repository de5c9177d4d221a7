"""What a decision journal holds: the inputs of a router's state in order, its choices, and what came of them.

Entries are positional msgpack arrays that begin with the name of their kind. A reader ignores trailing fields and whole
kinds that it does not know. Sequence hashes are in it, never token ids or prompts.

A segment begins with ``RouterSettingsNoted`` and ``Checkpoint``, so it can be read without those before it. Workers are
named once per segment (``WorkersNamed``) and are numbers after that.

Encoding and decoding of inputs: each kind of input next to the kind of entry that stands for it.

An entry holds less than its input where the rest is known from elsewhere: which records and which snapshot it was (the
pool's journal has them), which decision was booked (it is the last one of that request). Workers are numbers.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, assert_never

import msgspec
import numpy as np

from poolgrid.kernel.decision.decision import Decision
from poolgrid.kernel.decision.policy import (
    EXPECTED_MS,
    OWN_MS,
    PACE,
    Candidates,
    Choice,
    Column,
    Forecast,
    RoutingRequest,
)
from poolgrid.kernel.decision.stage_plan import LegChoice
from poolgrid.kernel.journal.ports import ReadableDisk
from poolgrid.kernel.journal.stored_records import SegmentKind, StoredRecord, stored_records
from poolgrid.kernel.projection.projection import LOAD_STEP_BLOCKS, Projection
from poolgrid.kernel.routing.inputs import (
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
from poolgrid.kernel.routing.working_set import Admission
from poolgrid.kernel.wire.events import JournalRecord
from poolgrid.kernel.wire.hashing import pack_hashes, unpack_hashes
from poolgrid.kernel.wire.identifiers import Role, WorkerKey
from poolgrid.server.consolidator.journal.inspection import NotKept, reaches_back_to, state_at

DECISIONS = SegmentKind(
    b"PGRIDDEC",
    False,
    "entries before {offset} are sound; move the file out of the directory: only the decisions in it are lost, and the "
    "pool's journal is not touched",
)

COMPRESSION_LEVEL = 1
"""zlib's quickest: columns are mostly small integers as floats, which it shrinks to a fifth."""

WINDOW_BITS, MEMORY_LEVEL = 12, 5
"""Most columns have some hundreds of bytes: the tables of zlib's usual window take twice their time to prepare."""

INPUTS_VERSION = 13
"""Which inputs a router's state is made of, and what they mean: higher than what a reader knows, it cannot replay.

A kind of input more, or one that does something else to the state, is a new version. An entry that no decision depends
on, or a trailing field that may be missing, is none.
"""

OLDEST_INPUTS_VERSION = 9
"""Of poolgrid 0.1.0, the first release; recordings of programs before it are refused."""

_FEATURE_COLUMNS = ("prefill_tokens", "active_blocks", "requests", "device_overlap", "host_overlap", "disk_overlap")
_MASK = 2**64 - 1


class JournalEntry(msgspec.Struct, array_like=True, frozen=True, tag=True, gc=False):
    """Base of all entries."""


class RouterSettingsNoted(JournalEntry, frozen=True):
    """The deciding router, and its rules."""

    router_id: str
    poolgrid: str
    """Version of the program."""
    settings: dict[str, Any]
    """Every setting that decisions depend on, by its name in ``RouterSettings``."""
    settings_version: str
    """A digest of ``settings``: equal for equal rules."""
    inputs_version: int = 1
    """``INPUTS_VERSION`` of the program; the first was written without it."""


class LedgerEntry(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One request on one worker, as the router's ledger has it."""

    worker_id: str
    dp_rank: int
    request_id: str
    prefill_tokens: int
    active_blocks: int
    confirmed: bool
    due_ms: float


class OpenChoice(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A choice whose start is awaited, for the cross-check of the worker's stream."""

    worker_id: str
    dp_rank: int
    dispatch_id: str
    path: bytes
    block_size: int
    blocks: int
    computed: int = 0
    """Place among those whose worker counts as holding their prompt since its first token, from 1 on; 0 = none."""


class CheckWindow(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What counts for the cross-check of one worker's stream: predicted, realised, disagreeing tokens."""

    worker_id: str
    dp_rank: int
    requests: list[tuple[int, int, int]]
    is_suspect: bool = False


class BelievedBlocks(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Blocks that one worker probably holds, from one choice."""

    worker: int
    """Position in ``RouterBeliefs.workers``."""
    chosen_ms: float
    parent: int | None
    """The block before the first; from a younger choice."""
    path: bytes


class RouterBeliefs(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Router state that no event reports: its own choices, and the workers whose events it does not trust."""

    workers: list[tuple[str, int]]
    blocks: list[BelievedBlocks]
    """Oldest choice first; the whole index in approximate mode, else the predictions for untrusted workers."""
    exact_from_ms: float
    """From this moment of the router's clock on nothing counts any more that is not here."""
    untrusted: list[tuple[str, int, str]]
    """Workers whose events are not trusted, and why, in the order and words of that time."""


class Checkpoint(JournalEntry, frozen=True):
    """All of the router's state that the pool's journal before ``offset`` does not have."""

    offset: int
    now_ms: float
    time_ms: int
    fresh: bool
    """The router has just begun: it knows nothing at all, not even what is before ``offset``."""
    complete: bool
    """True when nothing is in ``beliefs``: so readers that do not know that field begin elsewhere."""
    ledger: list[LedgerEntry]
    policy_count: int | None = None
    """What a policy that counts had counted."""
    open_choices: list[OpenChoice] = []
    windows: list[CheckWindow] = []
    beliefs: RouterBeliefs | None = None
    """Given when the router goes by more than the events of its workers."""
    paces: Any = None
    """What the observer of that name knows, which is given when the policy learns how fast workers are."""
    reserved: None = None
    observers: dict[str, Any] = {}
    """What other observers know, by their names."""
    late_starts: list[tuple[str, int, str]] = []
    """Worker, rank and request of ``LoadLedger.late_starts``, oldest first."""


class InputsLost(JournalEntry, frozen=True):
    """What happened next is not here; a ``Checkpoint`` follows."""

    inputs: int
    decisions: int
    """How many of them were decisions."""
    time_ms: int
    reason: str


class SnapshotLoaded(JournalEntry, frozen=True):
    """The state of the pool before record ``offset`` replaced all that was known of it."""

    offset: int
    now_ms: float
    time_ms: int = 0


class RecordsApplied(JournalEntry, frozen=True):
    """The pool's records up to ``to_offset`` were applied."""

    to_offset: int
    now_ms: float
    check: int
    """``stream_check`` over these records: distinguishes them from others with the same offsets."""


class WorkersNamed(JournalEntry, frozen=True):
    """The next workers, in the order of their numbers."""

    workers: list[tuple[str, int]]


class DecisionMade(JournalEntry, frozen=True):
    """One choice: its inputs, its candidates, every term, and what was chosen."""

    request: RoutingRequest
    """All that a policy may know of it, by name; its id is also the seed of ties and samples."""
    path: bytes
    """Sequence hashes of the prompt's whole blocks, packed."""
    now_ms: float
    time_ms: int
    attempt: int
    roles: tuple[int, ...]
    unavailable: list[tuple[int, str]]
    offset: int
    """The router's state held every record of the pool below this offset."""
    policy: str
    row: int
    reason: str
    rows: int
    columns: bytes
    """zlib: numbers of the candidates (u32), then rows of f64: six features, the cost if there is one, the terms."""
    has_costs: bool
    terms: tuple[str, ...]
    filtered: list[tuple[int, str]]
    untrusted: list[tuple[int, str]] = []
    behind_records: int = 0
    """Records that the pool's journal was known to hold beyond ``offset``."""
    reserved: None = None
    behind: list[tuple[int, int]] = []
    """Workers, and how many requests waited at the router that were to be computed behind this one there."""
    queued_ms: float = 0.0
    """How long the request had waited at the router when it was chosen for."""
    legs: LegChoice | None = None
    """Why the request has one leg or two, where ``roles`` leave that open."""


class TurnJudged(JournalEntry, frozen=True):
    """Whether a turn of a session was admitted to the pool's working set, and what led to that."""

    request: RoutingRequest
    path: bytes
    now_ms: float
    time_ms: int
    roles: tuple[int, ...]
    waited_ms: float
    admitted: bool
    crowded: list[int]
    """Workers without room for it."""
    displaced: list[tuple[int, str]]
    """Tenant and name of the sessions that lost their places to it."""
    is_behind: bool = False
    """Whether others had waited for long."""


class DecisionBooked(JournalEntry, frozen=True):
    """The last decision of a request was entered into the ledger."""

    request_id: str
    dispatch_id: str
    now_ms: float
    lease_ms: float


class WorkerCrowded(JournalEntry, frozen=True):
    """A worker refused a dispatch: other routers had sent it more than this one knew."""

    worker: int
    dispatch_id: str
    booked_tokens: int
    now_ms: float


class LeaseRenewed(JournalEntry, frozen=True):
    """A reservation's lease was renewed."""

    worker: int
    dispatch_id: str
    now_ms: float


class PrefillEnded(JournalEntry, frozen=True):
    """The first of a dispatch's answer was seen by the router."""

    worker: int
    dispatch_id: str
    is_held: bool = False
    """The worker counts as holding the prompt from now on."""
    first_token_ms: float = 0.0
    """When the first token passed the router, where it saw that itself."""
    untimed: bool = False
    """Nothing of the answer was seen: the prompt counts as computed since that was expected by now."""


class EntryReleased(JournalEntry, frozen=True):
    """The router took a dispatch off its ledger."""

    worker: int
    dispatch_id: str


class ReservationsExpired(JournalEntry, frozen=True):
    """Reservations due by ``now_ms`` expired; those of ``renewed`` were still held and their leases renewed."""

    now_ms: float
    renewed: list[str]


class OverlapRealised(JournalEntry, frozen=True):
    """What the chosen worker then really reused."""

    request_id: str
    attempt: int
    cached_tokens: int
    isl: int | None = None
    """Prompt tokens as the engine counted them, where its answer went past the router."""


class FirstTokenCame(JournalEntry, frozen=True):
    """How long the first token of a choice really took, of a policy that expected something."""

    request_id: str
    attempt: int
    ttft_ms: float


class RequestEnded(JournalEntry, frozen=True):
    """A request that this router served is over."""

    request_id: str
    output_tokens: int
    time_ms: int


AnyEntry = (
    RouterSettingsNoted
    | Checkpoint
    | InputsLost
    | SnapshotLoaded
    | RecordsApplied
    | WorkersNamed
    | DecisionMade
    | TurnJudged
    | DecisionBooked
    | WorkerCrowded
    | LeaseRenewed
    | PrefillEnded
    | EntryReleased
    | ReservationsExpired
    | OverlapRealised
    | FirstTokenCame
    | RequestEnded
)

encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyEntry)
_KINDS = {kind.__name__ for kind in AnyEntry.__args__}


def decode(payload: bytes) -> AnyEntry | str:
    """Return an entry, or the name of a kind that this version does not know; raises ``msgspec.MsgspecError``."""
    try:
        entry: AnyEntry = _decoder.decode(payload)
    except msgspec.MsgspecError:
        raw = msgspec.msgpack.decode(payload)
        if isinstance(raw, list) and raw and isinstance(raw[0], str) and raw[0] not in _KINDS:
            return raw[0]
        raise
    return entry


def stream_check(check: int, record: JournalRecord) -> int:
    """Return the check of a run of records, given that of the run without its last (0 for none)."""
    for value in (record.epoch, record.seq, record.recorded_ms, len(record.events)):
        check = (check ^ value) * 0x100000001B3 & _MASK  # FNV-1a's step
    return check


def pack_columns(
    numbers: Sequence[int], costs: Column | None, terms: Mapping[str, Column], candidates: Candidates
) -> bytes:
    """Return the candidates and every number about them, compressed."""
    columns = [getattr(candidates, name) for name in _FEATURE_COLUMNS]
    if costs is not None:
        columns.append(costs)
    columns.extend(terms.values())
    parts = [np.asarray(numbers, "<u4").tobytes()]
    parts += [np.asarray(column, "<f8").tobytes() for column in columns]
    compressor = zlib.compressobj(COMPRESSION_LEVEL, zlib.DEFLATED, WINDOW_BITS, MEMORY_LEVEL)
    return compressor.compress(b"".join(parts)) + compressor.flush()


def decision_of(made: DecisionMade, workers: Sequence[WorkerKey]) -> Decision:
    """Return a recorded decision as the router had it; raises ``ValueError`` when its parts do not fit together."""
    data = zlib.decompress(made.columns)
    rows = made.rows
    width = len(_FEATURE_COLUMNS) + made.has_costs + len(made.terms)
    if len(data) != rows * (4 + 8 * width):
        raise ValueError(f"decision about {made.request.request_id}: {len(data)} bytes of columns, needed {rows} rows")
    if not 0 <= made.row < rows:
        raise ValueError(f"decision about {made.request.request_id}: row {made.row} is chosen, there are {rows}")
    numbers = np.frombuffer(data, "<u4", rows)
    matrix = np.frombuffer(data, "<f8", rows * width, 4 * rows).reshape(width, rows)
    features = len(_FEATURE_COLUMNS)
    costs = matrix[features] if made.has_costs else None
    terms = {name: matrix[features + made.has_costs + at] for at, name in enumerate(made.terms)}
    expected = [float(terms[name][made.row]) for name in (EXPECTED_MS, OWN_MS, PACE) if name in terms]
    decision = Decision(
        made.request,
        made.time_ms,
        made.policy,
        made.offset,
        Choice(made.row, made.reason, costs, terms, Forecast(*expected) if len(expected) == 3 else None),
        Candidates(tuple(workers[number] for number in numbers), *matrix[:features]),
        {workers[number]: why for number, why in made.filtered},
        made.attempt,
        untrusted={workers[number]: why for number, why in made.untrusted},
        behind_records=made.behind_records,
        compared_blocks=len(made.path) // 8 if made.request.media else None,
    )
    decision.queued_ms = made.queued_ms
    decision.legs = made.legs
    return decision


def path_of(made: DecisionMade) -> tuple[int, ...]:
    """Return the sequence hashes of the request's prompt."""
    return unpack_hashes(made.path)


def made_of(wanted: WorkerWanted, decision: Decision, number_of: Mapping[WorkerKey, int]) -> DecisionMade:
    """Return the entry of a decision and of what led to it; ``number_of`` knows every worker in them."""
    choice, candidates = decision.choice, decision.candidates
    terms = choice.terms  # which are worked out each time that they are asked for
    return DecisionMade(
        decision.request,
        pack_hashes(wanted.path),
        wanted.now_ms,
        decision.time_ms,
        decision.attempt,
        tuple(map(int, wanted.roles)),
        [(number_of[worker], why) for worker, why in wanted.unavailable.items()],
        decision.offset,
        decision.policy,
        choice.row,
        choice.reason,
        len(candidates),
        pack_columns([number_of[worker] for worker in candidates.workers], choice.costs, terms, candidates),
        choice.costs is not None,
        tuple(terms),
        [(number_of[worker], why) for worker, why in decision.filtered.items()],
        [(number_of[worker], why) for worker, why in decision.untrusted.items()],
        decision.behind_records,
        None,
        [(number_of[worker], count) for worker, count in wanted.behind.items()],
        wanted.queued_ms,
        decision.legs,
    )


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
        case SnapshotArrived(load, now_ms, time_ms):
            return SnapshotLoaded(load.next_offset, now_ms, time_ms)
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
                number = self._named((item.worker,), out)[item.worker]
                return PrefillEnded(number, item.dispatch_id, item.is_held, item.first_token_ms, item.untimed)
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
            case SnapshotLoaded(offset, now_ms, time_ms):
                return self.snapshot(offset, now_ms, projection, time_ms)
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
                    entry.is_behind,
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
                held, first_token_ms = entry.is_held, entry.first_token_ms
                return PromptComputed(workers[entry.worker], entry.dispatch_id, held, first_token_ms, entry.untimed)
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

    def snapshot(self, offset: int, now_ms: float, projection: Projection, time_ms: int = 0) -> SnapshotArrived:
        """Return the pool's state before a record; raises ``NotKept`` or ``PoolJournalTooShort``."""
        if offset and offset < self._reaches_back:
            raise PoolJournalTooShort(
                f"the pool's journal no longer holds what was seen: it reaches back to record {self._reaches_back}"
            )
        frozen = state_at(self._pool, offset, self._blocks_max).freeze()
        load = projection.begin_load(frozen.offset, frozen.states(), frozen.visible_chains(), frozen.sessions)
        while load.step(LOAD_STEP_BLOCKS):
            pass
        return SnapshotArrived(load, now_ms, time_ms)

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
        offered.is_behind,
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
