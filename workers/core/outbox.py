"""Batches that the consolidator has not acknowledged: kept, bounded, in order.

Rules: every batch takes the next sequence number, also one that is thrown away; what is kept is contiguous and ends
at ``next_seq``. When keeping one more would break the bound, **everything** is dropped, and so is what comes until
``reopen``: a stream with a hole is worth nothing, and a restatement (``SnapshotBegan``) says it all. The hole in the
numbers tells the consolidator that something was lost. A restatement itself is kept whatever its size, and does not
count: it is bounded by the cache it describes, and one that overflowed would be followed by another, for ever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from poolgrid.wire import codec
from poolgrid.wire.events import AnyEvent, EventBatch

OUTBOX_BYTES_DEFAULT = 32 * 1024 * 1024
"""About ten minutes of a busy worker (50 steps a second, 1 KiB of events each); beyond it the cache is restated."""

OUTBOX_BYTES_MIN = 64 * 1024

FRAME_OVERHEAD_BYTES = 64
"""Counted per kept batch besides its bytes, so that a flood of small batches is bounded too."""


class Outbox:
    """The batches of one worker life, from the oldest unacknowledged on."""

    def __init__(self, worker_id: str, dp_rank: int, epoch: int, bytes_max: int = OUTBOX_BYTES_DEFAULT) -> None:
        if bytes_max < OUTBOX_BYTES_MIN:
            raise ValueError(
                f"making an outbox: bytes_max is {bytes_max}, allowed are integers from {OUTBOX_BYTES_MIN}"
            )
        self._worker_id = worker_id
        self._dp_rank = dp_rank
        self._epoch = epoch
        self._bytes_max = bytes_max
        self._frames: deque[tuple[bytes, int]] = deque()  # each with what it counts
        self._bytes = 0
        self.next_seq = 0
        """Number of the next batch."""
        self.overflowed = False
        """Batches are being thrown away until ``reopen``."""
        self.overflows = 0
        """How often that began."""

    @property
    def oldest_seq(self) -> int:
        """Return the first batch that can still be sent; ``next_seq`` when there is none."""
        return self.next_seq - len(self._frames)

    @property
    def kept_bytes(self) -> int:
        """Return what counts against the bound."""
        return self._bytes

    def __len__(self) -> int:
        return len(self._frames)

    def add(self, events: list[AnyEvent], time_ms: int, counts: bool = True) -> bytes | None:
        """Number and keep a batch; return its frame, or ``None`` when the outbox overflows or did before.

        ``counts=False`` is for the batches of a restatement.
        """
        seq = self.next_seq
        if self.overflowed:
            self.next_seq = seq + 1
            return None
        # Encoded before the number is used up: a batch that breaks a limit must not leave a hole.
        frame = codec.event_batch.encode(EventBatch(self._worker_id, self._dp_rank, self._epoch, seq, time_ms, events))
        self.next_seq = seq + 1
        size = len(frame) + FRAME_OVERHEAD_BYTES if counts else 0
        if size and self._bytes + size > self._bytes_max:
            self._frames.clear()
            self._bytes = 0
            self.overflowed = True
            self.overflows += 1
            return None
        self._frames.append((frame, size))
        self._bytes += size
        return frame

    def acknowledge(self, next_seq: int) -> None:
        while self._frames and self.oldest_seq < next_seq:
            self._bytes -= self._frames.popleft()[1]

    def frames_from(self, seq: int) -> Iterator[bytes]:
        """Iterate over the kept batches from ``seq`` on."""
        skip = max(0, seq - self.oldest_seq)
        for index, (frame, _) in enumerate(self._frames):
            if index >= skip:
                yield frame

    def reopen(self) -> None:
        """Drop what is kept and begin to keep again: a restatement follows."""
        self._frames.clear()
        self._bytes = 0
        self.overflowed = False
