"""What a decision journal holds: the inputs of a router's state in order, its choices, and what came of them.

Entries are positional msgpack arrays that begin with the name of their kind. A reader ignores trailing fields and whole
kinds that it does not know. Sequence hashes are in it, never token ids or prompts.

A segment begins with ``RouterSettingsNoted`` and ``Checkpoint``, so it can be read without those before it. Workers are
named once per segment (``WorkersNamed``) and are numbers after that.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from poolgrid.consolidator.journal.stored_records import SegmentKind
from poolgrid.router.core.candidates import Candidates, Choice, RoutingRequest
from poolgrid.router.core.decision import Decision
from poolgrid.router.core.inputs import WorkerWanted
from poolgrid.router.core.stage_plan import LegChoice
from poolgrid.wire.events import JournalRecord
from poolgrid.wire.hashing import pack_hashes, unpack_hashes
from poolgrid.wire.identifiers import WorkerKey

DECISIONS = SegmentKind(
    b"PGRIDDEC",
    False,
    "entries before {offset} are sound; move the file out of the directory: only the decisions in it are lost, and the "
    "pool's journal is not touched",
)

COMPRESSION_LEVEL = 1
"""zlib's quickest: columns are mostly small integers as floats, which it shrinks to a fifth."""

INPUTS_VERSION = 9
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


def pack_columns(numbers: Sequence[int], choice: Choice, candidates: Candidates) -> bytes:
    """Return the candidates and every number about them, compressed."""
    columns = [getattr(candidates, name) for name in _FEATURE_COLUMNS]
    if choice.costs is not None:
        columns.append(choice.costs)
    columns.extend(choice.terms.values())
    parts = [np.asarray(numbers, "<u4").tobytes()]
    parts += [np.ascontiguousarray(column, "<f8").tobytes() for column in columns]
    return zlib.compress(b"".join(parts), COMPRESSION_LEVEL)


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
    decision = Decision(
        made.request,
        made.time_ms,
        made.policy,
        made.offset,
        Choice(made.row, made.reason, costs, terms),
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
        pack_columns([number_of[worker] for worker in candidates.workers], choice, candidates),
        choice.costs is not None,
        tuple(choice.terms),
        [(number_of[worker], why) for worker, why in decision.filtered.items()],
        [(number_of[worker], why) for worker, why in decision.untrusted.items()],
        decision.behind_records,
        None,
        [(number_of[worker], count) for worker, count in wanted.behind.items()],
        wanted.queued_ms,
        decision.legs,
    )
