"""Who runs next: requests wait by priority, then first come first served; nobody overtakes the one in front.

The scheduler owns the sequences. It admits while a place in the batch, blocks and tokens of the step's budget last,
and picks the victim when blocks run out: lowest priority, then last arrived.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush

from workers.simulated.block_pool import BlockPool
from workers.simulated.sequence import Phase, Sequence


class Scheduler:
    """Waiting and running sequences of one engine."""

    def __init__(self, pool: BlockPool, max_batch_size: int) -> None:
        self._pool = pool
        self._max_batch_size = max_batch_size
        self._waiting: list[tuple[tuple[int, int], Sequence]] = []  # a heap; cancelled entries are skipped
        self._did_not_fit: tuple[int, int] | None = None  # (order of the head, pool version) of the last refusal
        self.waiting_count = 0
        self.prefilling: list[Sequence] = []
        """In the order of admission."""
        self.decoding: dict[int, Sequence] = {}
        """By arrival order number, in the order in which they began to decode."""
        self.unprefilled_tokens = 0
        """Tokens accepted and not yet computed."""

    @property
    def running_count(self) -> int:
        """Sequences that hold blocks."""
        return len(self.prefilling) + len(self.decoding)

    def running(self) -> Iterator[Sequence]:
        """Iterate over the sequences that hold blocks."""
        yield from self.prefilling
        yield from self.decoding.values()

    def enqueue(self, sequence: Sequence) -> None:
        """Let a sequence wait."""
        heappush(self._waiting, (sequence.key, sequence))
        self.waiting_count += 1
        self.unprefilled_tokens += sequence.target

    def admit(self) -> Sequence | None:
        """Move the first waiting sequence to prefilling, its cached prefix held; ``None`` when it must wait."""
        while self._waiting and self._waiting[0][1].phase is not Phase.WAITING:
            heappop(self._waiting)
        if not self._waiting or self.running_count >= self._max_batch_size:
            return None
        pool = self._pool
        sequence = self._waiting[0][1]
        attempt = (sequence.order, pool.version)
        if attempt == self._did_not_fit:
            return None
        # At least one token must be computed, or there would be no next token.
        match = pool.match(sequence.hashes, (sequence.target - 1) // pool.block_size)
        new_blocks = sequence.blocks_to_prefill() - match.device
        if not pool.take(sequence.hashes, match, new_blocks):
            self._did_not_fit = attempt
            return None
        heappop(self._waiting)
        self.waiting_count -= 1
        sequence.phase = Phase.PREFILLING
        sequence.shared = match.device + match.host
        sequence.private = new_blocks - match.host
        sequence.computed = sequence.shared * pool.block_size
        self.unprefilled_tokens -= sequence.computed
        self.prefilling.append(sequence)
        return sequence

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out of whatever it is in and release its blocks; its phase is the caller's to set."""
        if sequence.phase is Phase.WAITING:
            self.waiting_count -= 1
            self.unprefilled_tokens -= sequence.target
            return
        if sequence.phase is Phase.PREFILLING:
            self.prefilling.remove(sequence)
            self.unprefilled_tokens -= sequence.target - sequence.computed
        else:
            del self.decoding[sequence.order]
        self._pool.release(sequence.hashes[: sequence.shared], sequence.private)

    def victim(self) -> Sequence:
        """Return the running sequence to give way: lowest priority, then last arrived."""
        return max(self.running(), key=lambda sequence: sequence.key)
