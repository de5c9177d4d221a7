"""The journal of one consolidator: opened, written, made durable, kept within its bounds.

All that may wait for a disk is done on threads. A snapshot is made of the state frozen at one offset and waits for the
records before it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator
from typing import TypeVar

from poolgrid.kernel.consolidation.consolidator import ConsolidatorTurn
from poolgrid.kernel.consolidation.pool_state import PoolState
from poolgrid.kernel.journal.framing import JournalCorrupt, JournalFenced
from poolgrid.kernel.journal.ports import Journal
from poolgrid.server.consolidator.journal_writer import JournalWriter
from poolgrid.server.consolidator.service_context import ServiceContext, to_its_end
from poolgrid.server.consolidator.settings import ConsolidatorSettings, Tuning
from poolgrid.server.consolidator.state_dumps import StateDumps
from poolgrid.server.process.tasks import BulkWork

log = logging.getLogger(__name__)

T = TypeVar("T")

FILES_LOOK_MS = 1000.0
"""How often the journal's directory is searched for deleted segments, a scan of about twenty names, and
whether the journal is too large."""


class JournalKeeper:
    """The only owner of a journal; belongs to the service's loop."""

    def __init__(
        self,
        open_journal: Callable[[], Journal],
        settings: ConsolidatorSettings,
        tuning: Tuning,
        context: ServiceContext,
        on_fenced: Callable[[JournalFenced], None],
    ) -> None:
        self.journal: Journal
        self.writer: JournalWriter
        self.stored_offset = 0
        """Offset behind the last record that is in the journal and was published."""
        self.damage = ""
        """What was found of the journal's files, until a snapshot stands in for it."""
        self.snapshotting = False
        self._open_journal = open_journal
        self._settings = settings
        self._tuning = tuning
        self._context = context
        self._on_fenced = on_fenced
        self._dumps: StateDumps
        self._is_open = False
        self._syncs_later = False
        self._unsynced = False
        self._sync_trouble = ""
        self._damaged_files: set[str] = set()
        """Segments that could not be read, each reported once."""
        self._looking = False
        self._snapshot_offset = 0
        self._until_stored: deque[tuple[int, asyncio.Event]] = deque()
        """Those that wait for records to be stored; offsets only grow."""
        self._keeping = asyncio.Lock()
        """Held while snapshots are kept or records removed."""
        self._making_room = False

    async def open(self) -> PoolState:
        """Open the journal and return the state after its last record; raises what the journal raises."""
        await to_its_end(self._context.on_thread(self._open))
        pool = await to_its_end(self._context.on_thread(self.journal.recover, self._tuning.blocks_per_worker_max))
        self._snapshot_offset = self.stored_offset = pool.offset
        for line in self.journal.report:
            log.warning("journal %s: %s", self._settings.data_dir, line)
        return pool

    def _open(self) -> None:
        # On the thread, which remembers it even when the start was cancelled.
        self.journal = self._open_journal()
        self._is_open = True

    def start(
        self,
        dumps: StateDumps,
        bulk: BulkWork,
        on_stored: Callable[[ConsolidatorTurn, list[bytes]], None],
        on_full: Callable[[], None],
        on_room: Callable[[], None],
    ) -> None:
        self._dumps = dumps
        fsync, context = self._settings.fsync, self._context
        self.writer = JournalWriter(
            self.journal,
            fsync,
            self._tuning.append_retry_ms,
            context.clock,
            context.threads,
            on_stored,
            on_full,
            on_room,
            self._on_fenced,
            bulk,
        )
        self._syncs_later = fsync == "interval" and not self.journal.in_memory

    async def close(self) -> None:
        """Make the journal durable and close it, if it was opened."""
        if not self._is_open:
            return
        try:
            await self._context.on_thread(self.journal.close)
        except OSError as error:
            log.error("closing the journal failed (%s); the newest records may not be durable", error)

    @property
    def trouble(self) -> str:
        """Return what keeps the journal from being written as it should, in words; empty when all is well."""
        writer = self.writer
        if writer.stalled:
            return (
                f"the journal cannot be written since {writer.stalled_ms / 1000:.0f} s ({writer.stall_reason}); "
                "workers' events wait with them"
            )
        slow_ms = writer.slow_ms
        if slow_ms:
            return f"disk slow: {slow_ms:.0f} ms for a write of the journal; workers' events are known that much later"
        return self._sync_trouble or self.damage

    # What was stored

    def note_stored(self, offset: int) -> None:
        self.stored_offset = offset
        if self._syncs_later and not self._unsynced:
            self._sync_later()

    def wake_waiters(self) -> None:
        while self._until_stored and self._until_stored[0][0] <= self.stored_offset:
            self._until_stored.popleft()[1].set()

    async def stored(self, offset: int) -> bool:
        """Wait until all records below an offset are in the journal; return False when the end comes first."""
        if self.stored_offset < offset and not self._context.stopping:
            reached = asyncio.Event()
            self._until_stored.append((offset, reached))
            await reached.wait()
        return self.stored_offset >= offset and not self._context.stopping

    def stop_waiting(self) -> None:
        for _, reached in self._until_stored:
            reached.set()
        self._until_stored.clear()

    def _sync_later(self) -> None:
        self._unsynced = True
        sync_ms = self._tuning.fsync_interval_ms
        self._context.after("sync", sync_ms, lambda: self._context.spawn(self._sync(), "journal sync"))

    async def _sync(self) -> None:
        self._unsynced = False
        context = self._context
        try:
            await context.on_thread(self.journal.sync)
        except OSError as error:
            context.counts["journal_append_errors"] += 1
            self._sync_trouble = f"what was written last may not survive a power failure ({error})"
            context.complaints.note(
                "sync", "making the journal durable failed: %s%s", self._sync_trouble, level=logging.ERROR
            )
            if not context.stopping and not self._unsynced:
                self._sync_later()
        else:
            self._sync_trouble = ""

    # Snapshots

    def snapshot_if_due(self, offset: int) -> None:
        """Write a snapshot when enough records came after the last one."""
        due = offset - self._snapshot_offset >= self._tuning.snapshot_every_records
        if due and not self.journal.in_memory:  # no process will ever load one of memory
            self.snapshot_now()

    def snapshot_now(self) -> None:
        if not self.snapshotting and not self._context.ended:
            self.snapshotting = True
            self._context.spawn(self._snapshot(), "journal snapshot")

    async def _snapshot(self) -> None:
        context, damage = self._context, self.damage
        offset = self._dumps.offset
        try:
            frozen, parts = await self._dumps.make(self.journal.snapshot_parts)
            offset = frozen.offset
            if not await self.stored(offset):
                return
            async with self._keeping:
                await context.on_thread(self.journal.keep_snapshot, offset, _given_away(parts))
                removed = await context.on_thread(self.journal.retain, context.clock.wall_ms())
        except JournalFenced as error:
            self._on_fenced(error)
        except (OSError, JournalCorrupt) as error:
            context.counts["journal_snapshot_errors"] += 1
            words = "writing the journal snapshot at offset %d failed (%s); the next is tried later%s"
            context.complaints.note("snapshot", words, offset, error, level=logging.ERROR)
        else:
            log.info("journal snapshot at offset %d, %d old segments removed", offset, removed)
            if damage and self.damage == damage:
                log.warning("%s: the snapshot at offset %d replaces the lost records", damage, offset)
                self.damage = ""
        finally:
            self._snapshot_offset = offset
            self.snapshotting = False

    # Files

    def look_after_files(self) -> None:
        """Look at size and files now, and every ``FILES_LOOK_MS``; a journal in memory has none."""
        if self.journal.in_memory:
            return
        self._context.after("files", FILES_LOOK_MS, self.look_after_files)
        # Snapshots that come after so many records may come too late for large ones.
        stalled = self.writer.stalled
        if not stalled and self.journal.snapshot_due:
            self.snapshot_now()
        elif (stalled or self.journal.crowded) and not self._making_room:
            self._making_room = True
            self._context.spawn(self._make_room(stalled), "room in the journal")
        if not self._looking:
            self._looking = True
            self._context.spawn(self._find_lost_files(), "look at the journal's files")

    async def _make_room(self, stalled: bool) -> None:
        """Make a journal smaller that is much larger than its retention, or takes nothing any more."""
        # A snapshot of the state may be waiting for records that the journal has no room for.
        journal, wall_ms = self.journal, self._context.clock.wall_ms()
        try:
            async with self._keeping:
                if stalled:
                    blocks_max = self._tuning.blocks_per_worker_max
                    removed = await self._context.on_thread(journal.make_room, blocks_max, wall_ms)
                else:
                    removed = await self._context.on_thread(journal.retain, wall_ms)
        except JournalFenced as error:
            self._on_fenced(error)
        except (OSError, JournalCorrupt) as error:
            self._context.complaints.note("room", "making room in the journal failed (%s); it is tried again%s", error)
        else:
            if removed:
                log.info("the journal was too large: %d old segments removed", removed)
        finally:
            self._making_room = False

    async def _find_lost_files(self) -> None:
        """Notice deleted or cut segments, and continue in a new one behind a new snapshot."""
        try:
            lost = await self.writer.between_writes(self.journal.drop_lost)
        except JournalFenced as error:
            self._on_fenced(error)
        except OSError as error:
            self._context.complaints.note(
                "files", "looking at the journal's files failed: %s%s", error, level=logging.ERROR
            )
        else:
            if lost:
                self._context.counts["journal_lost_segments"] += len(lost)
                self._note_damage(
                    f"{len(lost)} journal segments were deleted or cut by another process: {', '.join(lost)}"
                )
            elif self.damage:
                self.snapshot_now()  # the last attempt failed
        finally:
            self._looking = False

    def note_unreadable(self, damage: JournalCorrupt) -> None:
        if damage.file not in self._damaged_files:
            self._damaged_files.add(damage.file)
            self._note_damage(str(damage))

    def _note_damage(self, what: str) -> None:
        self.damage = what
        log.error("%s; a snapshot is written, so that a restart finds the state", what)
        self.snapshot_now()


def _given_away(parts: list[T]) -> Iterator[T]:
    """Yield the parts of a list, which is empty then: the caller frees them, one by one.

    A snapshot of millions of blocks, freed at once by the loop, blocks it for fifty milliseconds.
    """
    parts.reverse()
    while parts:
        yield parts.pop()
