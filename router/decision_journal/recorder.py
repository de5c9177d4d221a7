"""Records what a router decides and what its decisions depend on, off the path of requests.

Rules
    1. The router's turn only appends to a list. A flush, ``FLUSH_MS`` later, hands the list to one thread that encodes
       and writes it; lists are written in order, one at a time.
    2. At most ``queue_limit`` inputs wait. Beyond it, and when a write fails, what waits is dropped and so is all that
       follows, until the thread is free and the disk takes bytes again. Then the journal records how much is missing
       (``InputsLost``) and why, and continues from a ``Checkpoint`` of the router's state.
    3. A checkpoint is taken between two inputs, on the router's loop, so its place is exact. The loop only
       copies references; the thread looks through them. Predictions from the router's own choices take at most
       ``1 / BELIEFS_SHARE`` of a segment, the youngest first, and the checkpoint records until when the rest matters.
    4. Nothing here ever keeps a request waiting, and a journal that cannot be written never ends the router.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import msgspec

from poolgrid.kernel.decision.decision import Decision
from poolgrid.kernel.journal.framing import FILE_HEADER, EntryFault, JournalCorrupt, file_header, frame, scan
from poolgrid.kernel.journal.ports import Disk
from poolgrid.kernel.journal.stored_records import SUFFIX, created_ms_of, offset_of, segment_names
from poolgrid.kernel.routing.inputs import Input, RecordsArrived
from poolgrid.kernel.routing.router_state import RouterState
from poolgrid.kernel.routing.working_set import Admission
from poolgrid.kernel.wire.hashing import stable_u64
from poolgrid.server.process.clock import Clock
from poolgrid.server.router.decision_journal.checkpoints import Draft, draft_of
from poolgrid.server.router.decision_journal.entries import (
    DECISIONS,
    INPUTS_VERSION,
    Decided,
    FirstTokenCame,
    InputsLost,
    InputWriter,
    JournalEntry,
    Kept,
    OverlapRealised,
    RecordsApplied,
    RequestEnded,
    RouterSettingsNoted,
    encoder,
    kept,
    records_applied,
)

log = logging.getLogger(__name__)

FLUSH_MS = 100.0
"""Longest time an input waits before it is handed to the writing thread: what a killed router loses."""

QUEUE_LIMIT = 20_000
"""Inputs that wait to be written: three seconds of a busy router."""

RETRY_MS = 1000.0
"""Wait after a failed write."""

SYNC_EVERY_FLUSHES = 10
"""Made durable about once a second: decisions explain, no other state depends on them."""

BELIEFS_SHARE = 16
"""Part of a segment that a checkpoint's beliefs may take: half a million blocks in 64 MiB, as many as predictions."""


@dataclass(slots=True)
class RecorderCounters:
    """What became of the inputs."""

    written_decisions: int = 0
    lost_decisions: int = 0
    failed_writes: int = 0


@dataclass(slots=True)
class _Batch:
    """What one trip to the writing thread is to do."""

    inputs: list[Kept]
    begin: Draft | None = None
    """Begin a segment with this before the inputs."""
    lost: InputsLost | None = None
    then_begin: Draft | None = None
    """Begin a segment with this behind the inputs."""


@dataclass(slots=True)
class DecisionRecorder:
    """An ``InputLog`` that writes; all methods but ``_write`` belong to the router's loop."""

    segments: DecisionSegments
    state: RouterState
    noted: RouterSettingsNoted
    clock: Clock
    segment_bytes: int
    queue_limit: int = QUEUE_LIMIT
    counters: RecorderCounters = field(default_factory=RecorderCounters)
    failing: str = ""
    """Why the last write failed; empty while writing works."""
    _pending: list[Kept] = field(default_factory=list)
    _executor: ThreadPoolExecutor | None = None
    _timer: asyncio.TimerHandle | None = None
    _writing: asyncio.Future[None] | None = None
    _broken: str = "the router began"
    """Why the journal does not continue what is on disk; empty while it does."""
    _fresh: bool = True
    _lost: int = 0
    _lost_decisions: int = 0
    _retry_at_ms: float = 0.0
    _flushes: int = 0
    _stopping: bool = False
    _writer: InputWriter = field(default_factory=InputWriter)
    """The writing thread's own."""

    # -- life ------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to write; the router must not have done anything yet."""
        self._executor = ThreadPoolExecutor(1, "decision-journal")
        self.flush()

    async def stop(self) -> None:
        """Write what waits, make it durable, release the directory."""
        self._stopping = True
        if self._timer is not None:
            self._timer.cancel()
        while self._writing is not None:
            await asyncio.wait({self._writing})
        self._timer = None
        if not self._broken or self._retry_at_ms <= self.clock.monotonic_ms():
            self.flush()
            while self._writing is not None:
                await asyncio.wait({self._writing})
        executor, self._executor = self._executor, None
        try:
            if executor is None:
                self.segments.close()  # it was not started, and has written nothing
            else:
                await asyncio.get_running_loop().run_in_executor(executor, self.segments.close)
        except OSError as error:
            log.error("closing the decision journal failed (%s); its newest entries may not be durable", error)
        if executor is not None:
            executor.shutdown(wait=False)

    @property
    def pending(self) -> int:
        return len(self._pending)

    # -- InputLog --------------------------------------------------------------------------------------------------

    def note(self, given: Input, came: Decision | Admission | None = None) -> None:
        """Note an input that changed the router's state."""
        pending = self._pending
        if type(given) is RecordsArrived and pending:
            last = pending[-1]
            # More of the same moment becomes one entry with what came before.
            if (
                type(last) is RecordsApplied
                and last.now_ms == given.now_ms
                and last.to_offset == given.records[0].offset
            ):
                pending[-1] = records_applied(given, last.check)
                return
        self._add(kept(given, came))

    # -- what came of it -------------------------------------------------------------------------------------------

    def realised(self, request_id: str, attempt: int, cached_tokens: int, isl: int | None = None) -> None:
        self._add(OverlapRealised(request_id, attempt, cached_tokens, isl))

    def first_token(self, request_id: str, attempt: int, ttft_ms: float) -> None:
        self._add(FirstTokenCame(request_id, attempt, ttft_ms))

    def ended(self, request_id: str, output_tokens: int) -> None:
        self._add(RequestEnded(request_id, output_tokens, self.clock.wall_ms()))

    # -- from list to thread ---------------------------------------------------------------------------------------

    def _add(self, item: Kept) -> None:
        if self._broken and self._executor is not None and not self._fresh:
            self._lose([item], self._broken)
            return
        if len(self._pending) >= self.queue_limit:
            dropped, self._pending = self._pending, []
            self._lose([*dropped, item], f"more than {self.queue_limit} inputs waited to be written")
            return
        self._pending.append(item)
        if self._timer is None and self._writing is None:
            self._schedule(FLUSH_MS)

    def _lose(self, items: Sequence[Kept], why: str) -> None:
        if not self._broken:
            log.error("the decision journal is incomplete from now on: %s; a replay will report it", why)
        self._broken = why
        decisions = sum(type(item) is Decided for item in items)
        self._lost += len(items)
        self._lost_decisions += decisions
        self.counters.lost_decisions += decisions
        if self._timer is None and self._writing is None:
            self._schedule(FLUSH_MS)

    def _schedule(self, delay_ms: float) -> None:
        if self._executor is not None and not self._stopping:
            self._timer = asyncio.get_running_loop().call_later(delay_ms / 1000, self.flush)

    def flush(self) -> None:
        """Hand what waits to the thread; what came before is written by then."""
        self._timer = None
        if self._executor is None or self._writing is not None:
            return
        inputs, self._pending = self._pending, []
        batch = _Batch(inputs)
        if self._broken:
            # Inputs that wait are those of a router that has just begun: it was empty before them.
            batch.begin = self._checkpoint()
            if self._lost:
                batch.lost = InputsLost(self._lost, self._lost_decisions, self.clock.wall_ms(), self._broken)
        elif self.segments.is_full(self.segment_bytes):
            batch.then_begin = self._checkpoint()
        elif not inputs:
            return
        self._broken, self._fresh = "", False
        self._lost = self._lost_decisions = 0
        self._flushes += 1
        future = asyncio.get_running_loop().run_in_executor(self._executor, self._write, batch)
        self._writing = future
        future.add_done_callback(lambda done: self._written(batch, done))

    def _written(self, batch: _Batch, done: asyncio.Future[None]) -> None:
        self._writing = None
        error = None if done.cancelled() else done.exception()
        if error is None:
            if self.failing:
                log.warning("the decision journal is written again")
            self.failing = ""
            self.counters.written_decisions += sum(type(item) is Decided for item in batch.inputs)
            if self._pending or self._broken:
                self._schedule(FLUSH_MS)
            return
        if not isinstance(error, OSError):
            log.error("writing the decision journal failed", exc_info=error)
        self.failing = str(error) or type(error).__name__
        self.counters.failed_writes += 1
        self._retry_at_ms = self.clock.monotonic_ms() + RETRY_MS
        lost, self._pending = self._pending, []
        if batch.lost is not None:
            self._lost += batch.lost.inputs
            self._lost_decisions += batch.lost.decisions
        self._lose([*batch.inputs, *lost], f"a write failed: {self.failing}")
        if self._timer is not None:
            self._timer.cancel()
        self._schedule(RETRY_MS)

    def _checkpoint(self) -> Draft:
        if self._fresh:
            return Draft(0, self.clock.monotonic_ms(), self.clock.wall_ms(), True)
        return draft_of(self.state, self.clock.monotonic_ms(), self.clock.wall_ms())

    # -- the thread ------------------------------------------------------------------------------------------------

    def _write(self, batch: _Batch) -> None:
        segments = self.segments
        segments.repair()
        now_ms = self.clock.wall_ms()
        if batch.begin is not None:
            self._begin(batch.begin, batch.lost, now_ms)
        payloads: list[bytes] = []
        for item in batch.inputs:
            self._writer.write(item, payloads)
        if payloads:
            segments.append(payloads)
        if batch.then_begin is not None:
            self._begin(batch.then_begin, None, now_ms)
            segments.retain(now_ms)
        if self._flushes % SYNC_EVERY_FLUSHES == 0:
            segments.sync()

    def _begin(self, draft: Draft, lost: InputsLost | None, now_ms: int) -> None:
        self._writer.begin_segment()
        checkpoint = draft.checkpoint(self.segment_bytes // BELIEFS_SHARE // 8)
        head: list[JournalEntry] = [self.noted, checkpoint] if lost is None else [self.noted, lost, checkpoint]
        self.segments.begin([encoder.encode(entry) for entry in head], now_ms)


def settings_noted(router_id: str, version: str, settings: Mapping[str, Any]) -> RouterSettingsNoted:
    """Return the entry that names a router and the settings its decisions depend on."""
    text = msgspec.json.encode(dict(sorted(settings.items()))).decode()
    return RouterSettingsNoted(router_id, version, dict(settings), f"{stable_u64(text):016x}", INPUTS_VERSION)


@dataclass(slots=True)
class _Segment:
    name: str
    first: int
    created_ms: int
    size: int
    begun_with: int = 0
    """Bytes with which it began in this life of the router."""


class DecisionSegments:
    """The segments of a decision journal: appended to by one process, each readable on its own.

    Rules
        1. A life of the router begins a segment; a segment that grew beyond ``segment_bytes``, and to twice what it
           began with, is followed by another one: checkpoints never take more than half of a journal.
        2. After a failed write the segment is cut back to what was there before, and closed: what was to be written is
           lost, and the next segment records that.
        3. What a killed process left torn is cut when the journal is opened. A damaged segment is left as it is: it is
           for ``verify`` to name, and no reason not to serve.
        4. Retention removes whole segments, oldest first, never the newest.
    """

    def __init__(self, disk: Disk, retention_bytes: int, retention_ms: int) -> None:
        self._disk = disk
        self._retention_bytes = retention_bytes
        self._retention_ms = retention_ms
        self._segments: list[_Segment] = []
        self._next = 0
        self._needs_repair = False
        self.report: list[str] = []
        """What opening found and did, for the log."""
        for name in segment_names(disk):
            self._open(name)

    def _open(self, name: str) -> None:
        data = self._disk.read(name, 0, self._disk.size(name))
        if len(data) < FILE_HEADER.size:
            self.report.append(f"{name}: removed an unfinished header of {len(data)} bytes")
            self._disk.remove(name)
            return
        first = offset_of(name)
        try:
            created_ms = created_ms_of(name, data, DECISIONS)
        except JournalCorrupt as error:
            self.report.append(str(error))
            self._segments.append(_Segment(name, first, 0, len(data)))
            self._next = first + 1
            return
        positions, end, damage = scan(data, FILE_HEADER.size, first)
        if damage is not None and damage.fault is EntryFault.TORN:
            self._disk.truncate(name, end)
            self.report.append(f"{name}: cut a torn tail of {len(data) - end} bytes at byte {end} ({damage.detail})")
            data = data[:end]
        elif damage is not None:
            self.report.append(f"{name}: damaged from byte {damage.position} on ({damage.detail})")
        self._segments.append(_Segment(name, first, created_ms, len(data)))
        # One number is left out behind damage, so that the next segment's name differs from all there are.
        self._next = first + len(positions) + (damage is not None and damage.fault is EntryFault.CORRUPT)
        if not positions:
            self._next = max(self._next, first + 1)

    def is_full(self, segment_bytes: int) -> bool:
        """Return whether another segment should follow the newest one."""
        if not self._segments:
            return False
        tail = self._segments[-1]
        return tail.size >= max(segment_bytes, 2 * tail.begun_with)

    def begin(self, payloads: Sequence[bytes], now_ms: int) -> None:
        name = f"{self._next:020d}{SUFFIX}"
        if name in self._disk.names():
            self._disk.truncate(name, 0)  # a failed attempt left a part behind
        entries = [frame(payload, number) for number, payload in enumerate(payloads, self._next)]
        data = b"".join((file_header(DECISIONS.magic, self._next, now_ms), *entries))
        self._disk.append(name, data)
        self._segments.append(_Segment(name, self._next, now_ms, len(data), len(data)))
        self._next += len(payloads)
        self._needs_repair = False

    def append(self, payloads: Sequence[bytes]) -> None:
        """Append entries to the newest segment, all of them or none."""
        tail = self._segments[-1]
        data = b"".join(frame(payload, number) for number, payload in enumerate(payloads, self._next))
        try:
            self._disk.append(tail.name, data)
        except OSError:
            self._needs_repair = True
            raise
        tail.size += len(data)
        self._next += len(payloads)

    def repair(self) -> None:
        """Cut what a failed write left behind; nothing may be written before that."""
        if self._needs_repair:
            self._disk.truncate(self._segments[-1].name, self._segments[-1].size)
            self._needs_repair = False

    def sync(self) -> None:
        if self._segments:
            self._disk.sync(self._segments[-1].name)

    def retain(self, now_ms: int) -> int:
        """Remove segments that are too many or too old; return how many."""
        removed = 0
        total = sum(segment.size for segment in self._segments)
        while len(self._segments) > 1:
            oldest, following = self._segments[0], self._segments[1]
            too_old = following.created_ms < now_ms - self._retention_ms
            if not (total > self._retention_bytes or too_old):
                break
            self._disk.remove(oldest.name)
            total -= oldest.size
            del self._segments[0]
            removed += 1
        return removed

    def sizes(self) -> tuple[int, int]:
        """Return the number of segments and their bytes."""
        return len(self._segments), sum(segment.size for segment in self._segments)

    def close(self) -> None:
        """Make everything durable and release the directory."""
        try:
            self.sync()
        finally:
            self._disk.close()
