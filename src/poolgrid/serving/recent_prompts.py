"""Whole prompts that were seen lately, with their paths: what a later turn of a conversation begins with.

Rules
    1. A prompt is found when the new one begins with all of it: one comparison of packed bytes, however long it is.
       Prompts are compared when they agree in a sample of their first bytes; that decides nothing but who is compared.
    2. Per sample the ``SAME_SAMPLE_MAX`` newest are kept. A prompt takes the place of the one that it continues.
    3. At most ``budget_bytes``; the prompt that was used longest ago goes first.
"""

from __future__ import annotations

from array import array
from typing import Final

from poolgrid.process.caches import BudgetedLru

LENGTHS = (512 * 1024, 128 * 1024, 32 * 1024, 8 * 1024)
"""Token bytes that samples are taken of: each prompt's is of the largest that it has. Shorter ones are not kept, their
path takes less than 0.1 ms."""

SAMPLE_BYTES: Final = 64
"""Bytes of a sample, spread evenly."""

SAME_SAMPLE_MAX: Final = 8
"""Prompts of one sample, as those with one long system prompt are; comparing 10k tokens takes a microsecond or two."""

HASH_BYTES: Final = 8
"""One sequence hash in an array."""

ENTRY_OVERHEAD_BYTES: Final = 600
"""Objects, key, map entries."""

_Key = tuple[int, int, int, bytes]


class RecentPrompt:
    """A prompt: token ids of whole blocks, and a sequence hash for each block."""

    __slots__ = ("_key", "path", "token_ids")

    def __init__(self, token_ids: bytes, path: array[int], key: _Key) -> None:
        self.token_ids = token_ids
        self.path = path
        self._key = key

    @property
    def size_bytes(self) -> int:
        return len(self.token_ids) + HASH_BYTES * len(self.path) + ENTRY_OVERHEAD_BYTES


class RecentPrompts:
    """Prompts by what they begin with."""

    def __init__(self, budget_bytes: int) -> None:
        self._of_sample: dict[_Key, tuple[RecentPrompt, ...]] = {}
        self._by_use: BudgetedLru[RecentPrompt, RecentPrompt] = BudgetedLru(
            budget_bytes, lambda prompt, _: prompt.size_bytes, lambda prompt, _: self._unlist(prompt)
        )

    @property
    def used_bytes(self) -> int:
        return self._by_use.used

    def beginning_of(self, token_ids: bytes, block_size: int, seed: int) -> RecentPrompt | None:
        """Return a prompt that ``token_ids`` begins with, the longest that is found; ``None`` without any."""
        for length in LENGTHS:
            if length <= len(token_ids):
                best: RecentPrompt | None = None
                for prompt in self._of_sample.get(_key(token_ids, length, block_size, seed), ()):
                    longer = best is None or len(prompt.token_ids) > len(best.token_ids)
                    if longer and token_ids.startswith(prompt.token_ids):
                        best = prompt
                if best is not None:
                    return self._by_use.get(best)
        return None

    def keep(
        self, token_ids: bytes, path: array[int], block_size: int, seed: int, continued: RecentPrompt | None
    ) -> None:
        """Remember a prompt; ``continued`` is what it begins with, and what it replaces."""
        length = next((length for length in LENGTHS if length <= len(token_ids)), None)
        if length is None:
            return
        prompt = RecentPrompt(token_ids, path, _key(token_ids, length, block_size, seed))
        if prompt.size_bytes > self._by_use.budget:
            return
        if continued is not None:
            self._by_use.drop(continued)
        same = self._of_sample.get(prompt._key, ())
        if len(same) >= SAME_SAMPLE_MAX:
            self._by_use.drop(same[-1])
            same = same[:-1]
        self._of_sample[prompt._key] = (prompt, *same)
        self._by_use.keep(prompt, prompt)

    def __len__(self) -> int:
        return len(self._by_use)

    def _unlist(self, prompt: RecentPrompt) -> None:
        left = tuple(each for each in self._of_sample[prompt._key] if each is not prompt)
        if left:
            self._of_sample[prompt._key] = left
        else:
            del self._of_sample[prompt._key]


def _key(token_ids: bytes, length: int, block_size: int, seed: int) -> _Key:
    return length, block_size, seed, token_ids[: length : length // SAMPLE_BYTES]
