"""The state of a router, which inputs change and nothing else does: projection, ledger, trust, and the policy's count.

Rules
    1. ``apply`` is the only door. It takes one input (``poolgrid.router.core.inputs``) and returns what came of it.
    2. What changed something is noted in ``log``, in order, as an input whose effect on the same state is the same. So
       the state after any run is that of another one that was given the log: a replay needs no rules of its own.
    3. Views are read from ``projection`` and ``selector``; ``preview`` leaves no trace.
"""

from __future__ import annotations

from typing import Protocol, assert_never, overload

from poolgrid.router.core.decision import Decision
from poolgrid.router.core.inputs import (
    Booked,
    Crowded,
    Expired,
    Input,
    PromptComputed,
    RecordsArrived,
    Released,
    Renewed,
    SnapshotArrived,
    WorkerWanted,
)
from poolgrid.router.core.projection import Projection
from poolgrid.router.core.selector import Found, Selector


class InputLog(Protocol):
    """Keeps the inputs that changed something."""

    def note(self, given: Input, decision: Decision | None = None) -> None:
        """Take an input, and the decision that came of it: quickly, in the router's turn, changing nothing."""
        ...


class RouterState:
    """One router's state over one pool."""

    def __init__(self, selector: Selector) -> None:
        self.projection: Projection = selector.projection
        self.selector = selector
        self.log: InputLog | None = None

    @overload
    def apply(self, given: WorkerWanted) -> Found: ...
    @overload
    def apply(self, given: Renewed | PromptComputed | Released) -> bool: ...
    @overload
    def apply(self, given: RecordsArrived | SnapshotArrived | Booked | Crowded | Expired) -> None: ...
    @overload
    def apply(self, given: Input) -> Found | bool | None: ...

    def apply(self, given: Input) -> Found | bool | None:
        """Let an input take effect.

        Returns the decision for ``WorkerWanted``, or why there is none, and nothing changed; for ``Renewed``,
        ``PromptComputed`` and ``Released`` whether that changed something; else ``None``. Raises ``Hole`` for records
        that are not the next.
        """
        # One of few exact types, the commonest first: ``match`` would cost a request a microsecond more.
        log = self.log
        if type(given) is WorkerWanted:
            found = self._select(given)
            if self.projection.retention is not None and type(found) is Decision:
                self.selector.advise(found, given.path, given.now_ms)
            if log is not None and type(found) is Decision:
                log.note(given, found)
            return found
        elif type(given) is Booked:
            self.selector.book(given.decision, given.path, given.now_ms, given.dispatch_id, given.lease_ms)
            if log is not None:
                log.note(given)
        elif type(given) is Released:
            retention = self.projection.retention
            blocks = None if retention is None else self.projection.ledger.blocks_of(given.worker, given.dispatch_id)
            if not self.projection.ledger.release(given.worker, given.dispatch_id):
                return False
            if retention is not None:
                retention.abandon(given.worker, given.dispatch_id, blocks)
            paces = self.projection.paces
            if paces is not None:
                paces.ended(given.worker, given.dispatch_id)
            if log is not None:
                log.note(given)
            return True
        elif type(given) is RecordsArrived:
            if log is not None and given.records:
                self.projection.expect(given.records[0].offset)  # what is not applied must not be noted
                log.note(given)
            apply, now_ms = self.projection.apply, given.now_ms
            for record in given.records:
                apply(record, now_ms)
        elif type(given) is Renewed:
            if not self.projection.ledger.renew(given.worker, given.dispatch_id, given.now_ms):
                return False
            if log is not None:
                log.note(given)
            return True
        elif type(given) is PromptComputed:
            seen = self.projection.ledger.prompt_seen(given.worker, given.dispatch_id)
            if given.is_held and self.projection.trust.prompt_computed(given.worker, given.dispatch_id):
                seen = True
            if seen and log is not None:
                log.note(given)
            return seen
        elif type(given) is Expired:
            expired, renewed = self.projection.ledger.expire(given.now_ms, given.held)
            paces, retention = self.projection.paces, self.projection.retention
            if expired and paces is not None:
                paces.await_only(self.projection.ledger.knows)
            if expired and retention is not None:
                retention.hold_only(self.projection.ledger.knows)
            if log is not None and (expired or renewed):
                # Of all that is held, only what was due made a difference.
                log.note(Expired(given.now_ms, renewed))
        elif type(given) is Crowded:
            slot = self.projection.index.slot(given.worker)
            self.projection.ledger.crowded(given.worker, slot, given.dispatch_id, given.booked_tokens, given.now_ms)
            if log is not None:
                log.note(given)
        elif type(given) is SnapshotArrived:
            self.projection.adopt(given.load, given.now_ms)
            if log is not None:
                log.note(given)
        else:
            assert_never(given)
        return None

    def preview(self, wanted: WorkerWanted) -> Found:
        """Return what ``apply`` would return for a request now; nothing is changed, counted or noted."""
        found = self._select(wanted, dry_run=True)
        if self.projection.retention is not None and type(found) is Decision:
            self.selector.advise(found, wanted.path, wanted.now_ms)
        return found

    def _select(self, wanted: WorkerWanted, dry_run: bool = False) -> Found:
        found = self.selector.select(
            wanted.request,
            wanted.path,
            wanted.now_ms,
            wanted.time_ms,
            wanted.unavailable,
            wanted.attempt,
            wanted.roles,
            dry_run,
            wanted.behind_records,
            wanted.behind,
        )
        if wanted.queued_ms and type(found) is Decision:
            found.queued_ms = wanted.queued_ms
        return found
