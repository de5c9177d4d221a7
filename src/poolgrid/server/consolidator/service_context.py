"""What the parts of one consolidator share: counters, limits of the log, timers, tasks, threads."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from poolgrid.kernel.wire.errors import WireError
from poolgrid.server.process.clock import Clock
from poolgrid.server.process.log_lines import Complaints
from poolgrid.server.process.tasks import detached

log = logging.getLogger(__name__)

T = TypeVar("T")

THREADS = 4
"""One each for appends, syncs, a snapshot and replays, so that none waits for another."""

COUNTED = (
    "undecodable_frames",
    "journal_append_errors",
    "journal_snapshot_errors",
    "journal_read_errors",
    "journal_lost_segments",
    "feed_records",
    "feed_replays",
    "feed_snapshots",
    "feed_answers_dropped",
    "feed_subscribers_refused",
)


class ServiceContext:
    """The life of one service; belongs to its loop."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.counts = dict.fromkeys(COUNTED, 0)
        self.complaints = Complaints(log, clock)
        self.stopping = False
        self.broken = ""
        """Why the state is not the fold of the journal any more; empty while it is."""
        self.threads = ThreadPoolExecutor(THREADS, "journal")
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def ended(self) -> bool:
        return self.stopping or bool(self.broken)

    def undecodable(self, peer: str, error: WireError) -> None:
        """Count an unreadable message, and log it now and then."""
        self.counts["undecodable_frames"] += 1
        self.complaints.about(peer, error)

    def after(self, name: str, delay_ms: float, work: Callable[[], None]) -> None:
        """Do something later; each name has one timer."""
        if self.stopping:
            return
        timer = self._timers.get(name)
        if timer is not None:
            timer.cancel()
        self._timers[name] = asyncio.get_running_loop().call_later(delay_ms / 1000, work)

    def cancel_timers(self) -> None:
        for timer in self._timers.values():
            timer.cancel()

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = detached(work, name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def end_tasks(self) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks)

    def on_thread(self, work: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self.threads, work, *arguments)


async def to_its_end(work: asyncio.Future[T]) -> T:
    """Wait for work on a thread, also when cancelled: what it opens is closed only then."""
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait({work})
        if not work.cancelled():
            work.exception()  # taken, or asyncio would complain: the caller that gave the start up knows why
        raise
