"""The sequence hashes of prompts, computed once for the parts that prompts share.

Rules
    1. A path is always what ``wire.hashing`` says, to the bit.
    2. It is computed in stretches of ``STRETCH_BLOCKS`` whole blocks. What a stretch adds depends on nothing but the
       sequence hash before it, the seed, the block size and the stretch's own tokens; these are its key, whole and
       unhashed, so two different stretches can never be taken for each other.
    3. At most ``budget_bytes``; the stretch that was used longest ago goes first.

So turn n of a conversation costs the hashes of its new text. No clock, no lock: owned by one event loop.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence

from wire.hashing import TOKEN_BYTES, block_hashes, sequence_hashes

STRETCH_BLOCKS = 32
"""Blocks of one stretch: at 16 to 64 tokens a block, 2 to 8 KiB that are compared in less time than one is hashed."""

BUDGET_BYTES = 64 * 1024 * 1024
"""About 9 M tokens at 16 tokens a block, 13 M at 64: the conversations of an hour on a busy pool."""

HASH_BYTES = 48
"""One sequence hash: an integer object and its place in a list."""

ENTRY_OVERHEAD_BYTES = 300
"""Key, list and map entry."""

_Key = tuple[int | None, int, int, bytes]


class PromptPaths:
    """Paths of prompts, with a memory of stretches."""

    def __init__(self, budget_bytes: int = BUDGET_BYTES) -> None:
        self._budget = budget_bytes
        self._known: OrderedDict[_Key, list[int]] = OrderedDict()
        self.used_bytes = 0
        self.reused_blocks = 0
        """Blocks whose hashes were not computed again."""

    def path(
        self,
        token_ids: bytes,
        block_size: int,
        seed: int,
        multimodal_hashes: Mapping[int, Sequence[int]] | None = None,
    ) -> list[int]:
        """Return the sequence hashes of the whole blocks of a prompt (u32 little-endian token ids).

        ``block_size`` is in tokens; ``multimodal_hashes`` as in ``wire.hashing.block_hashes``: prompts with such
        objects are computed anew.
        """
        stretch_bytes = STRETCH_BLOCKS * block_size * TOKEN_BYTES
        if multimodal_hashes or len(token_ids) < stretch_bytes:
            return sequence_hashes(block_hashes(token_ids, block_size, seed, multimodal_hashes))
        path: list[int] = []
        for _ in self.grow(path, token_ids, block_size, seed):
            pass
        return path

    def grow(self, path: list[int], token_ids: bytes, block_size: int, seed: int) -> Iterator[None]:
        """Append the path of a prompt to ``path``, a stretch between two yields (up to 20 µs): others may go between.

        What is asked for meanwhile changes nothing of it.
        """
        stretch_bytes = STRETCH_BLOCKS * block_size * TOKEN_BYTES
        known = self._known
        parent: int | None = None
        whole = len(token_ids) - len(token_ids) % stretch_bytes
        for at in range(0, whole, stretch_bytes):
            stretch = token_ids[at : at + stretch_bytes]
            key = (parent, seed, block_size, stretch)
            hashes = known.get(key)
            if hashes is None:
                hashes = sequence_hashes(block_hashes(stretch, block_size, seed), parent)
                self._keep(key, hashes)
            else:
                known.move_to_end(key)
                self.reused_blocks += STRETCH_BLOCKS
            path += hashes
            parent = hashes[-1]
            yield
        if len(token_ids) - whole >= block_size * TOKEN_BYTES:
            path += sequence_hashes(block_hashes(memoryview(token_ids)[whole:], block_size, seed), parent)

    def _keep(self, key: _Key, hashes: list[int]) -> None:
        if key in self._known or _size(key) > self._budget:
            return
        self._known[key] = hashes
        self.used_bytes += _size(key)
        while self.used_bytes > self._budget:
            oldest, _ = self._known.popitem(last=False)
            self.used_bytes -= _size(oldest)


def _size(key: _Key) -> int:
    return len(key[3]) + STRETCH_BLOCKS * HASH_BYTES + ENTRY_OVERHEAD_BYTES
