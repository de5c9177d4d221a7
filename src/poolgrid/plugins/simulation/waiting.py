"""Where requests wait at a simulated router: by the queue and the rules of a real one, without its bounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Final

from msgspec.structs import replace

from poolgrid.kernel.decision.decision import Decision
from poolgrid.kernel.decision.policy import HELD_MAX
from poolgrid.kernel.routing.inputs import WorkerWanted
from poolgrid.kernel.routing.selector import NoWorker, Selector
from poolgrid.kernel.wire.identifiers import Role, WorkerKey
from poolgrid.plugins.simulation.workload import SimulatedRequest
from poolgrid.server.router.engine_backlog import waits_too_long, with_enough
from poolgrid.server.router.lane_placer import LanePlacer, Tried
from poolgrid.server.serving.fair_queue import FairQueue, QueuedRequest

LANE: Final = "simulated"
ROLES: Final = (Role.AGGREGATED,)
_NOTHING: Final[Mapping[WorkerKey, int]] = {}

Behind = Mapping[WorkerKey, int]
Wanted = Callable[[SimulatedRequest, float, Behind], WorkerWanted]
"""Returns the question of a request at a time, with what was planned behind it."""


class WaitingRequests:
    """The requests that wait at one router."""

    def __init__(
        self,
        selector: Selector,
        hold_limit_ms: float,
        waits_for_engines: bool,
        wanted: Wanted,
        send: Callable[[SimulatedRequest, Decision, float], None],
    ) -> None:
        """``send`` hands a request to the engine of a decision's worker."""
        self._selector = selector
        self._hold_limit_ms = hold_limit_ms
        self._waits_for_engines = waits_for_engines
        self._wanted = wanted
        self._send = send
        self._queue: FairQueue[SimulatedRequest] = FairQueue(10**9, 2**60)
        self._placer = LanePlacer(self._queue, hold_limit_ms, self._try, self._plan)
        self._now_ms = 0.0
        self._changes = 0
        self._looked: tuple[object, float] = (None, 0.0)

    @property
    def is_empty(self) -> bool:
        return self._queue.is_empty

    @property
    def _plans(self) -> bool:
        planner = self._selector.planner
        return bool(self._hold_limit_ms) and planner is not None and planner.is_active

    def arrive(self, request: SimulatedRequest, now_ms: float) -> None:
        """Place a request, or let it wait until ``place``."""
        self._now_ms = now_ms
        if self._queue.is_empty:
            decision = self._choose(request, _NOTHING)
            planner = self._selector.planner
            waits = decision is None or (self._plans and planner is not None and planner.holds(decision))
            if decision is not None and not waits and not self._may_go(decision):
                decision = self._choose_other(request)
            if decision is not None and not waits:
                self._send(request, decision, now_ms)
                return
        while self._plans and len(self._queue) >= HELD_MAX:
            head = self._queue.head(LANE)
            if head is None or self._try(head, _NOTHING) is not Tried.GONE:
                break
        tokens, session = request.isl, request.session
        tenant = request.tenant if session is None else session.tenant
        queued = QueuedRequest(
            request,
            LANE,
            tenant,
            priority=request.priority,
            prompt_tokens=tokens,
            uncached_tokens=tokens,
            entered_ms=now_ms,
        )
        self._queue.enter(queued)
        self._changes += 1

    def place(self, now_ms: float) -> None:
        """Place those that can be."""
        self._now_ms = now_ms
        seen, again_ms = self._looked
        if self._queue.is_empty or (now_ms < again_ms and seen == self._basis()):
            return
        self._placer.place(LANE, now_ms, self._plans)
        first_ms = self._queue.first_entered_ms(LANE)
        due_ms = inf if first_ms is None or not self._plans else first_ms + self._placer.hold_limit_ms(LANE)
        self._looked = self._basis(), due_ms if due_ms > now_ms else inf

    def _basis(self) -> object:
        planner, ledger = self._selector.planner, self._selector.projection.ledger
        openings = 0 if planner is None else planner.openings(LANE, ROLES)
        return self._changes, self._plans, ledger.relieved, openings

    def _choose(self, request: SimulatedRequest, behind: Behind) -> Decision | None:
        found = self._selector.select(self._wanted(request, self._now_ms, behind))
        if isinstance(found, Decision):
            return found
        if isinstance(found, NoWorker) and found.busy:
            return None
        raise RuntimeError(f"simulating request {request.request_id}: {found}")

    def _choose_other(self, request: SimulatedRequest) -> Decision | None:
        """Return the choice of a policy that does not reckon with queues among workers that have not enough."""
        selector = self._selector
        if selector.planner is not None:
            return None
        group = selector.groups.of(LANE, ROLES)
        enough = with_enough(group, selector.projection.ledger)
        if len(enough) == len(group.workers):
            return None
        found = selector.select(replace(self._wanted(request, self._now_ms, _NOTHING), unavailable=enough))
        return found if isinstance(found, Decision) else None

    def _may_go(self, decision: Decision) -> bool:
        """Return whether a request may go to the engine of a decision's worker now."""
        if not self._waits_for_engines:
            return True
        card = self._selector.projection.fleet.workers[decision.worker].card
        return not waits_too_long(decision, card)

    def _try(self, queued: QueuedRequest[SimulatedRequest], behind: Behind = _NOTHING) -> Tried:
        decision = self._choose(queued.item, behind)
        if decision is None:
            return Tried.BUSY
        if not self._may_go(decision):
            decision = self._choose_other(queued.item)
            if decision is None:
                return Tried.BUSY if self._selector.planner is None else Tried.BACKLOGGED
        self._changes += 1
        self._queue.leave(queued, dispatched=True)
        self._send(queued.item, decision, self._now_ms)
        return Tried.GONE

    def _plan(self, taken: Sequence[QueuedRequest[SimulatedRequest]]) -> bool:
        planner = self._selector.planner
        assert planner is not None, "only a policy that plans is asked"
        if not planner.openings(LANE, ROLES):
            return False
        wanted = [self._wanted(each.item, self._now_ms, _NOTHING) for each in taken]
        # All of them, also where one did not go.
        return Tried.GONE in [self._try(taken[row], behind) for row, behind in planner.plan(wanted)]
