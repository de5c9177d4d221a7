"""The state of a router, which inputs change and nothing else does: projection, ledger, trust, and the policy's count.

Rules
    1. Only inputs change it (``poolgrid.kernel.routing.inputs``): each kind has a method, and ``apply`` takes any of
       them.
    2. What changed something is noted in ``log``, in order, as an input whose effect on the same state is the same. So
       the state after any run is that of another one that was given the log: a replay needs no rules of its own.
    3. Views are read from ``projection`` and ``selector``; ``preview`` leaves no trace.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

from poolgrid.kernel.decision.decision import Decision
from poolgrid.kernel.projection.projection import Projection
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
from poolgrid.kernel.routing.selector import Found, Selector
from poolgrid.kernel.routing.session_places import SessionPlaces
from poolgrid.kernel.routing.working_set import Admission


class InputLog(Protocol):
    """Keeps the inputs that changed something."""

    def note(self, given: Input, came: Decision | Admission | None = None) -> None:
        """Take an input, and what came of it: quickly, in the router's turn, changing nothing."""
        ...


class RouterState:
    """One router's state over one pool."""

    def __init__(self, selector: Selector) -> None:
        self.projection: Projection = selector.projection
        self.selector = selector
        self.sessions = SessionPlaces()
        """Which sessions' KV the pool is to keep."""
        self.projection.attach(self.sessions)
        self.log: InputLog | None = None

    def apply(self, given: Input) -> Any:
        """Let an input take effect, as the method for its kind does."""
        return _EFFECTS[type(given)](self, given)

    def select(self, given: WorkerWanted) -> Found:
        """Return the decision for a request, or why there is none, and nothing changed."""
        found = self.selector.select(given)
        if self.log is not None and isinstance(found, Decision):
            self.log.note(given, found)
        return found

    def offer(self, given: TurnOffered) -> Admission:
        """Return whether a turn of a session may go to a worker now, or would evict sessions that run.

        What changes nothing is not noted: a turn that still waits, and one that continues, where no lease is over.
        """
        sessions, request = self.sessions, given.request
        workers = self.selector.groups.of(request.model, given.roles).workers
        held = self.selector.best_overlap_blocks(request.model, given.roles, given.path)
        changes = sessions.working_set.changes
        found = sessions.offer(request, workers, given.path[:held], given.now_ms, given.waited_ms, given.is_behind)
        matters = bool(found.crowded or found.displaced or given.waited_ms) if found.admitted else not given.waited_ms
        # A lease that is over now need not be over by a later offer's.
        if self.log is not None and (matters or sessions.working_set.changes != changes):
            self.log.note(given, found)
        return found

    def book(self, given: Booked) -> None:
        self.selector.book(given.decision, given.path, given.now_ms, given.dispatch_id, given.lease_ms)
        if self.log is not None:
            self.log.note(given)

    def release(self, given: Released) -> bool:
        """Return whether that changed something, as ``renew`` and ``note_prompt`` do."""
        is_known = self.projection.release(given.worker, given.dispatch_id)
        if is_known and self.log is not None:
            self.log.note(given)
        return is_known

    def renew(self, given: Renewed) -> bool:
        is_open = self.projection.ledger.renew(given.worker, given.dispatch_id, given.now_ms)
        if is_open and self.log is not None:
            self.log.note(given)
        return is_open

    def note_prompt(self, given: PromptComputed) -> bool:
        is_news = self.projection.ledger.prompt_seen(given.worker, given.dispatch_id)
        if given.is_held and self.projection.trust.prompt_computed(given.worker, given.dispatch_id):
            is_news = True
        if given.first_token_ms:
            self.projection.first_token(given.worker, given.dispatch_id, given.first_token_ms)
        if given.untimed and is_news:
            self.projection.untimed_token(given.worker, given.dispatch_id)
        if (is_news or given.first_token_ms) and self.log is not None:
            self.log.note(given)
        return is_news

    def take_records(self, given: RecordsArrived) -> None:
        """Raises ``Hole`` for records that are not the next."""
        if self.log is not None and given.records:
            self.projection.expect(given.records[0].offset)  # what is not applied must not be noted
            self.log.note(given)
        apply, now_ms = self.projection.apply, given.now_ms
        for record in given.records:
            apply(record, now_ms)

    def expire(self, given: Expired) -> None:
        expired, renewed = self.projection.expire(given.now_ms, given.held)
        if self.log is not None and (expired or renewed):
            # Of all that is held, only what was due made a difference.
            self.log.note(Expired(given.now_ms, renewed))

    def overcommit(self, given: Overcommitted) -> None:
        slot = self.projection.index.slot(given.worker)
        self.projection.ledger.crowded(given.worker, slot, given.dispatch_id, given.booked_tokens, given.now_ms)
        if self.log is not None:
            self.log.note(given)

    def adopt(self, given: SnapshotArrived) -> None:
        self.projection.adopt(given.load, given.now_ms)
        self.sessions.adopt(given.load, given.now_ms, given.time_ms)
        if self.log is not None:
            self.log.note(given)

    def preview(self, wanted: WorkerWanted) -> Found:
        """Return what ``apply`` would return for a request now; nothing is changed, counted or noted."""
        return self.selector.select(wanted, dry_run=True)


_EFFECTS: Final[Mapping[type[Input], Callable[[RouterState, Any], Any]]] = {
    WorkerWanted: RouterState.select,
    TurnOffered: RouterState.offer,
    Booked: RouterState.book,
    Released: RouterState.release,
    Renewed: RouterState.renew,
    PromptComputed: RouterState.note_prompt,
    RecordsArrived: RouterState.take_records,
    SnapshotArrived: RouterState.adopt,
    Overcommitted: RouterState.overcommit,
    Expired: RouterState.expire,
}
