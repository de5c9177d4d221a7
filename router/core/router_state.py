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
        log, projection = self.log, self.projection
        match given:
            case WorkerWanted():
                found = self.selector.select(given)
                if log is not None and isinstance(found, Decision):
                    log.note(given, found)
                return found
            case RecordsArrived(records, now_ms):
                if log is not None and records:
                    projection.expect(records[0].offset)  # what is not applied must not be noted
                    log.note(given)
                for record in records:
                    projection.apply(record, now_ms)
                return None
            case Expired(now_ms, held):
                expired, renewed = projection.expire(now_ms, held)
                if log is not None and (expired or renewed):
                    # Of all that is held, only what was due made a difference.
                    log.note(Expired(now_ms, renewed))
                return None
            case Renewed() | PromptComputed() | Released():
                has_changed = self._on_dispatch(given)
                if log is not None and has_changed:
                    log.note(given)
                return has_changed
            case Booked():
                self.selector.book(given.decision, given.path, given.now_ms, given.dispatch_id, given.lease_ms)
            case Crowded(worker, dispatch_id, booked_tokens, now_ms):
                projection.ledger.crowded(worker, projection.index.slot(worker), dispatch_id, booked_tokens, now_ms)
            case SnapshotArrived(load, now_ms):
                projection.adopt(load, now_ms)
            case _:
                assert_never(given)
        if log is not None:
            log.note(given)
        return None

    def _on_dispatch(self, given: Renewed | PromptComputed | Released) -> bool:
        """Let an input about one dispatch take effect; return whether it changed something."""
        projection, worker, dispatch_id = self.projection, given.worker, given.dispatch_id
        match given:
            case Renewed():
                return projection.ledger.renew(worker, dispatch_id, given.now_ms)
            case Released():
                return projection.release(worker, dispatch_id)
            case PromptComputed():
                is_news = projection.ledger.prompt_seen(worker, dispatch_id)
                return (given.is_held and projection.trust.prompt_computed(worker, dispatch_id)) or is_news

    def preview(self, wanted: WorkerWanted) -> Found:
        """Return what ``apply`` would return for a request now; nothing is changed, counted or noted."""
        return self.selector.select(wanted, dry_run=True)
