"""The tokens behind the whole blocks of a prompt.

Engines whose hashes look ahead (drafting layers, from vLLM 0.33 and in SGLang) reach the end of a block only where the
tokens behind it are those that its hash covers. A router keeps them with a request where such engines are.
"""

from __future__ import annotations

import msgspec
import numpy as np

from poolgrid.kernel.wire.hashing import TOKEN_BYTES


class FollowingTokens(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """``count`` tokens behind each whole block, as far as the prompt has so many."""

    count: int
    packed: bytes
    """u32 little-endian."""

    @classmethod
    def of(cls, token_ids: bytes, block_size: int, count: int) -> FollowingTokens:
        """Take them out of a prompt's tokens; ``count`` is from 1."""
        tokens = np.frombuffer(token_ids, "<u4")
        ends = np.arange(1, max(0, len(tokens) - count) // block_size + 1) * block_size
        return cls(count, tokens[ends[:, None] + np.arange(count)].tobytes())

    def behind(self, blocks: int, count: int) -> bytes:
        """Return ``count`` tokens, at most those that are kept, behind so many blocks; empty = the prompt ends."""
        begin = (blocks - 1) * self.count * TOKEN_BYTES
        return self.packed[begin : begin + count * TOKEN_BYTES]
