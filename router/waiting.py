"""Requests that wait for a worker with room: the queue of ``admission``, driven by whatever may have made room.

Rules
    1. A request that finds every worker busy waits in the lane of its model. Beyond ``queue_limit`` requests or
       ``queue_prompt_tokens``, or this router's part of them, the lowest priority gives way and is refused.
    2. *Resumed* requests (their clients are being served already) go before all others, and are refused by time only.
    3. The head of each lane is placed as soon as it can be; nobody overtakes it in its lane.
    4. Once the line is closed nobody is placed any more.
    5. With a policy that plans, new requests are *held* in the line (``poolgrid.router.held_requests``), and rule 3 is
       not for them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from poolgrid.inference.ports import Refused
from poolgrid.process.awake_clock import within
from poolgrid.process.clock import Clock
from poolgrid.process.figures import counted
from poolgrid.router.choosing import Chooser
from poolgrid.router.held_requests import HeldRequests, is_over
from poolgrid.router.metrics import RouterMetrics
from poolgrid.router.placement import Lack, NotPlaced, WaitCause
from poolgrid.router.routed import Routed
from poolgrid.router.settings import RouterSettings
from poolgrid.serving.admission.admission_queue import AdmissionQueue
from poolgrid.serving.admission.drain_rate import DrainRate
from poolgrid.serving.admission.queue_view import QueueView
from poolgrid.serving.admission.queued_request import QueuedRequest, QueueOrder
from poolgrid.wire.identifiers import WorkerKey


def queue_span(request_id: str) -> str:
    """Return the name under which a trace has the span of a request's waiting, while it lasts."""
    return f"queue {request_id}"


class WaitingLine:
    """The line of one router."""

    def __init__(
        self,
        settings: RouterSettings,
        chooser: Chooser,
        metrics: RouterMetrics,
        clock: Clock,
        place: Callable[[Routed], NotPlaced | None],
        give_up: Callable[[Routed, str, float | None], None],
    ) -> None:
        """``place`` puts a request on a worker or says why not; ``give_up`` ends one that was served before."""
        self._settings = settings
        self._chooser = chooser
        self._metrics = metrics
        self._clock = clock
        self._place = place
        self._give_up = give_up
        self._no_room = f"no worker had room within {settings.queue_timeout_ms:.0f} ms"
        self._order = QueueOrder(settings.queue_order)
        self._queue: AdmissionQueue[Routed] = AdmissionQueue(
            settings.queue_limit, settings.queue_prompt_tokens, self._order, settings.queue_aging_tokens_per_s
        )
        self._held = HeldRequests(self._queue, chooser, clock, settings.hold_limit_ms, self._try)
        self._drain = DrainRate()
        self._pumping = False
        self._pump_scheduled = False
        self._closed = False

    def divide(self, routers: int) -> None:
        """Have the part of the queue's bounds that is this router's, of so many that share them."""
        self._queue.divide(routers)

    # -- in --------------------------------------------------------------------------------------------------------

    def is_before(self, model: str) -> bool:
        """Tell whether others wait in a model's lane already."""
        return self._queue.waiting(model)

    async def wait(self, routed: Routed, cause: WaitCause) -> None:
        """Wait until a new request is on a worker; raises ``Refused``."""
        now_ms = self._clock.monotonic_ms()
        dispatched = routed.dispatched = asyncio.get_running_loop().create_future()
        try:
            self._enter(routed, now_ms)
            if cause is WaitCause.HELD:
                self.pump_soon()
            await within(self._settings.queue_timeout_ms, self._clock, dispatched)
        except TimeoutError:
            raise self._busy(self._no_room) from None
        finally:
            # Once it is placed it is no longer waited for here: its worker may be lost, and it in the line again as a
            # resumed one, before this task has its turn.
            if routed.dispatched is dispatched:
                self.leave(routed)
                routed.dispatched = None
            self._waited(now_ms, cause)

    def resume(self, routed: Routed, cause: WaitCause) -> None:
        """Have a request whose client is being served already wait for its next worker."""
        routed.resumed_for = cause
        since_ms = routed.waits_since_ms
        self._queue.enter(self._queued(routed, self._clock.monotonic_ms() if since_ms is None else since_ms))

    def leave(self, routed: Routed) -> None:
        """Take a request out of the line, wherever it is; one that is not in it stays as it is."""
        queued, routed.queued = routed.queued, None
        if queued is not None:
            self._queue.leave(queued)
            if queued.resumed:
                self._waited(queued.entered_ms, routed.resumed_for)

    def _waited(self, since_ms: float, cause: WaitCause) -> None:
        self._metrics.queue_seconds.labels(cause.value).observe((self._clock.monotonic_ms() - since_ms) / 1000)

    def close(self, refusal: Refused) -> None:
        """Place nobody any more, and refuse those that wait."""
        self._closed = True
        for queued in list(self._queue):
            waiter = queued.item.dispatched
            if waiter is not None and not waiter.done():
                waiter.set_exception(refusal)

    def _enter(self, routed: Routed, now_ms: float) -> None:
        queued = self._queued(routed, now_ms)
        if self._chooser.plans:
            self._held.make_room(queued)
        for victim in self._queue.enter(queued):
            refusal = self._busy(
                f"waiting already: {counted(len(self._queue), 'request')} with "
                f"{counted(self._queue.prompt_tokens, 'prompt token')}, allowed are "
                f"{self._queue.requests_max} with {self._queue.prompt_tokens_max}"
            )
            victim.item.queued = None
            if victim is queued:
                raise refusal
            waiter = victim.item.dispatched
            if waiter is not None and not waiter.done():
                self._metrics.queue_evictions.inc()
                waiter.set_exception(refusal)

    def _queued(self, routed: Routed, now_ms: float) -> QueuedRequest[Routed]:
        request = routed.machine.request
        if request.trace is not None:
            request.trace.open[queue_span(request.request_id)] = request.trace.begin("queue")
        prompt_tokens = len(request.token_ids) // 4
        uncached = prompt_tokens
        if self._order is QueueOrder.SHORTEST_UNCACHED_WORK_FIRST:
            uncached = self._chooser.uncached_tokens(request, routed.path)
        routed.queued = QueuedRequest(
            routed,
            lane=request.model,
            tenant=request.tenant,
            weight=request.tenant_weight,
            priority=request.priority,
            prompt_tokens=prompt_tokens,
            uncached_tokens=uncached,
            entered_ms=now_ms,
            resumed=routed.dispatched is None,
        )
        return routed.queued

    # -- out -------------------------------------------------------------------------------------------------------

    def pump_soon(self) -> None:
        """Pump once this turn of the loop is over, however often it is asked for."""
        if not self._queue.is_empty and not self._pump_scheduled:
            self._pump_scheduled = True
            asyncio.get_running_loop().call_soon(self._scheduled_pump)

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
                if kind not in stuck and not self._try(routed):
                    stuck.add(kind)
            for lane in self._queue.lanes():
                if self._chooser.plans:
                    self._held.place(lane)
                    continue
                while (head := self._queue.head(lane)) is not None and self._try(head.item):
                    pass
        finally:
            self._pumping = False

    def expire(self, now_ms: float) -> None:
        """Give up those whose next worker did not come in time."""
        overdue_ms = now_ms - self._settings.queue_timeout_ms
        for queued in self._queue.resumed():
            if queued.entered_ms < overdue_ms:
                self.leave(queued.item)
                refusal = self._busy(self._no_room)
                self._give_up(queued.item, str(refusal), refusal.retry_after_s)

    def _scheduled_pump(self) -> None:
        self._pump_scheduled = False
        self.pump()

    def _try(self, routed: Routed) -> bool:
        """Place a waiting request; return False when it goes on waiting, because every worker is busy."""
        queued, dispatched = routed.queued, routed.dispatched
        assert queued is not None, "it is in the line"
        if is_over(routed):
            self.leave(routed)
            return True
        missing = self._place(routed)
        if missing is None:
            routed.queued = None
            if routed.waits_since_ms is None and not queued.resumed:
                routed.waits_since_ms = queued.entered_ms  # its worker may refuse it, and the time goes on
            self._queue.leave(queued, dispatched=True)
            if queued.resumed:
                self._waited(queued.entered_ms, routed.resumed_for)
            if dispatched is not None:
                routed.dispatched = None
                dispatched.set_result(None)
            return True
        if missing.lack is Lack.BUSY:
            return False
        self.leave(routed)
        if dispatched is not None:
            dispatched.set_exception(self.refusal(missing))
        else:
            self._give_up(routed, str(missing), None)
        return True

    # -- refusals --------------------------------------------------------------------------------------------------

    def refusal(self, missing: NotPlaced) -> Refused:
        """Return what a client is told for whose request there is no worker, now or at all."""
        if missing.lack is Lack.BUSY:
            return self._busy(str(missing))
        if missing.lack is Lack.POLICY_FAILED:
            return self._refuse(500, "policy_failed", str(missing))
        return self._refuse(503, "no_worker", str(missing))

    def _busy(self, message: str) -> Refused:
        return self._refuse(429, "busy", message, self.retry_after_s())

    def _refuse(self, status: int, code: str, message: str, retry_after_s: float | None = None) -> Refused:
        self._metrics.refused.labels(code).inc()
        return Refused(status, code, message, retry_after_s)

    # -- accounts and views ----------------------------------------------------------------------------------------

    def finished(self, routed: Routed) -> None:
        """Note that a request that was on a worker has ended: its tokens count in its tenant's turns."""
        self._drain.finished(self._clock.monotonic_ms())
        if self._queue.is_empty:
            return  # nobody has turns
        request = routed.machine.request
        self._queue.charge(
            request.model, request.tenant, request.tenant_weight, request.priority, routed.machine.delivery.tokens
        )

    def retry_after_s(self) -> float:
        """Return when a refused asker should come back."""
        now_ms = self._clock.monotonic_ms()
        return max(self._drain.retry_after_s(len(self._queue), now_ms), self._chooser.full.retry_after_s(now_ms))

    def backlog_s(self) -> float:
        return self._drain.backlog_s(len(self._queue), self._clock.monotonic_ms())

    def resumed(self) -> list[Routed]:
        return [queued.item for queued in self._queue.resumed()]

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def prompt_tokens(self) -> int:
        return self._queue.prompt_tokens

    def view(self) -> QueueView:
        """Return what operators are shown of the queue."""
        return QueueView(
            len(self._queue),
            self._queue.requests_max,
            self._queue.prompt_tokens,
            self._queue.prompt_tokens_max,
            self.retry_after_s() if self._drain.is_measured else None,
            self._metrics.refused.by_label(),
        )
