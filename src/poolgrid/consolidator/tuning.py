"""Values of a consolidator that no operator needs to set, with their reasons; tests choose others."""

from __future__ import annotations

from dataclasses import dataclass

from poolgrid.consolidator.core.pool_state import BLOCKS_PER_WORKER_MAX

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Tuning:
    """Sizes and times of one consolidator."""

    segment_bytes: int = 64 * MIB
    """Largest size at which a segment is closed."""
    memory_journal_bytes: int = 64 * MIB
    """Records kept for replay without a ``data_dir``: seconds of a busy pool, which is how long a router is away that
    was not restarted."""
    snapshot_every_records: int = 50_000
    """A restart reads that many records at most: a second of work."""
    fsync_interval_ms: float = 100.0
    """With ``fsync=interval``: what a power failure takes at most, ten syncs a second being nothing for a disk."""
    append_retry_ms: float = 500.0
    """Wait before a failed append is tried again: a full disk does not empty sooner."""
    feed_interval_ms: float = 2.0
    """Shortest time between two messages of the feed: the first record after a silence leaves at once, what follows
    within the interval leaves together. A router handles one message of ten records in half the time of ten."""
    feed_keep_alive_ms: float = 500.0
    """Silence of the feed after which the next offset is announced: routers then know that they are level."""
    stale_after_ms: int = 2000
    """How long missing batches may stay missing before the worker's blocks are not trusted: ten attempts to fill it."""
    blocks_per_worker_max: int = BLOCKS_PER_WORKER_MAX

    def segment_bytes_of(self, retention_bytes: int) -> int:
        """Return the size of segments: retention removes whole ones, and a sixteenth of it is exact enough."""
        return min(self.segment_bytes, retention_bytes // 16)
