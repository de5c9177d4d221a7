"""Requests that wait until some pool has room for them: tried again at what pools report.

Rules
    1. Which request waits is decided by ``FairQueue``: bounded, by priority, fair among tenants, then by arrival.
       Requests for which the same pools come into question wait in one *lane*; lanes do not wait for each other.
    2. A request is tried (``Attempt``) when it comes, unless others wait in its lane already. Those that wait are tried
       in their turn whenever something *changed*: a pool reported, or a request ended. Asking a pool takes a while, so
       up to ``ATTEMPTS_PER_LANE_MAX`` are tried at a time, asking in the order of their turns; when one finds no room,
       none is tried until the next change.
    3. A request that found no room keeps its place. One that no pool can serve leaves, with the reason.
    4. *Resumed* requests (their clients are being served already) go before all others of their lane.
    5. While a request waits, full pools are asked how they are more often than otherwise (``ask_pools``), because
       others than this router end requests there too.
    6. A request that leaves (cancelled, timed out, gave way) is out at once. An attempt in progress for it finds
       its request finished and takes back what it had reserved.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from functools import partial

from poolgrid.kernel.requests.inference import Refused
from poolgrid.server.global_router.metrics import GlobalRouterMetrics
from poolgrid.server.global_router.settings import GlobalRouterSettings
from poolgrid.server.process.clock import Clock, within
from poolgrid.server.process.tasks import Restart, detached, supervised
from poolgrid.server.serving.admission_queue import AdmissionQueue
from poolgrid.server.serving.fair_queue import QueuedRequest

log = logging.getLogger(__name__)

ASKS_PER_STATUS_INTERVAL = 5
"""How often full pools are asked for their status per ``status_interval_ms`` while requests wait: every 50 ms."""

ATTEMPTS_PER_LANE_MAX = 16
"""A pool answers in a millisecond or, under load, in ten: enough to place several thousand requests a second."""

NEW = "new"
"""Kind of those that are not served yet."""

Attempt = Callable[[], Awaitable[Refused | None]]
"""Places a request; returns why not when waiting may help, raises ``Refused`` when it does not."""


@dataclass(slots=True, eq=False)
class WaitingFlight:
    """A request that waits."""

    attempt: Attempt
    kind: Hashable
    """Requests of one kind fare alike: when one found no room, the others of its lane are not tried. ``NEW``, or what a
    resumed one is to do."""
    may_go: Callable[[], bool]
    """Returns, without a message to any pool, whether an attempt may end otherwise than in vain."""
    placed: asyncio.Future[None] | None
    refusal: Refused | None = None
    """Why the last attempt failed."""
    waited_ms: float = 0.0
    """How long it was in the queue."""
    is_tried: bool = False
    """Whether an attempt is in progress."""


Place = QueuedRequest[WaitingFlight]


class _Lane:
    """Those that wait for the same pools."""

    def __init__(self) -> None:
        self.wake = asyncio.Event()
        """Set when there may be something to do."""
        self.stuck: set[Hashable] = set()
        """Kinds that found no room since the last change."""
        self.attempts: set[asyncio.Task[None]] = set()
        self.server: asyncio.Task[None] | None = None


class GlobalRouterQueue(AdmissionQueue[WaitingFlight]):
    """All requests that wait at one global router; used from one event loop."""

    def __init__(
        self,
        settings: GlobalRouterSettings,
        metrics: GlobalRouterMetrics,
        clock: Clock,
        ask_pools: Callable[[], None],
        status_interval_ms: float,
    ) -> None:
        super().__init__(
            settings.max_queue_requests, settings.max_queue_prompt_tokens, settings.queue_timeout_ms, metrics, clock
        )
        self._ask_pools = ask_pools
        self._ask_interval_s = status_interval_ms / 1000 / ASKS_PER_STATUS_INTERVAL
        self._changes = 0
        """How often something changed."""
        self._lanes: dict[str, _Lane] = {}
        """Those in which requests wait."""
        self._asking: asyncio.TimerHandle | None = None

    # -- in --------------------------------------------------------------------------------------------------------

    async def admit(self, place: Place) -> None:
        """Place a request, now or when its turn comes; raises ``Refused``."""
        cause = "behind_others"
        if not self.has_waiting(place.lane):
            if await self._succeeds(place.item):
                return
            cause = "pools_full"
        self._enter(place)
        try:
            await self._wait(place, self._timeout_ms, cause)
        except TimeoutError:
            raise self.busy(f"no pool had room within {self._timeout_ms:.0f} ms", place.item) from None

    async def resume(self, place: Place, timeout_ms: float) -> None:
        """Place a request whose client is being served already; raises ``Refused`` with the last reason."""
        place.resumed = True
        if await self._succeeds(place.item):
            return
        self._enter(place)
        try:
            await self._wait(place, timeout_ms, "next_leg_or_move")
        except TimeoutError:
            raise place.item.refusal or self.busy("no pool had room in time") from None

    async def _wait(self, place: Place, timeout_ms: float, cause: str) -> None:
        """Wait until a place is served; raises ``Refused``, or ``TimeoutError``."""
        began_ms = self._clock.monotonic_ms()
        placed = place.item.placed
        assert placed is not None, "its task waits"
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
            self._count_wait(began_ms, cause)

    # -- turns -----------------------------------------------------------------------------------------------------

    def changed(self) -> None:
        """Try the requests that wait again: a pool reported, or a request left one."""
        self._changes += 1
        for lane in self._lanes.values():
            lane.stuck.clear()
            lane.wake.set()

    def _waits(self, name: str) -> bool:
        return self._queue.head(name) is not None or any(each.lane == name for each in self._queue.resumed())

    async def _serve(self, name: str, lane: _Lane) -> None:
        """Try those that wait in a lane, in their order, until none is left."""
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
        """Return the request that is to be tried now, if any."""
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
        """Try a request that waits; it leaves, one way or the other, or returns to its place."""
        waiting = place.item
        began = self._changes
        waiting.is_tried = True
        try:
            placed = waiting.placed
            assert placed is not None, "its task waits"
            if placed.done() or await self._succeeds(waiting):
                self._queue.leave(place, dispatched=True)
                if not placed.done():
                    placed.set_result(None)
            else:
                self._queue.put_back(place)
                if began == self._changes:
                    lane.stuck.add(waiting.kind)
        except Exception as error:
            if not isinstance(error, Refused):
                log.exception("placing a request that waited failed: this is a bug")
            self._queue.leave(place)
            self._refuse(waiting, error)
        finally:
            waiting.is_tried = False
            task = asyncio.current_task()
            assert task is not None, "attempts are tasks"
            lane.attempts.discard(task)
            lane.wake.set()

    async def _succeeds(self, waiting: WaitingFlight) -> bool:
        waiting.refusal = await waiting.attempt()
        return waiting.refusal is None

    # -- reports ------------------------------------------------------------------------------------------------------

    def _ask_soon(self) -> None:
        if self._asking is None:
            self._asking = asyncio.get_running_loop().call_later(self._ask_interval_s, self._ask)

    def _ask(self) -> None:
        self._asking = None
        if len(self._queue):
            self._ask_pools()
            self._ask_soon()

    def busy(self, message: str, item: WaitingFlight | None = None) -> Refused:
        """Return the refusal of a full or slow queue; pools' own estimate stands in until a rate is known."""
        last = None if item is None else item.refusal
        detail = "" if last is None else f"; {last}"
        retry_after_s = None if last is None else last.retry_after_s
        if self._drain.is_measured:
            retry_after_s = self.retry_after_s()
        return Refused(429, "busy", f"{message}{detail}", retry_after_s)

    def close(self, refusal: Refused) -> None:
        """Stop trying, and refuse the requests that wait."""
        super().close(refusal)
        for lane in self._lanes.values():
            for task in (lane.server, *lane.attempts):
                if task is not None:
                    task.cancel()
        if self._asking is not None:
            self._asking.cancel()
