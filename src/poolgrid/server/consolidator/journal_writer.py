"""Appends turns to the journal in their order, on a thread: the event loop never waits for a disk.

Rules
    1. Turns are stored in the order in which they were put, and reported (``on_stored``) in that order. A turn without
       records waits behind those before it: what it answers may name what they hold.
    2. One write is in progress at a time; the next takes everything that waits, up to ``WRITE_BYTES_MAX``. What one has
       stored is published in slices, in turn with all other bulk work (``poolgrid.server.process.tasks``).
    3. A write that fails is tried again every ``append_retry_ms``, without limit; nothing behind it is stored before
       it.
    4. A journal that another process has taken over (``JournalFenced``) takes nothing any more: what waits is never
       stored, and ``on_fenced`` is called once.
    5. What waits is bounded by ``QUEUE_BYTES_MAX``: then ``on_full`` is called, and its owner takes nothing in until
       ``on_room``. Nothing is dropped.

A journal in memory is written at once, on the loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, Literal

from poolgrid.kernel.consolidation.consolidator import ConsolidatorTurn
from poolgrid.kernel.journal.framing import JournalFenced
from poolgrid.kernel.journal.ports import Journal
from poolgrid.server.process.clock import Clock
from poolgrid.server.process.tasks import SLICE_MS, BulkWork, Restart, supervised

log = logging.getLogger(__name__)

QUEUE_BYTES_MAX = 64 * 1024 * 1024
"""Records and answers that wait for the disk: half a minute of a pool of a hundred busy workers."""

ROOM_SHARE = 0.5
"""Part of the queue that must be free again before more is taken in, so that it does not turn on and off."""

ITEM_BYTES = 512
"""What a turn, or an answer in it, counts besides its records."""

WRITE_BYTES_MAX = 8 * 1024 * 1024
"""Records of one write, which is all or nothing."""

TELL_BYTES = 12 * 1024
"""Records published between two turns of the event loop, each with ``RECORD_BYTES`` more: less than a millisecond for
a router in the same process, and more than is taken in meanwhile, so that what waits does not grow."""

RECORD_BYTES = 256
"""A record is as much work as this many bytes of hashes."""

SLOW_MS = 500.0
"""A write that takes longer is worth a word: a sound disk takes some milliseconds, a busy one a hundred."""

SLOW_TOLD_MS = 10_000.0
"""How long the word stands after the last slow write."""

COMPLAIN_EVERY_MS = 30_000.0
"""How often the log repeats that a journal still cannot be written."""


@dataclass(slots=True)
class _Item:
    """A turn with its encoded records, or work between two writes."""

    turn: ConsolidatorTurn | None
    payloads: list[bytes]
    size: int = 0
    job: Callable[[], Any] | None = None
    done: asyncio.Future[Any] | None = None


class JournalWriter:
    """The only one who writes a journal; belongs to the loop that made it."""

    def __init__(
        self,
        journal: Journal,
        fsync: Literal["interval", "always", "never"],
        append_retry_ms: float,
        clock: Clock,
        executor: Executor,
        on_stored: Callable[[ConsolidatorTurn, list[bytes]], None],
        on_full: Callable[[], None],
        on_room: Callable[[], None],
        on_fenced: Callable[[JournalFenced], None],
        bulk: BulkWork,
    ) -> None:
        self.errors = 0
        """Appends, and syncs before an acknowledgement, that failed."""
        self.stalled = False
        """Whether the last attempt failed."""
        self.stall_reason = ""
        self._journal = journal
        self._at_once = journal.in_memory
        """Whether there is no disk to wait for."""
        self._always = fsync == "always"
        self._retry_s = append_retry_ms / 1000
        self._clock = clock
        self._executor = executor
        self._on_stored = on_stored
        self._on_full = on_full
        self._on_room = on_room
        self._on_fenced = on_fenced
        self._bulk = bulk
        self._fenced = False
        self._waiting: deque[_Item] = deque()
        self._stored: deque[_Item] = deque()
        """Turns that are in the journal and not published yet."""
        self._waiting_bytes = 0
        self._full = False
        self._task: asyncio.Task[None] | None = None
        self._stopping = False
        self._stop = asyncio.Event()
        self._appended_turns = 0
        self._appended = False
        """Whether the records being written are in the journal, and only their sync is missing."""
        self._stalled_since_ms = 0.0
        self._complained_ms = 0.0
        self._began_ms: float | None = None
        self._took_ms = 0.0
        self._slow_until_ms = float("-inf")

    def put(self, turn: ConsolidatorTurn, payloads: list[bytes]) -> None:
        """Have a turn stored; ``on_stored`` may be called before this returns."""
        if self._task is None and not self._waiting and (not payloads or self._at_once):
            if payloads:
                self._journal.append(payloads, turn.now.wall_ms)
            self._on_stored(turn, payloads)
            return
        size = sum(map(len, payloads)) + ITEM_BYTES * (1 + len(payloads) + len(turn.replies))
        self._enqueue(_Item(turn, payloads, size))
        if self._waiting_bytes > QUEUE_BYTES_MAX and not self._full:
            self._full = True
            log.warning(
                "%d MiB wait for the journal's disk, which is the limit: events are not accepted until half are stored",
                QUEUE_BYTES_MAX // 2**20,
            )
            self._on_full()

    async def between_writes(self, job: Callable[[], Any]) -> Any:
        """Do some work on the thread while nothing is being written; raises what it raises."""
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._enqueue(_Item(None, [], job=job, done=done))
        return await done

    async def finish(self) -> None:
        """Store what waits, with one more attempt; what fails then was never acknowledged."""
        self._stopping = True
        self._stop.set()
        if self._task is not None:
            await asyncio.wait({self._task})
        for item in self._waiting:
            if item.done is not None:
                item.done.cancel()
        self._waiting.clear()

    @property
    def slow_ms(self) -> float:
        """Return how long writes take, when that is long: the one in progress, or the last one; else 0."""
        now_ms = self._clock.monotonic_ms()
        under_way_ms = now_ms - self._began_ms if self._began_ms is not None else 0.0
        if under_way_ms >= SLOW_MS:
            return max(under_way_ms, self._took_ms if now_ms < self._slow_until_ms else 0.0)
        return self._took_ms if now_ms < self._slow_until_ms else 0.0

    @property
    def stalled_ms(self) -> float:
        return self._clock.monotonic_ms() - self._stalled_since_ms if self.stalled else 0.0

    def _enqueue(self, item: _Item) -> None:
        self._waiting.append(item)
        self._waiting_bytes += item.size
        if self._task is None:
            self._task = supervised(self._write, "journal writer", Restart())

    async def _write(self) -> None:
        await self._write_waiting()
        # Only now: a writer that fails starts again, and there is never a second one.
        self._task = None

    async def _write_waiting(self) -> None:
        loop = asyncio.get_running_loop()
        waiting = self._waiting
        await self._tell()
        while waiting and not self._fenced:
            head = waiting[0]
            if head.job is not None and head.done is not None:
                await self._work(head.job, head.done)
                waiting.popleft()
                continue
            count, payloads, wall_ms = self._next_write()
            self._began_ms = began_ms = self._clock.monotonic_ms()
            try:
                if payloads:
                    await loop.run_in_executor(self._executor, self._store, payloads, wall_ms)
            except JournalFenced as error:
                self._fence(error)
                return
            except Exception as error:
                if not isinstance(error, OSError):
                    log.exception("writing the journal failed: this is a bug")
                self._note_failure(len(payloads), error)
                if self._stopping:
                    return
                await self._pause()
                continue
            finally:
                self._note_end(self._clock.monotonic_ms() - began_ms)
            self._note_success()
            self._appended = False
            self._stored.extend(waiting.popleft() for _ in range(count))
            await self._tell()

    def _fence(self, error: JournalFenced) -> None:
        if not self._fenced:
            self._fenced = True
            self._on_fenced(error)

    async def _tell(self) -> None:
        """Tell of the turns that are stored; others have their turn between, for this may be seconds of work."""
        stored = self._stored
        monotonic_ms = self._clock.monotonic_ms
        if stored and self._bulk.busy:
            await self._bulk.turn()
        room = TELL_BYTES
        ends_ms = monotonic_ms() + SLICE_MS
        while stored:
            if room <= 0 or monotonic_ms() >= ends_ms:
                await self._bulk.turn()
                room = TELL_BYTES
                ends_ms = monotonic_ms() + SLICE_MS
            item = stored.popleft()
            room -= sum(map(len, item.payloads)) + RECORD_BYTES * (1 + len(item.payloads))
            self._waiting_bytes -= item.size
            assert item.turn is not None, "jobs are not part of a write"
            try:
                self._on_stored(item.turn, item.payloads)
            except Exception:
                log.exception("the state of the journal could not be reported: this is a bug")
        if self._full and self._waiting_bytes <= ROOM_SHARE * QUEUE_BYTES_MAX:
            self._full = False
            if not self._stopping:
                self._on_room()

    def _next_write(self) -> tuple[int, list[bytes], int]:
        """Return how many turns are stored together, their records, and the time of the last."""
        count, size, wall_ms = 0, 0, 0
        payloads: list[bytes] = []
        for item in self._waiting:
            if item.turn is None or (count and size + item.size > WRITE_BYTES_MAX):
                break
            count += 1
            size += item.size
            payloads += item.payloads
            wall_ms = item.turn.now.wall_ms
            if self._appended and count == self._appended_turns:
                break
        self._appended_turns = count
        return count, payloads, wall_ms

    def _store(self, payloads: list[bytes], wall_ms: int) -> None:
        """Append, and make durable what must be before it is acknowledged; on the thread."""
        if not self._appended:
            self._journal.append(payloads, wall_ms)
            self._appended = True
        if self._always:
            # What a failed sync left on the disk is unknown; only another one can confirm that it is durable.
            self._journal.sync()

    async def _work(self, job: Callable[[], Any], done: asyncio.Future[Any]) -> None:
        try:
            result = await asyncio.get_running_loop().run_in_executor(self._executor, job)
        except Exception as error:
            if not done.done():
                done.set_exception(error)
        else:
            if not done.done():
                done.set_result(result)

    async def _pause(self) -> None:
        try:
            async with asyncio.timeout(self._retry_s):
                await self._stop.wait()
        except TimeoutError:
            pass

    def _note_end(self, took_ms: float) -> None:
        self._began_ms = None
        self._took_ms = took_ms
        if took_ms >= SLOW_MS:
            now_ms = self._clock.monotonic_ms()
            if now_ms >= self._slow_until_ms:
                log.warning("the journal's disk is slow: a write took %.0f ms", took_ms)
            self._slow_until_ms = now_ms + SLOW_TOLD_MS
        elif self._slow_until_ms > float("-inf"):
            self._slow_until_ms = float("-inf")

    def _note_failure(self, records: int, error: Exception) -> None:
        now_ms = self._clock.monotonic_ms()
        self.errors += 1
        self.stall_reason = str(error)
        if not self.stalled:
            self.stalled = True
            self._stalled_since_ms = now_ms
        elif now_ms - self._complained_ms < COMPLAIN_EVERY_MS:
            return
        self._complained_ms = now_ms
        log.error(
            "%s %d records %s failed (%s); nothing is acknowledged or published until it succeeds, tried again "
            "every %.0f ms",
            "making" if self._appended else "appending",
            records,
            "durable" if self._appended else "to the journal",
            error,
            1000 * self._retry_s,
        )

    def _note_success(self) -> None:
        if self.stalled:
            self.stalled = False
            log.warning(
                "the journal takes records again, at offset %d, after %.1f s",
                self._journal.next_offset,
                (self._clock.monotonic_ms() - self._stalled_since_ms) / 1000,
            )
