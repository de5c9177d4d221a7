"""What an infinite cache that all workers share would have reused: a bounded memory of the prompts that were seen.

Rules
    1. A prompt is its *path*: the sequence hashes of its whole blocks, each of which stands for its block and all
       before it. So a block was seen exactly if its hash was, and what was seen of a prompt is a prefix of its path.
    2. At most ``blocks_max`` hashes are kept, in two generations. New ones go to the young generation; when that has
       half of the bound, the old one is forgotten and the young one takes its place. What is asked for again becomes
       young again, so at least the last ``blocks_max / 2`` distinct blocks are known.
    3. What was forgotten counts as never seen: the figure is a lower bound, exact as long as nothing was forgotten.
    4. A path goes into one generation whole, or cut at its end. So each generation holds every ancestor of what it
       holds, and the known part of a path is found by halving, without a look at each block.
"""

from __future__ import annotations

from collections.abc import Sequence

BLOCK_BYTES = 100
"""Measured at the worst: a set's place for a hash, and the hash itself."""

SKETCH_BYTES = 64 * 1024 * 1024
"""670,000 blocks: of 32 tokens, at least the last 10 million tokens of distinct prompts. 20 workers with 16,384 blocks
each hold as many."""


class ReuseSketch:
    """The prompts that one router saw."""

    def __init__(self, budget_bytes: int = SKETCH_BYTES) -> None:
        """``budget_bytes`` bounds the memory; 0 keeps nothing, and nothing was ever seen."""
        self._generation_max = budget_bytes // BLOCK_BYTES // 2
        self._young: set[int] = set()
        self._old: set[int] = set()

    def note(self, path: Sequence[int]) -> int:
        """Remember a prompt, and return how many of its leading blocks had been seen before."""
        young, old = self._young, self._old
        length = len(path)
        if not length:
            return 0
        # Nearly every prompt is new from its first block on, or goes on from one that was just there.
        known = 0 if path[0] not in young else length if path[-1] in young else _known(path, young)
        if known == length:
            return known
        seen = known
        if old and path[known] in old:
            seen = length if path[-1] in old else _known(path, old)
        if len(young) + length - known > self._generation_max:
            self._old, known = young, 0
            young = self._young = set()
        young.update(path[known : self._generation_max])
        return seen

    def __len__(self) -> int:
        """Return how many hashes are kept; one that both generations have counts twice."""
        return len(self._young) + len(self._old)

    @property
    def used_bytes(self) -> int:
        """Return about how much memory it uses, at most its budget."""
        return len(self) * BLOCK_BYTES


def _known(path: Sequence[int], generation: set[int]) -> int:
    """Return how many leading hashes a generation holds: the first is among them, the last is not."""
    known, unknown = 1, len(path) - 1
    while known < unknown:
        middle = (known + unknown + 1) // 2
        if path[middle - 1] in generation:
            known = middle
        else:
            unknown = middle - 1
    return known
