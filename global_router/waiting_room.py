"""Requests that wait until some pool has room for them: the queue of ``admission``, driven by what pools say.

Rules
    1. Who waits is decided by ``AdmissionQueue``: bounded, by priority, fair among tenants, then by arrival. Requests
       for which the same pools come into question wait in one *lane*; lanes do not wait for each other.
    2. A request is tried (``Attempt``) when it comes, unless others wait in its lane already. Those that wait are tried
       in their turn whenever something *changed*: a pool spoke, or a request ended. Asking a pool takes a while, so up
       to ``ATTEMPTS_PER_LANE_MAX`` are tried at a time, asking in the order of their turns; when one finds no room,
       nobody is tried until the next change.
    3. A request that found no room keeps its place. One that no pool can serve leaves, with the reason.
    4. *Resumed* requests (their clients are being served already) go before all others of their lane.
    5. While anybody waits, full pools are asked how they are more often than otherwise (``ask_pools``), because others
       than this router end requests there too.
    6. Whoever leaves (cancelled, timed out, gave way) is out at once. An attempt that is under way for it finds its
       request finished and takes back what it had reserved.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from functools import partial

from poolgrid.global_router.metrics import GlobalRouterMetrics
from poolgrid.global_router.settings import GlobalRouterSettings
from poolgrid.inference.ports import Refused
from poolgrid.process.awake_clock import within
from poolgrid.process.clock import Clock
from poolgrid.process.figures import counted
from poolgrid.process.tasks import Restart, detached, supervised
from poolgrid.serving.admission.admission_queue import AdmissionQueue
from poolgrid.serving.admission.drain_rate import DrainRate
from poolgrid.serving.admission.queue_view import QueueView
from poolgrid.serving.admission.queued_request import QueuedRequest

log = logging.getLogger(__name__)

ASKS_PER_STATUS_INTERVAL = 5
"""How often full pools are asked for their status per ``status_interval_ms`` while somebody waits: every 50 ms."""

ATTEMPTS_PER_LANE_MAX = 16
"""A pool answers in a millisecond or, under load, in ten: enough to place some thousand requests a second."""

NEW = "new"
"""Kind of those that are not served yet."""

Attempt = Callable[[], Awaitable[Refused | None]]
"""Places a request; returns why not when waiting may help, raises ``Refused`` when it does not."""


@dataclass(slots=True, eq=False)
class Waiting:
    """One who waits."""

    attempt: Attempt
    kind: Hashable
    """Requests of one kind fare alike: when one found no room, the others of its lane are not tried. ``NEW``, or what a
    resumed one is to do."""
    may_go: Callable[[], bool]
    """Tells, without asking anybody, whether an attempt may end otherwise than in vain."""
    placed: asyncio.Future[None]
    refusal: Refused | None = None
    """Why the last attempt failed."""
    waited_ms: float = 0.0
    """How long it was in the queue."""
    is_tried: bool = False
    """Whether an attempt is under way."""


Place = QueuedRequest[Waiting]


class _Lane:
    """Those that wait for the same pools."""

    def __init__(self) -> None:
        self.wake = asyncio.Event()
        """Set when there may be something to do."""
        self.stuck: set[Hashable] = set()
        """Kinds that found no room since the last change."""
        self.attempts: set[asyncio.Task[None]] = set()
        self.server: asyncio.Task[None] | None = None


class WaitingRoom:
    """All who wait at one global router; used from one event loop."""

    def __init__(
        self,
        settings: GlobalRouterSettings,
        metrics: GlobalRouterMetrics,
        clock: Clock,
        ask_pools: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._metrics = metrics
        self._clock = clock
        self._ask_pools = ask_pools
        self._queue: AdmissionQueue[Waiting] = AdmissionQueue(settings.queue_limit, settings.queue_prompt_tokens)
        self._drain = DrainRate()
        self._changes = 0
        """How often something changed."""
        self._lanes: dict[str, _Lane] = {}
        """Those in which somebody waits."""
        self._asking: asyncio.TimerHandle | None = None

    def divide(self, routers: int) -> None:
        """Have the part of the queue's bounds that is this global router's, of so many that share them."""
        self._queue.divide(routers)

    # -- in --------------------------------------------------------------------------------------------------------

    async def admit(self, place: Place) -> None:
        """Place a request, now or when its turn comes; raises ``Refused``."""
        cause = "behind_others"
        if not self._queue.waiting(place.lane):
            if await self._succeeds(place.item):
                return
            cause = "pools_full"
        for victim in self._queue.enter(place):
            refusal = self._busy(
                f"waiting already: {counted(len(self._queue), 'request')} with "
                f"{counted(self._queue.prompt_tokens, 'prompt token')}, allowed are "
                f"{self._queue.requests_max} with {self._queue.prompt_tokens_max}",
                victim.item.refusal,
            )
            if victim is place:
                raise refusal
            if not victim.item.placed.done():
                self._metrics.queue_evictions.inc()
                victim.item.placed.set_exception(refusal)
        timeout_ms = self._settings.queue_timeout_ms
        try:
            await self._wait(place, timeout_ms, cause)
        except TimeoutError:
            raise self._busy(f"no pool had room within {timeout_ms:.0f} ms", place.item.refusal) from None

    async def resume(self, place: Place, timeout_ms: float) -> None:
        """Place a request whose client is being served already; raises ``Refused`` with the last reason."""
        place.resumed = True
        if await self._succeeds(place.item):
            return
        self._queue.enter(place)
        try:
            await self._wait(place, timeout_ms, "next_leg_or_move")
        except TimeoutError:
            raise place.item.refusal or self._busy("no pool had room in time", None) from None

    async def _wait(self, place: Place, timeout_ms: float, cause: str) -> None:
        """Wait until a place is served; raises ``Refused``, or ``TimeoutError``."""
        began_ms = self._clock.monotonic_ms()
        placed = place.item.placed
        lane = self._lanes.get(place.lane)
        if lane is None:
            lane = self._lanes[place.lane] = _Lane()
            lane.server = supervised(partial(self._serve, place.lane, lane), f"waiting for {place.lane!r}", Restart())
        lane.wake.set()
        self._ask_soon()
        try:
            await within(timeout_ms, self._clock, placed)
        finally:
            self._queue.leave(place)
            lane.wake.set()  # it may have been the last one
            place.item.waited_ms = self._clock.monotonic_ms() - began_ms
            self._metrics.queue_seconds.labels(cause).observe(place.item.waited_ms / 1000)

    # -- turns -----------------------------------------------------------------------------------------------------

    def changed(self) -> None:
        """Let those that wait try again: a pool said something, or a request left one."""
        self._changes += 1
        for lane in self._lanes.values():
            lane.stuck.clear()
            lane.wake.set()

    def _waits(self, name: str) -> bool:
        return self._queue.head(name) is not None or any(each.lane == name for each in self._queue.resumed())

    async def _serve(self, name: str, lane: _Lane) -> None:
        """Try those that wait in a lane, in their order, until nobody is left."""
        while lane.attempts or self._waits(name):
            lane.wake.clear()
            while len(lane.attempts) < ATTEMPTS_PER_LANE_MAX and (place := self._next(name, lane)) is not None:
                lane.attempts.add(detached(self._try(place, lane), "trying one that waited"))
                # It runs up to its first question to a pool, which takes room that is known of.
                await asyncio.sleep(0)
            await lane.wake.wait()
        # Only now: one that fails starts again, and those that wait find it here.
        del self._lanes[name]

    def _next(self, name: str, lane: _Lane) -> Place | None:
        """Return who is to be tried now, if anybody."""
        for place in self._queue.resumed():
            if place.lane == name and not place.item.is_tried and place.item.kind not in lane.stuck:
                return place
        head = self._queue.head(name)
        if head is None or NEW in lane.stuck:
            return None
        if not head.item.may_go():
            lane.stuck.add(NEW)
            return None
        return self._queue.take(name)

    async def _try(self, place: Place, lane: _Lane) -> None:
        """Try one that waits; it leaves, one way or the other, or goes back to its place."""
        waiting = place.item
        began = self._changes
        waiting.is_tried = True
        try:
            if waiting.placed.done() or await self._succeeds(waiting):
                self._queue.leave(place, dispatched=True)
                if not waiting.placed.done():
                    waiting.placed.set_result(None)
            else:
                self._queue.put_back(place)
                if began == self._changes:
                    lane.stuck.add(waiting.kind)
        except Exception as error:
            if not isinstance(error, Refused):
                log.exception("placing a request that waited failed: this is a bug")
            self._queue.leave(place)
            if not waiting.placed.done():
                waiting.placed.set_exception(error)
        finally:
            waiting.is_tried = False
            task = asyncio.current_task()
            assert task is not None, "attempts are tasks"
            lane.attempts.discard(task)
            lane.wake.set()

    async def _succeeds(self, waiting: Waiting) -> bool:
        waiting.refusal = await waiting.attempt()
        return waiting.refusal is None

    # -- news ------------------------------------------------------------------------------------------------------

    def _ask_soon(self) -> None:
        if self._asking is None:
            interval_s = self._settings.status_interval_ms / 1000 / ASKS_PER_STATUS_INTERVAL
            self._asking = asyncio.get_running_loop().call_later(interval_s, self._ask)

    def _ask(self) -> None:
        self._asking = None
        if len(self._queue):
            self._ask_pools()
            self._ask_soon()

    def finished(self, lane: str, tenant: str, weight: float, priority: int, output_tokens: int) -> None:
        """Note that a request that was on a worker has ended."""
        self._drain.finished(self._clock.monotonic_ms())
        self._queue.charge(lane, tenant, weight, priority, output_tokens)

    # -- views -----------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def prompt_tokens(self) -> int:
        return self._queue.prompt_tokens

    def retry_after_s(self) -> float | None:
        """Return when a refused asker should come back, from the rate at which requests ended lately."""
        if not self._drain.is_measured:
            return None
        return self._drain.retry_after_s(len(self._queue), self._clock.monotonic_ms())

    def backlog_s(self) -> float:
        return self._drain.backlog_s(len(self._queue), self._clock.monotonic_ms())

    def view(self) -> QueueView:
        """Return what operators are shown."""
        return QueueView(
            len(self._queue),
            self._queue.requests_max,
            self._queue.prompt_tokens,
            self._queue.prompt_tokens_max,
            self.retry_after_s(),
            self._metrics.refused.by_label(),
        )

    def _busy(self, message: str, last: Refused | None) -> Refused:
        """Return the refusal of a full or slow queue; pools' own estimate stands in until a rate is known."""
        measured_s = self.retry_after_s()
        told_s = last.retry_after_s if last is not None else None
        detail = f"; {last}" if last is not None else ""
        return Refused(429, "busy", f"{message}{detail}", told_s if measured_s is None else measured_s)

    def close(self, refusal: Refused) -> None:
        """Stop trying, and send those that wait away."""
        for place in list(self._queue):
            if not place.item.placed.done():
                place.item.placed.set_exception(refusal)
        for lane in self._lanes.values():
            for task in (lane.server, *lane.attempts):
                if task is not None:
                    task.cancel()
        if self._asking is not None:
            self._asking.cancel()
