"""The order of requests: by priority, then first come first served; no request overtakes the one in front.

The scheduler owns the sequences. It admits while a place in the batch, blocks and tokens of the step's budget last,
and picks the victim when blocks run out: lowest priority, then last arrived.

Two kinds of sequences hold blocks without being computed. *Transferring* ones have a place in the batch and cannot
give way, as blocks that are being filled from elsewhere must not be given to others. *Kept* ones wait for a decode
worker: they have no place in the batch, and at most ``kept_max`` of them, with those that will be kept, exist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush

from poolgrid.kernel.wire.identifiers import Stage
from poolgrid.kernel.worker_protocol.refusal import BusyError
from poolgrid.plugins.simulated.core.block_pool import BlockPool
from poolgrid.plugins.simulated.core.sequence import Sequence, SequencePhase


class Scheduler:
    """Waiting and running sequences of one engine."""

    def __init__(self, pool: BlockPool, max_batch_size: int, kept_max: int) -> None:
        self._pool = pool
        self._max_batch_size = max_batch_size
        self._kept_max = kept_max
        self._waiting: list[tuple[tuple[int, int], Sequence]] = []  # a heap; cancelled entries are skipped
        self._did_not_fit: tuple[int, int] | None = None  # (order of the head, pool version) of the last refusal
        self.waiting_count = 0
        self.prefilling: list[Sequence] = []
        """In the order of admission."""
        self.decoding: dict[int, Sequence] = {}
        """By arrival order number, in the order in which they began to decode."""
        self.transferring: dict[int, Sequence] = {}
        """By arrival order number."""
        self.kept: dict[str, Sequence] = {}
        """By transfer id."""
        self._prefill_stages = 0
        """Sequences of the prefill stage among those prefilling."""
        self.unprefilled_tokens = 0
        """Tokens accepted and not yet computed."""

    @property
    def running_count(self) -> int:
        return len(self.prefilling) + len(self.decoding) + len(self.transferring)

    def check_room(self, stage: Stage, max_waiting: int) -> None:
        """Raise ``BusyError`` where one more request cannot wait, or be kept."""
        if self.waiting_count >= max_waiting:
            raise BusyError(
                f"{self.waiting_count} requests are waiting, allowed are at most {max_waiting} (max_waiting_requests)"
            )
        if stage is Stage.PREFILL and len(self.kept) >= self._kept_max:
            raise BusyError(
                f"the KV of {len(self.kept)} requests is kept for decode workers, allowed are at most "
                f"{self._kept_max} (kept_transfers_max)"
            )

    def computed(self) -> Iterator[Sequence]:
        yield from self.prefilling
        yield from self.decoding.values()

    def enqueue(self, sequence: Sequence) -> None:
        heappush(self._waiting, (sequence.key, sequence))
        self.waiting_count += 1
        self.unprefilled_tokens += sequence.queued_tokens

    def admit(self, may_compute: bool) -> Sequence | None:
        """Move the first waiting sequence to prefilling or transferring, its cached prefix held.

        ``None`` when it must wait; without ``may_compute``, also when there is something to compute for it.
        """
        while self._waiting and self._waiting[0][1].phase is not SequencePhase.WAITING:
            heappop(self._waiting)
        if not self._waiting or self.running_count >= self._max_batch_size:
            return None
        pool = self._pool
        sequence = self._waiting[0][1]
        moves = sequence.stage is Stage.DECODE
        if not may_compute and not moves:
            return None
        hands_over = sequence.stage is Stage.PREFILL
        if hands_over and len(self.kept) + self._prefill_stages >= self._kept_max:
            return None
        attempt = (sequence.order, pool.version)
        if attempt == self._did_not_fit:
            return None
        # At least one token must be computed, or there would be no next token; a transfer brings it along.
        match = pool.match(sequence.hashes, (sequence.target if moves else sequence.target - 1) // pool.block_size)
        new_blocks = sequence.blocks_to_prefill() - match.device
        retention = None if sequence.retention is None else sequence.retained(0, match.device + match.host)
        if not pool.take(sequence.hashes, match, new_blocks, retention):
            self._did_not_fit = attempt
            return None
        heappop(self._waiting)
        self.waiting_count -= 1
        sequence.shared = match.device + match.host
        sequence.private = new_blocks - match.host
        sequence.computed = sequence.shared * pool.block_size
        if moves:
            sequence.phase = SequencePhase.TRANSFERRING
            self.transferring[sequence.order] = sequence
            return sequence
        sequence.phase = SequencePhase.PREFILLING
        self.unprefilled_tokens -= sequence.computed
        self.prefilling.append(sequence)
        self._prefill_stages += hands_over
        return sequence

    def keep(self, sequence: Sequence) -> None:
        """Hold the blocks of a prefilled sequence under its transfer id."""
        self.prefilling.remove(sequence)
        self._prefill_stages -= 1
        sequence.phase = SequencePhase.KEPT
        self.kept[sequence.transfer_id] = sequence

    def begin_decoding(self, sequence: Sequence) -> None:
        """Move a sequence whose prompt is complete, computed here or moved here, to decoding."""
        if sequence.phase is SequencePhase.TRANSFERRING:
            del self.transferring[sequence.order]
        else:
            self.prefilling.remove(sequence)
            self._prefill_stages -= sequence.stage is Stage.PREFILL
        sequence.phase = SequencePhase.DECODING
        self.decoding[sequence.order] = sequence

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out of whatever it is in and release its blocks; its phase is the caller's to set."""
        if sequence.phase is SequencePhase.WAITING:
            self.waiting_count -= 1
            self.unprefilled_tokens -= sequence.queued_tokens
            return
        if sequence.phase is SequencePhase.PREFILLING:
            self.prefilling.remove(sequence)
            self._prefill_stages -= sequence.stage is Stage.PREFILL
            self.unprefilled_tokens -= sequence.target - sequence.computed
        elif sequence.phase is SequencePhase.TRANSFERRING:
            del self.transferring[sequence.order]
        elif sequence.phase is SequencePhase.KEPT:
            del self.kept[sequence.transfer_id]
        else:
            del self.decoding[sequence.order]
        self._pool.release(sequence.hashes[: sequence.shared], sequence.private)

    def victim(self) -> Sequence:
        return max(self.computed(), key=lambda sequence: sequence.key)


class Calendar:
    """A heap by time or by step. An entry holds as long as ``holds`` says so; others are skipped."""

    def __init__(self, holds: Callable[[float, Sequence], bool]) -> None:
        self._holds = holds
        self._entries: list[tuple[float, int, Sequence]] = []
        self._pushed = 0
        """Keeps the heap from ever comparing two sequences."""

    def push(self, when: float, sequence: Sequence, alive: int) -> None:
        """Enter a sequence; ``alive`` is how many entries can hold at most, to which the heap is kept in proportion."""
        self._pushed += 1
        heappush(self._entries, (when, self._pushed, sequence))
        if len(self._entries) > 4 * alive + 64:
            self._entries = [entry for entry in self._entries if self._holds(entry[0], entry[2])]
            heapify(self._entries)

    def first(self) -> float | None:
        entries = self._entries
        while entries:
            if self._holds(entries[0][0], entries[0][2]):
                return entries[0][0]
            heappop(entries)
        return None

    def pop(self, until: float) -> Sequence | None:
        """Return the sequence to which the next thing happens up to then."""
        entries = self._entries
        while entries and entries[0][0] <= until:
            when, _, sequence = heappop(entries)
            if self._holds(when, sequence):
                return sequence
        return None
