"""Requests that wait for a worker with room, placed by whatever may have made room.

Rules
    1. A request that finds every worker busy waits in the lane of its model. Beyond ``max_queue_requests`` requests or
       ``max_queue_prompt_tokens``, or this router's part of them, the lowest priority gives way and is refused.
    2. *Resumed* requests (their clients are being served already) go before all others, and are refused by time only.
    3. The head of each lane is placed as soon as it can be; no other request of its lane overtakes it.
    4. Once the queue is closed no request is placed any more.
    5. A request waits while the engine where it would go has enough to compute (``router.engine_backlog``). Which are
       tried, and in which order, is in ``router.lane_placer``; with a policy that plans rule 3 is not for them.
    6. With a policy that plans, new requests are *deferred* until the worker that a plan gave them has no prompt to
       compute, at most ``HOLD_LIMIT_MS``. Those whose turn it is, up to ``PLANNED_MAX``, are planned together
       (``routing.selector.Planner``): at the end of a turn of the event loop in which one came, a worker has computed
       all its prompts, or has room again. A plan is forgotten at once. No request is refused because others are
       deferred: where that takes the room, those whose turn it is go to workers whose engines have not enough.
    7. With ``session_admission``, turns of sessions for which the pool's working set has no room wait in a lane of
       their own for each model, by when their session first asked (``router.lane_placer``). A client that was refused
       after ``queue_timeout_ms`` keeps that place for ``ASKED_KEPT_MS``. Turns that pass them are charged to their
       tenants. Where the pool gains nothing from that, admission rests (``router.admission_review``): none waits so.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from poolgrid.kernel.decision.policy import HELD_MAX
from poolgrid.kernel.requests.inference import InferenceRequest, Refused
from poolgrid.kernel.routing.working_set import AGE_MS
from poolgrid.kernel.wire.identifiers import WorkerKey
from poolgrid.server.process.clock import Clock, within
from poolgrid.server.router.admission_review import AdmissionReview
from poolgrid.server.router.choosing import Chooser
from poolgrid.server.router.lane_placer import LanePlacer, Tried, is_long, place_turns
from poolgrid.server.router.metrics import RouterMetrics
from poolgrid.server.router.placement import LocalRequest, PlacementFailure, WaitCause
from poolgrid.server.router.settings import RouterSettings
from poolgrid.server.serving.admission_queue import RETRY_AFTER_MAX_S, AdmissionQueue
from poolgrid.server.serving.fair_queue import QueuedRequest, QueueOrder

SESSIONS: Final = "\0sessions"
"""Ends the name of such a lane; no model has one like it."""

TASKS: Final = "\0tasks"
"""Ends the name of the lane of a model's tasks: other workers serve them than its prompts."""

PLACE_WAIT_MAX_S: Final = 5.0
"""Turns are offered again after this time even if nothing is known to have changed."""

SESSION_TICK_MS: Final = 0.001
"""A turn that has waited, however shortly, has waited longer than 0."""

ASKED_KEPT_MS: Final = 2 * RETRY_AFTER_MAX_S * 1000
"""Clients come back within ``Retry-After``, which is half of it at most."""


LOOK_MS: Final = 250.0
"""Requests that wait for an engine are tried again after this time even if no prompt is known to be computed."""


class LookedAt(NamedTuple):
    """What it depends on whether a request of a lane can be placed."""

    changes: int
    plans: bool
    waits_for_engine: bool
    relieved: int
    """How often workers had less to do, where requests wait for that."""
    of_plan: tuple[int, ...]


def lane_of(request: InferenceRequest) -> str:
    """Return the name of the lane in which a request waits."""
    return request.model if request.task is None else request.model + TASKS


def queue_span(request_id: str) -> str:
    """Return the name under which a trace has the span of a request's waiting, while it lasts."""
    return f"queue {request_id}"


class RouterQueue(AdmissionQueue[LocalRequest]):
    """The queue of one pool's router."""

    def __init__(
        self,
        settings: RouterSettings,
        chooser: Chooser,
        metrics: RouterMetrics,
        clock: Clock,
        place: Callable[[LocalRequest], PlacementFailure | None],
        give_up: Callable[[LocalRequest, str, float | None], None],
        review: AdmissionReview | None = None,
    ) -> None:
        """``place`` puts a request on a worker or returns why not; ``give_up`` ends one that was served before;
        ``review`` says whether turns wait for places, ``None`` = never."""
        self._order = QueueOrder(settings.queue_order)
        super().__init__(
            settings.max_queue_requests,
            settings.max_queue_prompt_tokens,
            settings.queue_timeout_ms,
            metrics,
            clock,
            self._order,
        )
        self._chooser = chooser
        self._review = review
        self._place = place
        self._give_up = give_up
        self._pumping = False
        self._pump_scheduled = False
        self._closed = False
        self._asked_ms: OrderedDict[tuple[int, str], float] = OrderedDict()
        """When sessions without a place first asked; at most ``max_queue_requests`` of them."""
        self._asked_max = max(1, settings.max_queue_requests)
        self._offered: dict[str, tuple[int, float]] = {}
        """By lane of sessions, at which change of the working set its head found no room, and when to try again."""
        self._place_timer: asyncio.TimerHandle | None = None
        self._changes = 0
        """How often a request came or left."""
        self._looked: dict[str, tuple[LookedAt, float]] = {}
        """By lane in which requests are deferred or wait for an engine, what was there when they were last tried, and
        when to try again without any change."""
        self._lanes = LanePlacer(self._queue, settings.hold_limit_ms, self._try_turn, self._place_planned)

    # -- in --------------------------------------------------------------------------------------------------------

    def must_wait(self, routed: LocalRequest) -> bool:
        """Return whether a new request has to wait for room in the pool's working set."""
        request = routed.machine.request
        if request.turn is None or self._review is None or self._review.rests:
            return False
        lane = request.model + SESSIONS
        first_ms = self._queue.first_entered_ms(lane)
        is_behind = first_ms is not None and is_long(first_ms, self._clock.monotonic_ms())
        if not self._chooser.admits(routed, is_behind=is_behind):
            return True
        if first_ms is not None:
            tokens = len(request.token_ids) // 4
            self._queue.charge(lane, request.payer, request.tenant_weight, request.priority, tokens)
        return False

    async def wait(self, routed: LocalRequest, cause: WaitCause) -> None:
        """Wait until a new request is on a worker; raises ``Refused``."""
        now_ms = self._clock.monotonic_ms()
        placed = routed.placed = asyncio.get_running_loop().create_future()
        try:
            routed.follows = self._chooser.naming.follows(routed.machine.request)
            queued = self._queued(routed, now_ms)
            if cause is WaitCause.WORKING_SET:
                self._await_place(queued, now_ms)
            elif self._chooser.plans:
                self._make_room(queued)
            self._enter(queued)
            self._changes += 1
            if cause is WaitCause.HELD:
                self.pump_soon()
            await within(self._timeout_ms, self._clock, placed)
        except TimeoutError:
            raise self._overdue(routed) from None
        finally:
            # Once it is placed it is no longer waited for here: its worker may be lost, and the request in the queue
            # again as a resumed one, before this task has its turn.
            if routed.placed is placed:
                self.leave(routed)
                routed.placed = None
            self._count_wait(now_ms, cause)

    def resume(self, routed: LocalRequest, cause: WaitCause) -> None:
        """Have a request whose client is being served already wait for its next worker."""
        routed.resumed_for = cause
        since_ms = routed.timer.waits_since_ms
        self._enter(self._queued(routed, self._clock.monotonic_ms() if since_ms is None else since_ms))

    def leave(self, routed: LocalRequest) -> None:
        """Take a request out of the queue, if it is in it."""
        queued, routed.queued = routed.queued, None
        if queued is not None:
            self._changes += 1
            self._queue.leave(queued)
            if queued.resumed:
                self._count_wait(queued.entered_ms, routed.resumed_for)

    def close(self, refusal: Refused) -> None:
        """Place no request any more, and refuse those that wait."""
        self._closed = True
        if self._place_timer is not None:
            self._place_timer.cancel()
        super().close(refusal)

    def _queued(self, routed: LocalRequest, now_ms: float) -> QueuedRequest[LocalRequest]:
        request = routed.machine.request
        if request.trace is not None:
            request.trace.open[queue_span(request.request_id)] = request.trace.begin("queue")
        # A task has none, and counts like one token: tenants take turns by what they were served.
        prompt_tokens = len(request.token_ids) // 4 or 1
        uncached = prompt_tokens
        if self._order is QueueOrder.SHORTEST_UNCACHED_WORK_FIRST:
            uncached = self._chooser.uncached_tokens(request, routed.path)
        routed.queued = QueuedRequest(
            routed,
            lane=lane_of(request),
            tenant=request.payer,
            weight=request.tenant_weight,
            priority=request.priority,
            prompt_tokens=prompt_tokens,
            uncached_tokens=uncached,
            entered_ms=now_ms,
            resumed=routed.placed is None,
        )
        return routed.queued

    # -- out -------------------------------------------------------------------------------------------------------

    def pump_soon(self) -> None:
        """Pump once this turn of the loop is over, however often it is asked for."""
        if not self._queue.is_empty and not self._pump_scheduled:
            self._pump_scheduled = True
            asyncio.get_running_loop().call_soon(self._scheduled_pump)

    def _scheduled_pump(self) -> None:
        self._pump_scheduled = False
        self.pump()

    def pump(self) -> None:
        """Place waiting requests while workers have room: resumed ones, then the head of each model's lane."""
        if self._pumping or self._closed or self._queue.is_empty:
            return
        self._pumping = True
        try:
            stuck: set[tuple[str, bool, frozenset[WorkerKey]]] = set()
            for queued in self._queue.resumed():
                # What one of them has tried already may be just right for the next; those that tried the same (a lost
                # worker leaves hundreds) fare alike, and are asked about once.
                routed = queued.item
                if routed.queued is not queued:
                    continue  # it left, or was placed, while others were
                kind = (queued.lane, routed.machine.plan.wants_decode, frozenset((*routed.tried, *routed.unable)))
                if kind not in stuck and self._try(routed) is not None:
                    stuck.add(kind)
            for lane in self._queue.lanes():
                if lane.endswith(SESSIONS):
                    self._place_sessions(lane)
                    continue
                self._place_lane(lane)
        finally:
            self._pumping = False

    def expire(self, now_ms: float) -> None:
        """Give up those whose next worker did not come in time."""
        for queued in self._queue.resumed():
            if queued.entered_ms < now_ms - self._timeout_ms:
                self.leave(queued.item)
                refusal = self._overdue(queued.item)
                self._give_up(queued.item, str(refusal), refusal.retry_after_s if refusal.status == 429 else None)

    def _try(self, routed: LocalRequest) -> PlacementFailure | None:
        """Place a waiting request; return why it continues to wait, ``None`` when it does not."""
        queued, placed = routed.queued, routed.placed
        assert queued is not None, "it is in the queue"
        if routed.is_over:
            self.leave(routed)
            return None
        failure = self._place(routed)
        if failure is None:
            routed.queued = None
            if routed.timer.waits_since_ms is None and not queued.resumed:
                routed.timer.waits_since_ms = queued.entered_ms  # its worker may refuse it, and the time runs on
            self._queue.leave(queued, dispatched=True)
            if queued.resumed:
                self._count_wait(queued.entered_ms, routed.resumed_for)
            if placed is not None:
                routed.placed = None
                placed.set_result(None)
            return None
        if failure.busy:
            return failure
        self.leave(routed)
        if placed is not None:
            placed.set_exception(self.refusal(failure))
        else:
            self._give_up(routed, str(failure), None)
        return None

    # -- turns of sessions -----------------------------------------------------------------------------------------

    def turns_without_place(self) -> list[QueuedRequest[LocalRequest]]:
        """Return the turns that wait for room in the working set, the one that asked first at the front."""
        waiting = [each for each in self._queue if each.lane.endswith(SESSIONS)]
        return sorted(waiting, key=lambda each: each.entered_ms)

    def release_turns(self) -> None:
        """Have turns that wait for places wait like other requests: admission rests."""
        for queued in self.turns_without_place():
            self._queue.leave(queued)
            queued.lane = queued.lane.removesuffix(SESSIONS)
            queued.waits_for_place = False
            queued.item.crowded = {}
            self._enter(queued)
        self._asked_ms.clear()
        self._offered.clear()
        self.pump()

    def _await_place(self, queued: QueuedRequest[LocalRequest], now_ms: float) -> None:
        """Have a turn wait for room in the working set, from when its session first asked."""
        turn = queued.item.machine.request.turn
        assert turn is not None, "only turns of sessions wait for that"
        asked = self._asked_ms
        session = (turn.tenant, turn.session)
        queued.lane += SESSIONS
        queued.waits_for_place = True
        queued.entered_ms = asked.setdefault(session, now_ms)
        if now_ms - queued.entered_ms > self._timeout_ms + ASKED_KEPT_MS:
            queued.entered_ms = asked[session] = now_ms
        asked.move_to_end(session)
        if len(asked) > self._asked_max:
            asked.popitem(last=False)
        self._offered.pop(queued.lane, None)
        self.pump_soon()

    def _place_sessions(self, lane: str) -> None:
        """Place turns of sessions as long as the working set has room for them."""
        chooser, now_ms = self._chooser, self._clock.monotonic_ms()
        changes, retry_ms = self._offered.get(lane, (-1, 0.0))
        if changes == chooser.place_changes and now_ms < retry_ms:
            return
        place_turns(self._queue, lane, now_ms, self._offer_place)
        first_ms = self._queue.first_entered_ms(lane)
        if first_ms is not None:
            retry_ms = min(chooser.next_place_ms(), first_ms + AGE_MS)
            self._offered[lane] = (chooser.place_changes, retry_ms)
            self._pump_at(now_ms, retry_ms)

    def _offer_place(self, queued: QueuedRequest[LocalRequest]) -> bool:
        """Place a turn for which the working set has room; return whether it waits no longer."""
        routed, turn = queued.item, queued.item.machine.request.turn
        waited_ms = max(self._clock.monotonic_ms() - queued.entered_ms, SESSION_TICK_MS)
        if not routed.is_over and not self._chooser.admits(routed, waited_ms):
            return False
        routed.has_place = True
        if self._try(routed) is not None:
            return False
        if turn is not None:
            self._asked_ms.pop((turn.tenant, turn.session), None)
        return True

    def _pump_at(self, now_ms: float, retry_ms: float) -> None:
        if self._place_timer is not None:
            self._place_timer.cancel()
        delay_s = min(PLACE_WAIT_MAX_S, max(0.001, (retry_ms - now_ms) / 1000))
        self._place_timer = asyncio.get_running_loop().call_later(delay_s, self.pump)

    # -- requests that are deferred, or wait for an engine ---------------------------------------------------------

    def _make_room(self, newcomer: QueuedRequest[LocalRequest]) -> None:
        """Place those whose turn it is until a newcomer has room in the queue, or engines have enough to compute."""
        while not self._queue.has_room(newcomer, HELD_MAX):
            head = self._queue.head(newcomer.lane)
            if head is None or self._try(head.item) is not None:
                return

    def _place_lane(self, lane: str) -> None:
        """Place those of a lane that can be, unless nothing has changed since that was last seen."""
        chooser, now_ms = self._chooser, self._clock.monotonic_ms()
        plans = chooser.plans and not lane.endswith(TASKS)
        seen, again_ms = self._looked.get(lane, (None, 0.0))
        if seen is not None and now_ms < again_ms and seen == self._basis(lane, plans, seen.waits_for_engine):
            return
        waits_for_engine = self._lanes.place(lane, now_ms, plans)
        first_ms = self._queue.first_entered_ms(lane)
        if first_ms is None or not (plans or waits_for_engine):
            self._looked.pop(lane, None)
            return
        due_ms = first_ms + self._lanes.hold_limit_ms(lane) if plans else math.inf
        if waits_for_engine or due_ms <= now_ms:
            due_ms = now_ms + LOOK_MS
        self._looked[lane] = self._basis(lane, plans, waits_for_engine), due_ms

    def _basis(self, lane: str, plans: bool, waits_for_engine: bool) -> LookedAt:
        relieved = self._chooser.relieved if waits_for_engine else 0
        return LookedAt(self._changes, plans, waits_for_engine, relieved, self._chooser.plan_basis(lane))

    def _try_turn(self, queued: QueuedRequest[LocalRequest]) -> Tried:
        failure = self._try(queued.item)
        if failure is None:
            return Tried.GONE
        waits_for_one = failure.waits_for_engine and self._chooser.planner is not None
        return Tried.BACKLOGGED if waits_for_one else Tried.BUSY

    def _place_planned(self, taken: Sequence[QueuedRequest[LocalRequest]]) -> bool:
        """Plan requests together, and place those that the plan selects; return whether there are any."""
        moved = False
        if self._chooser.takes_held(taken[0].lane):
            for routed, behind in self._chooser.plan([each.item for each in taken]):
                routed.behind = behind
                moved = self._try(routed) is None or moved
                routed.behind = {}
        return moved

    # -- refusals --------------------------------------------------------------------------------------------------

    def refusal(self, failure: PlacementFailure) -> Refused:
        """Return the refusal of a request for which there is no worker, now or at all."""
        if failure.busy:
            return self.busy(str(failure))
        if failure.is_policy_failure:
            return Refused(500, "policy_failed", str(failure))
        return Refused(503, "no_worker", str(failure))

    def _overdue(self, routed: LocalRequest) -> Refused:
        """Return the refusal of a request that has waited for too long."""
        request = routed.machine.request
        missing = self._chooser.missing_workers(request)
        if not missing:
            return self.busy(f"no worker had room within {self._timeout_ms:.0f} ms")
        why = f"model {request.model!r} has no {missing}: none came within {self._timeout_ms:.0f} ms"
        return Refused(503, "no_worker", why, self.retry_after_s())

    def retry_after_s(self) -> float:
        full_s = self._chooser.full.retry_after_s(self._clock.monotonic_ms())
        return max(super().retry_after_s(), full_s)

    def resumed(self) -> list[LocalRequest]:
        return [queued.item for queued in self._queue.resumed()]
