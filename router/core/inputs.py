"""What a router is told: the vocabulary of inputs, all that its decisions depend on.

Each input is a value. ``RouterState.apply`` is the one place where they take effect, the decision journal records them,
and a replay applies them again: with the policy's settings, the same inputs in the same order give the same decisions,
bit for bit. Clocks are in the inputs; nothing that handles one reads a clock.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, final

from poolgrid.router.core.decision import Decision
from poolgrid.router.core.projection import SnapshotLoad
from poolgrid.router.core.routing_request import RoutingRequest
from poolgrid.wire.events import JournalRecord
from poolgrid.wire.identifiers import Role, WorkerKey
from poolgrid.wire.value import Value

_NOBODY: Final[Mapping[WorkerKey, int]] = {}
_NO_REASONS: Final[Mapping[WorkerKey, str]] = {}
_AGGREGATED: Final = Role.AGGREGATED


@final
class RecordsArrived(Value):
    """The next records of the pool's journal, in order."""

    __slots__ = ("now_ms", "records")

    def __init__(self, records: Sequence[JournalRecord], now_ms: float) -> None:
        self.records = records
        self.now_ms = now_ms

    def parts(self) -> tuple[Any, ...]:
        return (self.records, self.now_ms)


@final
class SnapshotArrived(Value):
    """The state of the pool before record ``load.next_offset``, loaded to its end, replaces what was known of it."""

    __slots__ = ("load", "now_ms")

    def __init__(self, load: SnapshotLoad, now_ms: float) -> None:
        self.load = load
        self.now_ms = now_ms

    def parts(self) -> tuple[Any, ...]:
        return (self.load, self.now_ms)


@final
class WorkerWanted(Value):
    """A request wants a worker now; what comes of it is a ``Decision``."""

    __slots__ = (
        "attempt",
        "behind",
        "behind_records",
        "now_ms",
        "path",
        "queued_ms",
        "request",
        "roles",
        "time_ms",
        "unavailable",
    )

    def __init__(
        self,
        request: RoutingRequest,
        path: Sequence[int],
        now_ms: float,
        time_ms: int,
        unavailable: Mapping[WorkerKey, str] = _NO_REASONS,
        attempt: int = 0,
        roles: tuple[Role, ...] = (_AGGREGATED,),
        behind_records: int = 0,
        behind: Mapping[WorkerKey, int] = _NOBODY,
        queued_ms: float = 0.0,
    ) -> None:
        self.request = request
        self.path = path
        """Sequence hashes of the prompt's whole blocks."""
        self.now_ms = now_ms
        """Monotonic."""
        self.time_ms = time_ms
        """Wall clock, for the record."""
        self.unavailable = unavailable
        """Workers that the caller knows it cannot use, and why."""
        self.attempt = attempt
        self.roles = roles
        self.behind_records = behind_records
        """Records of the pool's journal that are known beyond those applied; marks the decision, changes nothing."""
        self.behind = behind
        """Requests that wait at the router, to be computed behind this one, by worker; for policies that plan."""
        self.queued_ms = queued_ms
        """How long it has waited at the router; for the record, changes nothing."""

    def parts(self) -> tuple[Any, ...]:
        """Return all of it, in the order in which it is given."""
        return (
            self.request,
            self.path,
            self.now_ms,
            self.time_ms,
            self.unavailable,
            self.attempt,
            self.roles,
            self.behind_records,
            self.behind,
            self.queued_ms,
        )

    def without(self, unavailable: Mapping[WorkerKey, str]) -> WorkerWanted:
        """Return the same of who cannot use these workers; whoever asks again may still change when, and how often."""
        wanted = WorkerWanted(*self.parts())
        wanted.unavailable = unavailable
        return wanted


@final
class Booked(Value):
    """The last decision of a request is carried out: its load counts from now on."""

    __slots__ = ("decision", "dispatch_id", "lease_ms", "now_ms", "path")

    def __init__(
        self, decision: Decision, path: Sequence[int], dispatch_id: str, now_ms: float, lease_ms: float = 0.0
    ) -> None:
        self.decision = decision
        self.path = path
        self.dispatch_id = dispatch_id
        """What the worker will report it as."""
        self.now_ms = now_ms
        self.lease_ms = lease_ms
        """How long it counts unconfirmed; 0 is the ledger's own."""

    def parts(self) -> tuple[Any, ...]:
        return (self.decision, self.path, self.dispatch_id, self.now_ms, self.lease_ms)


@final
class Crowded(Value):
    """A worker refused a dispatch: other routers had sent it more prompt tokens than this one knew."""

    __slots__ = ("booked_tokens", "dispatch_id", "now_ms", "worker")

    def __init__(self, worker: WorkerKey, dispatch_id: str, booked_tokens: int, now_ms: float) -> None:
        self.worker = worker
        self.dispatch_id = dispatch_id
        self.booked_tokens = booked_tokens
        self.now_ms = now_ms

    def parts(self) -> tuple[Any, ...]:
        return (self.worker, self.dispatch_id, self.booked_tokens, self.now_ms)


@final
class Renewed(Value):
    """Whoever holds a reservation wants its lease to begin anew."""

    __slots__ = ("dispatch_id", "now_ms", "worker")

    def __init__(self, worker: WorkerKey, dispatch_id: str, now_ms: float) -> None:
        self.worker = worker
        self.dispatch_id = dispatch_id
        self.now_ms = now_ms

    def parts(self) -> tuple[Any, ...]:
        return (self.worker, self.dispatch_id, self.now_ms)


@final
class PromptComputed(Value):
    """The first of a dispatch's answer was seen on its way: its prompt is no work any more, whatever events say."""

    __slots__ = ("dispatch_id", "is_held", "worker")

    def __init__(self, worker: WorkerKey, dispatch_id: str, is_held: bool = False) -> None:
        self.worker = worker
        self.dispatch_id = dispatch_id
        self.is_held = is_held
        """Its worker is believed to hold the prompt's blocks, until the worker's own events say what it holds."""

    def parts(self) -> tuple[Any, ...]:
        return (self.worker, self.dispatch_id, self.is_held)


@final
class Released(Value):
    """The router takes a dispatch off a worker."""

    __slots__ = ("dispatch_id", "worker")

    def __init__(self, worker: WorkerKey, dispatch_id: str) -> None:
        self.worker = worker
        self.dispatch_id = dispatch_id

    def parts(self) -> tuple[Any, ...]:
        return (self.worker, self.dispatch_id)


@final
class Expired(Value):
    """Reservations due by ``now_ms`` end, those of the dispatches ``held`` excepted, which begin anew."""

    __slots__ = ("held", "now_ms")

    def __init__(self, now_ms: float, held: Collection[str] = frozenset()) -> None:
        self.now_ms = now_ms
        self.held = held

    def parts(self) -> tuple[Any, ...]:
        return (self.now_ms, self.held)


Input = (
    RecordsArrived | SnapshotArrived | WorkerWanted | Booked | Crowded | Renewed | PromptComputed | Released | Expired
)
