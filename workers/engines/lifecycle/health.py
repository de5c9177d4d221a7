"""Whether an engine is alive, answers, and does its work.

Rules:

1. An engine that has shut down, or reports that it is not healthy, is *broken*: ``broken`` gets the error, and nothing
   heals it.
2. An engine whose thread or whose reader has not come back from a call for ``answer_timeout_ms`` is *silent*: nothing
   that it has can be expected of it. So is one in which nothing at all moves, and one that generates no token for
   request but its worker's own.
3. An engine that is idle proves itself by generating a token every now and then; one that is busy by its progress
   (``poolgrid.server.workers.engines.lifecycle.health``). One that is ill is asked again and again.
4. ``unhealthy_reason`` is the fault; silence is wrong too. Progress and proofs heal it, but no proof counts
   while a call is out.

Whether an engine does its work: not only that it lives, but that its requests make progress. Pure.

An engine whose KV transfers are stuck answers every question and finishes nothing. It is *stalled* when

1. requests have been in it for ``timeout_ms``, and nothing of any of them has moved, or
2. a decode request has waited that long for its KV while a later one has begun: engines admit in order, so its transfer
   hangs, and the blocks that wait for it are lost to others.

Output is movement, and so is an end that the engine came to by itself. A request that was given up, by its client or by
this worker, has not moved: where all clients lose patience before ``timeout_ms``, one after the other, time adds up.
Only time counts in which there was a request; an engine without any owes nothing.

A request that waits because the batch is full is no stall: others move, and none overtakes it. Progress heals at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from poolgrid.kernel.wire.limits import TEXT_CHARS_MAX
from poolgrid.server.process.clock import Clock
from poolgrid.server.process.tasks import detached
from poolgrid.server.workers.engines.lifecycle.engine_thread import EngineThread
from poolgrid.server.workers.metrics import WorkerMetrics


@dataclass(frozen=True, slots=True)
class Stall:
    """What does not move, and since when."""

    reason: str
    silent_ms: float
    total: bool
    """Whether nothing moves at all."""
    certain: bool = True
    """``False`` where only the time adds up of requests that were given up: each may have been given up at once."""


@dataclass(slots=True)
class _Entry:
    serial: int
    since_ms: float
    transfers: bool
    """Whether it waits for KV from another worker."""


class ProgressMonitor:
    """Watches the requests of one rank; time comes in as arguments, in milliseconds."""

    def __init__(self, timeout_ms: float) -> None:
        self._timeout_ms = timeout_ms
        self._waiting: dict[str, _Entry] = {}
        """Requests without output, in order of arrival."""
        self._running: set[str] = set()
        self._owed_ms = 0.0
        """Time with requests and without movement, up to ``_since_ms``."""
        self._since_ms = 0.0
        """Since when there are requests without movement, not counting what is owed from before."""
        self._serial = 0
        self._begun = -1
        """Serial of the youngest request that has begun."""

    def __len__(self) -> int:
        return len(self._waiting) + len(self._running)

    def entered(self, request_id: str, transfers: bool, now_ms: float) -> None:
        if not len(self):
            self._since_ms = now_ms
        self._waiting[request_id] = _Entry(self._serial, now_ms, transfers)
        self._serial += 1

    def moved(self, request_id: str, now_ms: float) -> None:
        self.proved(now_ms)
        entry = self._waiting.pop(request_id, None)
        if entry is not None:
            self._begun = max(self._begun, entry.serial)
            self._running.add(request_id)

    def proved(self, now_ms: float) -> None:
        """Note that the engine has done something, for whomever."""
        self._owed_ms = 0.0
        self._since_ms = now_ms

    def ended(self, request_id: str, now_ms: float) -> None:
        self.proved(now_ms)
        self._remove(request_id)

    def given_up(self, request_id: str, now_ms: float) -> None:
        """Note that a request is over because it was cancelled, or because it failed."""
        self._remove(request_id)
        if not len(self):
            self._owed_ms += max(0.0, now_ms - self._since_ms)
            self._since_ms = now_ms

    def silent_ms(self, now_ms: float) -> float:
        """Return for how long nothing has moved; 0 while there is nothing to move."""
        return self._owed_ms + max(0.0, now_ms - self._since_ms) if len(self) else 0.0

    def stall(self, now_ms: float) -> Stall | None:
        silent_ms = self.silent_ms(now_ms)
        if silent_ms > self._timeout_ms:
            transfers = sum(entry.transfers for entry in self._waiting.values())
            waiting = f", {transfers} of them for KV from another worker" if transfers else ""
            return Stall(
                f"{len(self)} requests are in the engine{waiting}, nothing has moved for {silent_ms:.0f} ms, "
                f"allowed are {self._timeout_ms:.0f}",
                silent_ms,
                total=True,
                certain=silent_ms - self._owed_ms > self._timeout_ms,
            )
        for request_id, entry in self._waiting.items():
            waited_ms = now_ms - entry.since_ms
            if waited_ms <= self._timeout_ms:
                break  # the others came later
            if entry.transfers and entry.serial < self._begun:
                return Stall(
                    f"request {request_id!r} has waited {waited_ms:.0f} ms for its KV while later ones began, "
                    f"allowed are {self._timeout_ms:.0f}",
                    waited_ms,
                    total=False,
                )
        return None

    def _remove(self, request_id: str) -> None:
        self._waiting.pop(request_id, None)
        self._running.discard(request_id)


log = logging.getLogger(__name__)

WATCH_INTERVAL_S = 1.0
"""Time between two looks at the engine's health; a quarter of the shortest time-out where that is less."""


class EngineBrokenError(RuntimeError):
    """The engine will not do anything any more."""


class EngineHealth:
    """State of an engine's health; the loop of its owner calls ``check`` every ``check_interval_s``."""

    def __init__(
        self,
        thread: EngineThread,
        is_alive: Callable[[], bool],
        generate_one: Callable[[int], Awaitable[None]] | None,
        reader_silent_ms: Callable[[float], float],
        dp_size: int,
        *,
        interval_ms: float,
        timeout_ms: float,
        progress_timeout_ms: float,
        answer_timeout_ms: float,
        clock: Clock,
        metrics: WorkerMetrics,
    ) -> None:
        """``is_alive`` and ``generate_one`` (of a rank) are called in the thread; ``None`` = it does not generate."""
        self._thread = thread
        self._is_alive = is_alive
        self._generate_one = generate_one
        self._reader_silent_ms = reader_silent_ms
        self._interval_ms = interval_ms
        self._timeout_s = timeout_ms / 1e3
        self._answer_timeout_ms = answer_timeout_ms
        self._clock = clock
        self._metrics = metrics
        self._progress = [ProgressMonitor(progress_timeout_ms) for _ in range(dp_size)]
        self._proved_ms = clock.monotonic_ms()
        """When the engine last did work for a request."""
        self._probe_failed = ""
        self._probing: asyncio.Task[None] | None = None
        self._changed: Callable[[], None] = _nobody
        self.unhealthy_reason = ""
        self.is_silent = False
        """Whether nothing can be expected of the engine."""
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.check_interval_s = min(
            WATCH_INTERVAL_S, progress_timeout_ms / 4e3, answer_timeout_ms / 4e3, interval_ms / 2e3
        )

    def observe(self, changed: Callable[[], None]) -> None:
        """Call ``changed`` from now on when ``unhealthy_reason`` begins or ends, or ``is_silent`` changes."""
        self._changed = changed

    # -- what requests tell --------------------------------------------------------------------------------------------

    def entered(self, rank: int, request_id: str, transfers: bool) -> None:
        """Note a request that the engine was given; ``transfers``: its KV comes from another worker."""
        self._progress[rank].entered(request_id, transfers, self._clock.monotonic_ms())

    def moved(self, rank: int, request_id: str) -> None:
        now_ms = self._clock.monotonic_ms()
        self._progress[rank].moved(request_id, now_ms)
        self.proved(now_ms)

    def ended(self, rank: int, request_id: str, now_ms: float) -> None:
        self._progress[rank].ended(request_id, now_ms)
        self.proved(now_ms)

    def given_up(self, rank: int, request_id: str, now_ms: float) -> None:
        self._progress[rank].given_up(request_id, now_ms)

    def proved(self, now_ms: float) -> None:
        """Note that the engine did work for a request."""
        self._proved_ms = now_ms
        self._probe_failed = ""
        if self.unhealthy_reason and not self._unanswered(now_ms):
            self._set("", silent=False)

    def seen(self, alive: bool, error: BaseException | None = None) -> bool:
        """Take the engine's report of its life; a dead one ends ``broken`` with ``error``. Return whether it is."""
        if self.broken.done():
            return True
        if alive:
            return False
        reason = error or RuntimeError("it reports that it is not healthy")
        self.broken.set_exception(EngineBrokenError(f"the engine has shut down: {reason}"))
        return True

    def lose(self, reason: str) -> None:
        """Take a broken engine from the watcher of its processes; the engine may never report it itself."""
        if not self.broken.done():
            self._set(reason, silent=False)
            self.broken.set_exception(EngineBrokenError(reason))

    # -- what time tells -----------------------------------------------------------------------------------------------

    def check(self, now_ms: float, busy: bool) -> None:
        """Ask for a heartbeat; look whether a busy engine makes progress; have an idle or ill one prove itself."""
        self._thread.beat(now_ms, self._is_alive, self.seen)
        self._metrics.engine_silence_seconds.set(max(each.silent_ms(now_ms) for each in self._progress) / 1e3)
        unanswered = self._unanswered(now_ms)
        if unanswered:
            self._set(unanswered, silent=True)
            return
        stalls = [stall for monitor in self._progress if (stall := monitor.stall(now_ms)) is not None]
        certain = next((stall for stall in stalls if stall.certain), None)
        if certain is not None:
            self._set(certain.reason, silent=certain.total)
        elif not stalls and self.unhealthy_reason and not self._probe_failed and (busy or self._generate_one is None):
            self._set("", silent=False)
        if stalls or self.unhealthy_reason or (not busy and now_ms - self._proved_ms >= self._interval_ms):
            self._prove()

    async def generate_one(self, timeout_s: float) -> None:
        """Generate a token on every rank; raises ``TimeoutError``, and what the engine raises."""
        generate = self._generate_one
        if generate is None:
            return

        async def all_ranks() -> None:
            async with asyncio.TaskGroup() as group:
                for rank in range(len(self._progress)):
                    group.create_task(_awaited(generate(rank)))

        try:
            async with asyncio.timeout(timeout_s):
                await self._thread.run(all_ranks, "one token")
        except ExceptionGroup as group:
            raise group.exceptions[0] from None

    async def close(self) -> None:
        if self._probing is not None:
            self._probing.cancel()
            await asyncio.wait({self._probing})
        self.broken.cancel()

    def _unanswered(self, now_ms: float) -> str:
        """Return which call has not come back in time, and for how long; empty = none."""
        for what, silent_ms in (
            ("the engine's thread", self._thread.silent_ms(now_ms)),
            ("reading the engine's events", self._reader_silent_ms(now_ms)),
        ):
            if silent_ms > self._answer_timeout_ms:
                return (
                    f"{what} has not come back from a call for more than {self._answer_timeout_ms:.0f} ms "
                    "(answer_timeout_ms)"
                )
        return ""

    def _prove(self) -> None:
        if self._generate_one is not None and (self._probing is None or self._probing.done()):
            self._probing = detached(self._probe(), "engine probe")

    async def _probe(self) -> None:
        self._proved_ms = self._clock.monotonic_ms()
        try:
            await self.generate_one(self._timeout_s)
        except TimeoutError:
            self._probe_failed = f"a one-token generation has not ended within {self._timeout_s * 1e3:.0f} ms"
        except Exception as error:
            self._probe_failed = f"a one-token generation failed: {error}"[:TEXT_CHARS_MAX]
        else:
            self._metrics.health_checks.labels("passed").inc()
            now_ms = self._clock.monotonic_ms()
            for monitor in self._progress:
                monitor.proved(now_ms)
            self.proved(now_ms)
            return
        self._metrics.health_checks.labels("failed").inc()
        if not self.broken.done():
            self._set(self._probe_failed, silent=True)

    def _set(self, unhealthy_reason: str, *, silent: bool) -> None:
        if unhealthy_reason and not self.unhealthy_reason:
            log.error("the engine is unhealthy: %s; new requests are refused", unhealthy_reason)
        elif self.unhealthy_reason and not unhealthy_reason:
            log.warning("the engine is well again")
        before = (bool(self.unhealthy_reason), self.is_silent)
        self.unhealthy_reason = unhealthy_reason
        self.is_silent = silent
        self._metrics.engine_healthy.set(not unhealthy_reason)
        if before != (bool(unhealthy_reason), silent):
            self._changed()


async def _awaited(work: Awaitable[None]) -> None:
    await work


def _nobody() -> None:
    return
