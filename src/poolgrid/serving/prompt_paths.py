"""The sequence hashes of prompts, computed once for the parts that prompts share.

Rules
    1. A path is always what ``poolgrid.wire.hashing`` says, to the bit.
    2. It is computed in stretches of ``STRETCH_BLOCKS`` whole blocks. What a stretch adds depends on nothing but the
       sequence hash before it, the seed, the block size and the stretch's own tokens; these are its key, whole and
       unhashed, so two different stretches can never be taken for each other.
    3. Whole prompts are remembered beside stretches (``recent_prompts.py``): a prompt that continues one of them costs
       the comparison with it and the hashes of its new blocks. Stretches are for what prompts share beyond that.
    4. At most ``budget_bytes``, half of it for each; the stretch, or prompt, that was used longest ago goes first.
    5. A path is an array. As a list it would be an object for each hash, all of which are touched when it is copied or
       given up, and looked at by the garbage collector. Nobody changes one that is whole: it is remembered as it is.

So turn n of a conversation costs the hashes of its new text. No clock, no lock: owned by one event loop.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from poolgrid.process.caches import BudgetedLru
from poolgrid.serving.recent_prompts import HASH_BYTES, RecentPrompts
from poolgrid.wire.hashing import TOKEN_BYTES, block_hashes, path_of, sequence_hashes

STRETCH_BLOCKS: Final = 32
"""Blocks of one stretch: at 16 to 64 tokens a block, 2 to 8 KiB that are compared in less time than one is hashed."""

BUDGET_BYTES: Final = 64 * 1024 * 1024
"""About 13 M tokens at 16 tokens a block, 15 M at 64, half of them in stretches and half in whole prompts: the
conversations of an hour on a busy pool."""

KNOWN_PER_YIELD: Final = 16
"""Stretches that are only looked up between two yields: together they take what one takes to compute."""

ENTRY_OVERHEAD_BYTES: Final = 300
"""Key, list and map entry."""

_Key = tuple[int | None, int, int, bytes]


class PromptPaths:
    """Paths of prompts, with a memory of stretches."""

    def __init__(self, budget_bytes: int = BUDGET_BYTES) -> None:
        self._known: BudgetedLru[_Key, array[int]] = BudgetedLru(budget_bytes - budget_bytes // 2, _size)
        self._recent = RecentPrompts(budget_bytes // 2)
        self.reused_blocks = 0
        """Blocks whose hashes were not computed again."""

    @property
    def used_bytes(self) -> int:
        return self._known.used + self._recent.used_bytes

    def path(
        self,
        token_ids: bytes,
        block_size: int,
        seed: int,
        multimodal_hashes: Mapping[int, Sequence[int]] | None = None,
    ) -> array[int]:
        """Return the sequence hashes of the whole blocks of a prompt (u32 little-endian token ids).

        ``block_size`` is in tokens; ``multimodal_hashes`` as in ``poolgrid.wire.hashing.block_hashes``: prompts with
        such objects are computed anew.
        """
        stretch_bytes = STRETCH_BLOCKS * block_size * TOKEN_BYTES
        if multimodal_hashes:
            return array("Q", sequence_hashes(block_hashes(token_ids, block_size, seed, multimodal_hashes)))
        if len(token_ids) < stretch_bytes:
            return path_of(token_ids, block_size, seed)
        path = array("Q")
        for _ in self.grow(path, token_ids, block_size, seed):
            pass
        return path

    def grow(self, path: array[int], token_ids: bytes, block_size: int, seed: int) -> Iterator[None]:
        """Append the path of a prompt to the empty ``path``; up to 20 µs pass between two yields.

        Others may go between: what they ask for changes nothing of it.
        """
        block_bytes = block_size * TOKEN_BYTES
        stretch_bytes = STRETCH_BLOCKS * block_bytes
        known = self._known
        continued = self._recent.beginning_of(token_ids, block_size, seed)
        parent: int | None = None
        at = 0
        if continued is not None:
            path.extend(continued.path)
            parent = path[-1]
            at = len(continued.token_ids)
            self.reused_blocks += len(path)
        whole = len(token_ids) - len(token_ids) % block_bytes
        while at < whole:
            end = min(at - at % stretch_bytes + stretch_bytes, whole)
            if end - at < stretch_bytes:
                # The rest of a stretch that a prompt ended in, or its beginning.
                rest = block_hashes(memoryview(token_ids)[at:end], block_size, seed)
                hashes = array("Q", sequence_hashes(rest, parent))
            else:
                key = (parent, seed, block_size, token_ids[at:end])
                found = known.get(key)
                if found is not None:
                    self.reused_blocks += STRETCH_BLOCKS
                    path.extend(found)
                    parent = found[-1]
                    at = end
                    if at // stretch_bytes % KNOWN_PER_YIELD == 0:
                        yield
                    continue
                hashes = array("Q", sequence_hashes(block_hashes(key[3], block_size, seed), parent))
                known.keep(key, hashes)
            path.extend(hashes)
            parent = hashes[-1]
            at = end
            yield
        if continued is None or len(continued.path) < len(path):
            self._recent.keep(token_ids[:whole], path, block_size, seed, continued)


def _size(key: _Key, hashes: array[int]) -> int:
    return len(key[3]) + STRETCH_BLOCKS * HASH_BYTES + ENTRY_OVERHEAD_BYTES
