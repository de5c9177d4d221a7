"""The inputs of a router's state: all that its decisions depend on.

Each input is a value. ``RouterState`` is the one place where they take effect, the decision journal records them,
and a replay applies them again: with the policy's settings, the same inputs in the same order give the same decisions,
bit for bit. Clocks are in the inputs; nothing that handles one reads a clock.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final

import msgspec

from poolgrid.kernel.decision.decision import Decision
from poolgrid.kernel.decision.policy import RoutingRequest
from poolgrid.kernel.projection.projection import SnapshotLoad
from poolgrid.kernel.wire.events import JournalRecord
from poolgrid.kernel.wire.identifiers import Role, WorkerKey

_NO_COUNTS: Final[Mapping[WorkerKey, int]] = {}
_NO_REASONS: Final[Mapping[WorkerKey, str]] = {}


class RecordsArrived(msgspec.Struct, frozen=True, gc=False):
    """The next records of the pool's journal, in order."""

    records: Sequence[JournalRecord]
    now_ms: float


class SnapshotArrived(msgspec.Struct, frozen=True):
    """The state of the pool before record ``load.next_offset``, loaded to its end, replaces what was known of it."""

    load: SnapshotLoad
    now_ms: float
    time_ms: int = 0
    """Wall clock, against which times in it count; 0 = the latest of them."""


class WorkerWanted(msgspec.Struct, frozen=True, gc=False):
    """A request needs a worker now; what comes of it is a ``Decision``."""

    request: RoutingRequest
    path: Sequence[int]
    """Sequence hashes of the prompt's whole blocks."""
    now_ms: float
    """Monotonic."""
    time_ms: int
    """Wall clock, for the record."""
    unavailable: Mapping[WorkerKey, str] = _NO_REASONS
    """Workers that the caller knows it cannot use, and why."""
    attempt: int = 0
    roles: tuple[Role, ...] = (Role.AGGREGATED,)
    behind_records: int = 0
    """Records of the pool's journal that are known beyond those applied; marks the decision, changes nothing."""
    behind: Mapping[WorkerKey, int] = _NO_COUNTS
    """Requests that wait at the router, to be computed behind this one, by worker; for policies that plan."""
    queued_ms: float = 0.0
    """How long it has waited at the router; changes its turn among those that wait, not where it goes."""


class TurnOffered(msgspec.Struct, frozen=True, gc=False):
    """A turn of a session asks for room in the pool's working set; what comes of it is an ``Admission``."""

    request: RoutingRequest
    path: Sequence[int]
    now_ms: float
    time_ms: int
    roles: tuple[Role, ...] = (Role.AGGREGATED,)
    waited_ms: float = 0.0
    """How long it has waited for that at the router."""
    is_behind: bool = False
    """Whether others have waited for long: it takes no room from them."""


class Booked(msgspec.Struct, frozen=True, gc=False):
    """The last decision of a request is carried out: its load counts from now on."""

    decision: Decision
    path: Sequence[int]
    dispatch_id: str
    """The id that the worker will report."""
    now_ms: float
    lease_ms: float = 0.0
    """How long it counts unconfirmed; 0 is the ledger's own."""


class Overcommitted(msgspec.Struct, frozen=True):
    """A worker refused a dispatch: other routers had sent it more prompt tokens than this one knew."""

    worker: WorkerKey
    dispatch_id: str
    booked_tokens: int
    now_ms: float


class Renewed(msgspec.Struct, frozen=True):
    """The lease of a reservation begins again."""

    worker: WorkerKey
    dispatch_id: str
    now_ms: float


class PromptComputed(msgspec.Struct, frozen=True, gc=False):
    """The first of a dispatch's answer passed the router: its prompt is no work any more, regardless of events."""

    worker: WorkerKey
    dispatch_id: str
    is_held: bool = False
    """Its worker counts as holding the prompt's blocks, until the worker's own events report what it holds."""
    first_token_ms: float = 0.0
    """When the first token passed this router, which observers learn from; 0 = the worker reports that itself."""
    untimed: bool = False
    """No first token of the answer can be seen: its time has come by what was expected, and teaches nothing."""


class Released(msgspec.Struct, frozen=True, gc=False):
    """The router takes a dispatch off a worker."""

    worker: WorkerKey
    dispatch_id: str


class Expired(msgspec.Struct, frozen=True):
    """Reservations due by ``now_ms`` end, those of the dispatches ``held`` excepted, which begin again."""

    now_ms: float
    held: Collection[str] = frozenset()


Input = (
    RecordsArrived
    | SnapshotArrived
    | WorkerWanted
    | TurnOffered
    | Booked
    | Overcommitted
    | Renewed
    | PromptComputed
    | Released
    | Expired
)
