"""Catching up with the pool's journal: snapshots and records are applied in slices, with turns for requests between.

Rules
    1. A snapshot is loaded next to the state in use and replaces it in one step; records that come meanwhile wait.
    2. What takes a moment is applied at once; more in slices, in their order, in turn with all else that is done in
       bulk (``poolgrid.server.process.tasks``). Nothing is left out. What ends a slice is what its records hold: one of
       a worker that reports its whole cache again holds a hundred times what one of an engine's step does.
    3. The router is *level* when all that arrived is applied. What is decided before is marked as behind.
    4. The state that a snapshot replaced is freed in slices too.
    5. Records that cannot be applied (a hole, a bug) end in a snapshot: what follows them is of no use and is dropped,
       and the router is not level until the snapshot is loaded. It is asked for at most every ``RESYNC_MS``.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Final

from poolgrid.kernel.consolidation.event_work import units_of
from poolgrid.kernel.projection.projection import LOAD_STEP_BLOCKS, SnapshotLoad
from poolgrid.kernel.routing.inputs import RecordsArrived, SnapshotArrived
from poolgrid.kernel.routing.router_state import RouterState
from poolgrid.kernel.wire.events import JournalRecord
from poolgrid.kernel.wire.feed import BlockChain, WorkerState
from poolgrid.kernel.wire.sessions import NO_SESSIONS, SessionsSnapshot
from poolgrid.server.process.clock import Clock
from poolgrid.server.process.tasks import BulkWork

log: Final = logging.getLogger(__name__)

RESYNC_MS = 1000.0
"""Shortest time between two requests for a snapshot: one of a large pool is seconds of work for all processes."""

SLICE_UNITS: Final = 2048
"""Work of records that are applied in one go (``event_work``), unless one is more by itself: a millisecond or two."""

RECORD_UNITS: Final = 32
"""A record is as much work, besides its events."""

ARRIVED_RECORDS_MAX: Final = 100_000
"""Records that wait for a snapshot or for their slice; beyond it the router does nothing else until fewer wait."""


class JournalApplier:
    """Implements ``poolgrid.kernel.journal.ports.PoolListener`` over the router's state."""

    def __init__(
        self,
        state: RouterState,
        clock: Clock,
        bulk: BulkWork,
        on_applied: Callable[[], None],
        resync: Callable[[], None],
    ) -> None:
        """``on_applied`` is called right after records or a snapshot became the state; ``resync`` asks the feed for a
        snapshot."""
        self.level = asyncio.Event()
        """Set while all that arrived is applied."""
        self._state = state
        self._projection = state.projection
        self._clock = clock
        self._bulk = bulk
        self._on_applied = on_applied
        self._resync = resync
        self._lost = False
        """Whether records could not be applied, and the snapshot that stands in for them has not come."""
        self._resynced_ms = float("-inf")
        self._resyncing: asyncio.TimerHandle | None = None
        self.resyncs = 0
        """How often a snapshot was asked for because records could not be applied."""
        self._loading: SnapshotLoad | None = None
        """The snapshot that is being loaded."""
        self._replaced: SnapshotLoad | None = None
        """One that was loaded, with the state that it replaced."""
        self._arrived: deque[JournalRecord] = deque()
        """Records that are still to be applied."""
        self._slice_scheduled = False
        self._stopped = False

    def on_snapshot(
        self,
        next_offset: int,
        workers: Sequence[WorkerState],
        chains: Iterable[tuple[int, BlockChain]],
        sessions: SessionsSnapshot = NO_SESSIONS,
    ) -> None:
        """Replace all state by a snapshot of the pool; at once when it is small, else a slice at a time."""
        self._arrived.clear()  # they are in the snapshot, or of another epoch
        self._lost = False
        self._loading = self._projection.begin_load(next_offset, workers, chains, sessions)
        self.level.clear()
        if not self._slice_scheduled:
            self._slice()

    def on_records(self, records: Sequence[JournalRecord]) -> None:
        """Apply journal records; at once when that takes a moment, else a slice at a time."""
        if self._lost:
            return
        is_level = self._loading is None and not self._arrived
        if is_level and (len(records) == 1 or _leading(records) == len(records)):
            self._apply(records)
            return
        self.level.clear()
        self._arrived.extend(records)
        if not self._slice_scheduled:
            self._slice()
        while len(self._arrived) > ARRIVED_RECORDS_MAX:
            self._step()

    def behind(self) -> int:
        """Return how many of the records that arrived are not applied yet, or would be in a snapshot."""
        if self._loading is None and not self._arrived and not self._lost:
            return 0
        behind = len(self._arrived)
        if self._loading is not None:
            behind += max(1, self._loading.next_offset - self._projection.next_offset)
        return max(behind, int(self._lost))

    def stop(self) -> None:
        self._loading = self._replaced = None
        self._arrived.clear()
        self._stopped = True
        if self._resyncing is not None:
            self._resyncing.cancel()

    def _slice(self) -> None:
        """Do one slice of what is to be caught up with, and have the next done once others had their turn."""
        self._slice_scheduled = False
        if self._step():
            self._slice_scheduled = True
            self._bulk.soon(self._slice)

    def _step(self) -> bool:
        """Load, apply or free a little; return whether there is more."""
        if self._loading is not None:
            if not self._loading.step(LOAD_STEP_BLOCKS):
                loaded, self._loading = self._loading, None
                self._state.adopt(SnapshotArrived(loaded, self._clock.monotonic_ms(), self._clock.wall_ms()))
                self._replaced = loaded
                self._note_level()
                self._on_applied()
        elif self._arrived:
            records = [self._arrived.popleft() for _ in range(_leading(self._arrived))]
            self._note_level()
            self._apply(records)  # takes the level back if that fails
        elif self._replaced is not None:
            index = self._replaced.index
            if index is None or not index.discard(LOAD_STEP_BLOCKS):
                self._replaced = None
        return self._loading is not None or bool(self._arrived) or self._replaced is not None

    def _note_level(self) -> None:
        if self._loading is None and not self._arrived:
            self.level.set()

    def _apply(self, records: Sequence[JournalRecord]) -> None:
        try:
            self._state.take_records(RecordsArrived(records, self._clock.monotonic_ms()))
        except Exception as error:
            self._start_over(records, error)
        else:
            self._on_applied()

    def _start_over(self, records: Sequence[JournalRecord], error: Exception) -> None:
        self._lost = True
        self._arrived.clear()
        self.level.clear()
        self.resyncs += 1
        now_ms = self._clock.monotonic_ms()
        wait_ms = max(0.0, self._resynced_ms + RESYNC_MS - now_ms)
        log.error(
            "records %d to %d of the journal could not be applied; a snapshot is asked for in %.0f ms, and what is "
            "decided until then is marked as behind",
            records[0].offset,
            records[-1].offset,
            wait_ms,
            exc_info=error,
        )
        self._resyncing = asyncio.get_running_loop().call_later(wait_ms / 1000, self._ask)

    def _ask(self) -> None:
        if self._lost and not self._stopped:
            self._resynced_ms = self._clock.monotonic_ms()
            self._resync()


def _leading(records: Collection[JournalRecord]) -> int:
    """Return how many of some records are applied in one go: one at least."""
    left = SLICE_UNITS
    for count, record in enumerate(records):
        left -= RECORD_UNITS + units_of(record.events)
        if left < 0 and count:
            return count
    return len(records)
